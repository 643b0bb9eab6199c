"""What each recipe would do to the loss, layer by layer, from one batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_policy_ext import formats
from keras_policy_ext.conversion.candidates import path_of
from keras_policy_ext.conversion.saved_input_bytes import itemsize
from keras_policy_ext.ext.sampling.captured import Use
from keras_policy_ext.ext.sampling.figures import Figures, measured, total
from keras_policy_ext.recipes import MATMULS, Quantization, Recipe

GRADIENTS = ("inputs_grad", "kernel_grad")


class Effect(NamedTuple):
    """The effect of a recipe in one layer, in the unit of the loss.

    Attributes:
        first: The change of the loss of the batch to first order.
        squares: The sum over samples of the square of the change that each
            sample adds to `first`.
        errors: For each matmul, the sum of squares of what rounding changes in
            the result, divided by the sum of squares of the result. That of
            the forward matmul is measured; that of a gradient is the sum of
            those of its two operands.
    """

    first: float
    squares: float
    errors: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Option:
    """A recipe for a layer.

    Attributes:
        uses: The uses of the kernels of the layer.
        recipe: The recipe.
        effect: What it does.
    """

    uses: Sequence[Use]
    recipe: Recipe
    effect: Effect

    @property
    def layer(self) -> keras.Layer:
        """The layer."""
        return self.uses[0].layer

    @property
    def share(self) -> float:
        """The share of the layer's matmuls that the recipe quantizes."""
        plain = sum(map(self.recipe.in_high_precision, MATMULS))
        return 1 - plain / len(MATMULS)

    def bytes(self, rounded: bool) -> int:
        """Return the bytes that the layer's matmuls read, rounded or not."""
        bits = 0.0
        for use in self.uses:
            plain = 8.0 * itemsize(use.plan.inputs_dtype)
            for (operand, _), asked in _asked(use, self.recipe).items():
                x = use.operand(operand)
                if x is not None:
                    each = plain if asked is None else _bits(asked)
                    bits += np.prod(x.shape) * (each if rounded else plain)
        return round(bits / 8)


def by_layer(uses: Iterable[Use]) -> list[list[Use]]:
    """Return uses in lists, one for each path of a layer."""
    found: dict[str, list[Use]] = {}
    for use in uses:
        found.setdefault(path_of(use.layer), []).append(use)
    return list(found.values())


def options(
    uses: Sequence[Use],
    recipes: Sequence[Recipe],
    samples: int,
    loss_scale: float,
) -> Iterator[Option]:
    """Yield an option for each recipe of a layer.

    Rounding changes the outputs of the forward matmul by `e`, and so the loss
    by `d(s) = ∂L/∂y(s) · e(s)` to first order, summed over the samples `s`. To
    second order, the loss rises in proportion to `Σ d(s)²`, if the outer
    products of the gradients of samples stand for the Hessian matrix (the
    empirical Fisher matrix).

    Args:
        uses: The uses of the kernels of a layer, in a pass without rounding.
        recipes: The recipes.
        samples: The number of samples in the batch.
        loss_scale: The factor of the loss whose gradients were taken.
    """
    plain = [_outputs(use, use.plan.recipe) for use in uses]
    known: dict[Any, Effect] = {}
    for recipe in recipes:
        key = tuple(tuple(_asked(use, recipe).items()) for use in uses)
        if key not in known:
            known[key] = _effect(uses, plain, recipe, samples, loss_scale)
        yield Option(uses, recipe, known[key])


def _effect(
    uses: Sequence[Use],
    plain: Sequence[Any],
    recipe: Recipe,
    samples: int,
    loss_scale: float,
) -> Effect:
    changes: dict[tuple[int, int], Any] = {}
    error = signal = 0.0
    for use, y in zip(uses, plain, strict=True):
        if 0 in y.shape:
            continue
        e = _outputs(use, recipe) - y
        error += _number(ops.sum(ops.square(e)))
        signal += _number(ops.sum(ops.square(y)))
        if use.outputs_grad is None:
            continue
        # Uses of one kernel share its rounding, so their changes add up.
        change = _of_samples(use.outputs_grad, e, samples) / loss_scale
        key = id(use.kernel), change.size
        changes[key] = changes.get(key, 0.0) + change
    errors = {"forward": error / signal if signal else 0.0}
    for matmul in GRADIENTS:
        errors[matmul] = sum(
            _operand_error(uses, operand, matmul, recipe)
            for operand in MATMULS[matmul]
        )
    return Effect(
        sum(float(np.sum(each)) for each in changes.values()),
        sum(float(np.sum(each**2)) for each in changes.values()),
        errors,
    )


def _outputs(use: Use, recipe: Recipe) -> Any:
    """Return the outputs of the forward matmul under a recipe, float32."""
    plan = dataclasses.replace(use.plan, recipe=recipe, training=False)
    x, w = map(ops.stop_gradient, (use.inputs, use.weights))
    outputs, _ = plan.bound.forward(x, w, (), observe=False)
    return ops.cast(outputs, "float32")


def _of_samples(gradient: Any, error: Any, samples: int) -> Any:
    """Return the change of the loss by each sample; by each row if unknown."""
    change = ops.cast(ops.stop_gradient(gradient), "float32") * error
    rows = samples if error.shape[0] % samples == 0 else error.shape[0]
    change = ops.sum(ops.reshape(change, (rows, -1)), axis=1)
    return ops.convert_to_numpy(change).astype("float64")


def _operand_error(
    uses: Sequence[Use], operand: str, matmul: str, recipe: Recipe
) -> float:
    found = []
    for use in uses:
        x, contraction = use.operand(operand), use.plan.contraction
        if x is None or 0 in x.shape:
            continue
        asked = _asked(use, recipe)[operand, matmul]
        x = ops.stop_gradient(x)
        numbers = measured(contraction, operand, matmul, asked, x)
        found.append(Figures.read(ops.convert_to_numpy(numbers)))
    figures = total(found)
    return figures.noise / figures.powers[1] if figures.noise else 0.0


def _asked(
    use: Use, recipe: Recipe
) -> dict[tuple[str, str], Quantization | None]:
    """Return how a recipe quantizes each operand in each matmul of a use."""
    plan = dataclasses.replace(use.plan, recipe=recipe)
    return plan.operands.quantizations


def _bits(asked: Quantization) -> float:
    """Return the bits that an element takes, with its part of the scales."""
    tile = asked.tile
    scale = 32 if asked.scale_format == "float32" else 8
    one = (tile.free or 0) * (tile.contracted or 0)
    return formats.get(asked.format).bits + (scale / one if one else 0.0)


def _number(x: Any) -> float:
    return float(ops.convert_to_numpy(x))
