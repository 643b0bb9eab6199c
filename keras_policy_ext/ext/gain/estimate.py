"""The time of a training step on a GPU, estimated from what it must do.

A matmul takes its operations by a share of the peak, and reads and writes
every operand once by a share of the bandwidth. Each operand that is quantized
is read and written before, as often as its recipe needs. Attention and
everything else takes the same time under each recipe.

The shares are fitted to published measurements by
`integration/benchmarks/published.py`, and its errors are in a file beside it.
Where this project has measured steps itself, `measured.json` has their speeds,
and float8 matmuls of about their sizes are estimated to have them.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

from keras_policy_ext import formats, recipes
from keras_policy_ext.backends.devices import Device
from keras_policy_ext.ext.gain.products import device_named
from keras_policy_ext.recipes import (
    MATMULS,
    OPERANDS,
    Quantization,
    Recipe,
    matmuls_of,
)


class Card(NamedTuple):
    """The speeds in the data sheet of an accelerator, without sparsity.

    Attributes:
        bfloat16: Operations a second of matmuls; of float16 without bfloat16.
        float8: Likewise; 0 for none.
        float4: Likewise; 0 for none.
        bandwidth: Bytes a second of its memory.
        source: Where the numbers were read.
    """

    bfloat16: float
    float8: float
    float4: float
    bandwidth: float
    source: str = ""


_QUOTED = "ml-engineering, which quotes the maker"
_ROOFLINE = "torchao, roofline_utils.py"
_GOOGLE = "Google Cloud, TPU documentation"
_CATALOG = "catalogs of cards; no data sheet was read"

CARDS = {
    "H100": Card(989e12, 1979e12, 0, 3.35e12, _QUOTED),
    "H200": Card(989e12, 1979e12, 0, 4.8e12, _QUOTED),
    "GH200": Card(989e12, 1979e12, 0, 4e12, f"{_QUOTED}; with 96 GB"),
    "B100": Card(1750e12, 3500e12, 7000e12, 8e12, _QUOTED),
    "B200": Card(2250e12, 4500e12, 9000e12, 7.67e12, _ROOFLINE),
    "GB200": Card(2500e12, 5000e12, 10000e12, 8e12, _QUOTED),
    "B300": Card(
        2250e12,
        4500e12,
        14000e12,
        8e12,
        f"{_ROOFLINE}; other sources say 12.6 to 15 in four bits",
    ),
    "GB300": Card(2500e12, 5000e12, 15000e12, 8e12, _QUOTED),
    "A100": Card(312e12, 0, 0, 2.04e12, f"{_QUOTED}; with 80 GB, SXM"),
    "L40S": Card(362e12, 733e12, 0, 0.864e12, _QUOTED),
    "L4": Card(121e12, 242e12, 0, 0.3e12, _CATALOG),
    "RTX4090": Card(165e12, 330e12, 0, 1.008e12, _CATALOG),
    "RTX5090": Card(209.5e12, 419e12, 1676e12, 1.792e12, _ROOFLINE),
    "RTX6000": Card(
        364e12,
        728e12,
        0,
        0.96e12,
        "computed: 142 SMs of an L40S at 2.505 GHz, 384 bits at 20 Gbit/s",
    ),
    "T4": Card(65e12, 0, 0, 0.32e12, _CATALOG),
    "V100": Card(125e12, 0, 0, 0.9e12, _CATALOG),
    "MI300X": Card(1307e12, 2615e12, 0, 5.3e12, _ROOFLINE),
    "MI300": Card(1307e12, 2615e12, 0, 5.3e12, "as MI300X"),
    "MI325X": Card(1307e12, 2615e12, 0, 6e12, _QUOTED),
    "MI355X": Card(2517e12, 5033e12, 10066e12, 8e12, _QUOTED),
    "MI350X": Card(
        2307e12, 4614e12, 9227e12, 8e12, "as MI355X, at 2.2 of 2.4 GHz"
    ),
    "MI350": Card(2307e12, 4614e12, 9227e12, 8e12, "as MI350X"),
    "TPU7x": Card(
        2307e12,
        4614e12,
        0,
        7.37e12,
        f"{_GOOGLE}; the bandwidth could not be checked",
    ),
    "v6e": Card(918e12, 0, 0, 1.638e12, _GOOGLE),
    "v5p": Card(459e12, 0, 0, 2.765e12, _GOOGLE),
    "v5e": Card(197e12, 0, 0, 0.819e12, _GOOGLE),
}
"""By product, as in the title of a `Device`. Peaks are operations a second
without sparsity and with accumulation in float32, bandwidths bytes a second.
H100 and H200 are the SXM ones. Sources are of August 2026: ml-engineering
links the data sheet of each maker, which was not read; torchao says which page
of a data sheet a number is from. On a TPU7x JAX shows each half of the chip as
a device."""

_OTHER_NAMES = {"V7X": "TPU7x", "IRONWOOD": "TPU7x", "TRILLIUM": "v6e"}


def product_of(title: str) -> str | None:
    """Return the key of `CARDS` that the title of a device has, or None."""
    for word in re.findall(r"\w+", title.replace("RTX ", "RTX")):
        product = _OTHER_NAMES.get(word.upper(), word)
        if product in CARDS:
            return product
    return None


def product_named(device: Device, name: str) -> str:
    """Return the key of `CARDS` for a device.

    Args:
        device: The device.
        name: How the caller named it, for the error.

    Raises:
        ValueError: If there is none.
    """
    product = product_of(device.title)
    if product is not None:
        return product
    raise ValueError(
        f"The speed of {device.title} is not known. Received: {name!r}. "
        f"Allowed: {', '.join(CARDS)}. Take the one that is most like it."
    )


FITTED = {
    "tensor": 1.025,
    "rows": 0.97,
    "blocks": 0.811,
    "mx": 1.058,
    "four bits": 0.555,
    "bandwidth": 0.503,
    "other": 3.703,
}
"""Speeds of matmuls by kind of scales, as parts of what a bfloat16 matmul gets
of its peak; the part of the bandwidth that is reached; and how often a step
moves each byte that the forward pass keeps."""

PEAK = 0.72
"""The part of the peak that a bfloat16 matmul gets, as Transformer Engine
measures on an H200."""

ATTENTION = 0.4
"""Likewise for the two matmuls of attention, which are in no recipe here."""

KERNEL_SECONDS = 2e-6
"""What starting one kernel takes in a compiled step."""

FLOAT32 = 16
"""How much longer than in bfloat16 a matmul takes in float32."""

BYTES_OF_UPDATE = 28
"""What Adam reads and writes for each weight, all in float32."""


HOST = {"plain": 1.53e-3, "history": 2.16e-3, "float8": 1.80e-3}
"""What the host takes for a step of one Dense layer on eager PyTorch, in
seconds: measured at 4096³ on an H200, where the GPU takes half of it. Three
keys: bfloat16, recipes with a history, and recipes without."""

XLA_RESULTS = 8
"""Bytes for each element of a result that XLA writes in float32 first, then
reads and writes in 16 bits, beyond writing it in 16 bits at once."""


class Matmuls(NamedTuple):
    """The three matmuls of a contraction: sizes, in elements.

    Attributes:
        inputs: Elements of the inputs.
        kernel: Elements of the kernel.
        outputs: Elements of the outputs.
        multiplications: Of one of the three matmuls, each with an addition.
        kernel_bytes: Bytes of an element of the kernel as it is stored.
    """

    inputs: float
    kernel: float
    outputs: float
    multiplications: float
    kernel_bytes: float = 4

    @classmethod
    def of(
        cls, rows: float, summed: float, free: float, groups: int = 1
    ) -> Matmuls:
        """Return those of (rows, summed) @ (summed, free), kernel in 16 bits.

        Args:
            rows: Rows of the inputs, those of all groups together.
            summed: The size of the axis that is summed over.
            free: The size of the axis of the outputs.
            groups: How many kernels there are, each for a part of the rows.
        """
        kernel = summed * free * groups
        number = rows * summed * free
        return cls(rows * summed, kernel, rows * free, number, 2)

    @classmethod
    def square(cls, size: int) -> Matmuls:
        """Return those of square matrices, kernel in float32."""
        return cls.of(size, size, size)._replace(kernel_bytes=4)

    @property
    def size(self) -> float:
        """The size of the square matrices whose matmuls gain as much.

        The time of matmuls grows with the product of their three sizes, that
        of casts with the sum of the products of two: the harmonic mean.
        """
        around = self.inputs + self.kernel + self.outputs
        return 3 * self.multiplications / around

    def elements(self, operand: str) -> float:
        """Return the number of elements of an operand."""
        named = {"outputs_grad": "outputs"}.get(operand, operand)
        return float(getattr(self, named))

    def moved(self, matmul: str, bytes_each: float) -> float:
        """Return the bytes that a matmul reads and writes; results in 16 bits.

        Args:
            matmul: `"forward"`, `"inputs_grad"` or `"kernel_grad"`.
            bytes_each: Bytes of an element of its operands.
        """
        first, second = MATMULS[matmul]
        (result,) = {*OPERANDS} - {first, second}
        read = self.elements(first) + self.elements(second)
        return bytes_each * read + 2 * self.elements(result)


def kind_of(asked: Quantization) -> str:
    """Return the key of `FITTED` for a matmul of operands quantized so."""
    if formats.get(asked.format).bits < 8:
        return "four bits"
    if asked.scale_format == "float8_e8m0fnu":
        return "mx"
    if asked.tile.is_whole or asked.tile.each_matrix:
        return "tensor"
    return "rows" if None in asked.tile[:2] else "blocks"


@functools.cache
def _asked(recipe: Recipe, operand: str, matmul: str) -> Quantization | None:
    return recipe.quantization(operand, matmul)


@dataclasses.dataclass(frozen=True)
class Estimator:
    """Estimates times on one card.

    Attributes:
        card: Its speeds.
        one_layout: Whether its float8 matmuls read operands in one layout.
        fallback: How much longer than in bfloat16 an emulated matmul takes.
        results: Bytes that a step moves for each element of outputs and
            gradients of inputs after a float8 matmul whose scales are not one
            for a tensor: XLA writes them in float32 first.
        fitted: As `FITTED`.
        corrections: By the name of a recipe, the sizes of square matrices at
            which steps were measured, in order, with the time that they took
            as a part of the estimate; under "" those of other recipes.
    """

    card: Card
    one_layout: bool = False
    fallback: float = 1
    results: float = 0
    fitted: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: FITTED
    )
    corrections: Mapping[str, tuple[tuple[float, float], ...]] = (
        dataclasses.field(default_factory=dict)
    )

    def moving(self, number: float) -> float:
        """Return the seconds in which a number of bytes is read or written."""
        return number / (self.card.bandwidth * self.fitted["bandwidth"])

    def other(self, attention: float, kept: float, weights: float) -> float:
        """Return the seconds of what no recipe changes.

        Args:
            attention: Multiplications of two activations in the forward pass.
            kept: Bytes that the forward pass keeps in 16 bits.
            weights: The number of weights that the optimizer updates.
        """
        seconds = 6 * attention / (self.card.bfloat16 * ATTENTION)
        seconds += self.moving(self.fitted["other"] * kept)
        return seconds + self.moving(BYTES_OF_UPDATE * weights)

    def plain(
        self,
        matmuls: Matmuls,
        which: Collection[str] = tuple(MATMULS),
        runs: float = 1,
    ) -> float:
        """Return the seconds of matmuls in 16 bits.

        Args:
            matmuls: Their sizes.
            which: Which of the three.
            runs: How often the forward pass runs; above 1 where a part of it
                is computed again in the backward pass.
        """
        return sum(
            self._seconds(matmuls, matmul, self.card.bfloat16 * PEAK, 2)
            * (runs if matmul == "forward" else 1)
            for matmul in which
        )

    def _seconds(
        self, matmuls: Matmuls, matmul: str, speed: float, bytes_each: float
    ) -> float:
        computing = 2 * matmuls.multiplications / speed
        moving = self.moving(matmuls.moved(matmul, bytes_each))
        return max(computing, moving) + KERNEL_SECONDS

    def quantized(
        self,
        matmuls: Matmuls,
        recipe: Recipe,
        native: Collection[str] = tuple(MATMULS),
        which: Collection[str] = tuple(MATMULS),
        casts: str = "once",
        runs: float = 1,
    ) -> float:
        """Return the seconds of matmuls under a recipe, casts included.

        Args:
            matmuls: Their sizes.
            recipe: The recipe.
            native: Which of the three are native on this device.
            which: Which of the three are computed.
            casts: `"once"` for a step; `"each"` where each matmul has its
                operands cast anew; `"none"` if they were cast before.
            runs: As for `plain`.
        """
        seconds = 0.0
        for matmul in which:
            asked = _asked(recipe, MATMULS[matmul][0], matmul)
            times = runs if matmul == "forward" else 1
            if asked is None:
                seconds += times * self.plain(matmuls, [matmul])
                continue
            if matmul not in native:
                plain = self.plain(matmuls, [matmul])
                seconds += times * self.fallback * plain
                continue
            bits = formats.get(asked.format).bits
            peak = self.card.float4 if bits < 8 else self.card.float8
            peak = peak or self.card.float8
            speed = peak * PEAK * self.fitted[kind_of(asked)]
            one = self._seconds(matmuls, matmul, speed, bits / 8)
            in_epilogue = kind_of(asked) == "tensor"
            if matmul != "kernel_grad" and not in_epilogue:
                outputs = matmul == "forward"
                size = matmuls.outputs if outputs else matmuls.inputs
                one += self.moving(self.results * size)
            seconds += times * one
        if casts == "none":
            return seconds
        number, kernels = self.cast_bytes(matmuls, recipe, which, casts)
        seconds += self.moving(number) + kernels * KERNEL_SECONDS
        if len(native) < len(MATMULS):
            return seconds
        return seconds * self._correction(matmuls.size, recipe.name)

    def _correction(self, size: float, recipe: str) -> float:
        """Return the measured time as a part of the estimate, interpolated."""
        points = self.corrections.get(recipe, self.corrections.get("", ()))
        if not points:
            return 1.0
        sizes, parts = zip(*points, strict=True)
        return float(np.interp(np.log(size), np.log(sizes), parts))

    def speed(self, matmuls: Matmuls, recipe: Recipe) -> float:
        """Return the speed of native matmuls against those in 16 bits."""
        return self.plain(matmuls) / self.quantized(matmuls, recipe)

    def cast_bytes(
        self,
        matmuls: Matmuls,
        recipe: Recipe,
        which: Collection[str] = tuple(MATMULS),
        casts: str = "once",
    ) -> tuple[float, int]:
        """Return the bytes that casts read and write, and their kernels.

        Args:
            matmuls: As for `quantized`.
            recipe: As for `quantized`.
            which: As for `quantized`.
            casts: As for `quantized`.
        """
        number, kernels = 0.0, 0
        for operand in OPERANDS:
            asked = [
                _asked(recipe, operand, matmul)
                for matmul in matmuls_of(operand)
                if matmul in which
            ]
            found = [each for each in asked if each is not None]
            if not found:
                continue
            kernel = operand == "kernel"
            read = matmuls.kernel_bytes if kernel else 2
            once = casts == "once" and all(each.tile.is_whole for each in found)
            written = sum(formats.get(each.format).bits / 8 for each in found)
            if once and not self.one_layout:
                written = formats.get(found[0].format).bits / 8
            passes = 1 if once else len(found)
            amaxes = 0
            for each in found[:passes]:
                whole = each.tile.is_whole or each.scale_format == (
                    "float8_e4m3fn"
                )
                rows = kind_of(each) == "rows"
                scale_is_known = hasattr(recipe, "amax_history_length")
                amaxes += rows or (whole and not scale_is_known)
            elements = matmuls.elements(operand)
            number += elements * (read * (passes + amaxes) + written)
            kernels += passes + amaxes
        return number, kernels


class Measured(NamedTuple):
    """The speed of a training step of a square Dense layer.

    Attributes:
        device: A key of `CARDS`.
        recipe: The name of a recipe.
        size: Rows, inputs and outputs.
        speed: Against bfloat16; 2 is twice as fast.
        origin: Where and when it was measured.
    """

    device: str
    recipe: str
    size: int
    speed: float
    origin: str


@functools.cache
def measured() -> tuple[Measured, ...]:
    """Return the rows that `integration/benchmarks/break_even.py` wrote."""
    package = importlib.resources.files("keras_policy_ext.ext.gain")
    text = package.joinpath("measured.json").read_text(encoding="utf-8")
    return tuple(Measured(**row) for row in json.loads(text))


SAME_PROGRAM = ({"H100", "H200", "GH200"},)
"""Products that run the same kernels; their memory is another."""


def measured_on(product: str) -> tuple[Measured, ...]:
    """Return the measured rows of a product, or else of one that is its like.

    Args:
        product: A key of `CARDS`.
    """
    own = tuple(row for row in measured() if row.device == product)
    like = {product}.union(*(s for s in SAME_PROGRAM if product in s))
    return own or tuple(row for row in measured() if row.device in like)


@functools.cache
def estimator_of(backend: str, product: str, device: Device) -> Estimator:
    """Return the `Estimator` of a framework on a device.

    Args:
        backend: The name of the framework.
        product: The key of `CARDS` for the device.
        device: The device.
    """
    xla = backend != "torch"
    estimator = Estimator(
        CARDS[product],
        device.one_layout,
        FLOAT32 if device.multiplies_in == "float32" else 1,
        XLA_RESULTS if xla else 0,
    )
    rows = measured_on(product) if xla else ()
    found: dict[str, list[tuple[float, float]]] = {}
    for row in sorted(rows, key=lambda row: row.size):
        square = Matmuls.square(row.size)
        speed = estimator.speed(square, recipes.get(row.recipe))
        found.setdefault(row.recipe, []).append((row.size, speed / row.speed))
    others = [point for points in found.values() for point in points]
    if others:
        # As slow as the slowest of those that were measured at a size.
        found[""] = sorted(dict(sorted(others)).items())
    corrections = {name: tuple(points) for name, points in found.items()}
    return dataclasses.replace(estimator, corrections=corrections)


@dataclasses.dataclass(frozen=True)
class BreakEven:
    """The matmul size from which float8 is faster, on one device and backend.

    Attributes:
        backend: The name of the framework.
        device: The name of the device.
        size: From this size of square matrices on, a training step of a Dense
            layer is faster in float8 than in bfloat16, under delayed and under
            current scaling. None: float8 never gains there.
        origin: Where the size comes from.
    """

    backend: str
    device: str
    size: int | None
    origin: str


def break_evens() -> tuple[BreakEven, ...]:
    """Return the break-even sizes of usual devices with each framework."""
    return tuple(
        break_even(backend, device_named(name))
        for name in ("H100", "H200", "B200")
        for backend in ("jax", "tensorflow", "torch")
    )


LARGEST = 2**15
"""The largest size that `break_even` tries."""


@functools.cache
def break_even(backend: str, device: Device) -> BreakEven:
    """Return the break-even size of a device whose float8 matmuls are native.

    Args:
        backend: The name of the framework. With PyTorch steps are eager.
        device: The device.
    """
    product = product_of(device.title)
    estimator = estimator_of(backend, product or "H100", device)
    host = HOST if backend == "torch" else dict.fromkeys(HOST, 0.0)
    size = None
    for tried in range(LARGEST, 0, -64):
        square = Matmuls.square(tried)
        delayed, current = (
            estimator.quantized(square, recipes.get(name))
            for name in ("delayed", "current")
        )
        float8 = max(delayed, host["history"], current, host["float8"])
        if max(estimator.plain(square), host["plain"]) <= float8:
            break
        size = tried
    title = product or device.title
    return BreakEven(backend, title, size, _origin(backend, product, estimator))


def _origin(backend: str, product: str | None, estimator: Estimator) -> str:
    """Return where a break-even size comes from."""
    if product is None:
        return "assumed to be as on an H100, since its speed is not known"
    if backend == "torch":
        return "estimated, with the time that the host of an H200 takes"
    if not estimator.corrections:
        return "estimated from data sheets and published measurements"
    by_origin: dict[str, list[str]] = {}
    for row in measured_on(product):
        speed = f"{row.speed:.2f} at {row.size}³ under {row.recipe}"
        by_origin.setdefault(row.origin, []).append(speed)
    found = "; ".join(
        f"{origin}: {', '.join(speeds)}" for origin, speeds in by_origin.items()
    )
    kind = "estimated, corrected by what was measured"
    if {"delayed", "current"} <= set(estimator.corrections):
        kind = "measured"
    if backend != "jax":
        kind = "assumed to be as with JAX"
    return f"{kind}, in speeds of bfloat16, on an {found}"
