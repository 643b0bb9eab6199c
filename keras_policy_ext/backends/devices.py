"""The table of devices and of what each can do in float8.

Each framework's `engine` finds the current device in this table. Kernels are
selected by its description only, never by running a test on the device.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterator

from keras_policy_ext.formats import FAMILIES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """A device and its float8 support: formats, kinds of scales, layouts.

    Attributes:
        title: Its name in a sentence.
        maker: `"nvidia"`, `"amd"`, `"google"`, `"apple"`, `"cpu"`, `"unknown"`.
        float8: The family of `formats.FAMILIES` that its matmuls read, or None.
        scales: The kinds of scales that its float8 matmuls accept: `"tensor"`,
            `"rows"`, `"blocks"` (of 128), `"mx"`. Other scales are applied to
            the output, or the matmul is emulated.
        one_layout: Whether its float8 matmuls read an operand in one layout
            only. An operand of two matmuls is then cast in both layouts.
        holds_float8: Whether values can be cast to, and stored in, float8.
        multiplies_in: The dtype in which emulated matmuls multiply where that
            is exact: `"float32"`, or a faster 16-bit dtype with float32 sums.
        source: The reference for these facts.
    """

    title: str
    maker: str
    float8: str | None = None
    scales: tuple[str, ...] = ()
    one_layout: bool = False
    holds_float8: bool = True
    multiplies_in: str = "float32"
    source: str = ""

    @property
    def summary(self) -> str:
        """A sentence that says what this device can do in float8."""
        emulated = f"emulated products are of {self.multiplies_in}"
        if not self.holds_float8:
            emulated += ", and float8 numbers are kept as bytes"
        if self.float8 is None:
            return f"{self.lacking()}; {emulated}"
        read = " and ".join(FAMILIES[self.float8])
        scales = ", ".join(_SCALES[each] for each in self.scales)
        return f"multiplies {read}, with scales of {scales}; {emulated}"

    @property
    def asks_for_powers_of_two(self) -> bool:
        """True if scales of blocks cost speed unless they are powers of two.

        Such a device has no matmul with float32 scales of blocks. It
        multiplies in bfloat16 instead, and that is exact only if the scales
        are powers of two. A CPU never asks: results do not depend on its
        bfloat16 instructions, which only PyTorch uses.
        """
        return (
            self.maker != "cpu"
            and "blocks" not in self.scales
            and self.multiplies_in == "bfloat16"
        )

    def lacking(self, *formats: str) -> str | None:
        """Return why the device has no matmul of these formats, or None."""
        if self.maker == "unknown":
            return (
                f"{self.title} is not known here, and taken for a device "
                "that has no float8 matmul"
            )
        if self.float8 is None:
            return f"{self.title} has no float8 matmul"
        if set(formats) <= set(FAMILIES[self.float8]):
            return None
        fnuz = self.float8 == "fnuz"
        named, suffix = ("named fnuz", "_fnuz") if fnuz else ("of OCP", "")
        return (
            f"{self.title} multiplies other formats, those {named}: recipe "
            f"current(fp8_format='hybrid{suffix}') is native there"
        )


_SCALES = {
    "tensor": "tensors",
    "rows": "rows",
    "blocks": "blocks of 128",
    "mx": "MX blocks",
}
_CUDA = (
    "CUDA C++ Programming Guide, Compute Capabilities; cuBLAS documentation, "
    "Scaling modes of narrow precision data types"
)
_ROCM = (
    "ROCm documentation, Data types and precision support; XLA's "
    "rocm_compute_capability.h"
)
_TPU = "Google Cloud TPU documentation, System architecture; libtpu 0.0.52"


def _nvidia(
    title: str, *scales: str, narrow: str = "bfloat16", one_layout: bool = False
) -> Device:
    """Return an NVIDIA GPU; no `scales`: no float8. Emulate in `narrow`."""
    return Device(
        title=title,
        maker="nvidia",
        float8="ocp" if scales else None,
        scales=scales,
        one_layout=one_layout,
        multiplies_in=narrow,
        source=_CUDA,
    )


def _scaling_tensors(
    maker: str, source: str, title: str, float8: str | None = None
) -> Device:
    """Return a device that multiplies float8 with one scale, if at all."""
    return Device(
        title=title,
        maker=maker,
        float8=float8,
        scales=("tensor",) if float8 else (),
        multiplies_in="bfloat16",
        source=source,
    )


_amd = functools.partial(_scaling_tensors, "amd", _ROCM)
_tpu = functools.partial(_scaling_tensors, "google", _TPU)

KNOWN = {
    "h200": _nvidia(
        "an NVIDIA Hopper (H200)", "tensor", "rows", "blocks", one_layout=True
    ),
    "b200": _nvidia("an NVIDIA Blackwell (B200)", "tensor", "rows", "mx"),
    "b300": _nvidia("an NVIDIA Blackwell (B300)", "tensor", "mx"),
    "rtx50": _nvidia("an NVIDIA RTX 50", "tensor", "rows"),
    "ada": _nvidia(
        "an NVIDIA Ada (L4, RTX 40)", "tensor", "rows", one_layout=True
    ),
    "rtx30": _nvidia("an NVIDIA RTX 30"),
    "a100": _nvidia("an NVIDIA A100"),
    "t4": _nvidia("an NVIDIA T4", narrow="float16"),
    "v100": _nvidia("an NVIDIA V100", narrow="float16"),
    "mi350": _amd("an AMD MI350", "ocp"),
    "mi300": _amd("an AMD MI300", "fnuz"),
    "mi200": _amd("an AMD MI200"),
    "rdna4": _amd("an AMD RDNA 4", "ocp"),
    "rdna3": _amd("an AMD RDNA 3"),
    "tpu7x": _tpu("a TPU7x", "ocp"),
    "v6e": _tpu("a TPU v6e"),
    "v5e": _tpu("a TPU v5e"),
    "mps": Device(
        title="an Apple GPU",
        maker="apple",
        holds_float8=False,
        source="PyTorch's casts to float8 on mps raise TypeError",
    ),
    "cpu": Device(
        title="a CPU",
        maker="cpu",
        source="CPU: no AMX or AVX512-BF16 was found",
    ),
    "cpu_bf16": Device(
        title="a CPU with AMX or AVX512-BF16",
        maker="cpu",
        multiplies_in="bfloat16",
        source="Intel 64 Architectures Software Developer's Manual; measured",
    ),
}
"""All known devices, by a short name."""

NVIDIA = {
    (7, 0): "v100",
    (7, 2): "v100",
    (7, 5): "t4",
    (8, 0): "a100",
    (8, 6): "rtx30",
    (8, 7): "rtx30",
    (8, 9): "ada",
    (9, 0): "h200",
    (10, 0): "b200",
    (10, 1): "b300",
    (10, 3): "b300",
    (12, 0): "rtx50",
}
"""The names in `KNOWN` by compute capability.

All builds of PyTorch with CUDA support row scales on the same devices, except
those for Windows (PyTorch's `RowwiseScaledMM.cu`).
"""

AMD = {
    "gfx90a": "mi200",
    "gfx940": "mi300",
    "gfx941": "mi300",
    "gfx942": "mi300",
    "gfx950": "mi350",
    "gfx1100": "rdna3",
    "gfx1101": "rdna3",
    "gfx1102": "rdna3",
    "gfx1103": "rdna3",
    "gfx1150": "rdna3",
    "gfx1151": "rdna3",
    "gfx1200": "rdna4",
    "gfx1201": "rdna4",
}
"""The names in `KNOWN` by architecture.

AMD devices report a compute capability too: an MI200 that of a Hopper.
"""

TPUS = {
    "TPU v2": "v5e",
    "TPU v3": "v5e",
    "TPU v4": "v5e",
    "TPU v5": "v5e",
    "TPU v5 lite": "v5e",
    "TPU v6 lite": "v6e",
    "TPU7x": "tpu7x",
}
"""The names in `KNOWN` by JAX's device kind; older TPUs count as a v5e."""

_pretended: contextvars.ContextVar[Device | None] = contextvars.ContextVar(
    "pretended device", default=None
)


@contextlib.contextmanager
def pretend(device: str | Device) -> Iterator[None]:
    """In the block, select kernels as if this device were present.

    Use it to inspect the choice of kernels. A function that is compiled in the
    block uses that choice after the block, too.

    Args:
        device: The device, or its name in `KNOWN`.

    Raises:
        ValueError: If it has another name.
    """
    if isinstance(device, str):
        if device not in KNOWN:
            raise ValueError(
                f"{device!r} is not a known device. Received: {device!r}. "
                f"Allowed: {', '.join(KNOWN)}. For another product, name the "
                "one that is most like it."
            )
        device = KNOWN[device]
    token = _pretended.set(device)
    try:
        yield
    finally:
        _pretended.reset(token)


pretended = _pretended.get
"""Return the device set by the innermost `pretend` block, or None."""


@functools.cache
def of_nvidia(capability: tuple[int, ...], title: str) -> Device:
    """Return the `Device` of an NVIDIA GPU with this compute capability.

    It is cached, since a plan is bound anew for each new object.

    Unlisted newer devices are assumed to have what every device has since Ada:
    float8 matmuls with one scale per tensor.
    """
    name = NVIDIA.get((capability[0], capability[1]))
    if name is not None:
        found = KNOWN[name]
    elif capability >= (8, 9):
        found = _nvidia(title, "tensor")
    else:  # Unlisted older devices: neither float8 nor 16 bits is relied on.
        found = _nvidia(title, narrow="float32")
    return dataclasses.replace(found, title=title)


@functools.cache
def of_amd(architecture: str, title: str) -> Device:
    """Return the `Device` of an AMD architecture, as `"gfx942:sramecc+"`."""
    return _of(AMD.get(architecture.partition(":")[0]), title)


@functools.cache
def of_google(kind: str) -> Device:
    """Return the `Device` of a TPU, found by the name that JAX gives it."""
    return _of(TPUS.get(kind), kind)


@functools.cache
def unknown(title: str) -> Device:
    """Return a `Device` that emulates all float8 matmuls in float32."""
    return Device(title=title, maker="unknown")


def _of(name: str | None, title: str) -> Device:
    """Return the device of `KNOWN` with this name, under its own title."""
    if name is None:  # The tables of this module do not list the device.
        return unknown(title)
    return dataclasses.replace(KNOWN[name], title=title)
