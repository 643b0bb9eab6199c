"""PyTorch on a GPU: most layers' passes, as lists of kernels found once.

A plan is bound to such a list if it multiplies two matrices of float8 values
with one scale each, which one cast writes in both layouts. The general path of
`contractions.bound_plan` computes the same bits. Its decisions take the host
longer than a GPU takes for the step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from keras_policy_ext._types import Tensor
from keras_policy_ext.backends.both_layouts import ScaleHint
from keras_policy_ext.backends.interface import Shape
from keras_policy_ext.backends.torch import casts, observations
from keras_policy_ext.backends.torch.scaled_mm import ALIGNMENT, HALVES, ScaledMM
from keras_policy_ext.formats import FAMILIES
from keras_policy_ext.numerics.observations import SLOTS
from keras_policy_ext.numerics.scale_sources import CurrentSource, DelayedSource
from keras_policy_ext.recipes import OPERANDS

if casts.HAS_TRITON:
    from keras_policy_ext.backends.torch import triton_kernels as kernels

_EMPTY = torch.empty

_WIDTH = 8
"""The distance of the scales of two operands, each with a marked scale."""

_DTYPES = "bfloat16", "float16", "float32"

class Launch:
    """A Triton kernel with its grid and constants, started directly.

    All calls have tensors of the same dtypes, at addresses that 16 divides,
    and the same sizes. So the kernel that the first call compiles is the one
    for all. Triton itself takes 9 µs to find it, 0.3 µs to start it. It starts
    kernels in this way (triton 3.6 to 3.9); its interpreter compiles nothing.

    Args:
        kernel: The function that Triton compiles.
        grid: The number of programs along each axis.
        constants: Its compile-time constants, by name.
        **options: Such as `num_warps`.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        constants: dict[str, Any],
        **options: Any,
    ):
        self._kernel, self._options = kernel, {**constants, **options}
        self._grid = (*grid, 1, 1)[:3]
        names = kernel.arg_names
        self._constants = [constants[n] for n in names if n in constants]
        self._start: Any = None

    def __call__(self, stream: int, *arguments: Any) -> None:
        """Start the kernel.

        Args:
            stream: The address of the CUDA stream.
            *arguments: Tensors and sizes, in the order of the kernel's.
        """
        if self._start is None:
            made = self._kernel[self._grid](*arguments, **self._options)
            if hasattr(made, "packed_metadata"):
                self._how = made.function, made.packed_metadata, *(None,) * 3
                self._start = made.run
            return
        constants = self._constants
        self._start(*self._grid, stream, *self._how, *arguments, *constants)


class Cast:
    """The cast of an operand of one shape, in both layouts.

    Args:
        straight: The passes that it is part of.
        operand: `"inputs"`, `"kernel"` or `"outputs_grad"`.
        matrix: A matrix of its shape and strides.
        lately: Whether the GPU has told that all operands were observed.
        observe: Whether to write the amax of each tile.
        sums: Whether to write sums of columns, a row for each row of tiles.
    """

    def __init__(
        self,
        straight: Straight,
        operand: str,
        matrix: Tensor,
        lately: bool,
        observe: bool,
        sums: bool = False,
    ):
        m, k = matrix.shape
        rows, columns = kernels.ROWS, kernels.COLUMNS
        grid = -(-m // rows), -(-k // columns)
        asked = straight.quantizations[operand]
        self._dtype = getattr(torch, asked.format)
        self._shape, self._across = (m, k), (k, m)
        self._tiles = grid[0] * grid[1]
        self._sums = (grid[0], k) if sums else None
        self._sizes = m, k, *matrix.stride()
        self._has_state = straight.source is not None
        index = OPERANDS.index(operand)
        is_last = operand == "outputs_grad"
        place = 0 if is_last or not index else _WIDTH
        if not self._has_state:
            index = 0 if is_last else index
        may_be_unseen = straight.may_be_unseen
        # Of a hint it only counts which of its tensors are there.
        hint = ScaleHint(
            matrix if self._has_state else None,
            matrix if may_be_unseen else None,
            straight.rule,
            lately,
        )
        block = {"ROWS": rows, "COLUMNS": columns}
        constants = {
            **kernels.cast_constants(
                asked, hint, (m, k), index, place, not self._has_state, sums
            ),
            "OBSERVE": observe and self._has_state,
            **kernels.conversion_constants(straight.interpreted),
            **block,
        }
        self._launch = Launch(kernels.cast_kernel, grid, constants)
        self._find_amax = None
        if not self._has_state or (may_be_unseen and not lately):
            tile = {**kernels.tile_constants((m, k)), **block}
            how = {"ALWAYS": not self._has_state, "INDEX": index, **tile}
            self._find_amax = Launch(kernels.amax_kernel, grid, how)

    def __call__(
        self, x: Tensor, scales: Tensor, unseen: Tensor, used: Tensor, stream: int
    ) -> tuple[Tensor, ...]:
        """Quantize a matrix.

        Args:
            x: The matrix.
            scales: Scales read from the state; zeros that become amaxes
                without a state, int32.
            unseen: Which operands were never observed.
            used: Gets the scale.
            stream: See `Launch`.

        Returns:
            The codes, those of the transpose, the amax of each tile, and the
            sums of the columns. The last two are `used` if they were not
            asked for.
        """
        device = x.device
        values = _EMPTY(self._shape, dtype=self._dtype, device=device)
        across = _EMPTY(self._across, dtype=self._dtype, device=device)
        amaxes = sums = used
        if self._has_state:
            amaxes = _EMPTY(self._tiles, dtype=torch.float32, device=device)
        if self._sums is not None:
            sums = _EMPTY(self._sums, dtype=torch.float32, device=device)
        found = amaxes if self._has_state else scales
        if self._find_amax is not None:
            self._find_amax(stream, x, unseen, found, *self._sizes)
        self._launch(
            stream, x, scales, unseen, used, values, across, found, sums,
            *self._sizes,
        )
        return values, across, amaxes, sums


class Saved(NamedTuple):
    """The tensors that a forward pass saves for the gradients.

    Attributes:
        inputs: (k, m), the codes of the transposed inputs.
        kernel: (k, n), the codes of the kernel.
        used: Float32 (2, 8). A row begins with the scale of the inputs, or of
            the kernel. Without a state, the marked scale is in column 4.
        scales: Float32 (3,), read from the state; None without one, like what
            follows.
        unseen: Bool (3,), read from the state.
        inputs_amax: The amax of each tile of the inputs; None if not observed.
        kernel_amax: Likewise of the kernel.
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

    Args:
        bound: A `BoundPlan` of two plain matrices, whose operands are each
            cast in both layouts.
        interpreted: See `TritonCasts`.

    Attributes:
        source: The `DelayedSource` of the plan; None without a state.
        differentiates: Whether it computes the gradients too. Outside of
            training a state observes the kernel alone.
    """

    def __init__(self, bound: Any, interpreted: bool):
        plan = bound.plan
        has_state = plan.source.state_shape is not None
        self.interpreted = interpreted
        self.rule = plan.source.rule
        self.source = plan.source if has_state else None
        self.may_be_unseen = has_state and plan.source.starts_from_current
        self.quantizations = plan.operands.cast_for_both
        self.differentiates = plan.training is not False or not has_state
        self.slot = 1 + plan.slot % SLOTS
        self.column = 0 if has_state else kernels.MARKED_AFTER
        self.contracted = len(plan.contraction.form.contracted)
        self.outputs_dtype = getattr(torch, plan.inputs_dtype)
        self.kernel_dtype = getattr(torch, plan.kernel_dtype)
        self.grad_dtype = getattr(torch, bound.dtype_of("kernel_grad"))
        # On a CPU, which interprets, the results must not change.
        on_cpu = bound.device.maker == "cpu"
        self.adds = self.outputs_dtype in HALVES and not on_cpu
        # Triton's interpreter does not round to 16 bits as a GPU does.
        self.sums_dtype = torch.float32 if interpreted else self.outputs_dtype
        self._passes: dict[Any, Passes | None] = {}

    def of(
        self, inputs: Shape, kernel: Shape, device: torch.device
    ) -> Passes | None:
        """Return the passes for operands of these shapes; None if it has none.

        Args:
            inputs: The shape of the inputs.
            kernel: The shape of the kernel.
            device: Where both are.
        """
        key = inputs, kernel, device
        found = self._passes.get(key, self)
        if found is self:
            fits = self.fits(inputs, kernel, device)
            found = Passes(self, inputs, kernel, device) if fits else None
            self._passes[key] = found
        return found

    def fits(self, inputs: Shape, kernel: Shape, device: torch.device) -> bool:
        """Return True if the hardware accepts the sizes; see `of`."""
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

    def empty(
        self, inputs: Tensor, kernel: Tensor, keep: bool
    ) -> list[Tensor]:
        """Return tensors of the shapes of the outputs and what is saved.

        Args:
            inputs: See `BoundPlan.forward`; it may have no data.
            kernel: See `BoundPlan.forward`; it may have no data.
            keep: Whether anything is saved.
        """
        m, k, n = self.sizes(inputs.shape, kernel.shape)
        rows = inputs.shape[: len(inputs.shape) - self.contracted]
        shape = *rows, *kernel.shape[self.contracted :]
        outputs = inputs.new_empty(shape, dtype=self.outputs_dtype)
        if not keep:
            return [outputs]
        x, w = (
            getattr(torch, self.quantizations[operand].format)
            for operand in ("inputs", "kernel")
        )
        wide = torch.float32
        found = [((k, m), x), ((k, n), w), ((2, _WIDTH), wide)]
        if self.source is not None:
            found += [((3,), wide), ((3,), torch.bool)]
            tiles = kernels.number_of_tiles
            found += [((tiles(m, k),), wide), ((tiles(k, n),), wide)]
        made = [inputs.new_empty(size, dtype=dtype) for size, dtype in found]
        return [outputs, *made]

    def leaves(self, saved: Sequence[Tensor]) -> list[Tensor]:
        """Return saved tensors in the form of `Residuals.leaves`."""
        each = Saved(*saved)
        found = []
        for codes, used in zip(each[:2], each.used.unbind(0), strict=True):
            found += [codes.mT[None], used[self.column].reshape(1, 1, 1)]
        known = [each.scales, each.unseen if self.may_be_unseen else None]
        known += [each.inputs_amax, each.kernel_amax]
        return found + [x for x in known if x is not None]


class Passes:
    """Both passes for operands of one shape, on one device.

    Args:
        straight: The passes of the plan.
        inputs: The shape of the inputs.
        kernel: The shape of the kernel.
        device: Where both are.
    """

    def __init__(
        self,
        straight: Straight,
        inputs: Shape,
        kernel: Shape,
        device: torch.device,
    ):
        self._straight, self._source = straight, straight.source
        self._m, self._k, self._n = straight.sizes(inputs, kernel)
        self._inputs_shape, self._kernel_shape = inputs, kernel
        self.columns = kernel[straight.contracted :]
        rows = inputs[: len(inputs) - straight.contracted]
        self._shape = *rows, *self.columns
        self._device, self._fast = device, device.type == "cuda"
        self._tells = straight.interpreted or (
            self._source is not None and casts.tells_the_host()
        )
        self._casts: dict[Any, Cast] = {}
        self._stream = _stream_of(device)
        if self._source is not None:
            constants = kernels.state_constants(self._source)
            self._width = constants["WIDTH"]
            self._read = Launch(kernels.history_kernel, (3,), constants)
            names = "WIDTH", "BLOCK"
            some = {name: constants[name] for name in names}
            some["PARTS"] = 4096
            self._observe = Launch(
                kernels.observation_kernel, (3,), some, num_warps=8
            )
        self._add_up = Launch(
            kernels.sums_kernel,
            (-(-self._n // kernels.SUMMED),),
            kernels.sums_constants(),
        )

    def forward(
        self,
        inputs: Tensor,
        kernel: Tensor,
        bias: Tensor | None,
        state: Tensor | None,
        observe: bool,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute the outputs; return the tensors of `Saved` too.

        Args:
            inputs: See `BoundPlan.forward`.
            kernel: See `BoundPlan.forward`.
            bias: See `BoundPlan.forward`.
            state: The state matrix of the recipe, or None.
            observe: See `BoundPlan.forward`.
        """
        straight, device, stream = self._straight, self._device, self._stream()
        x = _matrix(inputs, self._m, self._k)
        w = _matrix(kernel, self._k, self._n)
        used = _EMPTY((2, _WIDTH), dtype=torch.float32, device=device)
        lately, known = True, ()
        if state is None:
            scales = unseen = torch.zeros(2, dtype=torch.int32, device=device)
        else:
            scales = _EMPTY(3, dtype=torch.float32, device=device)
            unseen = _EMPTY(3, dtype=torch.bool, device=device)
            told = observations.told(state) if self._tells else None
            flags = unseen if told is None else told
            self._read(stream, _aligned(state), scales, unseen, flags)
            lately = observations.seen_lately(state)
            known = scales, unseen
        observe = observe and state is not None
        xv, xa, x_amax, _ = self._cast("inputs", x, lately, observe)(
            x, scales, unseen, used, stream
        )
        wv, wa, w_amax, _ = self._cast("kernel", w, lately, observe)(
            w, scales, unseen, used, stream
        )
        x_scale, w_scale = used.select(1, 0).unbind(0)
        added = None
        if bias is not None and straight.adds and bias.shape == self.columns:
            added = bias if bias.dim() == 1 else bias.reshape(-1)
        outputs = torch._scaled_mm(
            xv,
            wa.t(),
            x_scale,
            w_scale,
            bias=added,
            out_dtype=straight.outputs_dtype,
            use_fast_accum=self._fast,
        )
        if len(self._shape) != 2:
            outputs = _as_shape(outputs, self._shape)
        if bias is not None and added is None:
            outputs = outputs + bias
        amaxes = (x_amax, w_amax) if observe else ()
        return outputs, (xa, wv, used, *known, *amaxes)

    def backward(
        self,
        saved: Sequence[Tensor],
        outputs_grad: Tensor,
        state: Tensor | None,
        needed: Sequence[bool],
    ) -> list[Tensor | None]:
        """Compute the gradients of inputs, kernel, bias and state.

        Args:
            saved: From `forward`.
            outputs_grad: The gradient of the outputs.
            state: The state matrix of the recipe, or None.
            needed: Which of the first three gradients to compute.
        """
        straight, device, stream = self._straight, self._device, self._stream()
        kept = Saved(*saved)
        g = _matrix(outputs_grad, self._m, self._n)
        used = _EMPTY(_WIDTH, dtype=torch.float32, device=device)
        scales, unseen, lately = kept.scales, kept.unseen, True
        if state is None:
            scales = unseen = torch.zeros(1, dtype=torch.int32, device=device)
        else:
            lately = observations.seen_lately(state)
        observe = kept.inputs_amax is not None
        gv, ga, g_amax, sums = self._cast(
            "outputs_grad", g, lately, observe, needed[2]
        )(g, scales, unseen, used, stream)
        column = straight.column
        x_scale, w_scale = kept.used.select(1, column).unbind(0)
        g_scale = used.select(0, column)
        inputs_grad = kernel_grad = bias_grad = state_grad = None
        if needed[0]:
            inputs_grad = torch._scaled_mm(
                gv,
                kept.kernel.t(),
                g_scale,
                w_scale,
                out_dtype=straight.outputs_dtype,
            )
            if len(self._inputs_shape) != 2:
                inputs_grad = _as_shape(inputs_grad, self._inputs_shape)
        if needed[1]:
            kernel_grad = torch._scaled_mm(
                kept.inputs,
                ga.t(),
                x_scale,
                g_scale,
                out_dtype=straight.grad_dtype,
            )
            if straight.grad_dtype != straight.kernel_dtype:
                kernel_grad = kernel_grad.to(straight.kernel_dtype)
            if len(self._kernel_shape) != 2:
                kernel_grad = _as_shape(kernel_grad, self._kernel_shape)
        if needed[2]:
            dtype = straight.sums_dtype
            bias_grad = _EMPTY(self._n, dtype=dtype, device=device)
            self._add_up(stream, sums, bias_grad, sums.shape[0], self._n)
            if dtype != straight.outputs_dtype:
                bias_grad = bias_grad.to(straight.outputs_dtype)
            if len(self.columns) != 1:
                bias_grad = _as_shape(bias_grad, self.columns)
        if state is not None and observe:
            state_grad = _EMPTY(
                (3, self._width), dtype=torch.float32, device=device
            )
            amaxes = kept.inputs_amax, kept.kernel_amax, g_amax
            counts = [amax.shape[0] for amax in amaxes]
            self._observe(stream, *amaxes, *counts, state_grad, straight.slot)
        elif state is not None:
            state_grad = torch.zeros_like(state)
        return [inputs_grad, kernel_grad, bias_grad, state_grad]

    def leaves(self, saved: Sequence[Tensor]) -> list[Tensor]:
        """Return saved tensors in the form of `Residuals.leaves`."""
        return self._straight.leaves(saved)

    def _cast(
        self,
        operand: str,
        matrix: Tensor,
        lately: bool,
        observe: bool,
        sums: bool = False,
    ) -> Cast:
        key = operand, matrix.stride(), lately, observe, sums
        found = self._casts.get(key)
        if found is None:
            found = Cast(self._straight, operand, matrix, *key[2:])
            self._casts[key] = found
        return found


_as_shape = torch.ops.aten._unsafe_view.default
"""Reshapes a new tensor. Autograd does not take the result for a view."""


def _matrix(x: Tensor, rows: int, columns: int) -> Tensor:
    """Return a tensor as a matrix, at an address that 16 divides."""
    if x.dim() != 2:
        x = x.reshape(rows, columns)
    return _aligned(x)


def _aligned(x: Tensor) -> Tensor:
    """Return a tensor, cloned if 16 does not divide its address."""
    return x.clone() if x.data_ptr() % 16 else x


def _stream_of(device: torch.device) -> Callable[[], int]:
    """Return a function that returns the address of the current stream."""
    if device.type != "cuda":
        return int
    current = torch._C._cuda_getCurrentRawStream
    return functools.partial(current, device.index)


def bind(bound: Any) -> Straight | None:
    """Return the straight passes of a bound plan; None if it has none.

    Args:
        bound: See `Straight`.
    """
    both, source = bound.engine.both_layouts, bound.plan.source
    if not casts.HAS_TRITON or type(both) is not casts.TritonCasts:
        return None
    if type(source) not in (DelayedSource, CurrentSource):
        return None
    if any(type(each) is not ScaledMM for each, _ in bound.selections.values()):
        return None
    asked = bound.plan.operands.cast_for_both.values()
    formats = {each.format for each in asked}
    dtypes = {bound.plan.inputs_dtype, bound.plan.kernel_dtype}
    if not formats <= {*FAMILIES["ocp"]} or not dtypes <= {*_DTYPES}:
        return None
    if not both.interpreted and casts.lacking() is not None:
        return None
    return Straight(bound, both.interpreted)

