"""Count the multiplications of each layer of a model.

The count is of multiplications (each with its addition) with kernels, for one
sample, which is one row of the batch. Matmuls of two activations, such as the
scores of an attention, are not counted.

The call of the model is traced for two samples and for three. An operand that
is larger for three is an activation. A matmul with one such operand is one
with a kernel. The difference of the two counts is that of one sample.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import importlib
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import keras

from keras_policy_ext import seams
from keras_policy_ext._keras.walking import layers_within, own_weights
from keras_policy_ext.conversion.traced_model import Arguments, guesses
from keras_policy_ext.conversion.work import (
    ModelWork,
    Work,
    register_counter,
    scalars,
)
from keras_policy_ext.conversion.work import stored_kernels as stored_kernels_of
from keras_policy_ext.ext.count import matmul_sizes
from keras_policy_ext.ext.count.matmul_sizes import (
    MatmulSizes,
    Shape,
    StockProduct,
)
from keras_policy_ext.ext.count.traced_calls import Call, Tracer, trace
from keras_policy_ext.kernels import Einsum
from keras_policy_ext.layers.by_operation import counting as counting_products
from keras_policy_ext.layers.mixin import Float8Mixin
from keras_policy_ext.policies.of_layers import (
    is_frozen,
    multiplies_in_float8,
)

SAMPLES = (2, 3)
"""Sizes of the batches that are traced."""


class Counted(NamedTuple):
    """A matmul found in a call, and the layer that computes it.

    Attributes:
        layer: The layer that computes it.
        product: The sizes of the matmul.
        has_float8_form: Whether it is in float8 if the layer is.
        entries: Entries of the kernel, where that is known: a kernel of each
            token may be gathered from it.
    """

    layer: keras.Layer
    product: MatmulSizes
    has_float8_form: bool
    entries: int | None = None


class Uncounted(NamedTuple):
    """A layer that may have more matmuls, or repeat them more often."""

    layer: keras.Layer


class CountingTracer(Tracer):
    """Counts the matmuls in the calls that it traces."""

    def __init__(self) -> None:
        super().__init__()
        # By the `id` of a layer, and the sizes of a product in its program.
        self._entries: dict[tuple[int, tuple[int, ...]], int] = {}
        name = f"{__package__}.{keras.backend.backend()}"
        self._products = importlib.import_module(name).products

    def counting(self) -> AbstractContextManager[None]:
        """Return a block that notes products with kernels in programs."""
        return counting_products(self._note_kernel)

    def _note_kernel(
        self, equation: str, inputs: Any, read: Any, kernel: keras.Variable
    ) -> None:
        """Remember that the call being traced computes a kernel's product."""
        product = matmul_sizes.of_einsum(equation, inputs, read)
        key = id(self.traced_layer), _sizes(product)
        self._entries[key] = math.prod(kernel.shape)

    def count_stock(self, layer: keras.Layer, shape: Shape) -> list[Any]:
        """Count the matmuls of a stock layer by the formula of its class."""
        return _counted(layer, matmul_sizes.of_call(layer, shape))

    def count_cell(self, cell: Any, shape: Shape) -> list[Any]:
        """Count the matmuls of a cell by the formula of its class."""
        return _counted(cell, matmul_sizes.of_cell(cell, shape))

    def count_contraction(
        self, call: seams.ContractionCall, outputs: Shape
    ) -> list[Any]:
        """Count the matmul of a float8 contraction."""
        if isinstance(call.contraction, Einsum):
            equation = call.contraction.equation
            product = matmul_sizes.of_einsum(equation, *call.shapes)
        else:
            shapes = *call.shapes, outputs
            product = matmul_sizes.convolution(call.contraction, *shapes)
        entries = math.prod(call.operands[1].shape)
        return [Counted(call.layer, product, True, entries)]

    def count_program(self, layer: keras.Layer, program: Any) -> list[Any]:
        """Count the matmuls in a program."""
        counted: list[Any] = []
        is_complete = True
        for product, is_known in self._products(program):
            is_complete = is_complete and is_known
            if product is not None:
                key = id(self.traced_layer), _sizes(product)
                entries = self._entries.get(key)
                counted.append(Counted(layer, product, False, entries))
        return counted if is_complete else [*counted, Uncounted(layer)]

    def count_untraced(self, layer: keras.Layer) -> list[Any]:
        """Note that a layer, and those in it, are not counted."""
        return list(map(Uncounted, layers_within(layer)))

    def count_steps(self, counted: Sequence[Any], steps: int) -> list[Any]:
        """Count the matmuls of all steps of a loop."""
        return [
            each._replace(product=each.product.times(steps))
            if isinstance(each, Counted)
            else each
            for each in counted
        ]


def of_call(call: Call) -> list[Counted]:
    """Return the matmuls of a call."""
    return [each for each in call.counted if isinstance(each, Counted)]


def paired(
    small: Call, large: Call
) -> tuple[list[tuple[Counted, Counted]], list[keras.Layer]]:
    """Return the matmuls of calls on two batch sizes in pairs.

    Returns:
        The pairs, and the layers without pairs: they have more matmuls for
        more samples, as in a loop over the samples.
    """
    calls = of_call(small), of_call(large)
    one, other = (collections.Counter(id(x.layer) for x in c) for c in calls)
    loops = {key for key in one | other if one[key] != other[key]}
    kept = ([x for x in each if id(x.layer) not in loops] for each in calls)
    left = {id(x.layer): x.layer for each in calls for x in each}
    return list(zip(*kept, strict=True)), [left[key] for key in loops]


def _sizes(product: MatmulSizes) -> tuple[int, ...]:
    return product.multiplications, *sorted(product.sizes)


def _counted(
    layer: keras.Layer, products: Iterable[StockProduct]
) -> list[Counted]:
    return [Counted(layer, *each) for each in products]


class _WithKernel(NamedTuple):
    """A matmul with a kernel: its multiplications, the kernel's entries."""

    number: int
    size: int
    has_float8_form: bool


class _ModelCall(NamedTuple):
    """The accepted arguments of a model; its call for each of `SAMPLES`."""

    arguments: Arguments
    of_sizes: list[Call]


@register_counter
class CountedWork(ModelWork):
    """Counts the parameters and multiplications of each layer of a model.

    Args:
        model: A built model, as it is now: it may be converted afterwards.
    """

    def __init__(self, model: keras.Layer) -> None:
        super().__init__(model)
        self._layers = {id(x): x for x in layers_within(model)}
        self._counted: dict[int, list[_WithKernel]] = {}
        self._unknown: set[int] = set()
        if self.call is None:
            self._unknown.update(self._layers)
            return
        pairs, loops = paired(*self.call.of_sizes)
        for layer, counted in _with_kernels(pairs):
            self._layers[id(layer)] = layer
            self._counted.setdefault(id(layer), []).append(counted)
        self._unknown.update(map(id, loops))
        for call in self.call.of_sizes:
            unknown = (x for x in call.counted if isinstance(x, Uncounted))
            self._unknown.update(id(each.layer) for each in unknown)

    @functools.cached_property
    def call(self) -> _ModelCall | None:
        """The call of the model, counted; None if it cannot be traced."""
        for arguments in guesses(self.model):
            with contextlib.suppress(Exception):  # It refuses the guess.
                batches = map(arguments.of, SAMPLES)
                calls = trace(self.model, batches, CountingTracer())
                return _ModelCall(arguments, calls)
        return None

    def hold_for(self, converted: Iterable[keras.Layer]) -> bool:
        """Return True if the counts hold once these layers are in float8."""
        # They were taken before. A layer that multiplied by itself then, and
        # has its float8 form do it now, is counted anew.
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
        own = own_weights(layer)
        if not counted:
            return Work(parameters=scalars(stored_kernels_of(layer) or own))
        in_float8 = multiplies_in_float8(layer)
        parameters = _entries(layer, own, counted)
        plain = _plain_entries(layer, own, counted, parameters)
        if is_frozen(layer):
            parameters = scalars(stored_kernels_of(layer)) + plain
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
        self, layer: keras.Layer, in_floats: list[keras.Variable]
    ) -> tuple[Work, list[Work]]:
        """Return the `Work` of a frozen layer, and of kernels in floats."""
        rest, parts = super().of_parts(layer, in_floats)
        counted = self._counted.get(id(layer), ())
        plain = [x for x in counted if not x.has_float8_form]
        several = []
        for part in parts:
            size = part.parameters
            mine = [x for x in plain if len(in_floats) == 1 or x.size == size]
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


def _once(layer: keras.Layer, uncounted: Work) -> Work:
    """Return the `Work` of one call on the shape that a layer was built on."""
    if uncounted.multiplications is not None:
        return uncounted
    found = []
    with contextlib.suppress(Exception):
        _, *sizes = _first_shape(keras.Layer.get_build_config(layer))
        shape = (1, *(1 if size is None else size for size in sizes))
        found = matmul_sizes.of_call(layer, shape)
    number = sum(each.product.multiplications for each in found)
    number = number or uncounted.parameters
    in_floats = uncounted.plain_multiplications is None
    return dataclasses.replace(
        uncounted,
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
    stored = set(map(id, stored_kernels_of(layer)))
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
