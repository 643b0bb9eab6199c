"""Count the multiplications of each layer of a model.

The count is of multiplications (each with its addition) with kernels, for one
sample, which is one row of the batch. Matmuls of two activations, such as the
scores of an attention, are not counted.

The call of the model is traced for two samples and for three. An operand that
is larger for three is an activation. A matmul with one such operand is one
with a kernel. The difference of the two counts is that of one sample.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import keras

from keras_policy_ext._keras import walking
from keras_policy_ext.conversion import model_calls
from keras_policy_ext.conversion.traced_calls import multiplies_in_float8
from keras_policy_ext.conversion.work import (
    ModelWork,
    Work,
    register_counter,
    scalars,
    stored_kernels,
)
from keras_policy_ext.ext.count import matmul_sizes
from keras_policy_ext.ext.count.counted_calls import (
    Counted,
    CountingTracer,
    Uncounted,
    paired,
)
from keras_policy_ext.layers.mixin import Float8Mixin
from keras_policy_ext.policies.of_layers import is_frozen

SAMPLES = (2, 3)
"""Sizes of the batches that are traced."""


class _WithKernel(NamedTuple):
    """A matmul with a kernel: its multiplications, the kernel's entries."""

    number: int
    size: int
    has_float8_form: bool


@register_counter
class CountedWork(ModelWork):
    """Counts the parameters and multiplications of each layer of a model.

    Args:
        model: A built model, as it is now: it may be converted afterwards.
    """

    def __init__(self, model: keras.Layer) -> None:
        super().__init__(model)
        self._layers = {id(x): x for x in walking.layers_within(model)}
        self._counted: dict[int, list[_WithKernel]] = {}
        self._unknown: set[int] = set()
        if self.call is None:
            self._unknown.update(self._layers)
            return
        pairs, loops = paired(*self.call.calls)
        for layer, counted in _with_kernels(pairs):
            self._layers[id(layer)] = layer
            self._counted.setdefault(id(layer), []).append(counted)
        self._unknown.update(map(id, loops))
        for call in self.call.calls:
            unknown = (x for x in call.counted if isinstance(x, Uncounted))
            self._unknown.update(id(each.layer) for each in unknown)

    @functools.cached_property
    def call(self) -> model_calls.ModelCall | None:
        """The call of the model, traced and counted for both batches."""
        return model_calls.trace(self.model, SAMPLES, CountingTracer)

    def hold_for(self, converted: Iterable[keras.Layer]) -> bool:
        """Return True if the counts hold once these layers are in float8.

        They were taken before. A layer that has multiplied by itself then, and
        has its float8 form do it now, is counted anew.
        """
        return self.call is not None and all(
            each.has_float8_form
            for layer in converted
            for each in self._counted.get(id(layer), ())
        )

    @property
    def multiplying(self) -> list[keras.Layer]:
        """The layers whose calls multiply with a kernel."""
        return [self._layers[key] for key in self._counted]

    def of(self, layer: keras.Layer) -> Work:
        """Return the `Work` of a layer: its parameters and multiplications."""
        counted = self._counted.get(id(layer), ())
        if id(layer) in self._unknown and not counted:
            return _once(layer, super().of(layer))
        own = walking.own_weights(layer)
        if not counted:
            return Work(parameters=scalars(stored_kernels(layer) or own))
        in_float8 = multiplies_in_float8(layer)
        parameters = _entries(layer, own, counted)
        plain = _plain_entries(layer, own, counted, parameters)
        if is_frozen(layer):
            parameters = scalars(stored_kernels(layer)) + plain
        return Work(
            parameters=parameters,
            plain_parameters=plain,
            multiplications=sum(each.number for each in counted),
            plain_multiplications=sum(
                each.number
                for each in counted
                if not (in_float8 and each.has_float8_form)
            ),
            sizes_known=self.call is not None
            and self.call.arguments.are_sizes_known
            and id(layer) not in self._unknown,
        )

    def of_parts(
        self, layer: keras.Layer, left: list[keras.Variable]
    ) -> tuple[Work, list[Work]]:
        """Return the `Work` of a frozen layer without some of its kernels.

        Args:
            layer: A frozen layer, in the model when it was counted.
            left: Kernels of it that are not stored.

        Returns:
            That of the layer, and that of each of these kernels.
        """
        rest, parts = super().of_parts(layer, left)
        counted = self._counted.get(id(layer), ())
        plain = [x for x in counted if not x.has_float8_form]
        several = []
        for part in parts:
            size = part.parameters
            mine = [x for x in plain if len(left) == 1 or x.size == size]
            plain = [x for x in plain if x not in mine]
            number = sum(x.number for x in mine)
            several.append(dataclasses.replace(part, multiplications=number))
        number = sum(each.multiplications or 0 for each in several)
        rest = dataclasses.replace(
            rest,
            multiplications=(rest.multiplications or 0) - number,
            plain_multiplications=(rest.plain_multiplications or 0) - number,
        )
        return rest, several


def _once(layer: keras.Layer, work: Work) -> Work:
    """Return the `Work` of one call on the shape that a layer was built on."""
    if work.multiplications is not None:
        return work
    found = []
    with contextlib.suppress(Exception):
        _, *sizes = _first_shape(keras.Layer.get_build_config(layer))
        shape = (1, *(1 if size is None else size for size in sizes))
        found = matmul_sizes.of_call(layer, shape)
    number = sum(each.product.multiplications for each in found)
    number = number or work.parameters
    in_floats = work.plain_multiplications is None
    return dataclasses.replace(
        work,
        multiplications=number,
        plain_multiplications=number if in_floats else 0,
        sizes_known=False,
    )


def _entries(
    layer: keras.Layer,
    own: list[keras.Variable],
    counted: Iterable[_WithKernel],
) -> int:
    """Return the number of entries of the kernels in a layer's matmuls."""
    mixin = isinstance(layer, Float8Mixin)
    contracted: list[Any] = layer.float8_contracted if mixin else []
    own = [v for v in own if "bias" not in v.name]
    found: dict[int, keras.Variable] = {}
    sizes = {each.size for each in counted}
    for size in sizes:
        for weights in (contracted, own):
            alike = {id(v): v for v in weights if scalars([v]) == size}
            if alike:
                found.update(alike)
                break
    return scalars(found.values()) or sum(sizes)


def _plain_entries(
    layer: keras.Layer,
    own: list[keras.Variable],
    counted: Iterable[_WithKernel],
    parameters: int,
) -> int:
    """Return the number of entries of kernels that are not in float8."""
    if not isinstance(layer, Float8Mixin) or layer.float8_policy is None:
        return 0
    if not is_frozen(layer):
        in_float8 = [x for x in counted if x.has_float8_form]
        return parameters - _entries(layer, own, in_float8)
    sizes = {x.size for x in counted if not x.has_float8_form}
    stored = set(map(id, stored_kernels(layer)))
    others = [v for v in own if id(v) not in stored and "bias" not in v.name]
    return sum(size for v in others if (size := scalars([v])) in sizes)


def _with_kernels(
    pairs: Iterable[tuple[Counted, Counted]],
) -> Iterator[tuple[keras.Layer, _WithKernel]]:
    """Yield (layer, matmul) for matmuls with a kernel, per sample."""
    for one, other in pairs:
        operands = zip(one.product.sizes, other.product.sizes, strict=True)
        kernels = [before for before, after in operands if before == after]
        number = other.product.multiplications - one.product.multiplications
        if one.entries is not None and not kernels:
            kernels = [one.entries]  # A kernel of each token is gathered.
        if len(kernels) == 1 and number:
            counted = _WithKernel(number, kernels[0], one.has_float8_form)
            yield one.layer, counted


def _first_shape(shapes: Any) -> Any:
    """Return the first shape in nested lists and dicts of shapes."""
    if isinstance(shapes, dict):
        shapes = list(shapes.values())
    if not isinstance(shapes, (list, tuple)) or not shapes:
        return None
    if all(size is None or isinstance(size, int) for size in shapes):
        return shapes
    return _first_shape(shapes[0])
