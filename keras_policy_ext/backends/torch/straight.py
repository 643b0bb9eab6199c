"""PyTorch on a GPU: most layers' passes, as lists of kernels found once.

A plan is bound to such a list if it multiplies two plain matrices of float8
values, and one cast writes each operand in both layouts: with one scale, or
with a scale for each row that a matmul reads. The general path of
`contractions.bound_plan` computes the same bits. There, to decide what to
launch takes the host longer than the step takes a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from keras_policy_ext._types import Tensor
from keras_policy_ext.backends.both_layouts import ScaleHint
from keras_policy_ext.backends.devices import Device
from keras_policy_ext.backends.interface import Shape
from keras_policy_ext.backends.matmuls import ROW
from keras_policy_ext.backends.torch import backend, casts
from keras_policy_ext.backends.torch.scaled_mm import (
    ALIGNMENT,
    HALVES,
    ScaledMM,
    ScaledMMOfRows,
)
from keras_policy_ext.formats import FAMILIES
from keras_policy_ext.numerics.scale_sources import CurrentSource
from keras_policy_ext.recipes import MATMULS, OPERANDS, Quantization, matmuls_of

if casts.HAS_TRITON:
    from keras_policy_ext.backends.torch import triton_casts
    from keras_policy_ext.backends.torch.triton_casts import (
        Launch,
        aligned,
        stream_of,
    )

_empty = torch.empty

_FLOAT32 = torch.float32

_SCALES_WIDTH = 8
"""How many float32 numbers the used scales of an operand take in memory.

The first is its scale, and the one at `triton_casts.MARKED_AFTER` its marked
scale. The others are not written.
"""

_DTYPES = "bfloat16", "float16", "float32"


class Cast:
    """The cast of an operand of one shape with one scale, in both layouts.

    Args:
        straight: The plan that it is part of.
        operand: `"inputs"`, `"kernel"` or `"outputs_grad"`.
        matrix: A matrix of its shape and strides.
        seen_lately: Whether a GPU has reported that all operands were observed.
        observe: Whether to write the amax of each tile.
        sums: Whether to write sums of columns, a row for each row of tiles.
    """

    def __init__(
        self,
        straight: Straight,
        operand: str,
        matrix: Tensor,
        seen_lately: bool,
        observe: bool,
        sums: bool = False,
    ):
        """Prepare the kernels for an operand of this shape and strides."""
        m, k = matrix.shape
        grid = triton_casts.grid_of((m, k))
        quantization = straight.quantizations[operand]
        self._dtype = getattr(torch, quantization.format)
        self._shape, self._across_shape = (m, k), (k, m)
        self._tile_count = math.prod(grid)
        self._sums_shape = (grid[0], k) if sums else None
        self._sizes_and_strides = m, k, *matrix.stride()
        self._has_state = straight.source is not None
        is_kernel = operand == "kernel"
        # The operand's place in `scales` and `unseen`: its row of the state.
        # Without a state it is where its amax is written: 1 for a kernel, else
        # 0.
        index = OPERANDS.index(operand) if self._has_state else int(is_kernel)
        may_be_unseen = straight.may_be_unseen
        # Only which of these are None is read: any tensor will do.
        hint = ScaleHint(
            scale=matrix if self._has_state else None,
            unseen=matrix if may_be_unseen else None,
            rule=straight.rule,
            seen_lately=seen_lately,
        )
        constants = triton_casts.cast_constants(
            quantization,
            hint,
            (m, k),
            by_integers=straight.interpreted,
            INDEX=index,
            PLACE=_SCALES_WIDTH if is_kernel else 0,
            MARKED=not self._has_state,
            OBSERVE=observe and self._has_state,
            SUMS=sums,
        )
        self._cast = Launch(triton_casts.cast_kernel, grid, constants)
        self._find_amax = None  # Where the state has a scale.
        if not self._has_state or (may_be_unseen and not seen_lately):
            of_amax = {name: constants[name] for name in ("INDEX", "TILE")}
            of_amax["ALWAYS"] = not self._has_state
            self._find_amax = Launch(triton_casts.amax_kernel, grid, of_amax)

    def __call__(
        self,
        stream: int,
        x: Tensor,
        scales: Tensor,
        unseen: Tensor,
        used: Tensor,
    ) -> tuple[Tensor, ...]:
        """Quantize a matrix; write its scale into `used`, see `_SCALES_WIDTH`.

        `scales` and `unseen` were read from the state. Without one `scales` is
        zeros, int32, which become amaxes.

        Returns:
            The codes, those of the transpose, the amax of each tile, and the
            sums of the columns; `used` for what was not asked for.
        """
        device = x.device
        values = _empty(self._shape, dtype=self._dtype, device=device)
        across = _empty(self._across_shape, dtype=self._dtype, device=device)
        amaxes = sums = used  # Stand-ins, which are not written to.
        if self._has_state:
            amaxes = _empty(self._tile_count, dtype=_FLOAT32, device=device)
        if self._sums_shape is not None:
            sums = _empty(self._sums_shape, dtype=_FLOAT32, device=device)
        own_amaxes = amaxes if self._has_state else scales
        sizes = self._sizes_and_strides
        if self._find_amax is not None:
            self._find_amax(stream, x, unseen, own_amaxes, *sizes)
        written = used, values, across, own_amaxes, sums
        self._cast(stream, x, scales, unseen, *written, *sizes)
        return values, across, amaxes, sums


class CastOfRows:
    """The cast of an operand with a scale for each row; see `Cast`.

    It writes the transpose with a scale for each column of the operand.
    """

    def __init__(
        self, straight: Straight, operand: str, matrix: Tensor, sums: bool
    ):
        """Prepare the kernels for an operand of this shape and strides."""
        m, k = matrix.shape
        grid = triton_casts.grid_of((m, k))
        quantization = straight.quantizations[operand]
        self._dtype = getattr(torch, quantization.format)
        self._shape, self._across_shape = (m, k), (k, m)
        self._amax_count = m + k  # Of the rows, then of the columns.
        # `_scaled_mm` reads a column of scales first, and then a row.
        is_kernel, is_inputs = operand == "kernel", operand == "inputs"
        self._row_scales_shape = (1, m) if is_kernel else (m, 1)
        self._column_scales_shape = (k, 1) if is_inputs else (1, k)
        self._sums_shape = (grid[0], k) if sums else None
        self._sizes_and_strides = m, k, *matrix.stride()
        tile = {"TILE": triton_casts.tile_of((m, k))}
        constants = {
            **triton_casts.format_constants(quantization, straight.interpreted),
            # Where gradients read them. The outputs use saturated values.
            "MARKS_ROWS": not is_inputs,
            "MARKS_COLUMNS": not is_kernel,
            "SUMS": sums,
            **tile,
        }
        self._find_amaxes = Launch(triton_casts.edges_kernel, grid, tile)
        self._cast = Launch(triton_casts.cast_rows_kernel, grid, constants)

    def __call__(self, stream: int, x: Tensor) -> tuple[Tensor, ...]:
        """Return codes, those of the transpose, both scales, column sums."""
        device, sizes = x.device, self._sizes_and_strides
        # Int32 bits of floats, which the kernel raises.
        amaxes = torch.zeros(self._amax_count, dtype=torch.int32, device=device)
        values = _empty(self._shape, dtype=self._dtype, device=device)
        across = _empty(self._across_shape, dtype=self._dtype, device=device)
        rows, columns = self._row_scales_shape, self._column_scales_shape
        row_scales = _empty(rows, dtype=_FLOAT32, device=device)
        column_scales = _empty(columns, dtype=_FLOAT32, device=device)
        sums = row_scales  # A stand-in, which is not written to.
        if self._sums_shape is not None:
            sums = _empty(self._sums_shape, dtype=_FLOAT32, device=device)
        self._find_amaxes(stream, x, amaxes, *sizes)
        written = values, across, row_scales, column_scales, sums
        self._cast(stream, x, amaxes, *written, *sizes)
        return written


class Saved(NamedTuple):
    """The tensors that a forward pass with one scale saves for the gradients.

    Attributes:
        inputs: The codes of the transpose, (k, m).
        kernel: The codes, (k, n).
        used: A row of scales for each of both; see `_SCALES_WIDTH`.
        scales, unseen: What was read from the state; None without a state.
        inputs_amax, kernel_amax: Of tiles; None if nothing is observed.
    """

    inputs: Tensor
    kernel: Tensor
    used: Tensor
    scales: Tensor | None = None
    unseen: Tensor | None = None
    inputs_amax: Tensor | None = None
    kernel_amax: Tensor | None = None


class Straight:
    """The forward and the backward pass of a plan, as lists of kernels.

    The `BoundPlan` is of two plain matrices, with a source that `is_straight`.
    """

    def __init__(self, bound: Any, interpreted: bool):
        """Read from a bound plan what its kernels are to do."""
        plan = bound.plan
        has_state = plan.source.state_shape is not None
        self._is_gathered = plan.gathering is not None
        self._kind_of_passes = PassesOfCodes if self._is_gathered else Passes
        self.interpreted = interpreted
        self.rule = plan.source.rule
        self.source = plan.source if has_state else None
        self.may_be_unseen = has_state and plan.source.starts_from_current
        self.quantizations = {
            operand: plan.operands.quantizations[
                operand, matmuls_of(operand)[0]
            ]
            for operand in OPERANDS
        }
        # Outside of training a state observes the kernel alone: the backward
        # pass of such a plan is not here.
        self.differentiates = plan.training is not False or not has_state
        # The column of `used` with the scales that gradients read. Without a
        # state these are the marked ones: NaN of an operand that is not finite.
        self.grads_column = 0 if has_state else triton_casts.MARKED_AFTER
        self.contracted = len(plan.contraction.form.contracted)  # Axes.
        self.outputs_dtype = getattr(torch, plan.inputs_dtype)
        self.kernel_dtype = getattr(torch, plan.kernel_dtype)
        self.grad_dtype = getattr(torch, bound.kernel_grad_dtype)
        # Whether the matmul adds a bias, as by `ScaledMM.with_bias`.
        on_cpu = bound.device.maker == "cpu"
        self.adds = self.outputs_dtype in HALVES and not on_cpu
        # Triton's interpreter does not round to 16 bits as a GPU does.
        self.sums_dtype = _FLOAT32 if interpreted else self.outputs_dtype
        self._passes: dict[Any, Passes | None] = {}  # By shapes and device.

    def for_gradients(self, inputs: Tensor, kernel: Tensor) -> Passes | None:
        """Return the passes for these operands; None if they cannot run.

        Tensors without data cannot run: a kernel would read from address 0.
        """
        # A gathered kernel has a type of its own.
        has_kernel = self._is_gathered or backend.is_real(kernel)
        has_data = has_kernel and backend.is_real(inputs)
        if not (self.differentiates and has_data):
            return None
        return self.of(inputs.shape, kernel.shape, inputs.device)

    def of(
        self, inputs: Shape, kernel: Shape, device: torch.device
    ) -> Passes | None:
        """Return passes for these shapes, made once; None if none can run."""
        key = inputs, kernel, device
        if key not in self._passes:
            fits = self.fits(*key)
            kind = self._kind_of_passes
            self._passes[key] = kind(self, *key) if fits else None
        return self._passes[key]

    def fits(self, inputs: Shape, kernel: Shape, device: torch.device) -> bool:
        """Return True if the device and the shapes are supported; see `of`."""
        if not (self.interpreted or device.type == "cuda"):
            return False
        sizes = self.sizes(inputs, kernel)
        return all(size and size % ALIGNMENT == 0 for size in sizes)

    def sizes(self, inputs: Shape, kernel: Shape) -> tuple[int, int, int]:
        """Return m, k and n of the product (m, k) @ (k, n)."""
        count = self.contracted
        groups = inputs[: len(inputs) - count], kernel[:count], kernel[count:]
        m, k, n = map(math.prod, groups)
        return m, k, n

    def empty(self, inputs: Tensor, kernel: Tensor, keep: bool) -> list[Tensor]:
        """Return empty tensors for outputs and, if `keep`, for what is saved.

        They are for the compiler, which asks for shapes. The operands need no
        data.
        """
        m, k, n = self.sizes(inputs.shape, kernel.shape)
        rows = inputs.shape[: len(inputs.shape) - self.contracted]
        shape = *rows, *kernel.shape[self.contracted :]
        shapes = [(shape, self.outputs_dtype)]
        if keep:
            inputs_format, kernel_format = (
                getattr(torch, self.quantizations[operand].format)
                for operand in ("inputs", "kernel")
            )
            shapes += [
                ((k, m), inputs_format),
                ((k, n), kernel_format),
                *self._saved_after_codes(m, k, n),
            ]
        return [inputs.new_empty(size, dtype=dtype) for size, dtype in shapes]

    def _saved_after_codes(self, m: int, k: int, n: int) -> list[Any]:
        """Return shapes and dtypes of what `Saved` has after the codes."""
        shapes: list[Any] = [((2, _SCALES_WIDTH), _FLOAT32)]
        if self.source is not None:
            tiles = triton_casts.number_of_tiles
            shapes += [((3,), _FLOAT32), ((3,), torch.bool)]
            shapes += [((tiles(*each),), _FLOAT32) for each in ((m, k), (k, n))]
        return shapes

    def leaves(self, saved: Sequence[Tensor]) -> list[Tensor]:
        """Return what this pass saved as the list of `Residuals.leaves`.

        The general path differentiates a gradient from that list: operands as
        (1, k, rows), each with its scales, then what the state needs.
        """
        named = Saved(*saved)
        x_scale, w_scale = named.used[:, self.grads_column].reshape(2, 1, 1, 1)
        leaves = [named.inputs.mT[None], x_scale]
        leaves += [named.kernel.mT[None], w_scale]
        others = [named.scales, named.unseen if self.may_be_unseen else None]
        others += [named.inputs_amax, named.kernel_amax]
        return leaves + [x for x in others if x is not None]


class StraightOfRows(Straight):
    """`Straight` with a scale for each row that a matmul reads."""

    def __init__(self, bound: Any, interpreted: bool):
        super().__init__(bound, interpreted)
        self._kind_of_passes = PassesOfRows

    def _saved_after_codes(self, m: int, k: int, n: int) -> list[Any]:
        # Scales of the columns of the inputs and of the rows of the kernel.
        return [((k, 1), _FLOAT32), ((1, k), _FLOAT32)]

    def leaves(self, saved: Sequence[Tensor]) -> list[Tensor]:
        """Return what this pass saved as the list of `Residuals.leaves`."""
        x_across, w, x_scale, w_scale = saved
        x_scale, w_scale = x_scale.reshape(1, 1, -1), w_scale.reshape(1, -1, 1)
        return [x_across.mT[None], x_scale, w[None], w_scale]


class Passes:
    """Both passes for operands of one shape, on one device."""

    def __init__(
        self,
        straight: Straight,
        inputs: Shape,
        kernel: Shape,
        device: torch.device,
    ):
        """Prepare the kernels of both passes for these shapes."""
        self._straight, self._source = straight, straight.source
        self._m, self._k, self._n = straight.sizes(inputs, kernel)
        self._inputs_shape, self._kernel_shape = inputs, kernel
        self.columns = kernel[straight.contracted :]  # The shape of a bias.
        rows = inputs[: len(inputs) - straight.contracted]
        self._outputs_shape = *rows, *self.columns
        self._device, self._fast_accum = device, device.type == "cuda"
        self._stream = stream_of(device)
        self._casts: dict[Any, Any] = {}  # By operand, strides and options.
        self._state: Any = None  # The kernels that read and observe a state.
        if self._source is not None:
            self._state = self._source.passes(straight.interpreted)
        programs = (-(-self._n // triton_casts.SUMMED),)
        constants = triton_casts.sums_constants()
        self._add_up = Launch(triton_casts.sums_kernel, programs, constants)

    def forward(
        self,
        inputs: Tensor,
        kernel: Tensor,
        bias: Tensor | None,
        state: Tensor | None,
        observe: bool,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute the outputs; return the tensors to save for `backward` too.

        See `BoundPlan.forward`; `state` is the matrix, or None.
        """
        straight = self._straight
        x = _matrix(inputs, self._m, self._k)
        operands, saved = self._operands(x, kernel, state, observe)
        bias_inside = None  # The bias, if the matmul adds it.
        if bias is not None and straight.adds and bias.shape == self.columns:
            bias_inside = bias if bias.dim() == 1 else bias.reshape(-1)
        outputs = torch._scaled_mm(
            *operands,
            bias=bias_inside,
            out_dtype=straight.outputs_dtype,
            use_fast_accum=self._fast_accum,
        )
        outputs = _shaped(outputs, self._outputs_shape)
        if bias is not None and bias_inside is None:
            outputs = outputs + bias
        return outputs, saved

    def backward(
        self,
        saved: Sequence[Tensor],
        outputs_grad: Tensor,
        state: Tensor | None,
        needed: Sequence[bool],
        slot: int = 0,
    ) -> list[Tensor | None]:
        """Compute the gradients of inputs, kernel, bias and state.

        `saved` is from `forward`; `needed` says which of the first three.
        """
        straight = self._straight
        inputs_needed, kernel_needed, bias_needed = needed
        g = _matrix(outputs_grad, self._m, self._n)
        for_inputs, for_kernel, sums, state_grad = self._grad_operands(
            saved, g, state, bias_needed, slot
        )
        inputs_grad = kernel_grad = bias_grad = None
        if inputs_needed:
            dtype = straight.outputs_dtype
            inputs_grad = torch._scaled_mm(*for_inputs, out_dtype=dtype)
            inputs_grad = _shaped(inputs_grad, self._inputs_shape)
        if kernel_needed:
            dtype = straight.grad_dtype
            kernel_grad = torch._scaled_mm(*for_kernel, out_dtype=dtype)
            if dtype != straight.kernel_dtype:
                kernel_grad = kernel_grad.to(straight.kernel_dtype)
            kernel_grad = _shaped(kernel_grad, self._kernel_shape)
        if bias_needed:
            bias_grad = self._bias_grad(sums)
        return [inputs_grad, kernel_grad, bias_grad, state_grad]

    def _bias_grad(self, sums: Tensor) -> Tensor:
        """Add up sums of columns, (rows of tiles, n), to a bias's gradient."""
        dtype = self._straight.sums_dtype
        bias_grad = _empty(self._n, dtype=dtype, device=self._device)
        self._add_up(self._stream(), sums, bias_grad, sums.shape[0], self._n)
        if dtype != self._straight.outputs_dtype:
            bias_grad = bias_grad.to(self._straight.outputs_dtype)
        return _shaped(bias_grad, self.columns)

    def _operands(
        self, x: Tensor, kernel: Tensor, state: Tensor | None, observe: bool
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Quantize both operands; return matmul arguments, and what to save.

        `state` is that of the recipe, or None; `observe` asks for amaxes for
        it. A scale counts only if `unseen` is 0: else the operand's amax gives
        it.
        """
        device, stream = self._device, self._stream()
        # A row of scales for each operand, which casts write: `_SCALES_WIDTH`.
        used = _empty((2, _SCALES_WIDTH), dtype=_FLOAT32, device=device)
        seen_lately, reading = True, ()  # type: tuple[bool, tuple[Tensor, ...]]
        if state is None:
            # An amax of each operand, which casts find. They read no `unseen`.
            scales = unseen = torch.zeros(2, dtype=torch.int32, device=device)
        else:
            scales, unseen, seen_lately = self._state.read(stream, state)
            reading = scales, unseen
        observe = observe and state is not None
        options = {"seen_lately": seen_lately, "observe": observe}
        cast = self._cast(Cast, "inputs", x, **options)
        x_codes, x_across, x_amax, _ = cast(stream, x, scales, unseen, used)
        w_codes, w_across, w_amax = self._kernel_codes(
            kernel, options, stream, scales, unseen, used
        )
        x_scale, w_scale = used.select(1, 0).unbind(0)
        amaxes = (x_amax, w_amax) if observe else ()
        saved = x_across, w_codes, used, *reading, *amaxes
        return (x_codes, w_across.t(), x_scale, w_scale), saved

    def _kernel_codes(
        self,
        kernel: Tensor,
        options: dict[str, bool],
        stream: int,
        scales: Tensor,
        unseen: Tensor,
        used: Tensor,
    ) -> tuple[Tensor, ...]:
        """Quantize a kernel; return its codes, the transpose and the amax.

        A scale counts only if `unseen` is 0: else the amax gives it. The scale
        that was used is written into `used`.
        """
        w = _matrix(kernel, self._k, self._n)
        cast = self._cast(Cast, "kernel", w, **options)
        codes, across, amax, _ = cast(stream, w, scales, unseen, used)
        return codes, across, amax

    def _grad_operands(
        self,
        saved: Sequence[Tensor],
        g: Tensor,
        state: Tensor | None,
        sums: bool,
        slot: int,
    ) -> tuple[Any, ...]:
        """Quantize a gradient of the outputs for both matmuls that read it.

        `saved` is what the forward pass saved. `slot` is the number of this use
        of the kernel in the step. `sums` asks for the sums of columns. Return
        the arguments of `_scaled_mm` for the gradients of inputs and of kernel,
        these sums, and the gradient of the state.
        """
        device, stream = self._device, self._stream()
        residuals, column = Saved(*saved), self._straight.grads_column
        used = _empty(_SCALES_WIDTH, dtype=_FLOAT32, device=device)
        scales, unseen, seen_lately = residuals.scales, residuals.unseen, True
        if state is None:
            # The cast makes the scale. It needs a place for the amax alone.
            scales = unseen = torch.zeros(1, dtype=torch.int32, device=device)
        else:
            seen_lately = self._state.seen_lately(state)
        # The forward pass saved amaxes if the state is to learn from this step.
        observe = residuals.inputs_amax is not None
        options = {"seen_lately": seen_lately, "observe": observe, "sums": sums}
        cast = self._cast(Cast, "outputs_grad", g, **options)
        g_codes, g_across, g_amax, column_sums = cast(
            stream, g, scales, unseen, used
        )
        x_scale, w_scale = residuals.used.select(1, column).unbind(0)
        g_scale = used.select(0, column)
        state_grad = None
        if state is not None and observe:
            amaxes = residuals.inputs_amax, residuals.kernel_amax, g_amax
            state_grad = self._state.observed(stream, amaxes, slot)
        elif state is not None:
            state_grad = torch.zeros_like(state)
        for_inputs = g_codes, residuals.kernel.t(), g_scale, w_scale
        for_kernel = residuals.inputs, g_across.t(), x_scale, g_scale
        return for_inputs, for_kernel, column_sums, state_grad

    def _cast(
        self,
        kind: type[Cast | CastOfRows],
        operand: str,
        matrix: Tensor,
        **options: bool,
    ) -> Any:
        """Return a new or earlier `kind` for these strides and options."""
        key = operand, matrix.stride(), *options.values()
        cast = self._casts.get(key)
        if cast is None:
            cast = self._casts[key] = kind(
                self._straight, operand, matrix, **options
            )
        return cast


class PassesOfCodes(Passes):
    """`Passes` of a kernel that `fully_shard` has gathered as codes."""

    def _kernel_codes(
        self,
        kernel: Tensor,
        options: dict[str, bool],
        stream: int,
        scales: Tensor,
        unseen: Tensor,
        used: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return gathered codes and the amax; write the scale into `used`."""
        # Nothing is cast: the other arguments are for that.
        contents, row = kernel.contents, 1  # The row of `used` for kernels.
        used[row, 0] = contents.scale.reshape(())
        # Without a state gradients read marked scales: NaN if not finite.
        if self._source is None:
            marked_scale = contents.marked_scale.reshape(())
            used[row, self._straight.grads_column] = marked_scale
        codes = contents.codes.reshape(self._k, self._n)
        dtype = getattr(torch, self._straight.quantizations["kernel"].format)
        both_layouts = codes, codes.t().contiguous()
        codes, across = (x.view(dtype) for x in both_layouts)
        return codes, across, contents.amax.reshape(1)


class PassesOfRows(Passes):
    """`Passes` with a scale for each row that a matmul reads."""

    def _operands(
        self, x: Tensor, kernel: Tensor, state: Tensor | None, observe: bool
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return arguments of `_scaled_mm`, and codes and scales to save."""
        w = _matrix(kernel, self._k, self._n)
        stream = self._stream()
        # Scales of rows have no state: nothing is observed.
        cast = self._cast(CastOfRows, "inputs", x, sums=False)
        x_codes, x_across, x_row_scales, x_column_scales, _ = cast(stream, x)
        cast = self._cast(CastOfRows, "kernel", w, sums=False)
        w_codes, w_across, w_row_scales, w_column_scales, _ = cast(stream, w)
        saved = x_across, w_codes, x_column_scales, w_row_scales
        return (x_codes, w_across.t(), x_row_scales, w_column_scales), saved

    def _grad_operands(
        self,
        saved: Sequence[Tensor],
        g: Tensor,
        state: Tensor | None,
        sums: bool,
        slot: int,
    ) -> tuple[Any, ...]:
        """Do as `Passes._grad_operands`; there is no gradient of a state."""
        x_across, w_codes, x_scales, w_scales = saved
        cast = self._cast(CastOfRows, "outputs_grad", g, sums=sums)
        g_codes, g_across, row_scales, column_scales, column_sums = cast(
            self._stream(), g
        )
        for_inputs = g_codes, w_codes.t(), row_scales, w_scales
        for_kernel = x_across, g_across.t(), x_scales, column_scales
        return for_inputs, for_kernel, column_sums, None


_unsafe_view = torch.ops.aten._unsafe_view.default


def _shaped(x: Tensor, shape: Shape) -> Tensor:
    """Reshape a new tensor; autograd does not take the result for a view."""
    return x if len(shape) == x.dim() else _unsafe_view(x, shape)


def _matrix(x: Tensor, rows: int, columns: int) -> Tensor:
    """Return a tensor as a matrix, at an address that 16 divides."""
    if x.dim() != 2:
        x = x.reshape(rows, columns)
    return aligned(x)


def bind(bound: Any) -> Straight | None:
    """Return the `Straight` of a `BoundPlan`; None if it runs in general."""
    triton, plan = bound.engine.both_layouts, bound.plan
    if not casts.HAS_TRITON or type(triton) is not casts.TritonCasts:
        return None
    quantizations = [
        plan.operands.quantizations[operand, matmul]
        for matmul, operands in MATMULS.items()
        for operand in operands
    ]
    if any(
        each is None or each.rounding != "nearest" for each in quantizations
    ):
        return None
    formats = {each.format for each in quantizations}
    dtypes = {plan.inputs_dtype, plan.kernel_dtype}
    if not formats <= {*FAMILIES["ocp"]} or not dtypes <= {*_DTYPES}:
        return None
    if not triton.interpreted and casts.lacking() is not None:
        return None
    kinds = {type(kernel) for kernel, _ in bound.selections.values()}
    has_known_source = plan.source.is_straight
    casts_once = all(plan.operands.cast_for_both.values())
    if kinds == {ScaledMM} and has_known_source and casts_once:
        return Straight(bound, triton.interpreted)
    if kinds == {ScaledMMOfRows} and _is_cast_by_rows(
        plan, quantizations, bound.device
    ):
        return StraightOfRows(bound, triton.interpreted)
    return None


def _is_cast_by_rows(
    plan: Any, quantizations: list[Quantization], device: Device
) -> bool:
    """Return True if `CastOfRows` casts a plan's operands for `scaled_mm`."""
    return (
        type(plan.source) is CurrentSource
        and len({*quantizations}) == 1
        and quantizations[0].format == "float8_e4m3fn"
        and quantizations[0].tile == ROW
        and quantizations[0].scale_format == "float32"
        and quantizations[0].hadamard is None
        and quantizations[0].constant_scale is None
        and plan.inputs_dtype == "bfloat16"
        and backend.scales_rows(
            torch.device("cpu" if device.maker == "cpu" else "cuda")
        )
    )
