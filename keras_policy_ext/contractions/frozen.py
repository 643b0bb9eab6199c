"""Contractions with a kernel that is stored in few bits and not trained."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import keras
from keras import ops

from keras_policy_ext import backends, formats
from keras_policy_ext._types import Tensor
from keras_policy_ext.backends.interface import Shape
from keras_policy_ext.backends.matmuls import Choice, Request, Shapes
from keras_policy_ext.backends.parts import StoredMatrix
from keras_policy_ext.contractions import equations
from keras_policy_ext.contractions.equations import shape_of
from keras_policy_ext.contractions.kernel_matrices import kernel_matrices
from keras_policy_ext.contractions.kinds import Contraction, Einsum
from keras_policy_ext.contractions.plan import preferred
from keras_policy_ext.numerics import casting, quantized, scaling
from keras_policy_ext.numerics.quantized import Quantized
from keras_policy_ext.recipes import MATMULS, FrozenKernels, Quantization
from keras_policy_ext.stored_kernels import BLOCK, Axes, tile_of

Constants = tuple[Tensor, ...]

_OPERANDS = {"forward": "inputs", "inputs_grad": "outputs_grad"}
"""What each matmul multiplies with the kernel."""

_INT8 = "int8"

_INPUTS = formats.ALIASES["e4m3"]
_LARGEST_INPUT = formats.get(_INPUTS).max


@dataclasses.dataclass(frozen=True)
class FrozenPlan:
    """The plan of a contraction with a stored kernel; hashable data.

    Its other operands are constants: the codes of the kernel, its scales, and
    the scale of the inputs if it is static.

    Attributes:
        axes: The axes of the kernel that share a scale.
        dtype: The dtype of the inputs and outputs: the compute dtype.
        prefer: See `Plan`.
        for_xla: See `Plan`.
    """

    contraction: Any
    recipe: FrozenKernels
    axes: Axes
    dtype: str
    prefer: str | None = "auto"
    for_xla: bool = False

    def with_preference(self) -> FrozenPlan:
        """Return a copy of this plan with the current value of `prefer`."""
        if self.prefer:
            return self
        return dataclasses.replace(self, prefer=preferred())

    @property
    def only_widens(self) -> bool:
        """True if the plan does not quantize the inputs."""
        return self.recipe.activations is None

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Return the kind of kernel for each matmul, and the reason."""
        return (self.choice,)

    @property
    def choice(self) -> Choice:
        """Return the kind of kernel that runs the matmul, and the reason."""
        if self._rounds_to_integers:
            return Choice(
                "emulated",
                "inputs are rounded to int8, and integers are multiplied in "
                "float32",
            )
        if self._quantization("inputs") is None:
            return Choice(
                "emulated",
                "stored numbers are widened and multiplied in "
                f"{self.dtype}: inputs are not quantized",
            )
        if not self._has_matrix:
            return Choice("emulated", "stored numbers are widened first")
        return self._selection[1]

    def forward(self, inputs: Tensor, constants: Constants) -> Tensor:
        """Compute the outputs from inputs and a stored kernel.

        The constants are the codes of the kernel, or what `dequantized` takes
        in place of them, its scales, and the scale of the inputs if it is
        static.
        """
        codes, scale, *static_scale = constants
        shapes = shape_of(inputs), shape_of(codes)
        if self._rounds_to_integers:
            x, dtype = rounded_by(self.contraction, inputs, _INT8), "float32"
        elif self._quantization("inputs") is None:
            x, dtype = inputs, self.dtype
        elif (
            self._has_matrix and self._selection[1].native and _are_codes(codes)
        ):
            return self._native_product(
                inputs, codes, scale, static_scale, shapes
            )
        else:
            x, dtype = self._rounded_inputs(inputs, static_scale), "float32"
        return self._product("forward", x, codes, scale, dtype, shapes)

    def inputs_grad(
        self, outputs_grad: Tensor, constants: Constants, shape: Shape
    ) -> Tensor:
        """Return the gradient of the inputs, of this shape, in compute dtype.

        It ignores the rounding of the inputs (straight-through).
        """
        codes, scale, *_ = constants
        shapes = shape, shape_of(codes)
        return self._product(
            "inputs_grad", outputs_grad, codes, scale, self.dtype, shapes
        )

    @property
    def _is_einsum(self) -> bool:
        """True if one `ops.einsum` of the stored kernel gives the outputs."""
        contraction = self.contraction
        # A kernel that is permuted to a matrix is read with large strides: for
        # one row XLA takes twice as long (JAX 0.10, CPU).
        return isinstance(contraction, Einsum) and (
            contraction.reads_what_is_quantized
        )

    def _equation(self, matmul: str) -> str | None:
        """Return the einsum equation of a matmul; None if there is none."""
        if not self._is_einsum:
            return None
        first, second, out = equations.split(self.contraction.equation)
        if matmul == "forward":
            return f"{first},{second}->{out}"
        # An einsum cannot broadcast along an axis that the inputs alone have.
        alone = set(first) - set(second + out)
        return None if alone else f"{out},{second}->{first}"

    def _product(
        self,
        matmul: str,
        x: Tensor,
        codes: Tensor,
        scale: Tensor,
        dtype: str,
        shapes: Shapes,
    ) -> Tensor:
        """Compute the outputs or the inputs gradient, by parts or at once.

        `codes` are those of the kernel, or what `dequantized` takes in their
        place. `dtype` is that of the multiplication, `shapes` those of inputs
        and kernel.
        """
        product = self._product_by_parts(matmul, x, codes, scale, dtype, shapes)
        if product is not None:
            return product
        kernel = dequantized(self.recipe, self.axes, codes, scale, dtype)
        equation = self._equation(matmul)
        if equation is not None:
            outputs = ops.einsum(equation, ops.cast(x, dtype), kernel)
            return ops.cast(outputs, self.dtype)
        # `_float_matrix` returns the matrix for the outputs.
        b = self._float_matrix("kernel", kernel, dtype)
        b = b if matmul == "forward" else self.contraction.transposed(b)
        a = self._float_matrix(_OPERANDS[matmul], x, dtype)
        kernel, _ = self.contraction.choose(backends.engine, matmul, None, None)
        return self.contraction.product(
            matmul, kernel, a, b, shapes, self.dtype
        )

    def _product_by_parts(
        self,
        matmul: str,
        x: Tensor,
        codes: Tensor,
        scale: Tensor,
        dtype: str,
        shapes: Shapes,
    ) -> Tensor | None:
        """Multiply by parts of the kernel; None where it is decoded at once.

        The arguments are those of `_product`.
        """
        framework, shape = backends.current, tuple(codes.shape)
        is_decoded = keras.backend.standardize_dtype(codes.dtype) == "float32"
        cuts = self._is_einsum and framework.cuts(math.prod(shape))
        if is_decoded or dtype == "float64" or not cuts:
            return None
        form, tile = self.contraction.form, tile_of(self.recipe.per)
        in_blocks = tile is not None
        view = kernel_matrices(form, self.axes, shape, in_blocks, matmul)
        if view is None:
            return None
        forward, blocks, part = matmul == "forward", None, BLOCK
        matrices, _, n = view.shape
        if tile is not None:
            # One row of scales for `part` entries of the axis that is cut.
            part, across = reversed(tile) if view.sums == forward else tile
            if part == 1:
                return None  # A row for each entry is no row for a part.
            rows = ops.transpose(scale) if view.sums == forward else scale
            if across > 1:
                rows = framework.repeat(rows, across, 1)[:, :n]
            blocks, scale = rows, 1.0
        else:
            if tuple(scale.shape) != view.scales_shape:
                scale = ops.broadcast_to(scale, view.scales_shape)
            scale = framework.reshape(scale, (matrices, 1, -1))
        operand, x = _OPERANDS[matmul], ops.cast(x, "float32")
        x = view.operand.matrix(operand, view.operand.summed(operand, x))
        kernel = StoredMatrix(
            codes, blocks, self.recipe.weights, view.shape, view.sums, part
        )
        x = x if forward else x * scale
        y = framework.product_by_parts(x, kernel, dtype)
        if y is None:
            return None
        y = y * scale if forward else y
        result = view.result.result(matmul, y, form.sizes(*shapes))
        return ops.cast(result, self.dtype)

    @property
    def _rounds_to_integers(self) -> bool:
        """True if inputs are rounded to int8, with a scale per token."""
        recipe = self.recipe
        return recipe.has_integers and recipe.activations is not None

    def _quantization(self, operand: str) -> Quantization | None:
        """Return how an operand is quantized; None if it is not."""
        quantization = self.recipe.quantization(operand, "forward")
        return self.contraction.quantization(quantization)

    @functools.cached_property
    def _selection(self) -> tuple[Any, Choice]:
        """The matmul kernel for quantized operands, and its `Choice`."""
        a: Any = self.recipe.quantization("inputs", "forward")
        b: Any = self.recipe.quantization("kernel", "forward")
        batched = False
        request = Request("forward", a, b, batched, self.prefer, self.for_xla)
        return backends.engine.select(request)

    @functools.cached_property
    def _has_matrix(self) -> bool:
        """True if the kernel is a matrix (summed, free) that its scales fit.

        Tiles are along the axes in this order; a scale per output fits any.
        """
        if not self._is_einsum:
            return False
        form = self.contraction.form
        summed, free = (
            "".join(form.second[axis] for axis in group) for group in self.axes
        )
        if tile_of(self.recipe.per) is not None:
            # Tiles are cut along the axes in this order.
            return (summed, free) == (form.contracted, form.columns)
        return set(summed) == set(form.contracted) and not form.batch

    def _float_matrix(self, operand: str, x: Tensor, dtype: str) -> Quantized:
        """Return the matrix of an unquantized operand, cast to `dtype`."""
        home = self.contraction.operand(operand, x, None)
        plain = quantized.passthrough(ops.cast(home, dtype))
        return self.contraction.read(operand, plain)

    def _rounded_inputs(
        self, inputs: Tensor, static_scale: list[Tensor]
    ) -> Tensor:
        """Return the inputs, rounded to float8 values times their scale.

        `static_scale` has the one scale of the inputs, or nothing.
        """
        scale = static_scale[0] if static_scale else self._scale(inputs)
        engine, is_factor = backends.engine, False
        numbers = engine.cast(inputs, scale, _INPUTS, is_factor)
        numbers = engine.widen(numbers, "float32")
        return ops.multiply(numbers, scale)

    def _scale(self, inputs: Tensor) -> Tensor:
        """Return one scale per token, or per example of a convolution."""
        axes = self.contraction.summed_axes(len(inputs.shape))
        amax = scaling.amax(inputs, axis=axes, keepdims=True)
        scale = scaling.scale_for_limit(amax, _LARGEST_INPUT)
        # NaN if a value is not finite, so that the outputs show it.
        return scale * (amax * 0.0 + 1.0)

    def _native_product(
        self,
        inputs: Tensor,
        codes: Tensor,
        scale: Tensor,
        static_scale: list[Tensor],
        shapes: Shapes,
    ) -> Tensor:
        """Quantize the inputs; compute the outputs by a float8 matmul.

        `static_scale` has the one scale of the inputs, or nothing.
        """
        cast, contraction = backends.engine.narrow_cast, self.contraction
        quantization: Any = self._quantization("inputs")
        home = contraction.operand("inputs", inputs, quantization)
        known_scale = static_scale[0] if static_scale else None
        x, amax = quantized.quantize(home, quantization, known_scale, cast)
        if amax is not None:  # Infinite inputs give NaN, as by `_scale`.
            x = x.with_nan_scales(amax)
        x = contraction.read("inputs", x)
        kernel = self._stored_matrix(codes, scale)
        matmul_kernel, _ = self._selection
        return contraction.product(
            "forward", matmul_kernel, x, kernel, shapes, self.dtype
        )

    def _stored_matrix(self, codes: Tensor, scale: Tensor) -> Quantized:
        """Return the stored kernel as the quantized matrix that a matmul reads.

        `codes` are uint8, with the bits of float8 values.
        """
        form = self.contraction.form
        narrow = backends.current.as_float8(codes, self.recipe.weights)
        values = form.matrix("kernel", narrow)
        if tile_of(self.recipe.per) is not None:
            # Stored for the matrix, without its axis of batches.
            scale = scale[None]
        else:
            scale = form.matrix("kernel", scale)
        return Quantized(values, scale, self._quantization("kernel"))


def rounded_by(
    contraction: Contraction, inputs: Tensor, format_name: str
) -> Tensor:
    """Return the inputs of a contraction, rounded to integers times a scale.

    There is one scale per token, or per example of a convolution: the amax over
    the largest integer. The result is float32, and NaN where inputs that share
    a scale are not all finite.
    """
    axes = contraction.summed_axes(len(inputs.shape))
    amax = scaling.amax(inputs, axis=axes, keepdims=True)
    scale = scaling.scale_for_limit(amax, formats.get(format_name).max)
    scale = scale * (amax * 0.0 + 1.0)
    return casting.round_to_integers(inputs, scale, format_name) * scale


def dequantized(
    recipe: FrozenKernels, axes: Axes, codes: Tensor, scale: Tensor, dtype: str
) -> Tensor:
    """Return a stored kernel as floats, in the kernel's own axes.

    `codes` are the uint8 codes, the same numbers in float16, or a kernel that
    this function returned before in float32, which is only cast.
    """
    if keras.backend.standardize_dtype(codes.dtype) == "float32":
        return ops.cast(codes, dtype)
    if _are_codes(codes):
        numbers = backends.current.numbers(codes, recipe.weights)
    else:
        numbers = ops.cast(codes, "float32")
    tile = tile_of(recipe.per)
    if tile is not None:
        scale = scale_per_element(axes, scale, tuple(codes.shape), tile)
    return ops.cast(ops.multiply(numbers, scale), dtype)


def multiplies_codes(recipe: FrozenKernels) -> bool:
    """Return True if float8 matmuls here can read a kernel stored this way."""
    a, b = (recipe.quantization(x, "forward") for x in MATMULS["forward"])
    if a is None or b is None:
        return False
    batched = for_xla = False
    request = Request("forward", a, b, batched, preferred(), for_xla)
    _, choice = backends.engine.select(request)
    return choice.native


def _are_codes(codes: Tensor) -> bool:
    """Return False for what stands in place of codes; see `dequantized`."""
    return keras.backend.standardize_dtype(codes.dtype) == "uint8"


def scale_per_element(
    axes: Axes, scale: Tensor, shape: tuple[int, ...], tile: tuple[int, int]
) -> Tensor:
    """Expand the scales of tiles of a kernel to one scale per element."""
    columns, rows = axes.sizes(shape)
    for axis, size in enumerate(tile):
        if size > 1:
            scale = backends.current.repeat(scale, size, axis)
    scale = scale[:rows, :columns]
    order = axes.free + axes.summed
    scale = ops.reshape(scale, [shape[axis] for axis in order])
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return ops.transpose(scale, inverse)


_plan_of = functools.lru_cache(maxsize=4096)(FrozenPlan)


def frozen_plan(
    contraction: Contraction, recipe: FrozenKernels, axes: Axes, dtype: str
) -> FrozenPlan:
    """Return a frozen contraction's plan for the current settings."""
    framework = backends.current
    if framework.is_compiling():  # `prefer` is read when the plan runs.
        prefer, for_xla = None, False
        return FrozenPlan(contraction, recipe, axes, dtype, prefer, for_xla)
    return _plan_of(
        contraction,
        recipe,
        axes,
        dtype,
        preferred(),
        framework.traces_for_xla(),
    )


def run_frozen(
    plan: FrozenPlan,
    inputs: Tensor,
    *constants: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute the outputs of a frozen plan; constants have no gradient."""
    outputs = backends.current.run_frozen(plan, inputs, *constants)
    return outputs if bias is None else ops.add(outputs, bias)
