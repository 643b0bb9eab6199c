"""The time of a training step on a GPU, estimated from what it must do.

A matmul takes its operations by a share of the peak, and reads and writes
every operand once by a share of the bandwidth. Each operand that is quantized
is read and written before, as often as its recipe needs. Attention and
everything else takes the same time under each recipe.

The shares are fitted to published measurements by
`integration/benchmarks/published.py`; `docs/plan.md` has its errors.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from keras_policy_ext import formats
from keras_policy_ext.backends.devices import Device
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
"""By product, as in the title of a `Device`. Peaks have accumulation in
float32. `docs/plan.md` has this table, and tells what the sources are."""

_OTHER_NAMES = {"V7X": "TPU7x", "IRONWOOD": "TPU7x", "TRILLIUM": "v6e"}


def card_of(device: Device, name: str) -> Card:
    """Return the speeds of a device.

    Args:
        device: The device.
        name: How the caller named it, for the error.

    Raises:
        ValueError: If they are not known.
    """
    for word in re.findall(r"\w+", device.title.replace("RTX ", "RTX")):
        product = _OTHER_NAMES.get(word.upper(), word)
        if product in CARDS:
            return CARDS[product]
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
            gradients of inputs after a float8 matmul: XLA writes them in
            float32 first.
        fitted: As `FITTED`.
    """

    card: Card
    one_layout: bool = False
    fallback: float = 1
    results: float = 0
    fitted: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: FITTED
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
            if self.results and matmul != "kernel_grad":
                outputs = matmul == "forward"
                size = matmuls.outputs if outputs else matmuls.inputs
                one += self.moving(self.results * size)
            seconds += times * one
        if casts == "none":
            return seconds
        number, kernels = self.cast_bytes(matmuls, recipe, which, casts)
        return seconds + self.moving(number) + kernels * KERNEL_SECONDS

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
                amaxes += rows or (whole and not recipe.history_length)
            elements = matmuls.elements(operand)
            number += elements * (read * (passes + amaxes) + written)
            kernels += passes + amaxes
        return number, kernels
