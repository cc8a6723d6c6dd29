"""torch.compile for the decoder layers: what lies between two attention calls becomes a few kernels."""

import torch
from torch import nn
from torch._inductor import config as inductor
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.exc import InvalidCxxCompiler

from hybridrl.errors import ConfigError


def compile_layers(layers: list[nn.Module], key: str = "policy.training") -> None:
    """Compile the forward pass of each layer, and with it its backward pass, when it first runs.

    All layers of a kind share the compiled code. Numbers of tokens are variables in it, so that another micro-batch
    runs the same code. Attention over packed sequences stays as it is.
    Raises ConfigError when there is no C++ compiler, which torch.compile needs on any device.
    """
    check_compiler(key)
    if not torch.cuda.is_available():
        # Torch's cache of compiled code, which stays on disk, tells CPUs apart by this option alone. Code for vectors
        # of another width reads and writes beside the tensors: NaN, or a dead process.
        inductor.cpp.simdlen = pick_vec_isa().bit_width()
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)


def check_compiler(key: str) -> None:
    """Raise ConfigError unless there is a C++ compiler where torch.compile looks for one."""
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise ConfigError(f"{key}.compile=true needs a C++ compiler; install g++, name one in the environment variable "
                          f"CXX, or set {key}.compile=false.") from None
