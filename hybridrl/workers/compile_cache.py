"""Torch's cache of compiled code, which stays on disk and may be shared by machines."""

import torch
from torch.compiler import config


def tell_cpus_apart() -> None:
    """Let this process take no code from the cache that was compiled for another kind of CPU.

    Torch's key does not say how wide vectors are. Code for AVX-512 leaves half of what it should write under AVX2;
    the other way round it writes beyond the ends of tensors.
    """
    kind = torch.backends.cpu.get_cpu_capability()
    if kind not in config.cache_key_tag.split():
        config.cache_key_tag = f"{config.cache_key_tag} {kind}".strip()
