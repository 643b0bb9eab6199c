"""PyTorch: which device is here, and what PyTorch multiplies on it."""

from __future__ import annotations

import functools
import sys

import torch

from keras_policy_ext.backends import devices
from keras_policy_ext.backends.devices import Device
from keras_policy_ext.formats import FAMILIES

CUDA_OF_BLOCKS = (12, 9)
CUDA_OF_MX = (12, 8)
"""From which version on cuBLAS has these scales."""


def here() -> Device:
    """The device that PyTorch computes on, or the one that is pretended."""
    return devices.pretended() or _found()


def lacking(*formats: str) -> str | None:
    """Why PyTorch has no matmul of these formats for the device, or None.

    On a CPU it has one, which is slower than float32.
    """
    device = here()
    if device.maker == "cpu":
        others = [each for each in formats if each not in FAMILIES["ocp"]]
        return f"scaled_mm on a CPU reads no {others[0]}" if others else None
    if device.maker == "google":
        return f"PyTorch does not run on {device.title} here"
    return device.lacking(*formats)


def scales_rows(device: torch.device) -> bool:
    """True if `scaled_mm` takes scales of rows, for a result in bfloat16."""
    if device.type == "cpu":
        return torch.__version__ >= (2, 13)
    return sys.platform != "win32" and "rows" in here().scales


def lacking_blocks() -> str | None:
    """Why there is no matmul with scales of 128 blocks, or None."""
    return _lacking("blocks", CUDA_OF_BLOCKS, "128")


def lacking_mx() -> str | None:
    """Why there is no matmul with scales of MX blocks, or None."""
    return _lacking("mx", CUDA_OF_MX, "32")


def _lacking(scales: str, cuda: tuple[int, int], block: str) -> str | None:
    device = here()
    if device.maker != "nvidia":
        return f"torch has scales of {block} numbers with NVIDIA's CUDA only"
    if scales not in device.scales:
        return f"{device.title} has no matmul with scales of {block} numbers"
    if devices.pretended() is not None:
        return None
    built = tuple(map(int, str(torch.version.cuda).split(".")[:2]))
    if built < cuda:
        wanted = ".".join(map(str, cuda))
        return (
            f"scales of {block} numbers want CUDA {wanted}; torch is built "
            f"for {torch.version.cuda}"
        )
    return None


def casts_to_float8(device: torch.device) -> bool:
    """Return True if there are casts to float8 dtypes.

    On Apple's GPUs they raise TypeError (all releases up to September 2026).
    """
    if device.type == "cpu":
        return True
    apple = device.type == "mps"
    described = devices.KNOWN["mps"] if apple else here()
    return described.holds_float8


def multiplies_bfloat16() -> bool:
    """Return True if matmuls on this CPU read bfloat16, and are faster so."""
    return here() is devices.KNOWN["cpu_bf16"]


def sums_in_float32(dtype: str) -> bool:
    """True if a matmul of 16 bits writes its sums in float32 on this GPU."""
    halves = getattr(
        torch.backends.cuda.matmul, "allow_fp16_accumulation", False
    )
    return _sums_in_float32(dtype, bool(halves))


@functools.cache
def _sums_in_float32(dtype: str, halves: bool) -> bool:
    """Asked once for a process, with numbers of which no 16 bits have the sum.

    Older versions of PyTorch, and builds for other makers, have no such matmul.
    """
    try:
        x = torch.ones((16, 4112), device="cuda", dtype=getattr(torch, dtype))
        x[:, 0] = 0.5
        sums = torch.mm(x, torch.ones_like(x).t(), out_dtype=torch.float32)
        return bool((sums == 4111.5).all())
    # What PyTorch raises for a matmul or an argument that a build lacks.
    except (RuntimeError, TypeError):
        return False


def _found() -> Device:
    if torch.cuda.is_available():
        if torch.version.hip:
            name = torch.cuda.get_device_properties(0).gcnArchName
            return devices.of_amd(name, name.partition(":")[0])
        capability = torch.cuda.get_device_capability()
        title = f"compute capability {capability}"
        return devices.of_nvidia(capability, title)
    if torch.backends.mps.is_available():
        return devices.KNOWN["mps"]
    return devices.KNOWN["cpu_bf16" if _multiplies_bfloat16() else "cpu"]


@functools.cache
def _multiplies_bfloat16() -> bool:
    """True if this CPU has instructions for it, as far as torch can tell."""
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    checks = [getattr(torch.cpu, name, None) for name in names]
    return any(check is not None and check() for check in checks)
