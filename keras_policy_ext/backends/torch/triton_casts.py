"""PyTorch on CUDA: casts in both layouts by Triton kernels.

Kernels read a matrix `x` of m rows and k columns; `by_row` and `by_column` are
its strides. A program reads one tile.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from keras_policy_ext import formats
from keras_policy_ext._types import Size, Tensor
from keras_policy_ext.backends.both_layouts import Both, ScaleHint, Wanted
from keras_policy_ext.numerics import casting
from keras_policy_ext.recipes import Quantization

MARKED_AFTER = 4
"""How many float32 numbers a marked scale comes after the scale itself.

cuBLASLt needs scales at addresses that 16 divides.
"""

_MARKED_AFTER = tl.constexpr(MARKED_AFTER)

ROWS, COLUMNS = 64, 64
"""The sizes of a tile."""

_TRITON_DTYPES = {"float8_e4m3fn": tl.float8e4nv, "float8_e5m2": tl.float8e5}


class Launch:
    """A Triton kernel with its grid and constants, started directly.

    All calls have tensors of the same dtypes, at addresses that 16 divides,
    and the same sizes. So the kernel that the first call compiles is the one
    for all. Triton itself takes 9 µs to find it, 0.3 µs to start it. Later
    calls start it as Triton does (3.6 to 3.9).
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        constants: dict[str, Any],
        **options: Any,
    ):
        """Sort the constants as the kernel takes them."""
        self._kernel, self._options = kernel, {**constants, **options}
        self._grid = (*grid, 1, 1)[:3]
        names = kernel.arg_names
        self._constants = [constants[n] for n in names if n in constants]
        # None before a call, and in the interpreter, which compiles nothing.
        self._start: Any = None

    def __call__(self, stream: int, *arguments: Any) -> None:
        """Start the kernel with tensors and sizes, on a CUDA stream."""
        if self._start is None:
            compiled = self._kernel[self._grid](*arguments, **self._options)
            if hasattr(compiled, "packed_metadata"):
                self._launch_arguments = (
                    compiled.function,
                    compiled.packed_metadata,
                    *(None,) * 3,  # No launch metadata, no two hooks.
                )
                self._start = compiled.run
            return
        constants = self._constants
        self._start(
            *self._grid, stream, *self._launch_arguments, *arguments, *constants
        )


def stream_of(device: torch.device) -> Callable[[], int]:
    """Return a function that returns the address of the current stream."""
    if device.type != "cuda":
        return int  # `int()` is 0, which nothing reads.
    driver = triton.runtime.driver.active
    return functools.partial(driver.get_current_stream, device.index)


def aligned(x: Tensor) -> Tensor:
    """Return a tensor, cloned if 16 does not divide its address."""
    return x.clone() if x.data_ptr() % 16 else x


def quantize_both_ways(
    x: Tensor,
    quantization: Quantization,
    hint: ScaleHint,
    wanted: Wanted,
    by_integers: bool = False,
) -> Both:
    """Quantize a matrix to float8; write it and its transpose.

    If the scale may be unknown, a separate pass computes the amax. A kernel
    decides this on the device, so that the host does not wait. The matrix is
    (m, k), bfloat16, float16 or float32. `by_integers` computes codes by
    integer arithmetic, for Triton's interpreter: its own conversion is wrong.
    """
    m, k = x.shape
    has_scale = hint.scale is not None
    grid = grid_of((m, k))
    sizes = m, k, x.stride(0), x.stride(1)
    # Float32 of each tile, or int32 bits of one that all programs raise.
    tiles = (number_of_tiles(m, k),)
    amaxes = _empty(x, tiles, torch.float32) if has_scale else _zero(x)
    # A kernel gets any tensor for one that it does not read or write.
    unseen = hint.unseen if hint.unseen is not None else amaxes
    if not has_scale or (hint.unseen is not None and not hint.seen_lately):
        options = {"ALWAYS": not has_scale, "INDEX": 0, "TILE": tile_of((m, k))}
        amax_kernel[grid](x, unseen, amaxes, *sizes, **options)
    dtype = getattr(torch, quantization.format)
    values, across = _empty(x, (m, k), dtype), _empty(x, (k, m), dtype)
    scale = sums_of_tiles = _empty(x, (), torch.float32)
    if wanted.column_sums:
        sums_of_tiles = _empty(x, (grid[0], k), torch.float32)
    constants = cast_constants(
        quantization,
        hint,
        (m, k),
        by_integers,
        OBSERVE=wanted.amax and has_scale,
        SUMS=wanted.column_sums,
    )
    read = x, hint.scale if has_scale else amaxes, unseen
    written = scale, values, across, amaxes, sums_of_tiles
    cast_kernel[grid](*read, *written, *sizes, **constants)
    amax = amaxes.view(torch.float32) if wanted.amax else None
    sums = None
    if wanted.column_sums:
        sums = _empty(x, (k,), torch.float32)
        sums_kernel[(triton.cdiv(k, SUMMED),)](
            sums_of_tiles, sums, grid[0], k, **sums_constants()
        )
    return Both(values, across, scale, amax, sums)


def grid_of(shape: tuple[Size, Size]) -> tuple[Size, Size]:
    """Return how many tiles cover a matrix along each of its two axes."""
    m, k = shape
    return -(-m // ROWS), -(-k // COLUMNS)


def number_of_tiles(m: Size, k: Size) -> Size:
    """Return the number of tiles of an (m, k) matrix."""
    return math.prod(grid_of((m, k)))


def _empty(x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=x.device)


def _zero(x: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.int32, device=x.device)


SUMMED = 32
"""The number of columns whose sums one program adds up."""


def sums_constants() -> dict[str, int]:
    """Return the compile-time constants of `sums_kernel`."""
    return {"PARTS": 64, "BLOCK": SUMMED}


def tile_of(shape: tuple[int, int]) -> tuple[bool, bool, int, int]:
    """Return the constant `TILE` of kernels that read a matrix in tiles.

    `TILE[0]` says whether all tiles are full, `TILE[1]` whether indices need 64
    bits. `TILE[2]` and `TILE[3]` are the rows and columns of a tile.
    """
    m, k = shape
    is_full = m % ROWS == 0 and k % COLUMNS == 0
    return is_full, m * k >= 2**31, ROWS, COLUMNS


def format_constants(
    quantization: Quantization, by_integers: bool, margin: int = 0
) -> dict[str, Any]:
    """Return the constants of kernels that cast.

    `TOP` is that of `scale_of`, and `CODE` that of `_encode`.
    """
    number_format = formats.get(quantization.format)
    # NVIDIA's conversion saturates, and keeps NaN.
    saturates = not by_integers and torch.version.hip is None
    lowest, shift = casting.grid_constants(quantization.format)
    return {
        "TOP": number_format.max / 2.0**margin,
        "POWER_OF_TWO": quantization.scale_rounding == "up",
        "FORMAT": _TRITON_DTYPES[quantization.format],
        "CODE": (
            saturates,
            by_integers,
            number_format.max,
            0x7E if number_format.has_inf else 0x7F,  # The code of NaN.
            number_format.mantissa_bits,
            lowest,
            shift,
            1.0 / number_format.smallest_subnormal,
        ),
    }


def cast_constants(
    quantization: Quantization,
    hint: ScaleHint,
    shape: tuple[int, int],
    by_integers: bool,
    **others: Any,
) -> dict[str, Any]:
    """Return the compile-time constants of `cast_kernel`.

    `INDEX` is the operand's place in the tensors of scales and flags, `PLACE`
    that of the scale which is written. `MARKED` writes that a second time,
    `OBSERVE` writes amaxes, `SUMS` sums of columns. `FOUND_BEFORE` says that
    `amax_kernel` runs first. `others` replaces defaults. No tensor is read.
    """
    return {
        "GIVEN": hint.scale is not None,
        "MAYBE_UNSEEN": hint.unseen is not None,
        "FOUND_BEFORE": not hint.seen_lately,
        "INVERTED": hint.rule.by_multiplier,
        "INDEX": 0,
        "PLACE": 0,
        "MARKED": False,
        "OBSERVE": False,
        "SUMS": False,
        "TILE": tile_of(shape),
        **format_constants(quantization, by_integers, hint.rule.margin),
        **others,
    }


@triton.jit
def is_positive_finite(amax):
    """Return True for a number above 0 that is neither infinite nor NaN."""
    bits = amax.to(tl.int32, bitcast=True)
    return (bits > 0) & (bits < 0x7F800000)


@triton.jit
def scale_of(
    amax, previous, TOP, INVERTED: tl.constexpr, POWER_OF_TWO: tl.constexpr
):
    """Return the scale of an amax; `previous` if it is 0 or not finite.

    See `scaling.scale_of_multiplier` (if `INVERTED`) and
    `scaling.scale_for_limit`. `TOP` is the format's largest value / 2^margin.
    """
    normal = tl.maximum(tl.where(amax == amax, amax, 0.0), 2.0**-126)
    if INVERTED:
        multiplier = tl.div_rn(TOP + 0.0 * normal, normal)
        multiplier = tl.minimum(tl.maximum(multiplier, 2.0**-126), 2.0**126)
        scale = tl.div_rn(1.0 + 0.0 * normal, multiplier)
    else:
        scale = tl.div_rn(normal, TOP + 0.0 * normal)
        scale = tl.minimum(tl.maximum(scale, 2.0**-126), 2.0**127)
        if POWER_OF_TWO:
            bits = scale.to(tl.int32, bitcast=True) + 0x7FFFFF
            scale = (bits & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(is_positive_finite(amax), scale, previous)


@triton.jit
def largest_of(amaxes, count, BLOCK: tl.constexpr):
    """Return the largest magnitude of float32 values; NaN if one is NaN."""
    found, place = tl.zeros((BLOCK,), tl.int32), tl.arange(0, BLOCK)
    for start in range(0, count, BLOCK):
        inside = start + place < count
        some = tl.load(amaxes + start + place, mask=inside, other=0)
        found = tl.maximum(found, some.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    return tl.max(found, 0).to(tl.float32, bitcast=True)


@triton.jit
def _places(row, column, m, k, TILE: tl.constexpr):
    """Return a tile's rows, columns and mask; for `TILE` see `tile_of`."""
    i = row * TILE[2] + tl.arange(0, TILE[2])
    j = column * TILE[3] + tl.arange(0, TILE[3])
    if TILE[1]:
        i, j = i.to(tl.int64), j.to(tl.int64)
    return i, j, (i[:, None] < m) & (j[None, :] < k)


@triton.jit
def _tile(x, row, column, m, k, by_row, by_column, TILE: tl.constexpr):
    """Load a tile in float32, with zeros outside of the matrix."""
    i, j, inside = _places(row, column, m, k, TILE)
    places = x + i[:, None] * by_row + j[None, :] * by_column
    if TILE[0]:
        return tl.load(places).to(tl.float32)
    return tl.load(places, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _bits(numbers):
    """Return the bits of magnitudes, which order them; NaN is the largest."""
    return numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _amax_of_all(x, m, k, by_row, by_column, TILE: tl.constexpr):
    """Return the amax of a whole matrix, read by one program."""
    found = tl.full((TILE[2], TILE[3]), 0, tl.int32)
    for row in range(0, tl.cdiv(m, TILE[2])):
        for column in range(0, tl.cdiv(k, TILE[3])):
            tile = _tile(x, row, column, m, k, by_row, by_column, TILE)
            found = tl.maximum(found, _bits(tile))
    return tl.max(found).to(tl.float32, bitcast=True)


@triton.jit
def _quotient(x, scale, smallest):
    """Compute `x / scale`, correctly rounded wherever a code depends on it."""
    # A reciprocal and one correction (P. Markstein, "Computation of elementary
    # functions on the IBM RISC System/6000 processor", 1990) are half of the
    # instructions of a division. Infinity, NaN and the signs of zeros are
    # preserved. If the `smallest` scale makes a correction subnormal, divide.
    if smallest < 2.0**-60:
        quotient = tl.div_rn(x, tl.zeros_like(x) + scale)
    else:
        reciprocal = tl.div_rn(1.0 + 0.0 * scale, scale)
        first = x * reciprocal
        error = tl.fma(-first, tl.zeros_like(x) + scale, x)
        corrected = tl.fma(error, tl.zeros_like(x) + reciprocal, first)
        within = (tl.abs(first) < 2.0**20) & (first != 0.0)
        quotient = tl.where(within, corrected, first)
    return quotient


@triton.jit
def _integer_codes(
    number,
    MANTISSA: tl.constexpr,
    LOWEST: tl.constexpr,
    SHIFT: tl.constexpr,
    SUBNORMALS: tl.constexpr,
):
    """Return the float8 codes of clipped values, by integer arithmetic."""
    # They are rounded as by `casting.round_to_format`. `LOWEST` has the
    # exponent of the smallest normal value; `SHIFT` makes an anchor so large
    # that a sum with it has no bits below those of the format. A subnormal
    # times `SUBNORMALS` is its code.
    bits = number.to(tl.int32, bitcast=True)
    exponent = tl.maximum(bits & 0x7F800000, LOWEST)
    anchor = (exponent + SHIFT).to(tl.float32, bitcast=True)
    rounded = tl.abs((number + anchor) - anchor)
    magnitude = rounded.to(tl.int32, bitcast=True)
    normal = (magnitude - LOWEST + 0x800000) >> (23 - MANTISSA)
    subnormal = (rounded * SUBNORMALS).to(tl.int32)
    code = tl.where(magnitude >= LOWEST, normal, subnormal)
    return code | ((bits >> 24) & 0x80)


@triton.jit
def _encode(numbers, scale, smallest, FORMAT: tl.constexpr, CODE: tl.constexpr):
    """Return the float8 codes of a tile divided by scales."""
    # `smallest` is the smallest scale. `CODE[0]` says whether the conversion by
    # the hardware saturates, `CODE[1]` whether to use integers. `CODE[2]` is
    # the largest value, `CODE[3]` the code of NaN. The others are the constants
    # of `_integer_codes`.
    number = _quotient(numbers, scale, smallest)
    is_nan = numbers != numbers
    if CODE[0]:
        code = number.to(FORMAT).to(tl.uint8, bitcast=True)
        # The hardware writes 0x7F. A condition in place of a number would do,
        # but with a single conversion to a wider type Triton 3.6 transposes
        # what was before that, and computes all codes twice.
        is_nan = is_nan.to(tl.uint8)
        code = (code | is_nan) if CODE[3] == 0x7F else (code ^ is_nan)
    else:
        number = tl.minimum(tl.maximum(number, -CODE[2]), CODE[2])
        if CODE[1]:
            code = _integer_codes(number, CODE[4], CODE[5], CODE[6], CODE[7])
            code = code.to(tl.uint8)
        else:
            code = number.to(FORMAT).to(tl.uint8, bitcast=True)
        code = tl.where(is_nan, CODE[3], code).to(tl.uint8)
    return code


@triton.jit
def _store(to, i, j, columns, code, inside, TILE: tl.constexpr):
    """Write codes at rows i and columns j of a float8 matrix `to`."""
    codes = to.to(tl.pointer_type(tl.uint8), bitcast=True)
    places = codes + i[:, None] * columns + j[None, :]
    if TILE[0]:
        tl.store(places, code)
    else:
        tl.store(places, code, mask=inside)


@triton.jit
def _own_amax(
    x,
    amaxes,
    m,
    k,
    by_row,
    by_column,
    FOUND_BEFORE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return the amax of an operand that was never observed before."""
    # `amaxes` has those of its tiles if `FOUND_BEFORE`, by `amax_kernel`.
    if FOUND_BEFORE:
        tiles = tl.num_programs(0) * tl.num_programs(1)
        amax = largest_of(amaxes, tiles, 4096)
    else:
        # The host took it for observed; the state was restored since.
        amax = _amax_of_all(x, m, k, by_row, by_column, TILE)
    return amax


@triton.jit
def cast_kernel(
    x,
    scale,
    unseen,
    used,
    values,
    across,
    amaxes,
    sums,
    m,
    k,
    by_row,
    by_column,
    GIVEN: tl.constexpr,
    MAYBE_UNSEEN: tl.constexpr,
    FOUND_BEFORE: tl.constexpr,
    INVERTED: tl.constexpr,
    INDEX: tl.constexpr,
    PLACE: tl.constexpr,
    MARKED: tl.constexpr,
    OBSERVE: tl.constexpr,
    SUMS: tl.constexpr,
    TILE: tl.constexpr,
    TOP: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    FORMAT: tl.constexpr,
    CODE: tl.constexpr,
):
    """Quantize a tile into `values`; write its transpose into `across`.

    `scale` has scales or, if not `GIVEN`, amaxes as int32 bits. Flags in
    `unseen` say that the own amax replaces the scale. The scale of an amax that
    is 0 or not finite is 1. The first program also writes the scale into
    `used`. If `MARKED`, it writes it a second time, as NaN if a value is not
    finite: see `Quantized.with_nan_scales`.
    """
    row, column = tl.program_id(0), tl.program_id(1)
    numbers = _tile(x, row, column, m, k, by_row, by_column, TILE)
    mark = 1.0
    if GIVEN:
        chosen = tl.load(scale + INDEX)
        if MAYBE_UNSEEN:
            is_unseen = tl.load(unseen + INDEX) != 0
            if is_unseen:
                amax = _own_amax(
                    x, amaxes, m, k, by_row, by_column, FOUND_BEFORE, TILE
                )
                chosen = scale_of(amax, 1.0, TOP, INVERTED, POWER_OF_TWO)
    else:
        amax = tl.load(scale + INDEX).to(tl.float32, bitcast=True)
        chosen = scale_of(amax, 1.0, TOP, INVERTED, POWER_OF_TWO)
        mark = amax * 0.0 + 1.0  # NaN for infinity and NaN, else 1.
    if (row == 0) & (column == 0):
        tl.store(used + PLACE, chosen)
        if MARKED:
            tl.store(used + PLACE + _MARKED_AFTER, chosen * mark)
    if OBSERVE:
        largest = tl.max(_bits(numbers)).to(tl.float32, bitcast=True)
        tl.store(amaxes + row * tl.num_programs(1) + column, largest)
    i, j, inside = _places(row, column, m, k, TILE)
    if SUMS:
        tl.store(sums + row * k + j, tl.sum(numbers, 0), mask=j < k)
    code = _encode(numbers, chosen, chosen, FORMAT, CODE)
    _store(values, i, j, k, code, inside, TILE)
    _store(across, j, i, m, tl.trans(code), tl.trans(inside), TILE)


@triton.jit
def amax_kernel(
    x,
    wanted,
    amaxes,
    m,
    k,
    by_row,
    by_column,
    ALWAYS: tl.constexpr,
    INDEX: tl.constexpr,
    TILE: tl.constexpr,
):
    """Raise the amax of a matrix, int32 bits, to that of a tile, if `ALWAYS`.

    Otherwise, if its flag in `wanted` is set, write the tile's float32 amax.
    """
    row, column = tl.program_id(0), tl.program_id(1)
    if ALWAYS:
        tile = _tile(x, row, column, m, k, by_row, by_column, TILE)
        tl.atomic_max(amaxes + INDEX, tl.max(_bits(tile)))
    else:
        if tl.load(wanted + INDEX) != 0:
            tile = _tile(x, row, column, m, k, by_row, by_column, TILE)
            place = row * tl.num_programs(1) + column
            largest = tl.max(_bits(tile)).to(tl.float32, bitcast=True)
            tl.store(amaxes + place, largest)


@triton.jit
def edges_kernel(x, amaxes, m, k, by_row, by_column, TILE: tl.constexpr):
    """Merge the amaxes of a tile into those of all m rows and k columns.

    `amaxes` (m + k,) has those of rows first, as the int32 bits of floats.
    """
    row, column = tl.program_id(0), tl.program_id(1)
    numbers = _tile(x, row, column, m, k, by_row, by_column, TILE)
    i, j, _ = _places(row, column, m, k, TILE)
    tl.atomic_max(amaxes + i, tl.max(_bits(numbers), 1), mask=i < m)
    tl.atomic_max(amaxes + m + j, tl.max(_bits(numbers), 0), mask=j < k)


@triton.jit
def _scales_of_rows(
    amaxes,
    place,
    inside,
    scales,
    is_first,
    TOP: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    NAN_IF_INFINITE: tl.constexpr,
):
    """Return the scales of a tile's rows, or columns, from int32 `amaxes`."""
    # The program of the first tile beside others writes them into `scales`, as
    # NaN where an amax is not finite if `NAN_IF_INFINITE`.
    bits = tl.load(amaxes + place, mask=inside, other=0)
    amax = bits.to(tl.float32, bitcast=True)
    found = scale_of(amax, 1.0, TOP, False, POWER_OF_TWO)  # Not `INVERTED`.
    marked = found * (amax * 0.0 + 1.0) if NAN_IF_INFINITE else found
    if is_first:
        tl.store(scales + place, marked, mask=inside)
    return found


@triton.jit
def cast_rows_kernel(
    x,
    amaxes,
    values,
    across,
    row_scales,
    column_scales,
    sums,
    m,
    k,
    by_row,
    by_column,
    MARKS_ROWS: tl.constexpr,
    MARKS_COLUMNS: tl.constexpr,
    SUMS: tl.constexpr,
    TILE: tl.constexpr,
    TOP: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    FORMAT: tl.constexpr,
    CODE: tl.constexpr,
):
    """Quantize a tile by scales of its rows, its transpose by those of columns.

    `amaxes` are those of all rows, then of all columns.
    """
    row, column = tl.program_id(0), tl.program_id(1)
    numbers = _tile(x, row, column, m, k, by_row, by_column, TILE)
    i, j, inside = _places(row, column, m, k, TILE)
    of_rows = _scales_of_rows(
        amaxes, i, i < m, row_scales, column == 0, TOP, POWER_OF_TWO, MARKS_ROWS
    )
    of_columns = _scales_of_rows(
        amaxes + m,
        j,
        j < k,
        column_scales,
        row == 0,
        TOP,
        POWER_OF_TWO,
        MARKS_COLUMNS,
    )
    if SUMS:
        tl.store(sums + row * k + j, tl.sum(numbers, 0), mask=j < k)
    smallest = tl.min(of_rows, 0)
    code = _encode(numbers, of_rows[:, None], smallest, FORMAT, CODE)
    _store(values, i, j, k, code, inside, TILE)
    smallest = tl.min(of_columns, 0)
    code = _encode(numbers, of_columns[None, :], smallest, FORMAT, CODE)
    _store(across, j, i, m, tl.trans(code), tl.trans(inside), TILE)


@triton.jit
def sums_kernel(
    sums, found, parts, k, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Add up sums of columns, (parts, k), and write them into `found`.

    A program has `BLOCK` columns, and reads `PARTS` parts at a time. There is a
    part for each row of tiles.
    """
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((PARTS, BLOCK), tl.float32)
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)
        inside = (part[:, None] < parts) & (j[None, :] < k)
        places = sums + part[:, None] * k + j[None, :]
        total += tl.load(places, mask=inside, other=0.0)
    column = tl.sum(total, 0).to(found.dtype.element_ty)
    tl.store(found + j, column, mask=j < k)
