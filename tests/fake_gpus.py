"""GPUs that are not there, as PyTorch sees them."""

import contextlib
import logging
import types
import unittest.mock

import keras
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from keras_policy_ext.backends.torch import backend as torch_backend


@contextlib.contextmanager
def fake_cuda():
    """Fake CUDA tensors, whose matmul checks layouts as CUDA does.

    Yields a function `(*shape, dtype) -> tensor`.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)  # it logs what the tests provoke
    to = torch.Tensor.to

    def stay(x, target, *args, **kwargs):
        """Keras moves all tensors to its device, which is not linked here."""
        here = str(target) == str(x.device)
        return x if here else to(x, target, *args, **kwargs)

    patched = unittest.mock.patch.object(torch.Tensor, "to", stay)
    with FakeTensorMode(), keras.device("cuda:0"), patched:

        def empty(*shape, dtype="float8_e4m3fn"):
            return torch.empty(
                shape, dtype=getattr(torch, dtype), device="cuda"
            )

        yield empty
    logger.setLevel(before)


def fake(monkeypatch, capability=None, architecture=None, mps=False, cuda=None):
    """A machine with one device."""
    there = capability is not None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    hip = "7.0" if architecture else None
    monkeypatch.setattr(torch.version, "hip", hip, raising=False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    torch_backend.gpu_of.cache_clear()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda *device: capability
    )
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: types.SimpleNamespace(gcnArchName=architecture),
    )
