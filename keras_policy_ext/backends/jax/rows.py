"""JAX on CUDA: quantize a matrix with scales of rows, and of columns.

The two matmuls that read an operand sum over different axes. So it is
quantized twice: with the amaxes of its rows, and of its columns. XLA reads it
four times for that, and transposes codes in another kernel. Here one Pallas
kernel finds all amaxes, and a second one writes both casts, each in the layout
that its matmul reads. Triton compiles them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from keras_policy_ext._types import Tensor, override
from keras_policy_ext.backends.both_layouts import (
    RowCast,
    RowCasts,
    RowCastsOfBoth,
)
from keras_policy_ext.backends.devices import Device
from keras_policy_ext.backends.jax import partitioned
from keras_policy_ext.backends.jax.pallas_casts import (
    Ref,
    codes_of,
    lacking,
    magnitude,
    places_inside,
    read,
    store,
    triton,
)
from keras_policy_ext.backends.jax.partitioned import Shards
from keras_policy_ext.numerics import casting, scaling
from keras_policy_ext.numerics.tiles import scales_of
from keras_policy_ext.recipes import Quantization

SIDE = 64
"""The number of rows and of columns that one program reads."""


class How(NamedTuple):
    """Options of the kernels; hashable.

    Attributes:
        plain: The format of the codes of the matrix; None to write none.
        across: The format of the codes of the transpose; None to write none.
        sums: Whether to sum the columns of the matrix.
        interpreted: Whether to run in Pallas's interpreter, on any device.
        side: The number of rows and of columns that one program reads.
        warps: The number of warps that run a program.
    """

    plain: str | None
    across: str | None
    sums: bool = False
    interpreted: bool = False
    side: int = SIDE
    warps: int = 4


class PallasRowCasts(RowCasts):
    """Pallas kernels that quantize a matrix and its transpose by rows.

    Args:
        device: Returns the current device; not called if `interpreted`.
        interpreted: Whether to run in Pallas's interpreter, on any device.
    """

    def __init__(self, device: Callable[[], Device], interpreted: bool = False):
        self._device, self._interpreted = device, interpreted

    @override
    def supports(self, like: Tensor, *format_names: str) -> str | None:
        """Return why some format cannot be written; None if all can."""
        device = None if self._interpreted else self._device()
        for name in format_names:
            reason = lacking(like, str(like.dtype), name, device)
            if reason is not None:
                return reason
        return None

    @override
    def cast(
        self,
        matrix: Tensor,
        plain: Quantization | None,
        across: Quantization | None,
        column_sums: bool = False,
    ) -> RowCastsOfBoth:
        """Quantize a matrix and its transpose, each by its rows.

        `plain` says how to quantize the matrix, `across` the transpose; None
        leaves it out.
        """
        options = How(
            plain=None if plain is None else plain.format,
            across=None if across is None else across.format,
            sums=column_sums,
            interpreted=self._interpreted,
        )
        kernel = CastsOfRows(options, plain, across)
        # Each cast has codes, scales and amaxes, or three times None.
        codes, scales, amaxes, *of_transpose, sums = partitioned.run(
            kernel, matrix
        )
        codes_across, scales_across, amaxes_across = of_transpose
        of_plain = of_across = None
        if codes is not None:
            of_plain = RowCast(codes, scales, amaxes)
        if codes_across is not None:
            of_across = RowCast(codes_across, scales_across, amaxes_across)
        return RowCastsOfBoth(of_plain, of_across, sums)


class CastsOfRows(NamedTuple):
    """The casts of a matrix by rows, as `partitioned.run` takes them.

    `plain` and `across`: see `RowCasts.cast`. `vmapped`: without Pallas.
    """

    options: How
    plain: Quantization | None
    across: Quantization | None
    vmapped: bool = False

    @property
    def results(self) -> tuple[str | None, ...]:
        """The axes, rows i and columns j: codes, scales, amaxes twice; sums."""
        plain = (None,) * 3 if self.plain is None else ("ij", "i", "i")
        across = (None,) * 3 if self.across is None else ("ji", "j", "j")
        return *plain, *across, "j" if self.options.sums else None

    @property
    def of_xla(self) -> CastsOfRows:
        """The same casts without Pallas."""
        return self._replace(vmapped=True)

    def __call__(
        self, shards: Shards, x: Tensor, *scalars: Tensor | None
    ) -> tuple[Any, ...]:
        """Quantize the shard of a matrix; return what `results` lists."""
        find_amaxes, write_codes = amaxes_of, both_codes_of
        if self.vmapped:
            find_amaxes, write_codes = _amaxes_by_xla, _codes_by_xla
        of_rows, of_columns, sums = find_amaxes(self.options, x)
        # A row lies on the devices that have its columns.
        amaxes = (
            shards.largest(of_rows, shards.columns),
            shards.largest(of_columns, shards.rows),
        )
        quantizations = self.plain, self.across
        scales = [
            jnp.ones_like(amax) if each is None else scales_of(amax, each).scale
            for each, amax in zip(quantizations, amaxes, strict=True)
        ]
        codes = write_codes(self.options, x, *scales)
        results: list[Any] = []
        for values, scale, amax, size in zip(
            codes, scales, amaxes, x.shape, strict=True
        ):
            cast = [values, scale[:size], amax[:size]]  # Without the padding.
            results += [None] * 3 if values is None else cast
        return *results, None if sums is None else shards.column_sums(sums)


def amaxes_of(options: How, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the amaxes of the rows and of the columns of a matrix (m, k).

    They are float32 vectors, with zeros after them up to a multiple of
    `options.side`, not finite if a value is not. The third result is the sums
    of the columns, float32 (k,), or None.
    """
    if options.interpreted:
        return _amaxes_by_pallas(options, x)
    return lax.platform_dependent(
        x,
        cuda=functools.partial(_amaxes_by_pallas, options),
        default=functools.partial(_amaxes_by_xla, options),
    )


def both_codes_of(
    options: How, x: Tensor, of_rows: Tensor, of_columns: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return the codes of a matrix (m, k) and of its transpose (k, m).

    `of_rows` and `of_columns` are scales, float32, padded as the amaxes are.
    None for codes that are not needed.
    """
    if options.interpreted:
        return _codes_by_pallas(options, x, of_rows, of_columns)
    return lax.platform_dependent(
        x,
        of_rows,
        of_columns,
        cuda=functools.partial(_codes_by_pallas, options),
        default=functools.partial(_codes_by_xla, options),
    )


def _amaxes_by_xla(
    options: How, x: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the amaxes of rows and of columns, padded, and column sums."""
    rows, columns = (
        jnp.pad(scaling.amax(x, axis), (0, -size % options.side))
        for axis, size in ((1, x.shape[0]), (0, x.shape[1]))
    )
    sums = jnp.sum(x.astype(jnp.float32), 0) if options.sums else None
    return rows, columns, sums


def _codes_by_xla(
    options: How, x: Tensor, of_rows: Tensor, of_columns: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return the codes of a matrix and of its transpose, or None."""

    def codes(x: Tensor, scale: Tensor, name: str | None) -> Any:
        """Quantize a matrix with a scale per row, or not at all."""
        if name is None:
            return None
        scale = scale[: x.shape[0], jnp.newaxis]
        return casting.quantize(x, scale, name)

    plain = codes(x, of_rows, options.plain)
    return plain, codes(x.T, of_columns, options.across)


def _amaxes_by_pallas(
    options: How, x: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the amaxes of rows and of columns, padded, and column sums."""
    (m, k), side = x.shape, options.side
    grid = pl.cdiv(m, side), pl.cdiv(k, side)
    # All programs raise one vector of zeros to amaxes of rows, then of columns.
    zeros = jnp.zeros(side * sum(grid), jnp.float32)
    whole = pl.BlockSpec(zeros.shape, lambda i, j: (0,))
    specs, shapes = [whole], [jax.ShapeDtypeStruct(zeros.shape, zeros.dtype)]
    if options.sums:
        specs.append(pl.BlockSpec((1, side), lambda i, j: (i, j)))
        shapes.append(jax.ShapeDtypeStruct((grid[0], k), jnp.float32))
    results = pl.pallas_call(
        functools.partial(_amaxes_kernel, options, (m, k)),
        grid=grid,
        in_specs=[_tile_spec(options), whole],
        out_specs=specs,
        out_shape=shapes,
        input_output_aliases={1: 0},  # The zeros become the first result.
        compiler_params=_compiler_params(options),
        interpret=options.interpreted,
        name="float8_row_amaxes",
    )(x, zeros)
    amaxes, *sums_of_tiles = results
    rows = side * grid[0]
    sums = jnp.sum(sums_of_tiles[0], 0) if options.sums else None
    return amaxes[:rows], amaxes[rows:], sums


def _amaxes_kernel(
    options: How,
    sizes: tuple[int, int],
    x_ref: Ref,
    zeros_ref: Ref,
    amaxes_ref: Ref,
    *sums_ref: Ref,
) -> None:
    """Raise the amaxes of the rows, and then of the columns, by a tile."""
    # `zeros_ref` is not read: it is the memory of `amaxes_ref`, set to zeros.
    side = options.side
    inside = places_inside(sizes, (side, side))
    x = read(x_ref, inside)
    bits = magnitude(x)
    # The places of both vectors of amaxes, counted in sides of a tile.
    of_rows = pl.program_id(0)
    of_columns = pl.cdiv(sizes[0], side) + pl.program_id(1)
    # Triton compares floats that are not negative as their bits: NaN is above
    # infinity. Of integers it lacks the operation (JAX 0.10 to 0.11).
    for codes_format, place, axis in (
        (options.plain, of_rows, 1),
        (options.across, of_columns, 0),
    ):
        if codes_format is not None:
            largest = jnp.max(bits, axis=axis)
            triton.atomic_max(
                amaxes_ref,
                (pl.ds(place * side, side),),
                lax.bitcast_convert_type(largest, jnp.float32),
            )
    if options.sums:  # For the gradient of a bias.
        sums = jnp.sum(x, axis=0, keepdims=True)
        store(sums_ref[0], sums, inside.columns)


def _codes_by_pallas(
    options: How, x: Tensor, of_rows: Tensor, of_columns: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return what `_codes_by_xla` returns, by a kernel."""
    (m, k), side = x.shape, options.side
    specs, shapes = [], []
    if options.plain:
        specs.append(_tile_spec(options))
        shapes.append(jax.ShapeDtypeStruct((m, k), options.plain))
    if options.across:
        specs.append(pl.BlockSpec((side, side), lambda i, j: (j, i)))
        shapes.append(jax.ShapeDtypeStruct((k, m), options.across))
    codes = pl.pallas_call(
        functools.partial(_codes_kernel, options, (m, k)),
        grid=(pl.cdiv(m, side), pl.cdiv(k, side)),
        in_specs=[
            _tile_spec(options),
            pl.BlockSpec((side,), lambda i, j: (i,)),
            pl.BlockSpec((side,), lambda i, j: (j,)),
        ],
        out_specs=specs,
        out_shape=shapes,
        compiler_params=_compiler_params(options),
        interpret=options.interpreted,
        name="float8_row_casts",
    )(x, of_rows, of_columns)
    written = iter(codes)
    plain = next(written) if options.plain else None
    return plain, next(written) if options.across else None


def _codes_kernel(
    options: How,
    sizes: tuple[int, int],
    x_ref: Ref,
    row_scales_ref: Ref,
    column_scales_ref: Ref,
    *codes_refs: Ref,
) -> None:
    """Quantize a tile by rows; quantize it by columns and transpose it."""
    inside = places_inside(sizes, (options.side, options.side))
    x = read(x_ref, inside)
    written = iter(codes_refs)  # One for each format that is not None.
    if options.plain:
        scale = row_scales_ref[...][:, None]
        codes = codes_of(x, scale, options.plain, options.interpreted)
        store(next(written), codes, inside.elements)
    if options.across:
        scale = column_scales_ref[...][None, :]
        codes = codes_of(x, scale, options.across, options.interpreted)
        store(next(written), codes.T, inside.turned)


def _tile_spec(options: How) -> Any:
    return pl.BlockSpec((options.side, options.side), lambda i, j: (i, j))


def _compiler_params(options: How) -> Any:
    return triton.CompilerParams(num_warps=options.warps, num_stages=1)
