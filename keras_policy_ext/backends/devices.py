"""The table of devices and of what each can do in float8.

Each framework's `engine` finds the current device in this table. Kernels are
selected by its description only, never by running a test on the device.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import difflib
import functools
import re
from collections.abc import Iterable, Iterator

from keras_policy_ext.formats import FAMILIES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """A device and its float8 support: formats, kinds of scales, layouts.

    Attributes:
        title: Its name in a sentence.
        maker: `"nvidia"`, `"amd"`, `"google"`, `"apple"`, `"cpu"`, or
            `"unknown"`.
        float8: The family of `formats.FAMILIES` that its matmuls read, or
            None.
        scales: The kinds of scales that its float8 matmuls accept: `"tensor"`,
            `"rows"`, `"blocks"` (of 128), `"mx"`. Other scales are applied to
            the output, or the matmul is emulated.
        one_layout: Whether its float8 matmuls read an operand in one layout
            only. An operand of two matmuls is then cast in both layouts.
        holds_float8: Whether values can be cast to a float8 dtype and stored
            in it.
        multiplies_in: The dtype in which emulated matmuls multiply where that
            is exact: `"float32"`, or a faster 16-bit dtype with accumulation
            in float32.
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
        sums = f"emulated products are of {self.multiplies_in}"
        if not self.holds_float8:
            sums += ", and float8 numbers are kept as bytes"
        if self.float8 is None:
            return f"{self.lacking()}; {sums}"
        read = " and ".join(FAMILIES[self.float8])
        scales = ", ".join(_SCALES[each] for each in self.scales)
        return f"multiplies {read}, with scales of {scales}; {sums}"

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
        named, native = ("named fnuz", "_fnuz") if fnuz else ("of OCP", "")
        return (
            f"{self.title} multiplies other formats, those {named}: recipe "
            f"current(fp8_format='hybrid{native}') is native there"
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
    title: str,
    *scales: str,
    narrow: str = "bfloat16",
    one_layout: bool = False,
) -> Device:
    return Device(
        title=title,
        maker="nvidia",
        float8="ocp" if scales else None,
        scales=scales,
        one_layout=one_layout,
        multiplies_in=narrow,
        source=_CUDA,
    )


def _amd(title: str, float8: str | None) -> Device:
    return Device(
        title=title,
        maker="amd",
        float8=float8,
        scales=("tensor",) if float8 else (),
        multiplies_in="bfloat16",
        source=_ROCM,
    )


def _tpu(title: str, float8: str | None = None) -> Device:
    return Device(
        title=title,
        maker="google",
        float8=float8,
        scales=("tensor",) if float8 else (),
        multiplies_in="bfloat16",
        source=_TPU,
    )


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
    "mi200": _amd("an AMD MI200", None),
    "rdna4": _amd("an AMD RDNA 4", "ocp"),
    "rdna3": _amd("an AMD RDNA 3", None),
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

PRODUCTS = {
    "h200": "H100 H200 H800 H20 GH200",
    "b200": "B100 B200 GB200",
    "b300": "B300 GB300",
    "rtx50": "RTX5090 RTX5080 RTX5070 RTX5060 RTX5050",
    "ada": "L4 L40 L40S L20 RTX4090 RTX4080 RTX4070 RTX4060 RTX6000Ada",
    "rtx30": "RTX3090 RTX3080 RTX3070 RTX3060 A10 A10G A40 A6000 A5000 A4000",
    "a100": "A100 A800 A30",
    "t4": "T4 RTX2080 RTX2070 RTX2060",
    "v100": "V100",
    "mi350": "MI350 MI350X MI355X",
    "mi300": "MI300 MI300X MI300A MI325X",
    "mi200": "MI200 MI210 MI250 MI250X",
    "rdna4": "RX9070 RX9060",
    "rdna3": "RX7900 RX7800 RX7700 RX7600",
    "tpu7x": "TPU7x v7x Ironwood",
    "v6e": "v6e v6lite Trillium",
    "v5e": "v5e v5p v5lite v4 v3 v2",
    "mps": "mps Apple M1 M2 M3 M4 M5",
}
"""Products with the abilities of a device of `KNOWN`, by its name there."""

_TITLES = {"nvidia": "an NVIDIA", "amd": "an AMD", "google": "a TPU"}

_MAKER = r"nvidia|geforce|tesla|quadro|amd|instinct|radeon|google|cloud|apple"
_VARIANT = (
    r"ti|super|laptop|gpu|pro|max|ultra|xtx?|gre|sxm\d?|pcie|nvl|\d+gb|hbm.*"
)

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

AMD devices also report a compute capability, which misleads: that of an MI200
is a Hopper's.
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


def get(name: str) -> Device:
    """Return the `Device` of a product or device name, such as `"h100"`.

    Args:
        name: A name in `KNOWN` or of a product, such as `"RTX 4090"`. Case,
            blanks, hyphens, maker and variant are ignored.

    Raises:
        ValueError: If no device has this name.
    """
    if name in KNOWN:
        return KNOWN[name]
    known = _by_product()
    for plain in _plain_names(name):
        if plain in known:
            return known[plain]
    raise ValueError(
        f"{name!r} is not a known device.{_meant(name, known)} Received: "
        f"{name!r}. Allowed: {', '.join(KNOWN)}, and names of products, such "
        "as h100, rtx4090 or mi300x. Take the one that is most like it."
    )


def _by_product() -> dict[str, Device]:
    """Return all devices by product name, in lower case without blanks."""
    found = {_plain(name): device for name, device in KNOWN.items()}
    for name, products in PRODUCTS.items():
        device = KNOWN[name]
        for product in products.split():
            title = f"{_TITLES.get(device.maker)} {_spaced(product)}"
            if device.maker == "apple" or product.upper() == "TPU7X":
                title = device.title
            found[product.lower()] = dataclasses.replace(device, title=title)
    return found


def _spaced(product: str) -> str:
    """Put blanks into a product name: `RTX4090` to `RTX 4090`."""
    return re.sub(r"^(RTX|RX)(\d+)", r"\1 \2 ", product).strip()


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _plain_names(name: str) -> Iterator[str]:
    """Yield spellings of a device name to look up, the exact one first."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    others = [w for w in words if not re.fullmatch(f"{_MAKER}|{_VARIANT}", w)]
    product = "".join(others)
    shorter = re.sub(f"(?<=\\d)({_VARIANT})+$", "", product)
    for each in dict.fromkeys((_plain(name), product, shorter)):
        yield from (each, each.removeprefix("tpu"), each.removeprefix("rtx"))
        yield f"rtx{each}"


def _meant(name: str, known: Iterable[str]) -> str:
    """Return `" Did you mean …?"` with similar names, or `""` without any."""
    alike = difflib.get_close_matches(_plain(name), known, cutoff=0.7)
    return f" Did you mean {' or '.join(alike)}?" if alike else ""


@contextlib.contextmanager
def pretend(name: str) -> Iterator[None]:
    """In the block, select kernels as if the named device were present.

    Use it to inspect the choice of kernels. A function that is compiled in the
    block uses that choice after the block, too.

    Raises:
        ValueError: If the device is not known.
    """
    token = _pretended.set(get(name))
    try:
        yield
    finally:
        _pretended.reset(token)


pretended = _pretended.get
"""Return the device set by the innermost `pretend` block, or None."""


@functools.cache
def of_nvidia(capability: tuple[int, ...], title: str) -> Device:
    """Return the `Device` of an NVIDIA GPU with this compute capability.

    It is the same object each time: a plan is bound anew to another one.

    Unlisted newer devices are assumed to have what every device has since Ada:
    float8 matmuls with one scale per tensor.
    """
    name = NVIDIA.get((capability[0], capability[1]))
    if name is not None:
        found = KNOWN[name]
    elif capability >= (8, 9):
        found = _nvidia(title, "tensor")
    else:
        found = _nvidia(title, narrow="float32")
    return dataclasses.replace(found, title=title)


@functools.cache
def of_amd(architecture: str, title: str) -> Device:
    """Return the `Device` of an AMD architecture such as `gfx942:sramecc+`."""
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
    if name is None:
        return unknown(title)
    return dataclasses.replace(KNOWN[name], title=title)
