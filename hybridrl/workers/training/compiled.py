"""torch.compile for the decoder layers: what lies between two attention calls becomes a few kernels."""

import torch
from torch import nn
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler

from hybridrl.errors import ConfigError
from hybridrl.workers.compile_cache import tell_cpus_apart


def compile_layers(layers: list[nn.Module], key: str = "policy.training") -> None:
    """Compile the forward pass of each layer, and with it its backward pass, when it first runs.

    All layers of a kind share the compiled code. Numbers of tokens are variables in it, so that another micro-batch
    runs the same code. Attention over packed sequences stays as it is.
    Raises ConfigError when there is no C++ compiler, which torch.compile needs on any device.
    """
    check_compiler(key)
    tell_cpus_apart()
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)


def check_compiler(key: str) -> None:
    """Raise ConfigError unless there is a C++ compiler where torch.compile looks for one."""
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise ConfigError(f"{key}.compile=true needs a C++ compiler; install g++, name one in the environment variable "
                          f"CXX, or set {key}.compile=false.") from None
