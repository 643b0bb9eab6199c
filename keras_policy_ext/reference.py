"""NumPy truth: slow, obvious, the judge of every kernel.

Imports NumPy and ml_dtypes only. Everything is float32 unless it says
otherwise; `scale` is the dequantizing multiplier, `x ≈ q * scale`. `dtype` is
the name of a narrow format (`formats.names()`).
"""

import math
from fractions import Fraction
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np

from keras_policy_ext import formats

Array = np.ndarray[Any, Any]

#: The smallest normal float32: no scale is smaller.
SMALLEST_SCALE = np.float32(2.0**-126)
#: The largest power of two in float32: no scale is larger.
LARGEST_SCALE = np.float32(2.0**127)
_FLOAT32_MAX = np.finfo(np.float32).max


class Scaling(Protocol):
    """What the reference asks of a recipe (`recipes.Recipe` has it)."""

    @property
    def history_length(self) -> int:
        """Length of the amax history; 0 for stateless recipes."""

    @property
    def scale_options(self) -> dict[str, Any]:
        """Keyword arguments for `scale_from_amax`."""

    def format_of(self, operand: str) -> str:
        """The ml_dtypes name of an operand's format."""


# Casting


def cast(x: Any, dtype: str) -> Array:
    """Saturating change of dtype.

    Values beyond ±max and ±inf become ±max, NaN stays NaN, subnormals are
    kept, and rounding is to nearest, ties to even. The clip comes first:
    ml_dtypes turns 465 into NaN in `float8_e4m3fn`.

    Args:
        x: Array of any shape, read as float32.
        dtype: A signed narrow format.

    Returns:
        Array of that dtype and of x's shape.

    Raises:
        ValueError: If the format is unknown, or unsigned
            (`float8_e8m0fnu` holds exponents: see `quantize_mx`).
    """
    target = _signed_format(dtype)
    limit = np.float32(target.max)
    with np.errstate(invalid="ignore"):  # NumPy warns of NaN.
        return np.clip(_float32(x), -limit, limit).astype(target.dtype)


def round_scalar(x: float, dtype: str) -> float:
    """Round one number by exact arithmetic; `cast` must agree with it.

    The number is split into a significand and an exponent; the spacing of
    the format at that exponent divides it; the quotient, an exact fraction,
    is rounded to an integer. After gfloat's `round_float`.

    Args:
        x: Any Python float.
        dtype: A signed narrow format.

    Returns:
        The nearest number of the format, ties to even, saturating.

    Raises:
        ValueError: As for `cast`.
    """
    target = _signed_format(dtype)
    if math.isnan(x) or x == 0:
        return x
    if math.isinf(x):
        return math.copysign(target.max, x)
    exponent = math.frexp(abs(x))[1] - 1
    lowest = math.frexp(target.smallest_normal)[1] - 1
    spacing = Fraction(2) ** (max(exponent, lowest) - target.mantissa_bits)
    steps = round(Fraction(abs(x)) / spacing)  # Ties go to the even integer.
    return math.copysign(min(float(steps * spacing), target.max), x)


def stochastic_round(x: Any, bits: Any, dtype: str = "bfloat16") -> Array:
    """Round to one of the two neighbours, as 16 random bits say.

    A number at the fraction p between its neighbours, p rounded down to a
    multiple of 2^-16, becomes the one further from 0 where p + bits * 2^-16
    reaches 1: for a share p of all bits. Finite numbers stay finite.

    Args:
        x: Array of any shape, read as float32.
        bits: Integers from 0 to 2^16 - 1, broadcastable to x.
        dtype: `"bfloat16"`, `"float16"`, or another signed ml_dtypes format
            with infinities.

    Returns:
        Array of that dtype.
    """
    info: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    with np.errstate(invalid="ignore"):  # NumPy warns of NaN.
        x = _float32(x).astype(np.float64)
    finite = np.where(np.isfinite(x), np.abs(x), 0.0)
    exponent = np.maximum(np.frexp(finite)[1] - 1, info.minexp)
    spacing = np.ldexp(1.0, exponent - info.nmant)
    below = np.floor(finite / spacing)
    fraction = np.floor((finite / spacing - below) * 2**16)
    further = fraction + np.asarray(bits, np.int64) >= 2**16
    rounded = np.minimum((below + further) * spacing, float(info.max))
    return np.where(np.isfinite(x), np.copysign(rounded, x), x).astype(
        info.dtype
    )


def quantize(x: Any, scale: Any, dtype: str) -> Array:
    """`cast(float32(x) / scale)`: divide first, then saturate.

    Args:
        x: Array of any shape.
        scale: Dequantizing scale, broadcastable to x.
        dtype: A signed narrow format.

    Returns:
        Codes: an array of that dtype and of x's shape.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return cast(_float32(x) / _float32(scale), dtype)


def dequantize(q: Any, scale: Any, dtype: Any = "float32") -> Array:
    """`float32(q) * scale`, then a cast to dtype.

    Args:
        q: Codes of any shape.
        scale: Dequantizing scale, broadcastable to q.
        dtype: Any NumPy dtype, or the name of an ml_dtypes one.

    Returns:
        Array of that dtype and of q's shape.
    """
    return (_float32(q) * _float32(scale)).astype(np.dtype(dtype))


def quantize_dequantize(
    x: Any, scale: Any, dtype: str, out_dtype: Any = "float32"
) -> Array:
    """`dequantize(quantize(x))`: what a matmul in that format sees of x."""
    return dequantize(quantize(x, scale, dtype), scale, out_dtype)


# Scales


def amax(x: Any) -> np.float32:
    """The largest magnitude, 0 for an empty array, NaN if x has one."""
    return np.float32(np.max(np.abs(_float32(x)), initial=0.0))


def scale_from_amax(
    amax: Any,
    dtype: str,
    margin: int = 0,
    power_of_two: bool = False,
    previous: Any = 1.0,
) -> Array:
    """The dequantizing scale that maps amax onto the largest number.

    `scale = amax / max(dtype) * 2**margin` in float32, between 2^-126 (the
    smallest normal float32, whose reciprocal is finite) and 2^127. An amax
    below 2^-126 counts as 2^-126: JAX and TensorFlow on a CPU compute with
    subnormals as if they were 0. Element-wise over arrays of amax.

    Args:
        amax: Array of any shape.
        dtype: The narrow format.
        margin: Head-room in powers of two; more than 127 act as 127.
        power_of_two: Round the scale up to a power of two, on the bits.
        previous: Kept where amax is 0 or not finite; broadcastable to amax.

    Returns:
        float32 array of amax's shape.
    """
    observed, usable = _usable(amax)
    with np.errstate(over="ignore", under="ignore"):
        scale = observed / _limit_with_margin(dtype, margin)
    scale = np.clip(scale, SMALLEST_SCALE, LARGEST_SCALE)
    if power_of_two:
        scale = _round_up_to_power_of_two(scale)
    return np.where(usable, scale, _float32(previous))


def scale_of_multiplier(
    amax: Any, dtype: str, margin: int = 0, previous: Any = 1.0
) -> Array:
    """`1 / (max(dtype) / 2**margin / amax)`: the scale of delayed scaling.

    Flax and Transformer Engine compute the quantizing multiplier and invert
    it. This differs from `scale_from_amax` by one ulp at most, but delayed
    scaling feeds its own rounding back through the weights: after some steps
    only the same order of operations gives the same amaxes as theirs.
    Element-wise over arrays of amax.

    Source: `compute_scale` in flax/linen/fp8_ops.py.

    Args:
        amax: Array of any shape.
        dtype: The narrow format.
        margin: Head-room in powers of two; more than 127 act as 127.
        previous: Kept where amax is 0 or not finite; broadcastable to amax.

    Returns:
        float32 array of amax's shape, between 2^-126 and 2^126.
    """
    observed, usable = _usable(amax)
    with np.errstate(over="ignore", under="ignore"):
        multiplier = _limit_with_margin(dtype, margin) / observed
    multiplier = np.clip(multiplier, SMALLEST_SCALE, 1 / SMALLEST_SCALE)
    return np.where(usable, np.float32(1) / multiplier, _float32(previous))


def _usable(amax: Any) -> tuple[Array, Array]:
    """Normal amaxes, 1 where there is none, and where there is one."""
    observed = _float32(amax)
    usable = np.isfinite(observed) & (observed > 0)
    normal = np.maximum(observed, SMALLEST_SCALE)
    return np.where(usable, normal, np.float32(1)), usable


def _limit_with_margin(dtype: str, margin: int) -> np.float32:
    return np.float32(formats.get(dtype).max * 2.0 ** -min(margin, 127))


def _round_up_to_power_of_two(scale: Array) -> Array:
    bits = _float32(scale).view(np.uint32)
    exponent = bits & np.uint32(0x7F800000)
    up = np.where(bits == exponent, np.uint32(0), np.uint32(0x00800000))
    return (exponent + up).view(np.float32)


def update_history(history: Any, amax: Any) -> Array:
    """Insert an amax: the history rolls by one, the newest is at index 0.

    The order is that of Keras and Flax: the history is rotated to the left
    and index 0 overwritten, so that index 1 holds the oldest entry and the
    last index the one before the newest. A non-finite amax is not inserted.

    Args:
        history: `(length,)`.
        amax: Scalar.

    Returns:
        float32 `(length,)`.
    """
    if not np.isfinite(amax):
        return _float32(history).copy()
    rolled = np.roll(_float32(history), -1)
    rolled[0] = amax
    return rolled


def delayed_scale(
    history: Any,
    dtype: str,
    *,
    current_amax: Any,
    previous: Any = None,
    margin: int = 0,
    amax_compute: str = "max",
    initial_scale: Any = "current",
) -> np.float32:
    """The scale that delayed scaling uses in this step.

    It is the `scale_of_multiplier` of the reduced history.

    Args:
        history: `(length,)`, as it is **before** this step's amax enters.
        dtype: The narrow format.
        current_amax: This tensor's own amax, used by
            `initial_scale="current"` while there is nothing else.
        previous: The scale of the last step, kept while the history is all
            zero; None while only zeros were ever observed.
        margin: Head-room in powers of two.
        amax_compute: `"max"` or `"most_recent"`.
        initial_scale: `"current"` or 1.0.

    Returns:
        A float32 scalar.
    """
    entries = _float32(history)
    reduced = entries[0] if amax_compute == "most_recent" else entries.max()
    if initial_scale == "current" and previous is None and not reduced:
        reduced = current_amax
    previous = 1.0 if previous is None else previous
    return np.float32(scale_of_multiplier(reduced, dtype, margin, previous))


# Errors


def sqnr_db(reference: Any, approximation: Any) -> float:
    """Signal to quantization noise in dB: 10·log10(Σ r² / Σ (r − a)²).

    Computed in float64. `inf` if the two are equal, `-inf` if the reference
    is all zero and the approximation is not.
    """
    exact = np.asarray(reference).astype(np.float64)
    noise = exact - np.asarray(approximation).astype(np.float64)
    noise_power = float(np.sum(noise**2))
    signal_power = float(np.sum(exact**2))
    if noise_power == 0:
        return math.inf
    if signal_power == 0:
        return -math.inf
    return 10 * math.log10(signal_power / noise_power)


def underflow_fraction(x: Any, scale: Any, dtype: str) -> float:
    """Fraction (0 to 1) of the nonzero values that become 0.

    0.0 if there are no nonzero values.
    """
    nonzero = _float32(x) != 0
    lost = nonzero & (_float32(quantize(x, scale, dtype)) == 0)
    return float(lost.sum() / max(int(nonzero.sum()), 1))


# A whole linear layer


class Linear(NamedTuple):
    """One float8 linear layer, forward and backward.

    Attributes:
        y: `(..., out)`, the output.
        inputs_grad: `(..., in)`.
        kernel_grad: `(in, out)`.
        quantized: Codes by operand.
        scales: Dequantizing scales by operand.
    """

    y: Array
    inputs_grad: Array
    kernel_grad: Array
    quantized: dict[str, Array]
    scales: dict[str, Array]


def linear(x: Any, kernel: Any, g: Any, recipe: Scaling) -> Linear:
    """A linear layer under tensorwise current scaling.

    `y = x·w`, `inputs_grad = g·wᵀ`, `kernel_grad = xᵀ·g`, all over quantized
    operands, accumulated in float64 and rounded once to float32.

    Args:
        x: `(..., in)`.
        kernel: `(in, out)`.
        g: `(..., out)`, the gradient of the output.
        recipe: A stateless tensorwise recipe.

    Returns:
        A `Linear`.

    Raises:
        ValueError: If the recipe keeps a history (see `DelayedLinear`).
    """
    if recipe.history_length:
        raise ValueError(
            "reference.linear keeps no state between steps. Received: "
            f"{recipe!r}. Allowed: a recipe without history, such as "
            "CurrentScaling(). Use DelayedLinear."
        )
    operands = {"inputs": x, "kernel": kernel, "outputs_grad": g}
    scales = {
        operand: scale_from_amax(
            amax(value), recipe.format_of(operand), **recipe.scale_options
        )
        for operand, value in operands.items()
    }
    return _linear(operands, scales, recipe)


class DelayedLinear:
    """A linear layer under delayed scaling, step by step.

    `forward` and `backward` of one step use the scales that follow from the
    histories before it, then observe. Products accumulate in
    float64; the scales are `scale_of_multiplier`'s, so that a free-running
    trace of steps has the amaxes and scales of Flax.

    Args:
        recipe: A `recipes.DelayedScaling`.

    Attributes:
        histories: float32 `(length,)` by operand.
        scales: float32 scalar by operand: the ones last used.
    """

    def __init__(self, recipe: Any) -> None:
        self.recipe = recipe
        self.histories: dict[str, Array] = {}
        self.scales: dict[str, np.float32] = {}
        self._known: set[str] = set()
        self.quantized: dict[str, Array] = {}
        for operand in ("inputs", "kernel", "outputs_grad"):
            length = recipe.history_length
            self.histories[operand] = np.zeros(length, np.float32)
            self.scales[operand] = np.float32(1)

    def forward(self, x: Any, kernel: Any, observe: bool = True) -> Array:
        """The output `(..., out)` of x `(..., in)` and kernel `(in, out)`.

        With `observe=False` (a pass that is not training) the histories and
        scales stay as they are.
        """
        a, scale_a = self._quantize("inputs", x, observe)
        b, scale_b = self._quantize("kernel", kernel, observe)
        return _product(a, b, scale_a, scale_b)

    def backward(self, g: Any) -> tuple[Array, Array]:
        """inputs_grad `(..., in)` and kernel_grad of g `(..., out)`."""
        c, scale = self._quantize("outputs_grad", g, True)
        x, kernel = self.quantized["inputs"], self.quantized["kernel"]
        inputs_grad = _product(c, kernel.T, scale, self.scales["kernel"])
        kernel_grad = _product(
            _rows(x).T, _rows(c), self.scales["inputs"], scale
        )
        return inputs_grad, kernel_grad

    def _quantize(
        self, operand: str, x: Any, observe: bool
    ) -> tuple[Array, np.float32]:
        dtype = self.recipe.format_of(operand)
        observed = amax(x)
        scale = delayed_scale(
            self.histories[operand],
            dtype,
            current_amax=observed,
            previous=self.scales[operand] if operand in self._known else None,
            margin=self.recipe.margin,
            amax_compute=self.recipe.amax_compute,
            initial_scale=self.recipe.initial_scale,
        )
        codes = quantize(x, scale, dtype)
        if observe:
            history = update_history(self.histories[operand], observed)
            self.histories[operand] = history
            self.scales[operand] = scale
            self.quantized[operand] = codes
            if history.any():
                self._known.add(operand)
        return codes, scale


def _linear(
    operands: dict[str, Any], scales: dict[str, Array], recipe: Scaling
) -> Linear:
    codes = {
        operand: quantize(value, scales[operand], recipe.format_of(operand))
        for operand, value in operands.items()
    }
    x, kernel, g = (codes[o] for o in ("inputs", "kernel", "outputs_grad"))
    sx, sw, sg = (scales[o] for o in ("inputs", "kernel", "outputs_grad"))
    return Linear(
        y=_product(x, kernel, sx, sw),
        inputs_grad=_product(g, kernel.T, sg, sw),
        kernel_grad=_product(_rows(x).T, _rows(g), sx, sg),
        quantized=codes,
        scales=scales,
    )


def _product(a: Array, b: Array, scale_a: Any, scale_b: Any) -> Array:
    """`(a·b) * scale_a * scale_b` in float64, rounded once to float32."""
    product = a.astype(np.float64) @ b.astype(np.float64)
    return (product * np.float64(scale_a) * np.float64(scale_b)).astype(
        np.float32
    )


def _rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


# Blocks


class BlockQuantized(NamedTuple):
    """Codes with one scale per block.

    Attributes:
        codes: Of x's shape.
        scales: `(rows / tile[0], columns / tile[1])`, rounded up.
    """

    codes: Array
    scales: Array


class NVFP4Quantized(NamedTuple):
    """NVFP4 codes: the value is `code * scale * amax / 2688`.

    Attributes:
        codes: `float4_e2m1fn`, of x's shape.
        scales: `float8_e4m3fn` per block.
        amax: The tensor's amax, float32.
    """

    codes: Array
    scales: Array
    amax: np.float32


def quantize_block(
    x: Any,
    dtype: str = "float8_e4m3fn",
    tile: tuple[int, int] = (1, 128),
    power_of_two: bool = True,
) -> BlockQuantized:
    """One scale per tile of a matrix, as in DeepSeek-V3 (arXiv 2412.19437).

    The last tile of a row or column may be smaller; padding never changes a
    scale. A tile of zeros has scale 1.

    Args:
        x: `(rows, columns)`.
        dtype: The narrow format.
        tile: Rows and columns of a tile: `(1, 128)` or `(128, 128)`.
        power_of_two: Round scales up to powers of two.

    Returns:
        Codes `(rows, columns)` and dequantizing float32 scales.
    """
    scales = scale_from_amax(
        _block_amax(x, tile), dtype, power_of_two=power_of_two
    )
    spread = _spread(scales, tile, np.shape(x))
    return BlockQuantized(quantize(x, spread, dtype), scales)


def quantize_mx(
    x: Any,
    dtype: str = "float8_e4m3fn",
    block: int = 32,
    rounding: str = "round_up",
) -> BlockQuantized:
    """OCP MX: one E8M0 scale per block along the last axis.

    Args:
        x: `(rows, columns)`.
        dtype: The narrow format of the elements.
        block: Columns of a block.
        rounding: `"round_up"` (arXiv 2506.08027) or `"floor"` (OCP MX 1.0),
            to the bit.

    Returns:
        Codes `(rows, columns)` and scales as `float8_e8m0fnu`, whose byte E
        means 2^(E − 127).

    Raises:
        ValueError: If there is no such rounding.
    """
    rules = {"round_up": _e8m0_round_up, "floor": _e8m0_floor}
    if rounding not in rules:
        raise ValueError(
            f"Unknown rounding of MX scales. Received: {rounding!r}. "
            "Allowed: 'round_up' or 'floor'. Leave it out for 'round_up'."
        )
    tile = (1, block)
    exponents = rules[rounding](_block_amax(x, tile), dtype)
    # Multiply by 2^(127 − E): dividing by 2^-127 fails where denormals are
    # flushed. The power itself is always a normal number but for E = 254.
    factors = np.ldexp(np.float32(1), 127 - exponents.astype(np.int32))
    with np.errstate(invalid="ignore", over="ignore"):
        scaled = _float32(x) * _spread(factors, tile, np.shape(x))
    codes = cast(scaled, dtype)
    return BlockQuantized(
        codes, exponents.view(formats.get("float8_e8m0fnu").dtype)
    )


def quantize_nvfp4(x: Any, tile: tuple[int, int] = (1, 16)) -> NVFP4Quantized:
    """NVFP4: e2m1 elements, e4m3 block scales, one float32 tensor scale.

    Bit for bit Transformer Engine's reference quantizer, rounding to nearest.

    Args:
        x: `(rows, columns)`.
        tile: Rows and columns of a block: `(1, 16)` or `(16, 16)`.

    Returns:
        An `NVFP4Quantized`.
    """
    element = formats.get("float4_e2m1fn")
    block_max = np.float32(formats.get("float8_e4m3fn").max)
    tensor = amax(x)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        wanted = block_max * np.float32(element.max) / tensor
        scale = np.minimum(wanted, _FLOAT32_MAX) if tensor else np.float32(1)
        blocks = _block_amax(x, tile) * (scale / np.float32(element.max))
        scales = cast(blocks, "float8_e4m3fn")
        inverse = np.float32(1) / (_float32(scales) * (np.float32(1) / scale))
        encode = np.minimum(inverse, _FLOAT32_MAX)
        scaled = _float32(x) * _spread(encode, tile, np.shape(x))
    return NVFP4Quantized(cast(scaled, element.name), scales, tensor)


def _e8m0_round_up(block_amax: Array, dtype: str) -> Array:
    v = block_amax * (np.float32(1) / np.float32(formats.get(dtype).max))
    bits = v.view(np.uint32)
    exponent = (bits >> 23).astype(np.int32)
    fraction = bits & np.uint32(0x7FFFFF)
    small = (exponent == 0) & (fraction <= 0x400000)
    up = (fraction > 0) & (exponent != 254) & ~small
    return _e8m0_special(exponent + up, block_amax)


def _e8m0_floor(block_amax: Array, dtype: str) -> Array:
    largest = math.frexp(formats.get(dtype).max)[1] - 1
    exponent = np.frexp(block_amax)[1] - 1 - largest
    return _e8m0_special(np.clip(exponent, -127, 127) + 127, block_amax)


def _e8m0_special(exponent: Array, block_amax: Array) -> Array:
    exponent = np.where(block_amax == 0, 0, exponent)
    exponent = np.where(np.isinf(block_amax), 254, exponent)
    exponent = np.where(np.isnan(block_amax), 255, exponent)
    return exponent.astype(np.uint8)


def _block_amax(x: Any, tile: tuple[int, int]) -> Array:
    """The amax of each tile: `(rows / tile[0], columns / tile[1])`."""
    magnitudes = np.abs(_matrix(x))
    for axis, size in enumerate(tile):
        starts = np.arange(0, magnitudes.shape[axis], size)
        magnitudes = np.maximum.reduceat(magnitudes, starts, axis=axis)
    return magnitudes


def _spread(
    blocks: Array, tile: tuple[int, int], shape: tuple[int, ...]
) -> Array:
    """Repeat one value per tile over the elements of a matrix."""
    whole = blocks.repeat(tile[0], axis=0).repeat(tile[1], axis=1)
    return whole[: shape[0], : shape[1]]


def _matrix(x: Any) -> Array:
    matrix = _float32(x)
    if matrix.ndim != 2:
        raise ValueError(
            "Blocks are defined on matrices. Received: an array of shape "
            f"{matrix.shape}. Allowed: (rows, columns). Reshape it so that "
            "the contracted axis is the last."
        )
    return matrix


def _signed_format(dtype: str) -> formats.Format:
    target = formats.get(dtype)
    if target.name == "float8_e8m0fnu":
        raise ValueError(
            "float8_e8m0fnu holds exponents, not signed numbers. Received: "
            f"dtype={dtype!r}. Allowed: the other formats of formats.names(). "
            "Use quantize_mx, which makes such scales."
        )
    return target


def _float32(x: Any) -> Array:
    return np.asarray(x).astype(np.float32)
