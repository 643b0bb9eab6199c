"""JAX on CUDA: read an operand once, write float8 codes in both layouts.

XLA writes the codes of an operand, their transpose, the amax and the sums of
columns by several kernels, each of which reads the operand or its codes
again. Here one kernel of Pallas does it, which Triton compiles.
"""

from __future__ import annotations

import concurrent.futures
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from keras_policy_ext import formats, user_code
from keras_policy_ext._types import Tensor, override
from keras_policy_ext.backends import devices
from keras_policy_ext.backends.both_layouts import (
    Both,
    BothLayouts,
    ScaleHint,
    Wanted,
)
from keras_policy_ext.backends.devices import Device
from keras_policy_ext.backends.jax import partitioned
from keras_policy_ext.backends.jax.partitioned import Shards
from keras_policy_ext.formats import FAMILIES
from keras_policy_ext.numerics import casting, scaling
from keras_policy_ext.numerics.scale_sources import ScaleRule
from keras_policy_ext.recipes import Quantization

# JAX says that it will be removed (0.11.2).
try:
    from jax.experimental.pallas import triton as triton  # Also for `rows`.
except ImportError:
    triton = None

ROWS, COLUMNS = 64, 64
"""The tile of one program of the cast."""

PART, PROGRAMS = 4096, 256
"""How many elements a program of `amax_if` reads at once; how many run."""

MOST = 1 << 31
"""The number of elements from which a place does not fit an int32."""

Ref: TypeAlias = Any
"""A reference to a block of a tensor, in a kernel."""

DTYPES = ("bfloat16", "float16", "float32")


class Cast(NamedTuple):
    """Options of the kernel that casts a matrix; hashable.

    Attributes:
        format: The name of the format.
        rule: How a scale is computed from an amax.
        power_of_two: Whether that scale is rounded up to a power of two.
        across: Whether to write the transpose of the codes too.
        sums: Whether to write the sums of columns too.
        interpreted: Whether to run on any device, in Pallas's interpreter.
    """

    format: str
    rule: ScaleRule = ScaleRule(by_multiplier=False)
    power_of_two: bool = False
    across: bool = True
    sums: bool = False
    interpreted: bool = False


class Scale(NamedTuple):
    """The scale of a matrix, or the amax that it is computed from.

    Attributes:
        given: Float32 (1,), the scale if `unseen` is 0.
        unseen: Int32 (1,), whether the scale is that of the amax.
        amaxes: Int32 (n,), the bits of amaxes, the largest of which counts; n
            is a power of two.
    """

    given: Tensor
    unseen: Tensor
    amaxes: Tensor


class PallasCasts(BothLayouts):
    """Pallas kernels that quantize a matrix, and write its transpose too.

    Args:
        device: Returns the current device; not called if `interpreted`.
        interpreted: Whether to run in Pallas's interpreter, on any device.
    """

    sums_columns = True

    def __init__(self, device: Callable[[], Device], interpreted: bool = False):
        self._device, self.interpreted = device, interpreted

    @override
    def supports(
        self, like: Tensor, dtype: str, format_name: str
    ) -> str | None:
        device = None if self.interpreted else self._device()
        return lacking(like, dtype, format_name, device)

    @override
    def quantize(
        self,
        matrix: Tensor,
        quantization: Quantization,
        hint: ScaleHint,
        wanted: Wanted,
    ) -> Both:
        """Quantize a matrix and its transpose, on each shard of it.

        `hint` has the scale, or says how to compute it from the amax.
        """
        # The kernel reads rows of memory. Its two layouts are then exchanged.
        is_transposed = wanted.is_transposed_in_memory
        x = matrix.T if is_transposed else matrix
        options = Cast(
            format=quantization.format,
            rule=hint.rule,
            power_of_two=quantization.scale_rounding == "up",
            across=self.interpreted or self._device().one_layout,
            sums=wanted.column_sums,
            interpreted=self.interpreted,
        )
        kernel = ShardCast(options, wanted)
        codes, across, scale, amax, column_sums = partitioned.run(
            kernel, x, hint.scale, hint.unseen
        )
        layouts = (across, codes) if is_transposed else (codes, across)
        return Both(*layouts, scale, amax, column_sums)


class ShardCast(NamedTuple):
    """The cast of a matrix or shard; `vmapped`, for `jax.vmap`: by XLA."""

    options: Cast
    wanted: Wanted
    vmapped: bool = False

    @property
    def results(self) -> tuple[str | None, ...]:
        """The axes (rows i, columns j): codes, transpose, scale, amax, sums."""
        amax = "" if self.wanted.amax else None
        return "ij", "ji", "", amax, "j" if self.options.sums else None

    @property
    def of_xla(self) -> ShardCast:
        """The same cast without Pallas."""
        return self._replace(vmapped=True)

    def __call__(
        self, shards: Shards, x: Tensor, *scalars: Tensor | None
    ) -> tuple[Any, ...]:
        """Quantize a matrix or shard.

        The scalars are the given scale, and whether its operand was never
        observed; each may be None. Return the codes, those of the transpose,
        the scale, the amax and the sums of columns; None where not wanted.
        """
        given_scale, unseen = scalars
        scale = self._scale(shards, x, given_scale, unseen)
        # XLA fuses a cast whose transpose nothing reads.
        run = _by_xla if self.wanted.no_transpose or self.vmapped else cast
        result = run(self.options, x, scale)
        amax, sums = None, result.column_sums
        if self.wanted.amax:
            if given_scale is None and shards.cut:
                # `_scale` found the amax of all shards.
                amax = _largest_amax(scale.amaxes)
            else:
                amax = shards.amax(result.amax)
        if sums is not None:
            sums = shards.column_sums(sums)
        return result.values, result.across, result.scale, amax, sums

    def _scale(
        self,
        shards: Shards,
        x: Tensor,
        given_scale: Tensor | None,
        unseen: Tensor | None,
    ) -> Scale:
        """Return the given scale, or amaxes to compute one from.

        `unseen` is a flag: the operand was never observed, so that the given
        scale does not count. None: it was.
        """

        def amax() -> Tensor:
            largest = shards.amax(scaling.amax(x), early=True)
            return lax.bitcast_convert_type(largest, jnp.int32).reshape(1)

        one, zero = jnp.ones(1, jnp.float32), jnp.zeros(1, jnp.int32)
        if given_scale is None:
            return Scale(one, unseen=jnp.ones(1, jnp.int32), amaxes=amax())
        given = jnp.reshape(given_scale, (1,))
        if unseen is None:
            return Scale(given, unseen=zero, amaxes=zero)
        flag = jnp.reshape(unseen, (1,)).astype(jnp.int32)
        if self.vmapped or shards.cut:
            # Devices exchange amaxes only if the operand was never observed.
            return Scale(given, flag, lax.cond(unseen, amax, lambda: zero))
        # A branch would end the graph that CUDA replays, so a kernel tests it.
        return Scale(given, flag, amax_if(flag, x, self.options.interpreted))


def lacking(
    like: Tensor, dtype: str, format_name: str, device: Device | None = None
) -> str | None:
    """Return why Pallas's casts cannot quantize an operand; None if they can.

    `like` is a tensor with its sizes; the device None for the interpreter.
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
    if device is not None and device.maker != "nvidia":
        return "Pallas's casts are for CUDA"
    is_real = device is not None and devices.pretended() is None
    if is_real and (reason := failing()) is not None:
        return reason
    return partitioned.lacking()


@functools.cache
def failing() -> str | None:
    """Return why the kernels fail on this device; None if they work.

    They are tested once per process, with real data, before their first use.
    If they fail there is a warning: without them a step takes longer.
    """
    reason = _failure_of_kernels()
    if reason is not None:
        warnings.warn(
            f"Each float8 layer takes longer here: {reason}. XLA casts its "
            "operands instead, with the same results.",
            UserWarning,
            stacklevel=user_code.stacklevel(),
        )
    return reason


def _failure_of_kernels() -> str | None:
    """Run the kernels on real data; return why they fail, or None."""
    if triton is None:
        return f"jax {jax.__version__} has no Pallas for Triton"
    # A new thread runs the test eagerly, even if the caller is being traced.
    # `jax.ensure_compile_time_eval` cannot run Pallas (JAX 0.10 and 0.11).
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        try:
            if all(thread.map(_gives_our_codes, FAMILIES["ocp"])):
                return None
        # A compiler may raise any error on an untested device: the reason.
        except Exception as error:
            message = str(error).partition("\n")[0]
            return (
                f"Pallas's casts fail here: {type(error).__name__}: {message}"
            )
    return "Pallas's casts do not round here as they should"


def _gives_our_codes(format_name: str) -> bool:
    """Return True if a cast of every bfloat16 has the right codes."""
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    x = bits.view(jnp.bfloat16)
    # A divisor by which quotients are inexact.
    scale, zero = np.float32(0.37), jnp.zeros(1, jnp.int32)
    dtype, limit = jnp.dtype(format_name), formats.get(format_name).max
    with np.errstate(all="ignore"):
        quotient = x.astype("float32") / scale
    codes = np.clip(quotient, -limit, limit).astype(dtype)
    options = Cast(format_name)
    given = Scale(jnp.full(1, scale), unseen=zero, amaxes=zero)
    result = jax.jit(cast, static_argnums=0)(options, jnp.asarray(x), given)
    return all(
        _are_equal(expected, np.asarray(each))
        for expected, each in ((codes, result.values), (codes.T, result.across))
    )


def _are_equal(codes: np.ndarray, others: np.ndarray) -> bool:
    """Return True if two arrays of float8 have the same bits, or are NaN."""
    same = codes.view(np.uint8) == others.view(np.uint8)
    nan = np.isnan(codes.astype("float32"))
    return bool(np.all(same | nan & np.isnan(others.astype("float32"))))


def cast(options: Cast, x: Tensor, scale: Scale) -> Both:
    """Quantize a matrix (m, k) of 16-bit or 32-bit floats with one scale.

    Return the codes, their transpose and the amax: by Pallas on CUDA or in its
    interpreter, else by XLA.
    """
    if options.interpreted:
        return _by_pallas(options, x, scale)
    return lax.platform_dependent(
        x,
        scale,
        cuda=functools.partial(_by_pallas, options),
        default=functools.partial(_by_xla, options),
    )


def _by_xla(options: Cast, x: Tensor, scale: Scale) -> Both:
    """Cast as `_by_pallas` does, by operations of XLA."""
    amax, limit = _largest_amax(scale.amaxes), formats.get(options.format).max
    margin = options.rule.margin
    if options.rule.by_multiplier:
        own_scale = scaling.scale_of_multiplier(amax, limit, margin)
    else:
        own_scale = scaling.scale_for_limit(
            amax, limit, margin, options.power_of_two
        )
    used = jnp.where(scale.unseen[0] != 0, own_scale, scale.given[0])
    codes = casting.quantize(x, used, options.format)
    sums = jnp.sum(x.astype(jnp.float32), 0) if options.sums else None
    return Both(codes, codes.T, used, scaling.amax(x), sums)


def _by_pallas(options: Cast, x: Tensor, scale: Scale) -> Both:
    """Run `_cast_kernel`, one program for each tile."""
    m, k = x.shape
    rows, columns = pl.cdiv(m, ROWS), pl.cdiv(k, COLUMNS)
    tile = pl.BlockSpec((ROWS, COLUMNS), lambda i, j: (i, j))
    dtype, wide = jnp.dtype(options.format), jnp.float32
    of_tile = pl.BlockSpec((1, 1), lambda i, j: (i, j))
    # Of each result, the block that a program writes, its shape and dtype.
    outputs = {
        "codes": (tile, (m, k), dtype),
        "scale": (_whole_vector(1), (1,), wide),
        "amaxes": (of_tile, (rows, columns), jnp.int32),
    }
    if options.across:
        turned = pl.BlockSpec((COLUMNS, ROWS), lambda i, j: (j, i))
        outputs["across"] = turned, (k, m), dtype
    if options.sums:  # Of the columns of each tile.
        row = pl.BlockSpec((1, COLUMNS), lambda i, j: (i, j))
        outputs["sums"] = row, (rows, k), wide
    specs, shapes, dtypes = zip(*outputs.values(), strict=True)
    results = pl.pallas_call(
        functools.partial(_cast_kernel, options, (m, k), tuple(outputs)),
        grid=(rows, columns),
        in_specs=[tile, *(_whole_vector(each.size) for each in scale)],
        out_specs=list(specs),
        out_shape=list(map(jax.ShapeDtypeStruct, shapes, dtypes)),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        interpret=options.interpreted,
        name="float8_cast",
    )(x, *scale)
    named = dict(zip(outputs, results, strict=True))
    codes = named["codes"]
    return Both(
        codes,
        named["across"] if options.across else codes.T,
        named["scale"][0],
        _largest_amax(named["amaxes"]),
        jnp.sum(named["sums"], 0) if options.sums else None,
    )


def _whole_vector(size: int) -> Any:
    return pl.BlockSpec((size,), lambda i, j: (0,))


def _cast_kernel(
    options: Cast,
    sizes: tuple[int, int],
    names: tuple[str, ...],
    x_ref: Ref,
    given_ref: Ref,
    unseen_ref: Ref,
    found_amaxes_ref: Ref,
    *refs: Any,
) -> None:
    """Quantize a tile; write what is asked for, under `names`."""
    # The scale is given, or that of amaxes which an earlier pass found. The
    # amaxes that are written are those of the tiles.
    written = dict(zip(names, refs, strict=True))
    is_first = (pl.program_id(0) == 0) & (pl.program_id(1) == 0)
    inside = places_inside(sizes, (ROWS, COLUMNS))
    x = read(x_ref, inside)
    scale = lax.cond(
        unseen_ref[0] != 0,
        lambda: _scale_of(options, jnp.max(found_amaxes_ref[...])),
        lambda: given_ref[...],
    )

    @pl.when(is_first)
    def _() -> None:
        written["scale"][...] = scale

    codes = codes_of(x, scale, options.format, options.interpreted)
    store(written["codes"], codes, inside.elements)
    written["amaxes"][...] = jnp.full((1, 1), jnp.max(magnitude(x)))
    if options.across:
        store(written["across"], codes.T, inside.turned)
    if options.sums:
        sums = jnp.sum(x, axis=0, keepdims=True)
        store(written["sums"], sums, inside.columns)


def _scale_of(options: Cast, bits: Tensor) -> Tensor:
    """Return the scale, (1,), of an amax's bits; 1 for 0, infinity and NaN."""
    # As `scaling.scale_of_multiplier` or `scaling.scale_for_limit` computes it.
    bits = jnp.full((1,), bits)
    usable = (bits > 0) & (bits < casting.EXPONENT_BITS)
    amax = lax.bitcast_convert_type(bits, jnp.float32)
    amax = jnp.maximum(jnp.where(usable, amax, 1.0), scaling.SMALLEST_SCALE)
    limit = scaling.with_margin(
        formats.get(options.format).max, options.rule.margin
    )
    limits = jnp.full((1,), limit, jnp.float32)
    if options.rule.by_multiplier:
        multiplier = _divide_in_kernel(options, limits, amax)
        largest = 1.0 / scaling.SMALLEST_SCALE
        multiplier = jnp.clip(multiplier, scaling.SMALLEST_SCALE, largest)
        scale = _divide_in_kernel(
            options, jnp.ones_like(multiplier), multiplier
        )
    else:
        scale = _divide_in_kernel(options, amax, limits)
        scale = jnp.clip(scale, scaling.SMALLEST_SCALE, scaling.LARGEST_SCALE)
        if options.power_of_two:
            # Any bit of the mantissa, 23 bits, raises the exponent.
            above = lax.bitcast_convert_type(scale, jnp.int32) + 0x7FFFFF
            above = above & np.int32(casting.EXPONENT_BITS)
            scale = lax.bitcast_convert_type(above, jnp.float32)
    return jnp.where(usable, scale, 1.0)


def _divide_in_kernel(options: Cast, x: Tensor, y: Tensor) -> Tensor:
    """Divide in a kernel, correctly rounded."""
    if options.interpreted:
        # Without `where`, XLA would replace the division by a product.
        return x / jnp.where(x == x, y, 1.0)
    return _asm("div.rn.f32", x, y)


class Inside(NamedTuple):
    """Masks of the places of a tile that are in the matrix; None if all are.

    Attributes:
        elements: Bool (rows, columns).
        turned: Bool (columns, rows), the same.
        columns: Bool (1, columns).
    """

    elements: Tensor | None = None
    turned: Tensor | None = None
    columns: Tensor | None = None


def places_inside(sizes: tuple[int, int], tile: tuple[int, int]) -> Inside:
    """Return which places of a program's tile are in a matrix."""
    if sizes[0] % tile[0] == 0 and sizes[1] % tile[1] == 0:
        return Inside()
    rows, columns = (
        lax.iota(jnp.int32, side) + pl.program_id(axis) * side < size
        for axis, (side, size) in enumerate(zip(tile, sizes, strict=True))
    )
    elements = rows[:, None] & columns[None, :]
    return Inside(elements, elements.T, columns[None, :])


def read(ref: Ref, inside: Inside) -> Tensor:
    """Return a tile in float32, with zeros outside of the matrix."""
    if inside.elements is None:
        return ref[...].astype(jnp.float32)
    return triton.load(ref, mask=inside.elements, other=0.0).astype(jnp.float32)


def store(ref: Ref, x: Tensor, inside: Tensor | None) -> None:
    """Store a tile, or only what is inside of the matrix."""
    if inside is None:
        ref[...] = x
    else:
        triton.store(ref, x, mask=inside)


def magnitude(x: Tensor) -> Tensor:
    """Return the bits of magnitudes: ordered like them, NaN above all."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return bits & np.int32(casting.MAGNITUDE_BITS)


def _largest_amax(bits: Tensor) -> Tensor:
    """Return the largest of amaxes given by their bits, in float32."""
    return lax.bitcast_convert_type(jnp.max(bits), jnp.float32)


def codes_of(
    x: Tensor, scale: Tensor, format_name: str, interpreted: bool
) -> Tensor:
    """Divide a float32 tile in a kernel by a scale, clip, and cast it."""
    limit = formats.get(format_name).max
    if interpreted:
        # XLA multiplies by the reciprocal of a divisor that it broadcasts.
        quotient = x / jnp.where(x == x, scale, 1.0)
    else:
        quotient = _quotient(x, scale)
    codes = jnp.clip(quotient, -limit, limit).astype(format_name)
    # Triton's clip turns NaN into a number.
    bits = lax.bitcast_convert_type(codes, jnp.uint8)
    has_inf = formats.get(format_name).has_inf
    nan = 0x7E if has_inf else 0x7F  # Of e5m2, of e4m3fn.
    bits = jnp.where(x == x, bits, jnp.uint8(nan))
    return lax.bitcast_convert_type(bits, jnp.dtype(format_name))


def _quotient(x: Tensor, scale: Tensor) -> Tensor:
    """Compute `x / scale`, correctly rounded wherever a code depends on it."""

    def spread(scale: Tensor) -> Tensor:
        """Broadcast a scale to the shape of `x`."""
        return jnp.broadcast_to(scale, x.shape)

    # By the reciprocal and one correction (P. Markstein, "Computation of
    # elementary functions on the IBM RISC System/6000 processor", 1990), half
    # of the instructions of a division. Infinity, NaN and the signs of zeros
    # are preserved, as quotients beyond 2^20, which are clipped, stay as they
    # are.
    def corrected() -> Tensor:
        """Return the quotient by way of the reciprocal."""
        reciprocal = spread(_asm("rcp.rn.f32", scale))
        first = x * reciprocal
        error = _asm("fma.rn.f32", -first, spread(scale), x)
        better = _asm("fma.rn.f32", error, reciprocal, first)
        is_corrected = (jnp.abs(first) < 2.0**20) & (first != 0.0)
        return jnp.where(is_corrected, better, first)

    # A plain division where a correction could be subnormal.
    smallest = jnp.min(scale) if scale.ndim else scale
    return lax.cond(
        smallest < 2.0**-60,
        lambda: _asm("div.rn.f32", x, spread(scale)),
        corrected,
    )


def _asm(instruction: str, *arguments: Tensor) -> Tensor:
    """Run an instruction of PTX on float32 tiles, one for each element."""
    like = arguments[0]
    places = ", ".join(f"${i}" for i in range(len(arguments) + 1))
    (result,) = triton.elementwise_inline_asm(
        f"{instruction} {places};",
        args=arguments,
        constraints=",".join(["=f"] + ["f"] * len(arguments)),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(like.shape, like.dtype)],
    )
    return result


def amax_if(wanted: Tensor, x: Tensor, interpreted: bool = False) -> Tensor:
    """Return amaxes of parts of a tensor, or zeros if `wanted`, (1,), is 0.

    Nothing of `x` is then read. The amaxes are int32 (`PROGRAMS`,), the bits of
    float32; NaN is above all.
    """
    if interpreted:
        return _amaxes_by_pallas(wanted, x, interpreted=True)
    return lax.platform_dependent(
        wanted, x, cuda=_amaxes_by_pallas, default=_amaxes_by_xla
    )


def _amaxes_by_xla(wanted: Tensor, x: Tensor) -> Tensor:
    """Return what `amax_if` returns; each amax is that of the tensor."""
    bits = lax.bitcast_convert_type(scaling.amax(x), jnp.int32)
    return jnp.broadcast_to(jnp.where(wanted[0] != 0, bits, 0), (PROGRAMS,))


def _amaxes_by_pallas(
    wanted: Tensor, x: Tensor, interpreted: bool = False
) -> Tensor:
    """Return what `amax_if` returns, by a kernel."""
    if x.size < PART:  # A program reads a whole part.
        return _amaxes_by_xla(wanted, x)
    return pl.pallas_call(
        functools.partial(_amax_kernel, x.size),
        grid=(PROGRAMS,),
        out_specs=pl.BlockSpec((1,), lambda i: (i,)),
        out_shape=jax.ShapeDtypeStruct((PROGRAMS,), jnp.int32),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpreted,
        name="float8_amax_if",
    )(wanted, x.reshape(-1))


def _amax_kernel(
    size: int, wanted_ref: Ref, x_ref: Ref, found_ref: Ref
) -> None:
    """Write the bits of the amax of each `PROGRAMS`th part, or 0."""
    found_ref[...] = jnp.zeros((1,), jnp.int32)
    # Not in the branch: Pallas's interpreter has no `program_id` there.
    first = pl.program_id(0) * PART

    @pl.when(wanted_ref[0] != 0)
    def _() -> None:
        """Write the amax of this program's parts."""

        def larger(i: Tensor, bits: Tensor) -> Tensor:
            """Return the larger of `bits` and part `i`'s amax."""
            # A program may read the last part again, so none is cut.
            start = jnp.minimum(first + i * PROGRAMS * PART, size - PART)
            x = x_ref[pl.ds(start, PART)].astype(jnp.float32)
            return jnp.maximum(bits, jnp.max(magnitude(x)))

        times = pl.cdiv(size, PROGRAMS * PART)
        bits = lax.fori_loop(0, times, larger, jnp.int32(0))
        found_ref[...] = jnp.full((1,), bits)
