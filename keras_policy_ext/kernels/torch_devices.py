"""PyTorch: which devices multiply float8, and which can hold it."""

from __future__ import annotations

import sys

import torch

from keras_policy_ext.kernels.contract import HOPPER_OR_ADA

AMD_WITH_OCP_FLOAT8 = ("gfx950", "gfx1200", "gfx1201")
"""AMD's architectures whose matmuls read `float8_e4m3fn` and `float8_e5m2`:
MI350 and RDNA 4. Source: rocm.docs.amd.com, "Data types and precision
support"."""

AMD_WITH_OTHER_FLOAT8 = ("gfx940", "gfx941", "gfx942")
"""Those that read `float8_e4m3fnuz` and `float8_e5m2fnuz` alone: MI300.
Source: rocm.docs.amd.com, HIP 6.2, "FP8 numbers"."""

ROWS = ((8, 9), (9, 0), (10, 0), (12, 0))
"""The compute capabilities for which all builds of PyTorch with CUDA have a
matmul with scales of rows, but for those on Windows. Source: PyTorch's
`RowwiseScaledMM.cu`."""

HOPPER = 9
BLACKWELL = 10
"""Major numbers of compute capabilities. Blackwell's is that of its data
center cards, B200 and B300."""


def lacking() -> str | None:
    """Why the device has no matmul of these float8 formats, or None."""
    if torch.cuda.is_available():
        return _of_amd() if torch.version.hip else _of_nvidia()
    if torch.backends.mps.is_available():
        return "Apple's GPUs have no float8 numbers"
    return None


def scales_rows(device: torch.device) -> bool:
    """Whether `scaled_mm` takes scales of rows, for a result in bfloat16."""
    if device.type == "cpu":
        return torch.__version__ >= (2, 13)
    if torch.version.hip or sys.platform == "win32":
        return False
    return torch.cuda.get_device_capability() in ROWS


def lacking_blocks() -> str | None:
    """Why there is no matmul with scales of 128 blocks, or None."""
    return _other_than(HOPPER, (12, 9), "128")


def lacking_mx() -> str | None:
    """Why there is no matmul with scales of MX blocks, or None."""
    return _other_than(BLACKWELL, (12, 8), "32")


def _other_than(major: int, cuda: tuple[int, int], block: str) -> str | None:
    """By the only architecture whose cuBLAS has it, and since when."""
    if not torch.cuda.is_available() or torch.version.hip:
        return f"torch has scales of {block} numbers with NVIDIA's CUDA only"
    capability = torch.cuda.get_device_capability()
    if capability[0] != major:
        return (
            f"torch has scales of {block} numbers for compute capability "
            f"{major}.x, not {capability}"
        )
    built = tuple(map(int, str(torch.version.cuda).split(".")[:2]))
    if built < cuda:
        wanted = ".".join(map(str, cuda))
        return (
            f"scales of {block} numbers want CUDA {wanted}; torch is built "
            f"for {torch.version.cuda}"
        )
    return None


def casts_to_float8(device: torch.device) -> bool:
    """Whether there are casts to float8 dtypes.

    On Apple's GPUs they raise TypeError (all releases up to September 2026).
    """
    return device.type != "mps"


def _of_nvidia() -> str | None:
    capability = torch.cuda.get_device_capability()
    if capability < HOPPER_OR_ADA:
        return f"compute capability {capability} has no float8 matmul"
    return None


def _of_amd() -> str | None:
    """By the architecture: MI200, which has none, says that it is (9, 0)."""
    name = torch.cuda.get_device_properties(0).gcnArchName
    architecture = name.partition(":")[0]
    if architecture in AMD_WITH_OCP_FLOAT8:
        return None
    if architecture in AMD_WITH_OTHER_FLOAT8:
        return f"{architecture} multiplies other formats, those named fnuz"
    return f"{architecture} has no float8 matmul"
