"""A plan bound to a device: kernels, casts and layouts are selected once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from keras import ops

from keras_policy_ext import backends
from keras_policy_ext._types import Tensor, override
from keras_policy_ext.backends.devices import Device
from keras_policy_ext.backends.interface import BoundOperation
from keras_policy_ext.backends.matmuls import Choice, Engine, Shapes
from keras_policy_ext.contractions.equations import shape_of
from keras_policy_ext.contractions.kinds import Einsum
from keras_policy_ext.contractions.operands import (
    Binding,
    BoundOperand,
    PassOptions,
    Selections,
    bind_operand,
)
from keras_policy_ext.contractions.second_derivatives import second_gradients
from keras_policy_ext.numerics import quantized, scaling
from keras_policy_ext.numerics.quantized import Quantized
from keras_policy_ext.numerics.scale_sources import Reading, Slot
from keras_policy_ext.recipes import MATMULS, OPERANDS


class BoundMatmul:
    """One of a contraction's three matmuls, with the kernel that runs it."""

    def __init__(
        self, plan: Any, matmul: str, kernel: Any, operands: list[BoundOperand]
    ):
        """Find which uses of the operands this matmul reads.

        `kernel` is the matmul kernel that runs it, in a bound `plan`.
        """
        self._matmul, self._kernel = matmul, kernel
        self._contraction = plan.contraction
        self.dtype = _dtype_of(plan, matmul, kernel)
        # The use of each operand in this matmul.
        self._a, self._b = (
            each.first if matmul == each.first.matmul else each.second
            for each in operands
        )

    def __call__(
        self,
        a: Quantized,
        b: Quantized,
        shapes: Shapes,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Multiply two quantized operands; add a bias in the output's dtype.

        `shapes` are those of the inputs and of the kernel.
        """
        a, b = self._a.read(a), self._b.read(b)
        product = self._contraction.product(
            self._matmul, self._kernel, a, b, shapes, self.dtype
        )
        return product if bias is None else ops.add(product, bias)


class MatmulWithBias(BoundMatmul):
    """A forward matmul that can add the bias before it rounds the output."""

    def __call__(
        self,
        a: Quantized,
        b: Quantized,
        shapes: Shapes,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Multiply two operands and add a bias, in one kernel if possible."""
        columns = kernel = None
        if bias is not None:
            columns = self._contraction.of_columns(bias, shapes)
        if columns is not None:
            kernel = self._kernel.with_bias(columns)
        if kernel is None:
            return super().__call__(a, b, shapes, bias)
        a, b = self._a.read(a), self._b.read(b)
        return self._contraction.product(
            self._matmul, kernel, a, b, shapes, self.dtype
        )


def bind_matmul(
    plan: Any,
    matmul: str,
    selection: tuple[Any, Choice],
    operands: dict[str, BoundOperand],
) -> BoundMatmul:
    """Return the `BoundMatmul` that computes one of a plan's three matmuls.

    `selection` is the matmul kernel for it, and the reason; `operands` has all
    three operands by name.
    """
    kernel, _ = selection
    is_einsum = isinstance(plan.contraction, Einsum)
    adds = is_einsum and hasattr(kernel, "with_bias") and matmul == "forward"
    kind = MatmulWithBias if adds else BoundMatmul
    dtypes = plan.inputs_dtype, plan.kernel_dtype
    # This gradient is rounded to bfloat16 in any case. A kernel may have a
    # variant that rounds it before the scales multiply.
    if matmul == "kernel_grad" and dtypes == ("bfloat16", "float32"):
        kernel = getattr(kernel, "of_gradient", kernel)
    return kind(plan, matmul, kernel, [operands[x] for x in MATMULS[matmul]])


def _dtype_of(plan: Any, matmul: str, kernel: Any) -> str:
    """Return the dtype in which a matmul of a plan writes the output."""
    if matmul != "kernel_grad":
        return str(plan.inputs_dtype)
    # In float16 the gradient of a float32 kernel could overflow. If the matmul
    # kernel writes float32 at no extra cost, a separate pass from 16 bits to
    # float32 would move 6 bytes per element.
    can_write_float32 = getattr(kernel, "writes_float32", False)
    is_half = plan.inputs_dtype == "float16"
    if is_half or (can_write_float32 and plan.kernel_dtype == "float32"):
        return str(plan.kernel_dtype)
    return str(plan.inputs_dtype)


@dataclasses.dataclass(frozen=True)
class Residuals:
    """The tensors that a contraction saves for its backward pass.

    Attributes:
        inputs: The quantized inputs that `kernel_grad` reads. With one scale
            they keep the operand's axes: a transposed copy is one more tensor.
        kernel: The quantized kernel that `inputs_grad` reads, laid out alike.
        reading: The reading of the state; None for a recipe without state.
        amaxes: Float32, of the inputs and the kernel; None if not observed.
        shapes: The shapes of the inputs and the kernel; scalar tensors for
            sizes that a TensorFlow graph does not know.
        engine: The kernels of the framework.
    """

    inputs: Quantized
    kernel: Quantized
    reading: Reading | None
    amaxes: tuple[Tensor, Tensor] | None
    shapes: Shapes
    engine: Engine

    def leaves(self, narrow: bool = True) -> list[Tensor]:
        """List the saved tensors in the order that `BoundPlan.residuals` takes.

        If `narrow`, operands are in the dtypes that the framework saves.
        """
        framework, encode, tensors = backends.current, self.engine.encode, []
        for operand in (self.inputs, self.kernel):
            if narrow and operand.quantization is not None:
                format_name = operand.quantization.format
                dtype = framework.kept_dtype(operand.values, format_name)
                operand = operand.encoded(dtype, encode)
            tensors += operand.leaves()
        if self.reading is not None:
            tensors += self.reading.leaves()
        return [*tensors, *(self.amaxes or ())]


class BoundPlan(BoundOperation):
    """A `Plan` bound to a device, with its kernels, casts and layouts.

    Attributes:
        selections: The kernel of each matmul, and the reason for it.
        inputs: How the inputs are quantized.
        kernel: How the kernel is quantized.
        outputs_grad: How the gradient of the outputs is quantized.
        straight: Both passes as lists of kernels; None for most contractions
            that are not of a layer like `Dense`, and on most devices.
    """

    def __init__(self, plan: Any, engine: Engine, device: Device):
        """Select a plan's kernels; bind its operands and three matmuls."""
        self.plan, self.engine, self.device = plan, engine, device
        self.selections = _select(plan, engine)
        binding = Binding(plan, engine, self.selections)
        operands = {each: bind_operand(binding, each) for each in OPERANDS}
        self.inputs, self.kernel, self.outputs_grad = operands.values()
        self._forward, self._inputs_grad, self._kernel_grad = (
            bind_matmul(plan, matmul, self.selections[matmul], operands)
            for matmul in MATMULS
        )
        self._source = plan.source
        self._observes_amaxes = plan.source.observes_amaxes
        self._is_inference = plan.training is False
        self._kernel_dtype = plan.kernel_dtype
        self.kernel_grad_dtype = self._kernel_grad.dtype
        self.straight = engine.straight(self) if self._is_plain else None

    @property
    def _is_plain(self) -> bool:
        """True if it multiplies the operands as plain matrices."""
        contraction, gathering = self.plan.contraction, self.plan.gathering
        is_einsum = type(contraction) is Einsum
        # If `is_quantized`, the kernel arrives gathered.
        is_whole = gathering is None or gathering.is_quantized
        return is_einsum and is_whole and contraction.form.is_plain

    @override
    def forward(
        self,
        inputs: Tensor,
        kernel: Tensor,
        state: tuple[Tensor, ...],
        observe: bool,
        bias: Tensor | None = None,
        no_backward: bool = False,
        slot: Slot = 0,
    ) -> tuple[Tensor, Residuals]:
        """Return the outputs plus the bias, and what to save.

        `observe` says whether the state needs the amaxes of the operands;
        `slot` is the number of this use of the kernel in the step.
        """
        observe = observe and bool(state) and self._observes_amaxes
        known = reading = None
        if state:
            known = self._source.read(*state)
            reading = self._source.simplified(known, *state)
        options = PassOptions(reading, observe, no_backward, slot=slot)
        x = self.inputs.quantize(inputs, options)
        w = self.kernel.quantize(kernel, options)
        shapes = shape_of(inputs), shape_of(kernel)
        outputs = self._forward(x.first, w.first, shapes, bias)
        amaxes = (x.amax, w.amax) if observe else None
        # `known`, not `reading`: the backward pass simplifies it anew.
        return outputs, Residuals(
            x.second, w.second, known, amaxes, shapes, self.engine
        )

    @override
    def residuals(self, leaves: Sequence[Tensor], shapes: Shapes) -> Residuals:
        """Rebuild what `Residuals.leaves` listed.

        What a recipe with a state read from it comes after the operands, and
        the amaxes of the operands come last.
        """
        tensors = iter(leaves)
        quantizations = self.plan.operands.saved_for_backward
        x = quantized.of_leaves(tensors, quantizations["inputs"])
        w = quantized.of_leaves(tensors, quantizations["kernel"])
        reading, rest = self._source.reading_of(list(tensors))
        amaxes = None
        if rest:
            inputs_amax, kernel_amax = rest
            amaxes = inputs_amax, kernel_amax
        return Residuals(x, w, reading, amaxes, shapes, self.engine)

    @override
    def observed(
        self, residuals: Residuals, inputs: Tensor, kernel: Tensor
    ) -> Residuals:
        """Add the amaxes of the operands to residuals saved without them."""
        if not self._observes_amaxes or residuals.reading is None:
            return residuals
        kernel_amax = self.kernel.amax(kernel)
        # Outside of training the amax of the inputs is not used.
        inputs_amax = kernel_amax
        if not self._is_inference:
            inputs_amax = self.inputs.amax(inputs)
        return dataclasses.replace(residuals, amaxes=(inputs_amax, kernel_amax))

    @override
    def backward(
        self,
        residuals: Residuals,
        outputs_grad: Tensor,
        state: tuple[Tensor, ...],
        needed: tuple[bool, bool] = (True, True),
        bias_shape: tuple[int, ...] | None = None,
        slot: Slot = 0,
    ) -> tuple[Tensor | None, Tensor | None, tuple[Tensor, ...], Tensor | None]:
        """Return the gradients of the inputs, the kernel, state and bias.

        `slot` is the number of this use of the kernel in the step.
        """
        reading, shapes = residuals.reading, residuals.shapes
        if reading is not None:
            reading = self._source.simplified(reading, *state)
        observe = residuals.amaxes is not None and not self._is_inference
        sums = bias_shape is not None
        options = PassOptions(reading, observe, sums=sums, slot=slot)
        g = self.outputs_grad.quantize(outputs_grad, options)
        inputs_grad = kernel_grad = bias_grad = None
        inputs_needed, kernel_needed = needed
        if inputs_needed:
            inputs_grad = self._inputs_grad(g.first, residuals.kernel, shapes)
        if kernel_needed:
            kernel_grad = self._kernel_grad(residuals.inputs, g.second, shapes)
            kernel_grad = ops.cast(kernel_grad, self._kernel_dtype)
        state_grad: tuple[Tensor, ...] = ()
        if state:
            (matrix,) = state
            grad = self._source.gradient(
                residuals, reading, g.amax, matrix, slot, self._is_inference
            )
            state_grad = (grad,)
        if bias_shape is not None:
            bias_grad = g.column_sums
            if bias_grad is None:  # The cast could not sum this tensor.
                axes_of_rows = len(outputs_grad.shape) - len(bias_shape)
                bias_grad = ops.sum(outputs_grad, tuple(range(axes_of_rows)))
            bias_grad = ops.cast(bias_grad, self.plan.inputs_dtype)
            bias_grad = ops.reshape(bias_grad, bias_shape)
        return inputs_grad, kernel_grad, state_grad, bias_grad

    @override
    def takes_bias(self, bias: Tensor, inputs: Tensor, kernel: Tensor) -> bool:
        """Return True if the outputs gradient's cast sums columns."""
        contraction = self.plan.contraction
        if not self.outputs_grad.sums_columns_of(inputs):
            return False
        is_einsum = isinstance(contraction, Einsum)
        shapes = shape_of(inputs), shape_of(kernel)
        return is_einsum and contraction.of_columns(bias, shapes) is not None

    @override
    def caught_up(
        self, kernel: Tensor, state: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Return the state, with a scale large enough for the kernel."""
        if not self._observes_amaxes:
            return state
        # A bank has an amax for each of its matrices.
        is_bank = self.plan.states > 1
        amax = (self.kernel.amax if is_bank else scaling.amax)(kernel)
        return tuple(self._source.caught_up(amax, each) for each in state)

    @override
    def second_derivatives(self, *arguments: Any) -> tuple[Any, ...]:
        return second_gradients(self, *arguments)


def _select(plan: Any, engine: Engine) -> Selections:
    """Select a kernel for each matmul of a plan; return it and the reason."""
    quantization = plan.operands.quantizations
    return {
        matmul: plan.contraction.choose(
            engine,
            matmul,
            quantization[a, matmul],
            quantization[b, matmul],
            plan.prefer,
            plan.for_xla,
        )
        for matmul, (a, b) in MATMULS.items()
    }
