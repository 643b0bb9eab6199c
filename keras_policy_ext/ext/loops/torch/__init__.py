"""PyTorch: `fully_shard`, CUDA graphs, and amaxes that a pass has observed."""

from contextlib import AbstractContextManager
from typing import Any

import torch

from keras_policy_ext.ext.delayed.torch.observations import (
    enter as enter_observed,
)

__all__ = ["compiling_cuda_graphs", "enter_observed", "has_replicas"]


def compiling_cuda_graphs() -> AbstractContextManager[Any]:
    """Return a block in which what is compiled runs as CUDA graphs."""
    # `torch.compile(mode="reduce-overhead")` does so too, but the caller of
    # `torch.compile` is Keras. The setting is private (torch 2.11 to 2.13).
    import torch._inductor.config as settings

    block: Any = settings.patch({"triton.cudagraphs": True})
    return block


def has_replicas() -> bool:
    """Return True if this process is one of several that train a model."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized()
