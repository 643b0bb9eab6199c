"""JAX on CUDA: read an operand once, write float8 codes in both layouts.

XLA writes the codes of an operand, their transpose, the amax and the sums of
columns by several kernels, each of which reads the operand or its codes
again. Here one kernel of Pallas does it, which Triton compiles.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from keras_policy_ext import formats
from keras_policy_ext._types import Tensor, override
from keras_policy_ext.backends.both_layouts import (
    Both,
    BothLayouts,
    ScaleHint,
    Wanted,
)
from keras_policy_ext.backends.devices import Device
from keras_policy_ext.formats import FAMILIES
from keras_policy_ext.numerics import casting, scaling
from keras_policy_ext.numerics.scale_sources import ScaleRule
from keras_policy_ext.numerics.tiles import scales_of
from keras_policy_ext.recipes import Quantization

ROWS, COLUMNS = 64, 64
"""The tile of one program of the cast."""

PART = 8192
"""The number of elements that one program of `amax_if` reads."""

MOST = 1 << 31
"""The number of elements from which a place does not fit an int32."""

DTYPES = ("bfloat16", "float16", "float32")
_PARAMS = triton.CompilerParams(num_warps=4, num_stages=1)


class Cast(NamedTuple):
    """How the kernel casts a matrix; hashable.

    Attributes:
        format: The name of the format.
        across: Whether to write the transpose of the codes too.
        sums: Whether to write the sums of columns too.
        interpreted: Whether to run on any device, in Pallas's interpreter.
    """

    format: str
    across: bool
    sums: bool
    interpreted: bool = False


class PallasCasts(BothLayouts):
    """Pallas kernels that quantize a matrix, and write its transpose too.

    Args:
        device: Returns the device that is computed on.
        interpreted: Whether to run on any device, in Pallas's interpreter; for
            tests.
    """

    sums_columns = True

    def __init__(self, device: Any, interpreted: bool = False):
        self._device, self.interpreted = device, interpreted

    @override
    def supports(
        self, like: Tensor, dtype: str, format_name: str
    ) -> str | None:
        if self.interpreted:
            return lacking(like, dtype, format_name)
        return lacking(like, dtype, format_name, self._device())

    @override
    def quantize(
        self,
        matrix: Tensor,
        asked: Quantization,
        known: ScaleHint,
        wanted: Wanted,
    ) -> Both:
        x = matrix.T if wanted.lies_across else matrix
        amax, scale = self._scale(x, asked, known)
        how = Cast(
            asked.format,
            self.interpreted or self._device().one_layout,
            wanted.column_sums,
            self.interpreted,
        )
        run = _by_xla if wanted.once else cast
        codes, across, largest, column_sums = run(how, x, scale)
        if wanted.lies_across:
            codes, across = across, codes
        amax = largest if amax is None else amax
        return Both(
            codes, across, scale, amax if wanted.amax else None, column_sums
        )

    def _scale(
        self, x: Tensor, asked: Quantization, known: ScaleHint
    ) -> tuple[Tensor | None, Tensor]:
        """Return the amax if it had to be found first, and the scale."""
        if known.scale is None:
            amax = scaling.amax(x)
            return amax, scale_of(amax, asked, known.rule)
        scale = jnp.reshape(known.scale, ())
        if known.unseen is None:
            return None, scale
        # A branch would end the graph that CUDA replays.
        own = amax_if(known.unseen, x, self.interpreted)
        own = scale_of(own, asked, known.rule)
        return None, jnp.where(known.unseen, own, scale)


def lacking(
    like: Tensor, dtype: str, format_name: str, device: Device | None = None
) -> str | None:
    """Return why Pallas's casts cannot quantize an operand; None if they can.

    Args:
        like: A tensor with the sizes of the operand.
        dtype: The dtype of the operand.
        format_name: The format to quantize to.
        device: The device; None for Pallas's interpreter.
    """
    if format_name not in FAMILIES["ocp"]:
        return f"Pallas's casts do not write {format_name}"
    if dtype not in DTYPES:
        return f"Pallas's casts do not read {dtype}"
    sizes = tuple(like.shape)
    if not all(isinstance(size, int) for size in sizes):
        return "Pallas's casts need known sizes"
    if not 0 < math.prod(sizes) < MOST:
        return "Pallas's casts read 1 to 2^31 - 1 numbers"
    if device is None:
        return None
    if device.maker != "nvidia":
        return "Pallas's casts are for CUDA"
    if jax.device_count() > 1:
        return "Pallas's casts are for one device"
    return None


def scale_of(amax: Tensor, asked: Quantization, rule: ScaleRule) -> Tensor:
    """Return the scale of an amax, as a recipe's rule says."""
    if not rule.inverted:
        return scales_of(amax, asked).scale
    limit = formats.get(asked.format).max
    return scaling.scale_of_multiplier(amax, limit, rule.margin)


def cast(
    how: Cast, x: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Quantize a matrix with one scale.

    Args:
        how: What to write.
        x: (m, k), bfloat16, float16 or float32.
        scale: Float32 scalar.

    Returns:
        The codes (m, k), their transpose (k, m), the amax of `x`, a float32
        scalar that is NaN if a value is NaN, and the sums of the columns of
        `x`, float32 (k,), or None.
    """
    if how.interpreted:
        return _by_pallas(how, x, scale)
    return lax.platform_dependent(
        x,
        scale,
        cuda=functools.partial(_by_pallas, how),
        default=functools.partial(_by_xla, how),
    )


def _by_xla(
    how: Cast, x: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    codes = casting.quantize(x, scale, how.format)
    sums = jnp.sum(x.astype(jnp.float32), 0) if how.sums else None
    return codes, codes.T, scaling.amax(x), sums


def _by_pallas(
    how: Cast, x: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    m, k = x.shape
    rows, columns = pl.cdiv(m, ROWS), pl.cdiv(k, COLUMNS)
    tile = pl.BlockSpec((ROWS, COLUMNS), lambda i, j: (i, j))
    dtype = jnp.dtype(how.format)
    outputs = {
        "codes": (tile, (m, k), dtype),
        "amaxes": (
            pl.BlockSpec((1, 1), lambda i, j: (i, j)),
            (rows, columns),
            jnp.int32,
        ),
    }
    if how.across:
        turned = pl.BlockSpec((COLUMNS, ROWS), lambda i, j: (j, i))
        outputs["across"] = turned, (k, m), dtype
    if how.sums:
        row = pl.BlockSpec((1, COLUMNS), lambda i, j: (i, j))
        outputs["sums"] = row, (rows, k), jnp.float32
    specs, shapes, dtypes = zip(*outputs.values(), strict=True)
    found = pl.pallas_call(
        functools.partial(_cast_kernel, how, (m, k), tuple(outputs)),
        grid=(rows, columns),
        in_specs=[tile, pl.BlockSpec((1,), lambda i, j: (0,))],
        out_specs=list(specs),
        out_shape=list(map(jax.ShapeDtypeStruct, shapes, dtypes)),
        compiler_params=_PARAMS,
        interpret=how.interpreted,
        name="float8_cast",
    )(x, scale.reshape(1))
    named = dict(zip(outputs, found, strict=True))
    codes = named["codes"]
    across = named["across"] if how.across else codes.T
    sums = jnp.sum(named["sums"], 0) if how.sums else None
    return codes, across, _largest(named["amaxes"]), sums


def _cast_kernel(
    how: Cast,
    sizes: tuple[int, int],
    names: tuple[str, ...],
    x_ref: Any,
    scale_ref: Any,
    *refs: Any,
) -> None:
    """Quantize a tile; write what is asked for."""
    inside = _inside(sizes)
    x = (
        x_ref[...]
        if inside is None
        else triton.load(x_ref, mask=inside, other=0.0)
    )
    x = x.astype(jnp.float32)
    codes = codes_of(x, scale_ref[...], how.format, how.interpreted)
    written = dict(zip(names, refs, strict=True))
    store(written["codes"], codes, inside)
    written["amaxes"][...] = jnp.full((1, 1), jnp.max(magnitude(x)))
    if how.across:
        turned = None if inside is None else inside.T
        store(written["across"], codes.T, turned)
    if how.sums:
        below = None if inside is None else _columns_inside(sizes)
        store(written["sums"], jnp.sum(x, axis=0, keepdims=True), below)


def _inside(sizes: tuple[int, int]) -> Tensor | None:
    """Return which elements of a tile are in the matrix; None if all are."""
    if sizes[0] % ROWS == 0 and sizes[1] % COLUMNS == 0:
        return None
    shape = ROWS, COLUMNS
    i = lax.broadcasted_iota(jnp.int32, shape, 0) + pl.program_id(0) * ROWS
    j = lax.broadcasted_iota(jnp.int32, shape, 1) + pl.program_id(1) * COLUMNS
    return (i < sizes[0]) & (j < sizes[1])


def _columns_inside(sizes: tuple[int, int]) -> Tensor:
    """Return which columns of a tile are in the matrix, (1, columns)."""
    j = lax.broadcasted_iota(jnp.int32, (1, COLUMNS), 1)
    return j + pl.program_id(1) * COLUMNS < sizes[1]


def store(ref: Any, x: Tensor, inside: Tensor | None) -> None:
    """Store a tile, or only what is inside of the matrix."""
    if inside is None:
        ref[...] = x
    else:
        triton.store(ref, x, mask=inside)


def magnitude(x: Tensor) -> Tensor:
    """Return the bits of magnitudes: ordered like them, NaN above all."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return bits & np.int32(casting.MAGNITUDE_BITS)


def _largest(bits: Tensor) -> Tensor:
    return lax.bitcast_convert_type(jnp.max(bits), jnp.float32)


def codes_of(
    x: Tensor, scale: Tensor, format_name: str, interpreted: bool
) -> Tensor:
    """Divide a tile by a scale, clip, and cast it to a format.

    Args:
        x: Float32, a tile in a kernel.
        scale: Float32 scalar, or of a shape that broadcasts to the tile.
        format_name: The name of the format.
        interpreted: Whether Pallas's interpreter runs the kernel.
    """
    limit = formats.get(format_name).max
    if interpreted:
        # XLA multiplies by the reciprocal of a divisor that it broadcasts.
        quotient = x / jnp.where(x == x, scale, 1.0)
    else:
        quotient = _quotient(x, scale)
    codes = jnp.clip(quotient, -limit, limit).astype(format_name)
    if not formats.get(format_name).has_inf:
        return codes
    # Of the NaN of e5m2 the same one on every device.
    bits = lax.bitcast_convert_type(codes, jnp.uint8)
    bits = jnp.where(x == x, bits, jnp.uint8(0x7E))
    return lax.bitcast_convert_type(bits, jnp.dtype(format_name))


def _quotient(x: Tensor, scale: Tensor) -> Tensor:
    """Compute `x / scale`, correctly rounded wherever a code depends on it.

    It uses the reciprocal and one correction (P. Markstein, "Computation of
    elementary functions on the IBM RISC System/6000 processor", 1990), half of
    the instructions of a division. Infinity, NaN and the signs of zeros are
    preserved. It divides if a correction could be subnormal.
    """

    def spread(scale: Tensor) -> Tensor:
        return jnp.broadcast_to(scale, x.shape)

    def corrected() -> Tensor:
        reciprocal = spread(_asm("rcp.rn.f32", scale))
        first = x * reciprocal
        error = _asm("fma.rn.f32", -first, spread(scale), x)
        better = _asm("fma.rn.f32", error, reciprocal, first)
        within = (jnp.abs(first) < 2.0**20) & (first != 0.0)
        return jnp.where(within, better, first)

    smallest = jnp.min(scale) if scale.ndim else scale
    return lax.cond(
        smallest < 2.0**-60,
        lambda: _asm("div.rn.f32", x, spread(scale)),
        corrected,
    )


def _asm(instruction: str, *arguments: Tensor) -> Tensor:
    """Run an instruction of PTX on float32 tiles, element by element."""
    like = arguments[0]
    places = ", ".join(f"${i}" for i in range(len(arguments) + 1))
    (found,) = triton.elementwise_inline_asm(
        f"{instruction} {places};",
        args=arguments,
        constraints=",".join(["=f"] + ["f"] * len(arguments)),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(like.shape, like.dtype)],
    )
    return found


def amax_if(wanted: Tensor, x: Tensor, interpreted: bool = False) -> Tensor:
    """Return the amax of a tensor if it is wanted, else 0.

    Args:
        wanted: Bool scalar.
        x: Of any shape; nothing of it is read if the amax is not wanted.
        interpreted: Whether to run in Pallas's interpreter.

    Returns:
        Float32 scalar; NaN if a value is NaN.
    """
    if interpreted:
        return _amax_by_pallas(wanted, x, interpreted=True)
    return lax.platform_dependent(
        wanted,
        x,
        cuda=_amax_by_pallas,
        default=lambda wanted, x: jnp.where(wanted, scaling.amax(x), 0.0),
    )


def _amax_by_pallas(
    wanted: Tensor, x: Tensor, interpreted: bool = False
) -> Tensor:
    programs = pl.cdiv(x.size, PART)
    bits = pl.pallas_call(
        functools.partial(_amax_kernel, x.size),
        grid=(programs,),
        in_specs=[
            pl.BlockSpec((1,), lambda i: (0,)),
            pl.BlockSpec((PART,), lambda i: (i,)),
        ],
        out_specs=pl.BlockSpec((1,), lambda i: (i,)),
        out_shape=jax.ShapeDtypeStruct((programs,), jnp.int32),
        compiler_params=_PARAMS,
        interpret=interpreted,
        name="float8_amax_if",
    )(wanted.astype(jnp.int32).reshape(1), x.reshape(-1))
    return _largest(bits)


def _amax_kernel(
    size: int, wanted_ref: Any, x_ref: Any, found_ref: Any
) -> None:
    """Write the amax of a part if it is wanted; return at once if not."""
    found_ref[...] = jnp.zeros((1,), jnp.int32)
    # Pallas's interpreter knows no programs inside of a branch.
    start = pl.program_id(0) * PART

    @pl.when(wanted_ref[0] != 0)
    def _() -> None:
        place = lax.iota(jnp.int32, PART) + start
        x = triton.load(x_ref, mask=place < size, other=0.0)
        found_ref[...] = jnp.full(
            (1,), jnp.max(magnitude(x.astype(jnp.float32)))
        )
