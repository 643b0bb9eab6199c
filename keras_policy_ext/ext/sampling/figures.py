"""What quantization does to an operand, in numbers that add up over uses."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from keras import ops

from keras_policy_ext import formats
from keras_policy_ext._types import Tensor
from keras_policy_ext.ext.nvfp4.quantized import hadamard, padded
from keras_policy_ext.numerics.quantized import quantize as quantize_matrix
from keras_policy_ext.recipes import Quantization, matmuls_of


@dataclasses.dataclass(frozen=True)
class Figures:
    """Counts and sums over the values of an operand that is quantized.

    Two of them add up. Values that are not finite are counted, and are 0 in
    everything else.

    Attributes:
        counts: The number of values; of values that are not finite; of zeros;
            of values that are rounded and are not 0, under a Hadamard
            transform of transformed ones; of these, how many would round
            beyond the largest number of the format, and how many become 0.
        amax: The largest magnitude.
        scale: The largest dequantizing scale; 1 if nothing is quantized.
        powers: The sums of the first four powers.
        noise: The sum of squares of what rounding changes.
    """

    counts: tuple[float, ...] = (0.0,) * 6
    amax: float = 0.0
    scale: float = 0.0
    powers: tuple[float, ...] = (0.0,) * 4
    noise: float = 0.0

    @classmethod
    def read(cls, numbers: Any) -> Figures:
        """Return the figures in a vector of `measured`."""
        *counts, amax, scale, x1, x2, x3, x4, noise = map(float, numbers)
        powers = amax * x1, amax**2 * x2, amax**3 * x3, amax**4 * x4
        return cls(tuple(counts), amax, scale, powers, amax**2 * noise)

    def __add__(self, other: Figures) -> Figures:
        return Figures(
            tuple(map(sum, zip(self.counts, other.counts, strict=True))),
            max(self.amax, other.amax),
            max(self.scale, other.scale),
            tuple(map(sum, zip(self.powers, other.powers, strict=True))),
            self.noise + other.noise,
        )

    @property
    def size(self) -> float:
        """The number of values."""
        return self.counts[0]

    @property
    def nonfinite(self) -> float:
        """The number of values that are infinite or NaN."""
        return self.counts[1]

    @property
    def saturated(self) -> float:
        """The number of values that would round beyond the largest number."""
        return self.counts[4]

    @property
    def sqnr_db(self) -> float | None:
        """The signal-to-quantization-noise ratio in dB; None without noise."""
        signal = self.powers[1]
        if not self.noise or not signal:
            return None
        return 10.0 * math.log10(signal / self.noise)

    @property
    def zero_fraction(self) -> float:
        """The fraction of values that are 0."""
        return self.counts[2] / max(self.size, 1.0)

    @property
    def saturated_fraction(self) -> float:
        """The fraction of nonzero values that saturate."""
        return self.counts[4] / max(self.counts[3], 1.0)

    @property
    def underflow_fraction(self) -> float:
        """The fraction of nonzero values that become 0."""
        return self.counts[5] / max(self.counts[3], 1.0)

    @property
    def kurtosis(self) -> float | None:
        """The fourth central moment over the variance squared; None without.

        It is 3 for normal numbers, and larger the rarer and larger outliers
        are.
        """
        if not self.size:
            return None
        first, second, third, fourth = (x / self.size for x in self.powers)
        variance = second - first**2
        if variance <= 1e-12 * second:
            return None
        central = fourth - 4 * first * third + 6 * first**2 * second
        return (central - 3 * first**4) / variance**2


def total(figures: Iterable[Figures]) -> Figures:
    """Return the sum of figures."""
    return sum(figures, Figures())


def measured(
    contraction: Any,
    operand: str,
    matmul: str,
    asked: Quantization | None,
    x: Tensor,
    scale: Tensor | None = None,
) -> Tensor:
    """Quantize an operand as one of its matmuls reads it; return figures.

    Args:
        contraction: What is multiplied, such as a `kernels.Einsum`.
        operand: `"inputs"`, `"kernel"` or `"outputs_grad"`.
        matmul: The matmul that reads it.
        asked: How the recipe quantizes it; None for not at all.
        x: The operand.
        scale: Float32 scalar, the scale of the tensor; None to find the
            scales from `x`.

    Returns:
        Float32 vector, for `Figures.read`.
    """
    x = contraction.operand(operand, ops.cast(x, "float32"), asked)
    finite = ops.isfinite(x)
    x = ops.where(finite, x, 0.0)
    read, scales, rounded = x, ops.ones((), "float32"), x
    edge = math.inf
    if asked is not None:
        read, scales, rounded = _rounded(asked, operand, matmul, x, scale)
        edge = _edge(asked.format)
    magnitude = ops.abs(read)
    nonzero = ops.greater(magnitude, 0.0)
    counts = [
        ops.logical_not(finite),
        ops.equal(x, 0.0),
        nonzero,
        ops.greater(magnitude, scales * edge),
        ops.logical_and(nonzero, ops.equal(rounded, 0.0)),
    ]
    amax = ops.max(ops.abs(x))
    unit = ops.where(ops.greater(amax, 0.0), amax, 1.0)
    parts, error = x / unit, (read - rounded) / unit
    squares = ops.square(parts)
    sums = [parts, squares, squares * parts, ops.square(squares)]
    size = float(np.prod(finite.shape))
    return ops.stack(
        [
            ops.convert_to_tensor(size, "float32"),
            *(ops.sum(ops.cast(each, "float32")) for each in counts),
            amax,
            ops.max(scales),
            *map(ops.sum, [*sums, ops.square(error)]),
        ]
    )


def _rounded(
    asked: Quantization,
    operand: str,
    matmul: str,
    x: Tensor,
    scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what is quantized, the scale of each value, and the result."""
    across = matmul != matmuls_of(operand)[0]
    if across:
        asked = asked.transposed
    if asked.hadamard is not None:
        # It changes no norm: what it returns is rounded, and so compared.
        axis = 1 if across else 2
        x = hadamard(padded(x, axis), axis)
        asked = dataclasses.replace(asked, hadamard=None)
    key = None
    if asked.rounding == "stochastic":
        key = ops.convert_to_tensor(0, "int32")
    found, _ = quantize_matrix(x, asked, scale, key=key, across=across)
    scales = found.spread_scale
    if asked.has_one_scale:
        scales = ops.reshape(scales, ())
    if found.tensor_scale is not None:
        scales = scales * found.tensor_scale
    return x, scales, found.values * scales


@functools.cache
def _edge(format_name: str) -> float:
    """Return the number beyond which values round past the largest one."""
    found = formats.get(format_name)
    last_bit = 2.0 ** (math.floor(math.log2(found.max)) - found.mantissa_bits)
    return found.max + last_bit / 2
