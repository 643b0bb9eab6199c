"""The product with a kernel that is stored in float8, and not trained."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import keras
from keras import ops

from keras_policy_ext import backends, formats
from keras_policy_ext._types import Tensor
from keras_policy_ext.backends.matmuls import Choice, Request
from keras_policy_ext.contractions import equations
from keras_policy_ext.contractions.equations import shape_of
from keras_policy_ext.contractions.kinds import Contraction, Einsum
from keras_policy_ext.contractions.plan import preferred
from keras_policy_ext.numerics import quantized, scaling
from keras_policy_ext.numerics.quantized import Quantized
from keras_policy_ext.recipes import FrozenKernels, Quantization
from keras_policy_ext.stored_kernels import BLOCK, Axes

Constants = tuple[Tensor, ...]

_INPUTS = formats.ALIASES["e4m3"]
_LARGEST_INPUT = formats.get(_INPUTS).max


@dataclasses.dataclass(frozen=True)
class FrozenPlan:
    """One product with a stored kernel, ready to run; hashable.

    What it is given beside the inputs are constants: the codes of the kernel,
    its scales, and the scale of the inputs where that was found before.

    Attributes:
        contraction: What is multiplied.
        recipe: How kernel and inputs are quantized.
        axes: Which axes of the kernel share a scale.
        dtype: Of inputs and outputs: the compute dtype.
        prefer: As for `Plan`.
        for_xla: As for `Plan`.
    """

    contraction: Any
    recipe: FrozenKernels
    axes: Axes
    dtype: str
    prefer: str | None = "auto"
    for_xla: bool = False

    def resolved(self) -> FrozenPlan:
        """This plan, with what is preferred here and now."""
        if self.prefer:
            return self
        return dataclasses.replace(self, prefer=preferred())

    @property
    def only_widens(self) -> bool:
        """Return True if inputs are not rounded."""
        return self.recipe.activations is None

    @property
    def choice(self) -> Choice:
        """Which kind of kernel runs the product, and why."""
        if self._asked("inputs") is None:
            return Choice(
                "emulated",
                "stored numbers are widened and multiplied in "
                f"{self.dtype}: inputs are not quantized",
            )
        if not self._has_matrix:
            return Choice("emulated", "stored numbers are widened first")
        return self._chosen[1]

    def forward(self, inputs: Tensor, constants: Constants) -> Tensor:
        """The outputs.

        Args:
            inputs: Of dtype `dtype`.
            constants: Codes, or the kernel widened; scales, and perhaps the
                scale of the inputs.

        Returns:
            Outputs of dtype `dtype`.
        """
        codes, scale, *known = constants
        shapes = shape_of(inputs), shape_of(codes)
        if self._asked("inputs") is None:
            x, wide = inputs, self.dtype
        elif self._runs_natively(codes):
            return self._native(inputs, codes, scale, known, shapes)
        else:
            x, wide = self._rounded(inputs, known), "float32"
        if self._is_einsum:
            equation = self.contraction.equation
            return self._einsum(equation, ops.cast(x, wide), codes, scale)
        kernel = self._dequantized(codes, scale, wide)
        reads = (
            self._read("inputs", x, wide),
            self._read("kernel", kernel, wide),
        )
        return self._product("forward", *reads, shapes)

    def inputs_grad(
        self, outputs_grad: Tensor, constants: Constants, shape: Any
    ) -> Tensor:
        """The gradient of the inputs, in the compute dtype.

        Rounding the inputs is taken for the identity.

        Args:
            outputs_grad: Of dtype `dtype`.
            constants: As for `forward`.
            shape: Of the inputs.
        """
        codes, scale, *_ = constants
        equation = self._gradient_equation
        if equation is not None:
            return self._einsum(equation, outputs_grad, codes, scale)
        kernel = self._dequantized(codes, scale, self.dtype)
        read = self._read("kernel", kernel, self.dtype)
        reads = (
            self._read("outputs_grad", outputs_grad, self.dtype),
            self.contraction.transposed(read),
        )
        return self._product("inputs_grad", *reads, (shape, shape_of(codes)))

    @property
    def _is_einsum(self) -> bool:
        """Return True if one einsum of the kernel as it lies does it.

        A matrix made of it would be read against the order of memory: for
        one row XLA takes twice as long (JAX 0.10, CPU).
        """
        contraction = self.contraction
        return isinstance(contraction, Einsum) and (
            contraction.reads_what_is_quantized
        )

    @property
    def _gradient_equation(self) -> str | None:
        """The einsum of the gradient; None where it is not one."""
        if not self._is_einsum:
            return None
        first, second, out = equations.split(self.contraction.equation)
        alone = set(first) - set(second + out)
        return None if alone else f"{out},{second}->{first}"

    def _einsum(
        self, equation: str, x: Tensor, codes: Tensor, scale: Tensor
    ) -> Tensor:
        """One einsum with the kernel, in the dtype of `x`, then cast."""
        dtype = keras.backend.standardize_dtype(x.dtype)

        def product(codes: Tensor, scale: Tensor) -> Tensor:
            kernel = self._dequantized(codes, scale, dtype)
            return ops.cast(ops.einsum(equation, x, kernel), self.dtype)

        first, second, out = equations.split(equation)
        free = [c for c in second if c in out and c not in first]
        if self.recipe.per == "block" or not free:
            return product(codes, scale)
        # The largest; what torch.compile follows has no `key=`.
        places = [second.index(letter) for letter in free]
        sizes = [codes.shape[place] for place in places]
        place = places[sizes.index(max(sizes))]
        return backends.current().in_parts(
            product, codes, scale, place, out.index(second[place])
        )

    def _asked(self, operand: str) -> Quantization | None:
        asked = self.recipe.quantization(operand, "forward")
        return self.contraction.quantization(asked)

    @functools.cached_property
    def _chosen(self) -> tuple[Any, Choice]:
        """Select the kernel for two quantized operands, with the reason."""
        a: Any = self.recipe.quantization("inputs", "forward")
        b: Any = self.recipe.quantization("kernel", "forward")
        request = Request("forward", a, b, False, self.prefer, self.for_xla)
        return backends.engine().select(request)

    @functools.cached_property
    def _has_matrix(self) -> bool:
        """True if the scales of the kernel are those of its home matrix."""
        if not self._is_einsum:
            return False
        form = self.contraction.form
        summed, free = (
            "".join(form.second[axis] for axis in group) for group in self.axes
        )
        if self.recipe.per == "block":
            return (summed, free) == (form.contracted, form.columns)
        return set(summed) == set(form.contracted) and not form.batch

    def _runs_natively(self, codes: Tensor) -> bool:
        """True if a matmul reads the codes, and they are not widened yet."""
        native = self._has_matrix and self._chosen[1].native
        return native and not _is_wide(codes)

    def _product(
        self, matmul: str, a: Quantized, b: Quantized, shapes: Any
    ) -> Tensor:
        kernel, _ = self.contraction.choose(
            backends.engine(), matmul, None, None
        )
        return self.contraction.product(
            matmul, kernel, a, b, shapes, self.dtype
        )

    def _read(self, operand: str, x: Tensor, dtype: str) -> Quantized:
        """Return the matrix of an operand that is not quantized."""
        home = self.contraction.operand(operand, x, None)
        plain = quantized.passthrough(ops.cast(home, dtype))
        return self.contraction.read(operand, plain)

    def _dequantized(self, codes: Tensor, scale: Tensor, dtype: str) -> Tensor:
        """The kernel in its own axes."""
        return dequantized(self.recipe, self.axes, codes, scale, dtype)

    def _rounded(self, inputs: Tensor, known: list[Tensor]) -> Tensor:
        """Return the dequantized inputs, float32, in their own axes."""
        scale = known[0] if known else self._scale(inputs)
        engine = backends.engine()
        numbers = engine.cast(inputs, scale, _INPUTS, False)
        numbers = engine.widen(numbers, "float32")
        return ops.multiply(numbers, scale)

    def _scale(self, inputs: Tensor) -> Tensor:
        """That of each token, or example of a convolution.

        NaN where a number of one is not finite, so that the outputs tell.
        """
        axes = self.contraction.summed_axes(len(inputs.shape))
        amax = scaling.amax(inputs, axis=axes, keepdims=True)
        scale = scaling.scale_for_limit(amax, _LARGEST_INPUT)
        return scale * (amax * 0.0 + 1.0)

    def _native(
        self,
        inputs: Tensor,
        codes: Tensor,
        scale: Tensor,
        known: list[Tensor],
        shapes: Any,
    ) -> Tensor:
        """The product by a matmul that reads float8 itself."""
        engine = backends.engine()
        contraction: Any = self.contraction
        asked: Any = self._asked("inputs")
        home = contraction.operand("inputs", inputs, asked)
        x, amax = quantized.quantize(
            home, asked, known[0] if known else None, engine.narrow_cast
        )
        x = contraction.read(
            "inputs", x if amax is None else x.with_nan_scales(amax)
        )
        kernel = self._stored(codes, scale)
        return contraction.product(
            "forward", self._chosen[0], x, kernel, shapes, self.dtype
        )

    def _stored(self, codes: Tensor, scale: Tensor) -> Quantized:
        """The home matrix of the kernel, as it is stored."""
        contraction: Any = self.contraction
        narrow = backends.current().as_float8(codes, self.recipe.weights)
        values = contraction.form.matrix("kernel", narrow)
        if self.recipe.per == "block":
            scale = scale[None]
        else:
            scale = contraction.form.matrix("kernel", scale)
        return Quantized(values, scale, self._asked("kernel"))


def dequantized(
    recipe: FrozenKernels, axes: Axes, codes: Tensor, scale: Tensor, dtype: str
) -> Tensor:
    """Dequantize a stored kernel, in its own axes.

    Args:
        recipe: How it is stored.
        axes: Which of its axes are summed.
        codes: Its numbers, uint8; or what this function made of them in
            float32.
        scale: Its scales.
        dtype: Of the result.
    """
    if _is_wide(codes):
        return ops.cast(codes, dtype)
    numbers = backends.current().numbers(codes, recipe.weights)
    if recipe.per == "block":
        scale = _spread(axes, scale, tuple(codes.shape))
    return ops.cast(ops.multiply(numbers, scale), dtype)


def multiplies_codes(recipe: FrozenKernels) -> bool:
    """Return True if matmuls of this device read codes that are stored so."""
    a, b = (
        recipe.quantization(operand, "forward")
        for operand in ("inputs", "kernel")
    )
    if a is None or b is None:
        return False
    request = Request("forward", a, b, False, preferred(), False)
    return backends.engine().select(request)[1].native


def _is_wide(codes: Tensor) -> bool:
    return keras.backend.standardize_dtype(codes.dtype) != "uint8"


def _spread(axes: Axes, scale: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The scale of each number, from those of blocks of a matrix."""
    columns, rows = axes.sizes(shape)
    for axis in (0, 1):
        scale = backends.current().repeat(scale, BLOCK, axis)
    scale = scale[:rows, :columns]
    order = axes.free + axes.summed
    scale = ops.reshape(scale, [shape[axis] for axis in order])
    back = sorted(range(len(order)), key=order.__getitem__)
    return ops.transpose(scale, back)


@functools.lru_cache(maxsize=4096)
def _plan_of(*fields: Any) -> FrozenPlan:
    return FrozenPlan(*fields)


def frozen_plan(
    contraction: Contraction, recipe: FrozenKernels, axes: Axes, dtype: str
) -> FrozenPlan:
    """The plan of a product that is called here and now.

    The arguments are the first attributes of `FrozenPlan`.
    """
    framework = backends.current()
    if framework.is_compiling():
        return FrozenPlan(contraction, recipe, axes, dtype, prefer=None)
    return _plan_of(
        contraction,
        recipe,
        axes,
        dtype,
        preferred(),
        framework.traces_for_xla(),
    )


def run_frozen(plan: FrozenPlan, inputs: Tensor, *constants: Tensor) -> Tensor:
    """The outputs of a plan, with a gradient to the inputs.

    Args:
        plan: From `frozen_plan`.
        inputs: Of dtype `plan.dtype`.
        *constants: See `FrozenPlan.forward`.
    """
    return backends.current().run_frozen(plan, inputs, *constants)
