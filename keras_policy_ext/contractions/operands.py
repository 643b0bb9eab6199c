"""How each operand of a contraction is quantized, cast and laid out."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from keras import ops

from keras_policy_ext import backends
from keras_policy_ext._types import Tensor
from keras_policy_ext.backends import emulated
from keras_policy_ext.backends.both_layouts import (
    QuantizedForBoth,
    RowCast,
    Wanted,
    read_both,
)
from keras_policy_ext.backends.matmuls import ROW, Choice, Engine
from keras_policy_ext.contractions.kinds import AxisNames, Contraction
from keras_policy_ext.numerics import quantized, scaling
from keras_policy_ext.numerics.casting import Cast
from keras_policy_ext.numerics.quantized import Quantized
from keras_policy_ext.numerics.scale_sources import Amax, Reading, Slot
from keras_policy_ext.recipes import (
    MATMULS,
    OPERANDS,
    Quantization,
    Recipe,
    matmuls_of,
    read_transposed,
)


@dataclasses.dataclass(frozen=True)
class Operands:
    """The quantizations of the three operands of a contraction."""

    contraction: Contraction
    recipe: Recipe

    @functools.cached_property
    def quantizations(self) -> dict[tuple[str, str], Quantization | None]:
        """The quantization by operand and matmul, None if not quantized."""
        return {
            (operand, matmul): self.contraction.quantization(
                self.recipe.quantization(operand, matmul)
            )
            for matmul, operands in MATMULS.items()
            for operand in operands
        }

    @functools.cached_property
    def shares_quantization(self) -> dict[str, bool]:
        """By operand, True if both its matmuls read one quantized matrix."""
        return {
            operand: read_transposed(
                *(self.quantizations[operand, m] for m in matmuls_of(operand))
            )
            for operand in OPERANDS
        }

    @functools.cached_property
    def cast_for_both(self) -> dict[str, Quantization | None]:
        """By operand, the quantization that one cast writes for both matmuls.

        None unless both matmuls read the same values of a matrix, with one
        scale.
        """
        shared = {}
        for operand in OPERANDS:
            first_matmul, _ = matmuls_of(operand)
            quantization = self.quantizations[operand, first_matmul]
            can = (
                quantization is not None
                and quantization.keeps_axes
                and quantization.constant_scale is None
                and quantization.scale_format == "float32"
                and quantization.scale_rounding != "floor"
                and self.shares_quantization[operand]
                and self.contraction.reads_one_matrix
            )
            shared[operand] = quantization if can else None
        return shared

    @functools.cached_property
    def stored_transposed(self) -> dict[tuple[str, str], bool]:
        """By operand and matmul, True if the matrix's transpose is quantized.

        That is so if it is stored in memory this way, as most kernels are. A
        compiler that scales and transposes in one kernel would otherwise read
        with large strides (up to ten times as slow, JAX 0.10, CPU).
        """
        return {
            (operand, matmul): quantization is not None
            and not quantization.keeps_axes
            and self.contraction.is_transposed_in_memory(operand)
            for (operand, matmul), quantization in self.quantizations.items()
        }

    def reads_transpose(self, operand: str, matmul: str) -> bool:
        """Return True if a matmul reads the quantized operand transposed."""
        _, second_matmul = matmuls_of(operand)
        # The second matmul reads the transpose, unless that was quantized.
        is_second = matmul == second_matmul
        return is_second != self.stored_transposed[operand, matmul]

    def quantized_as(self, operand: str, matmul: str) -> Quantization | None:
        """Return how an operand is quantized, in the layout that is stored."""
        quantization = self.quantizations[operand, matmul]
        if quantization is None or not self.reads_transpose(operand, matmul):
            return quantization
        return quantization.transposed

    def kernel_axes(self, axes: AxisNames, matmul: str) -> tuple[Any, ...]:
        """Convert `axes`, an entry per kernel axis, to the quantized axes."""
        quantization = self.quantizations["kernel", matmul]
        entries = self.contraction.kernel_axes(axes, quantization)
        if not self.stored_transposed["kernel", matmul]:
            return entries
        batch, rows, columns = entries
        return batch, columns, rows

    @functools.cached_property
    def saved_for_backward(self) -> dict[str, Quantization | None]:
        """The quantization in which each operand is saved; None for floats."""
        return {
            "inputs": self.quantized_as("inputs", "kernel_grad"),
            "kernel": self.quantized_as("kernel", "inputs_grad"),
        }


operands_of = functools.lru_cache(maxsize=1024)(Operands)
"""Return a contraction's `Operands` under a recipe, from a cache."""


def amax_of(operand: str) -> Any:
    """Return the function that computes the amax of this operand."""
    if operand == "outputs_grad":  # By columns first, like a bias's gradient.
        return scaling.amax_by_columns
    return scaling.amax


def gathered(gathering: Any, axes: tuple[Any, ...], *reads: Quantized) -> Any:
    """All-gather the quantized shards of a kernel; return the whole kernels.

    The kernel is quantized before it is gathered. The scales are computed from
    the amax over all shards, so that they are equal on all devices.

    Args:
        gathering: From `Backend.gathering_of`.
        axes: See `Backend.gathered`; for the axes of the values.
        *reads: The same values with scales that may differ.
    """
    framework = backends.current

    def along_axes(x: Tensor) -> Tensor:
        """Gather a tensor along the axes that are sharded."""
        sizes = zip(x.shape, axes, strict=True)
        # Devices share a scale of size 1 along an axis.
        cut_by = [() if size == 1 else names for size, names in sizes]
        return framework.gathered(x, gathering, cut_by)

    quantization: Any = reads[0].quantization
    dtype = framework.kept_dtype(reads[0].values, quantization.format)
    narrow = [each.encoded(dtype) for each in reads]
    values = along_axes(narrow[0].values)
    if quantization.tile.is_whole:  # One scale, which all devices have.
        return tuple(each.with_values(values) for each in narrow)
    return tuple(
        dataclasses.replace(each, values=values, scale=along_axes(each.scale))
        for each in narrow
    )


Selections = dict[str, tuple[Any, Choice]]
"""By matmul, the kernel that runs it, and the reason for it."""


class Binding(NamedTuple):
    """A `Plan`, the kernels of the framework, and those that were selected."""

    plan: Any
    engine: Engine
    selections: Selections


class PassOptions(NamedTuple):
    """Options of a pass for the quantization of an operand.

    Attributes:
        reading: The reading of the state; None for a recipe without state.
        observe: Whether the amax is needed for the state.
        no_backward: Whether only the first matmul runs.
        sums: Whether to sum the columns of the matrix if the cast can.
        slot: The number of this use of the kernel in the step.
    """

    reading: Reading | None
    observe: bool
    no_backward: bool = False
    sums: bool = False
    slot: Slot = 0


class OperandUse:
    """The quantization of an operand in one of its two matmuls.

    Attributes:
        quantization: How the recipe quantizes it; None if it does not.
        native: Whether a float8 matmul reads it.
        reads_transpose: Whether the matmul reads the transpose of the codes.
        is_stochastic: Whether it is rounded stochastically.
        is_stored_in_float8: Whether a float8 matmul reads what it quantizes.
    """

    def __init__(self, binding: Binding, operand: str, matmul: str):
        """Look up how this matmul reads the operand.

        `binding` has the plan, and the kernels selected for it.
        """
        plan, engine, selections = binding
        operands = plan.operands
        self.operand, self.matmul = operand, matmul
        self.contraction, self.source = plan.contraction, plan.source
        self.inputs_dtype = plan.inputs_dtype
        self.quantization = plan.operands.quantizations[operand, matmul]
        self.native = selections[matmul][1].native
        self.is_stored_in_float8 = self.native
        self.reads_transpose = operands.reads_transpose(operand, matmul)
        self.amax_of = amax_of(operand)
        self._as_stored = operands.quantized_as(operand, matmul)
        self._stored_transposed = operands.stored_transposed[operand, matmul]
        self._engine = engine
        self._gathering, self._gathered_axes = None, ()
        if _is_gathered(plan, operand):
            self._gathering, axes = plan.gathering, plan.gathering.axes
            self._gathered_axes = operands.kernel_axes(axes, matmul)
        self.is_stochastic = self._folds_scales = self._only_casts = False
        if self.quantization is not None:
            self.is_stochastic = self.quantization.rounding == "stochastic"
            # Scales that vary along the sum cannot multiply the output.
            self._folds_scales = not self.quantization.scale_leaves_sum
            # If the scale is known, `quantized.quantize` would only cast.
            self._only_casts = (
                self.quantization.keeps_axes
                and self.quantization.constant_scale is None
                and self._gathering is None
            )

    def quantize(
        self,
        home: Tensor,
        amax: Amax,
        reading: Reading | None,
        cast: Cast,
        slot: Slot = 0,
    ) -> tuple[Quantized, Quantized]:
        """Quantize an operand; return one copy for outputs, one for gradients.

        Both have the same values, clipped to the range of the format. If a
        value is not finite and the recipe has no state to report it, the copy
        for gradients is marked: its scales are NaN.

        `home` is the operand as `Contraction.operand` returns it; the result
        has the layout of `Operands.stored_transposed`. `reading` is what was
        read from the state, or None. `slot`, the number of this use of the
        kernel in the step, is part of the random key.
        """
        if self.quantization is None:
            plain = quantized.passthrough(ops.cast(home, self.inputs_dtype))
            return plain, plain
        if self._stored_transposed:
            home = quantized.swapped(home)
        key = None
        if self.is_stochastic:
            key = self.source.key(reading, slot, amax, self.matmul)
        scale = self.source.scale(
            self.operand, self.quantization, amax, reading
        )
        if scale is not None and self._only_casts:
            is_factor = False  # The cast divides by the scale.
            values = cast(home, scale, self._as_stored.format, is_factor)
            scales = scale[None, None, None]
            operand = Quantized(values, scales, self._as_stored)
            return operand, operand
        saturated, amaxes = quantized.quantize(
            home,
            self._as_stored,
            scale,
            cast,
            self.amax_of,
            key,
            self.reads_transpose,
        )
        if self.is_stochastic and self.is_stored_in_float8:
            # The values are of the format, but still in float32.
            saturated = saturated.encoded(self.quantization.format)
        marked = (
            saturated if amaxes is None else saturated.with_nan_scales(amaxes)
        )
        if self._gathering is not None:
            return gathered(
                self._gathering, self._gathered_axes, saturated, marked
            )
        return saturated, marked

    def read(self, operand: Quantized) -> Quantized:
        """Return a quantized operand as the matrix that this matmul reads."""
        if self.native:
            operand = operand.with_float32_scales
            matrix = self.contraction.read(self.operand, operand)
        else:
            engine, dtype = self._engine, self.inputs_dtype
            wide = operand.decoded(engine.widen, engine.decode, dtype)
            matrix = self.contraction.read(self.operand, wide)
            if self._folds_scales:
                matrix = emulated.folded(matrix, self.reads_transpose)
        # Last, since XLA commutes a transpose with one operation per pass.
        if self.reads_transpose:
            return self.contraction.transposed(matrix)
        return matrix


class UseOfBothLayouts(OperandUse):
    """The use in one matmul of an operand that is stored in both layouts."""

    is_in_both_layouts: Callable[[Tensor], bool]
    """The method of the `OperandInBothLayouts`, which decides by the sizes."""

    def read(self, operand: Quantized) -> Quantized:
        """Return the operand's matrix, in the layout that this matmul reads."""
        if not self.is_in_both_layouts(operand.values):
            return super().read(operand)
        if self.reads_transpose:
            return self.contraction.transposed(operand)
        return operand


class BoundOperand:
    """An operand of a plan on a device, quantized for both of its matmuls.

    It is quantized once if the second matmul can read the transpose of the
    first one's matrix. Otherwise it is quantized twice.

    Attributes:
        first: The operand in the first matmul that reads it.
        second: The operand in the second matmul that reads it.
        is_shared: Whether both matmuls read one quantized matrix.
    """

    use: type[OperandUse] = OperandUse

    def __init__(self, binding: Binding, operand: str):
        """Bind both uses of the operand, and select its cast.

        `binding` has the plan, and the kernels selected for it.
        """
        plan, engine, _ = binding
        self.operand = operand
        self.first, self.second = (
            self.use(binding, operand, matmul) for matmul in matmuls_of(operand)
        )
        self.is_shared = plan.operands.shares_quantization[operand]
        if self.is_shared:
            # What is quantized for the first matmul is read by the second too.
            self.first.is_stored_in_float8 |= self.second.native
        # Takes a tensor and its quantization; see `Contraction.operand`.
        self._home = functools.partial(plan.contraction.operand, operand)
        self._in_forward = self.first.matmul == "forward"
        self._framework = backends.current
        self._amax_of = self.first.amax_of
        if plan.states > 1:
            # One amax for each matrix of a bank.
            amaxes, as_first = plan.contraction.amaxes, self.first.quantization
            self._amax_of = functools.partial(
                amaxes, operand, quantization=as_first
            )
        uses = self.first, self.second
        self._is_stochastic = any(use.is_stochastic for use in uses)
        self._cast = engine.cast_in_training if plan.training else engine.cast
        if self.first.native or self.second.native:
            self._cast = engine.narrow_cast  # A float8 matmul reads float8.

    def sums_columns_of(self, like: Tensor) -> bool:
        """Return True if `quantize` can sum the columns of such a tensor."""
        return False

    def amax(self, x: Tensor) -> Tensor:
        """Compute an operand's amax, a scalar or one per matrix of a bank."""
        return self._amax_of(self._home(x, self.first.quantization))

    def quantize(self, x: Tensor, options: PassOptions) -> QuantizedForBoth:
        """Quantize an operand for the two matmuls that read it.

        `options.slot` is the number of this use of the kernel in the step.
        """
        reading, slot = options.reading, options.slot
        home = self._home(x, self.first.quantization)
        cast, in_branch = self._cast, False
        # On a GPU the amax of a kernel is a pass that nothing else needs.
        if self.operand == "kernel":
            in_branch = not self._framework.on_cpu(x)
        # A random key depends on the amax.
        needs_amax = options.observe or self._is_stochastic
        amax = Amax(home, needs_amax, self._amax_of, in_branch)
        saturated, marked = self.first.quantize(home, amax, reading, cast, slot)
        # `marked` has NaN scales if a value is not finite. Gradients read that.
        first = saturated if self._in_forward else marked
        if not self.is_shared:
            home = self._home(x, self.second.quantization)
            _, marked = self.second.quantize(home, amax, reading, cast, slot)
        observed = amax.value if options.observe else None
        return QuantizedForBoth(first, marked, observed)

    def matrix(self, operand: Quantized) -> Quantized:
        """Return a quantized operand as its matrix (batch, rows, columns)."""
        return self.first.contraction.read(self.operand, operand)


class OperandInBothLayouts(BoundOperand):
    """An operand that one cast quantizes and writes in both layouts."""

    use = UseOfBothLayouts
    first: UseOfBothLayouts
    second: UseOfBothLayouts

    def __init__(self, binding: Binding, operand: str):
        """Prepare the one cast that writes the operand and its transpose."""
        super().__init__(binding, operand)
        plan = binding.plan
        self._both: Any = binding.engine.both_layouts
        self._quantization: Any = plan.operands.cast_for_both[operand]
        self._rule: Any = plan.source.rule
        is_kernel = operand == "kernel"
        self._dtype = plan.kernel_dtype if is_kernel else plan.inputs_dtype
        self._is_transposed_in_memory = (
            plan.contraction.is_transposed_in_memory(operand)
        )
        for use in (self.first, self.second):
            use.is_in_both_layouts = self.is_in_both_layouts

    def matrix(self, operand: Quantized) -> Quantized:
        """Return a quantized operand as its matrix (batch, rows, columns)."""
        if self.is_in_both_layouts(operand.values):
            return operand
        return super().matrix(operand)

    def sums_columns_of(self, like: Tensor) -> bool:
        """Return True if the cast can sum the columns of the matrix."""
        return self._both.sums_columns and self.is_in_both_layouts(like)

    def is_in_both_layouts(self, values: Tensor) -> bool:
        """Return True if one cast can write these values in both layouts."""
        format_name = self._quantization.format
        return self._both.supports(values, self._dtype, format_name) is None

    def quantize(self, x: Tensor, options: PassOptions) -> QuantizedForBoth:
        """Quantize an operand by one cast in both layouts, if it can.

        Otherwise it is quantized as any operand.
        """
        if not self.is_in_both_layouts(x):
            return super().quantize(x, options)
        home = self._home(x, self.first.quantization)
        # Not quantized yet, so it has no scale.
        home = Quantized(home, None, self._quantization)
        matrix = self.first.contraction.read(self.operand, home).values
        wanted = Wanted(
            amax=options.observe,
            is_transposed_in_memory=self._is_transposed_in_memory,
            no_transpose=options.no_backward,
            column_sums=options.sums,
        )
        return read_both(
            self._both,
            matrix,
            self.operand,
            self._quantization,
            self._rule,
            options.reading,
            wanted,
        )


class OperandOfRows(BoundOperand):
    """An operand that one cast quantizes by rows for both of its matmuls."""

    def __init__(self, binding: Binding, operand: str):
        """Prepare the one cast that scales rows for both matmuls."""
        super().__init__(binding, operand)
        self._row_casts: Any = binding.engine.row_casts
        self._uses = self.first, self.second
        self._quantizations = tuple(use.quantization for use in self._uses)
        # One of the two may be None, of a matmul in high precision.
        self._by_rows = [q for q in self._quantizations if q is not None]
        self._is_transposed_in_memory = (
            binding.plan.contraction.is_transposed_in_memory(operand)
        )

    def sums_columns_of(self, like: Tensor) -> bool:
        """Return True if the cast can sum the columns of the matrix."""
        # It reads what is in memory, and so would sum the rows of a transpose.
        return not self._is_transposed_in_memory and self._can_cast(like)

    def _can_cast(self, x: Tensor) -> bool:
        """Return True if the cast can write the formats of both uses."""
        formats = [quantization.format for quantization in self._by_rows]
        return self._row_casts.supports(x, *formats) is None

    def quantize(self, x: Tensor, options: PassOptions) -> QuantizedForBoth:
        """Quantize an operand by one cast for both matmuls, if it can."""
        home = self._home(x, self._by_rows[0])
        # It casts one matrix, not a batch.
        if home.shape[0] != 1 or not self._can_cast(home):
            return super().quantize(x, options)
        by_first, by_second = self._quantizations
        if options.no_backward:
            by_second = None
        cast = self._row_casts.cast
        # The cast reads a matrix as it lies in memory.
        if self._is_transposed_in_memory:
            result = cast(quantized.swapped(home)[0], by_second, by_first)
            casts = result.across, result.plain
        else:
            result = cast(home[0], by_first, by_second, options.sums)
            casts = result.plain, result.across
        (saturated, marked), (_, second_marked) = (
            self._for_use(use, cast, x)
            for use, cast in zip(self._uses, casts, strict=True)
        )
        first = saturated if self._in_forward else marked
        # Without a state no amax is wanted.
        return QuantizedForBoth(first, second_marked, None, result.column_sums)

    def _for_use(
        self, use: OperandUse, cast: RowCast | None, x: Tensor
    ) -> tuple[Quantized, Quantized]:
        """Return what `OperandUse.quantize` returns, from a cast.

        That is one copy for outputs, and one for gradients, with NaN scales for
        rows that are not finite. `cast` is None if this use needs no cast.
        """
        if cast is None:  # The matmul is in high precision, or not run.
            plain = ops.cast(self._home(x, None), use.inputs_dtype)
            return (quantized.passthrough(plain),) * 2
        scale, amax = cast.scale[None, :, None], cast.amax[None, :, None]
        read = Quantized(cast.values[None], scale, use.quantization)
        marked = read.with_nan_scales(amax)
        if use.reads_transpose:
            return read.transposed, marked.transposed
        return read, marked


class OperandOfCodes(BoundOperand):
    """A kernel that arrives as codes, which are gathered before the layer.

    `x` is a tensor of `kpe.loops.gather_float8`. Its `read` takes whether a
    float8 matmul reads it. It returns the quantized kernel for the outputs,
    that for the gradients, and the amax.
    """

    def __init__(self, binding: Binding, operand: str):
        """Prepare to quantize a kernel that devices gather as float8.

        Raise if it has more than one scale.
        """
        super().__init__(binding, operand)
        plan, quantization = binding.plan, self.first.quantization
        has_one_scale = quantization is not None and quantization.keeps_axes
        if not (self.is_shared and has_one_scale):
            raise NotImplementedError(
                "A kernel that is gathered as float8 has one scale. Received: "
                f"{plan.contraction!r} under {plan.recipe!r}, which needs "
                "more. Allowed: kernels that are not gathered as float8. "
                "Leave out kpe.loops.gather_float8 for this layer."
            )
        self._quantization = quantization
        self._in_float8 = self.first.native or self.second.native

    def amax(self, x: Tensor) -> Tensor:
        """Return the amax of the shard of this process, a scalar."""
        _, _, amax = x.read(self._quantization, self._in_float8)
        return amax

    def quantize(self, x: Tensor, options: PassOptions) -> QuantizedForBoth:
        """Return the kernel as it is, for the two matmuls that read it."""
        saturated, marked, amax = x.read(self._quantization, self._in_float8)
        observed = amax if options.observe else None
        return QuantizedForBoth(saturated, marked, observed)


def bind_operand(binding: Binding, operand: str) -> BoundOperand:
    """Return the `BoundOperand` that quantizes an operand of a plan.

    `binding` has the plan and the implementations of its matmuls. An operand is
    cast once for both of its matmuls where one cast can write both layouts.
    """
    plan, engine, selections = binding
    if _is_gathered(plan, operand) and plan.gathering.is_quantized:
        return OperandOfCodes(binding, operand)
    cast_for_both = (
        engine.both_layouts is not None
        and plan.operands.cast_for_both[operand] is not None
        and plan.source.rule is not None
        and not _is_gathered(plan, operand)
        and all(selections[m][1].native for m in matmuls_of(operand))
    )
    kind: type[BoundOperand] = BoundOperand
    if cast_for_both:
        kind = OperandInBothLayouts
    elif _one_cast_may_scale_rows(binding, operand):
        kind = OperandOfRows
    return kind(binding, operand)


def _is_gathered(plan: Any, operand: str) -> bool:
    """Return True for a kernel whose quantized shards are gathered."""
    # Each device quantizes a small shard of such a kernel. It gathers the codes
    # in one layout, since both would be twice the bytes.
    return operand == "kernel" and plan.gathering is not None


def _one_cast_may_scale_rows(binding: Binding, operand: str) -> bool:
    """Return True if one pass that scales rows may serve all its matmuls."""
    plan, engine, selections = binding
    if engine.row_casts is None:
        return False
    rule = plan.source.rule
    quantizations = {
        matmul: plan.operands.quantizations[operand, matmul]
        for matmul in matmuls_of(operand)
    }
    # A matmul in high precision, None, reads the operand as it is.
    by_matmul = {m: q for m, q in quantizations.items() if q is not None}
    has_row_scales = bool(by_matmul) and all(
        quantization == _by_rows(quantization)
        for quantization in by_matmul.values()
    )
    divides_by_amax = rule is not None and not rule.by_multiplier
    has_no_state = plan.source.state_shape is None
    is_native = all(selections[matmul][1].native for matmul in by_matmul)
    return (
        has_row_scales
        and divides_by_amax
        and has_no_state
        and is_native
        and plan.contraction.reads_one_matrix
        and not _is_gathered(plan, operand)
    )


def _by_rows(quantization: Quantization) -> Quantization:
    """Return the quantization with one float32 scale per row."""
    return Quantization(
        format=quantization.format,
        tile=ROW,
        scale_rounding=quantization.scale_rounding,
    )
