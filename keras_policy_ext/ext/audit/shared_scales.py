"""Find float8 products in which examples or positions share scales."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_policy_ext import backends
from keras_policy_ext._types import Tensor
from keras_policy_ext.contractions.frozen import FrozenPlan
from keras_policy_ext.contractions.plan import unrounded
from keras_policy_ext.conversion.candidates import path_of
from keras_policy_ext.ext.sampling.captured import Listing
from keras_policy_ext.kernels import Einsum
from keras_policy_ext.recipes import EACH_MATRIX, WHOLE, Quantization, Tile
from keras_policy_ext.reference import form_of, home_matrices, tile_amax
from keras_policy_ext.seams import ContractionCall, Planned

Array = np.ndarray[Any, Any]

FACTOR = 50.0
"""How many times as large others make the amax of an operand."""

_NOISE = {"float16": 2.0**-6, "bfloat16": 2.0**-4}
"""What counts as unchanged, relative to the amax, of 16 bits."""


class Shared(NamedTuple):
    """An operand of a product that has scales of several examples or positions.

    Attributes:
        path: The path of the layer.
        class_name: The name of its class.
        product: The einsum equation, or `"convolution"`.
        operand: `"inputs"`, or `"first"` or `"second"` of two activations.
        scale_of: What one scale is of, such as `"the tensor"`.
        effect: How far others move outputs, as a relative RMS.
        by_history: Whether the scale is from earlier steps.
    """

    path: str
    class_name: str
    product: str
    operand: str
    scale_of: str
    effect: float
    by_history: bool


@dataclasses.dataclass
class Product:
    """A float8 product of a layer in a call of the model.

    Attributes:
        layer: The layer.
        of_weights: Whether the second operand is a weight.
        plan: The `Plan` or `FrozenPlan`.
        run: Computes outputs from the two operands, in float8.
        plain: Computes them in float32, without rounding.
        operands: The operands, the second perhaps as codes.
    """

    layer: keras.Layer
    of_weights: bool
    plan: Any
    run: Callable[..., Tensor]
    plain: Callable[..., Tensor]
    operands: tuple[Tensor, Tensor]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the operands that are activations."""
        return ("inputs",) if self.of_weights else ("first", "second")

    def asked(self, place: int) -> Quantization | None:
        """Return how the operand at this place is quantized, or None."""
        operand = ("inputs", "kernel")[place]
        recipe = self.plan.recipe.quantization(operand, "forward")
        return self.plan.contraction.quantization(recipe)

    def alike(self, other: Product) -> bool:
        """Return True if another run has the same product in its place."""
        shapes = (
            [tuple(x.shape) for x in each.operands] for each in (self, other)
        )
        same = self.plan.contraction == other.plan.contraction
        first, second = shapes
        return self.layer is other.layer and same and first == second


def listing() -> Listing:
    """Return a listing of products with a quantized operand, in floats."""
    return Listing(
        lambda call: call.run(_unrounded(call.planned)),
        _quantizes_inputs,
        lambda outputs: not backends.current.runs_now(),
    )


def product_of(call: ContractionCall) -> Product:
    """Return a contraction of a listing as a product."""
    planned = call.planned._replace(bias=None)
    plain = _unrounded(planned)

    def in_floats(first: Tensor, second: Tensor) -> Tensor:
        first = ops.cast(ops.convert_to_tensor(first), "float32")
        changes: dict[str, Any] = {"dtype": "float32"}
        if not planned.is_frozen:
            second = ops.cast(ops.convert_to_tensor(second), "float32")
            changes = {"inputs_dtype": "float32", "kernel_dtype": "float32"}
        wide = dataclasses.replace(plain.plan, **changes)
        return plain._replace(plan=wide, inputs=first, kernel=second).run()

    def in_float8(first: Tensor, second: Tensor) -> Tensor:
        return planned._replace(inputs=first, kernel=second).run()

    return Product(
        call.layer,
        call.weight is not None,
        planned.plan,
        in_float8,
        in_floats,
        (planned.inputs, planned.kernel),
    )


def _quantizes_inputs(call: ContractionCall) -> bool:
    recipe: Any = call.planned.plan.recipe
    if call.planned.is_frozen:
        return recipe.activations is not None
    return recipe.quantization("inputs", "forward") is not None


def _unrounded(planned: Planned) -> Planned:
    """Return a contraction that rounds no activation."""
    plan: Any = planned.plan
    if not planned.is_frozen:
        return planned._replace(plan=unrounded(plan), state=())
    recipe = dataclasses.replace(plan.recipe, activations=None)
    plan = dataclasses.replace(plan, recipe=recipe)
    return planned._replace(plan=plan, state=planned.state[:1])


def shared_in(
    before: Sequence[Product], after: Sequence[Product]
) -> tuple[list[Shared], list[keras.Layer]]:
    """Return operands whose scales others share, and layers that differ.

    Args:
        before: The products of a call.
        after: Those of a call in which others have other values: other
            examples, or later positions.

    Returns:
        An entry for each operand of each product, and the layers whose
        products are not the same ones in both calls.
    """
    found, differing = [], []
    for n, product in enumerate(before):
        if n >= len(after) or not product.alike(after[n]):
            differing.append(product.layer)
            continue
        for place, name in enumerate(product.names):
            values = after[n].operands[place]
            shared = _shared(product, place, name, values)
            if shared is not None:
                found.append(shared)
    return found, differing


def _shared(
    product: Product, place: int, name: str, after: Tensor
) -> Shared | None:
    """Return an entry if others share scales of an operand, or None."""
    asked = product.asked(place)
    before = _array(product.operands[place])
    changed = _differ(before, _array(after), product.operands[place].dtype)
    if asked is None or not changed.any():
        return None
    kept, effect = _measured(product, place, before, _array(after), changed)
    shares = kept.any() and _shares(product, place, asked, changed, kept)
    if not shares and not effect:
        return None
    contraction = product.plan.contraction
    is_einsum = isinstance(contraction, Einsum)
    source = getattr(product.plan, "source", None)
    return Shared(
        path_of(product.layer),
        type(product.layer).__name__,
        contraction.equation if is_einsum else "convolution",
        name,
        _words(asked),
        effect,
        bool(source and source.observes_amaxes and not effect),
    )


def _measured(
    product: Product, place: int, before: Array, after: Array, changed: Array
) -> tuple[Array, float]:
    """Return which outputs stay in floats, and how far they move in float8."""
    # The changed values are scaled to make the amax `FACTOR` times as large.
    largest = np.abs(after[changed]).max()
    factor = FACTOR * max(np.abs(before).max(), 1e-6) / max(largest, 1e-30)

    def outputs(run: Callable[..., Tensor], times: float | None) -> Array:
        operands = list(product.operands)
        if times is not None:
            values = np.where(changed, after * (times * factor), before)
            dtype = keras.backend.standardize_dtype(operands[place].dtype)
            values = ops.convert_to_tensor(values.astype("float32"))
            operands[place] = ops.cast(values, dtype)
        return _array(run(*operands))

    # A number that stays by chance does not stay twice.
    plain, *others = (outputs(product.plain, n) for n in (None, 1.0, -0.5))
    kept = np.isfinite(plain)
    for other in others:
        kept &= plain == other
    float8, moved = (outputs(product.run, n) for n in (None, 1.0))
    size, error = _rms(float8[kept]), _rms((moved - float8)[kept])
    return kept, error / size if size else float(error > 0)


def _rms(x: Array) -> float:
    return math.sqrt(float(np.mean(np.square(x)))) if x.size else 0.0


def _shares(
    product: Product,
    place: int,
    asked: Quantization,
    changed: Array,
    kept: Array,
) -> bool:
    """Return True if a tile has changed values, and is read by kept outputs."""
    if asked.constant_scale is not None:
        return False
    contraction = product.plan.contraction
    frozen = isinstance(product.plan, FrozenPlan)
    if frozen and product.plan.recipe.activations == "static":
        return False
    if not isinstance(contraction, Einsum):
        if not frozen:
            return True
        # A scale per example.
        pairs = zip(changed, kept, strict=True)
        return any(bool(c.any() and k.any()) for c, k in pairs)
    form = form_of(contraction.equation)
    operand = ("inputs", "kernel")[place]
    values = home_matrices(form, operand, changed)
    outputs = home_matrices(form, "outputs_grad", kept)
    rows = outputs.max(axis=2 - place, initial=0.0)[:, :, np.newaxis]
    read = np.broadcast_to(rows, values.shape)
    tile = WHOLE if asked.has_tensor_scale else asked.tile
    both = tile_amax(values, tile) * tile_amax(read, tile)
    return bool(both.any())


def _differ(before: Array, after: Array, dtype: Any) -> Array:
    """Return where two arrays differ by more than noise."""
    noise = _NOISE.get(keras.backend.standardize_dtype(dtype), 2.0**-16)
    largest = np.abs(before).max(initial=0.0)
    return np.abs(after - before) > noise * largest


def _array(x: Any) -> Array:
    found = ops.convert_to_numpy(ops.cast(ops.convert_to_tensor(x), "float32"))
    return np.asarray(found)


def _words(asked: Quantization) -> str:
    """Return what one scale is of, in words."""
    if asked.tile.is_whole or asked.has_tensor_scale:
        return "the tensor"
    if asked.tile == EACH_MATRIX:
        return "a matrix"
    if asked.tile == Tile(free=1):
        return "a row"
    return "×".join("all" if n is None else str(n) for n in asked.tile[:2])
