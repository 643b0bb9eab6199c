"""Record the products of layers whose class has no float8 form."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import keras

from keras_policy_ext._keras import products, quantization, walking
from keras_policy_ext.conversion.traced_model import (
    Note,
    TracedCall,
    TracedModel,
)
from keras_policy_ext.layers import by_operation
from keras_policy_ext.layers.attention_products import (
    Attention,
    Fused,
    Multiplied,
    role_in_attention,
)
from keras_policy_ext.layers.by_operation import (
    Noted,
    Recorded,
    RecordedProduct,
)
from keras_policy_ext.layers.drop_in import form_of
from keras_policy_ext.layers.mixin import Float8Mixin
from keras_policy_ext.layers.operands import is_floating


def record(
    traced: TracedModel, unknown: list[keras.Layer], attention: bool = False
) -> None:
    """Record the products of some layers of a model, once for each layer.

    If the model cannot be traced, nothing is recorded, and the next call tries
    again. It is not traced if no layer can have such products: a product with a
    weight of another layer is looked for only in a model with an embedding.

    Args:
        traced: A built model.
        unknown: Layers of it whose class has no float8 form of the package.
        attention: Whether products of two activations matter too.
    """
    unknown = [x for x in unknown if by_operation.record_of(x) is None]
    with_own = [x for x in unknown if _may_multiply(x)]
    others = [x for x in unknown if _may_read_others(x)]
    if not with_own:
        are_tables = map(_is_table, walking.layers_within(traced.model))
        if not (others and (attention or any(are_tables))):
            return
    if traced.call is None:
        return
    notes = _Notes(traced.model, traced.call)
    for layer in {id(x): x for x in (*with_own, *others)}.values():
        if notes.has(layer):
            by_operation.remember(layer, notes.of(layer))


def _may_multiply(layer: keras.Layer) -> bool:
    """Return True if a layer has a weight of its own that may be a kernel."""
    if not layer.built or quantization.is_quantized(layer):
        return False
    own = walking.own_weights(layer)
    return any(len(v.shape) >= 2 and is_floating(v.dtype) for v in own)


def _may_read_others(layer: keras.Layer) -> bool:
    """Return True if a layer may multiply with a weight of another layer."""
    library = type(layer).__module__.partition(".")[0]
    is_stock = library in ("keras", "keras_policy_ext")
    return layer.built and not is_stock and not isinstance(layer, keras.Model)


def _is_table(layer: keras.Layer) -> bool:
    return isinstance(layer, keras.layers.Embedding)


class _Product(NamedTuple):
    """A product, by the layer that has the weight and the weight's number."""

    owner: keras.Layer
    number: int
    equation: str
    is_moved: bool

    @property
    def weight(self) -> keras.Variable:
        return walking.own_weights(self.owner)[self.number]


class _Notes:
    """Sorts what was noted in the traced call of a model by its layers."""

    def __init__(self, model: keras.Layer, call: TracedCall) -> None:
        """Sort what the layers of a model have computed in a traced call."""
        # By the id of a weight, its layer and its number in `own_weights`.
        self._places = {
            id(variable): (layer, number)
            for layer in walking.layers_within(model)
            for number, variable in enumerate(walking.own_weights(layer))
        }
        # All by the id of the layer; fields of `Recorded` say what they are.
        self._products: dict[int, list[_Product]] = {}
        self._branches: dict[int, str] = {}
        self._choosing: set[int] = set()
        self._activations: dict[int, list[Note]] = {}
        self._scores = call.scores()
        self._called = set(call.called)  # Layers that the call has reached.
        for note in call.noted:
            self._take(note)
        for layer in walking.layers_within(model):
            if isinstance(layer, keras.layers.RNN) and self.has(layer):
                # It may compute what its cell does, without a call of the cell.
                self._called.update(map(id, walking.layers_within(layer)))

    def _take(self, note: Note) -> None:
        """Add a note to those of its layer."""
        key, found = id(note.layer), note.found
        if isinstance(found, (Multiplied, Fused)):
            self._activations.setdefault(key, []).append(note)
        elif isinstance(found, str) and found not in products.BRANCHES:
            self._choosing.add(key)  # By a top-k, for instance.
        elif isinstance(found, str):
            self._branches.setdefault(key, found)
        elif isinstance(found, Noted) and id(found.variable) in self._places:
            owner, number = self._places[id(found.variable)]
            product = _Product(owner, number, found.equation, found.is_moved)
            self._products.setdefault(key, []).append(product)

    def _attention(self, layer: keras.Layer) -> Attention:
        """Return what the products of two activations in a layer are."""
        notes = self._activations.get(id(layer), ())
        fused = [x.found for x in notes if isinstance(x.found, Fused)]
        roles = [
            (
                each.found.equation,
                role_in_attention(each.found, id(each) in self._scores),
            )
            for each in notes
            if isinstance(each.found, Multiplied)
        ]
        needs_flash = any(each.needs_flash for each in fused)
        return Attention(
            tuple(roles), is_fused=bool(fused), needs_flash=needs_flash
        )

    def has(self, layer: keras.Layer) -> bool:
        """Return True if the traced call reached a layer."""
        return id(layer) in self._called

    def of(self, layer: keras.Layer) -> Recorded:
        """Return the products and choices noted of a layer that was called."""
        found = dict.fromkeys(self._products.get(id(layer), ()))
        own = [_public_record(x, layer) for x in found if x.owner is layer]
        foreign = [x for x in found if x.owner is not layer]
        if not _may_read_others(layer):
            foreign = []
        # Owners that only hold weights come first. A weight that its owner
        # multiplies in float8 is refused; others are tied to their owner.
        uncalled = [x for x in foreign if self._is_uncalled(x.owner, layer)]
        called = [x for x in foreign if x not in uncalled]
        refused = [x for x in called if self._owner_contracts(x)]
        tied = [x for x in called if x not in refused]
        chosen = uncalled or ([] if own else tied)
        return Recorded(
            products=(*own, *(_public_record(x, layer) for x in chosen)),
            branch=self._branches.get(id(layer), ""),
            chooses=id(layer) in self._choosing,
            is_tied=bool(tied) and not own and not uncalled,
            refused=tuple(weakref.ref(x.owner) for x in refused),
            attention=self._attention(layer),
        )

    def _is_uncalled(self, owner: keras.Layer, layer: keras.Layer) -> bool:
        """Return True if `owner` only holds the weights of `layer`."""
        if id(owner) in self._called or _is_table(owner):
            return False  # It uses them too, perhaps in another call.
        if isinstance(owner, Float8Mixin) and owner.float8_policy is not None:
            return False  # Another model may call it.
        within = walking.layers_within(layer)[1:]
        return any(each is owner for each in within)

    def _owner_contracts(self, product: _Product) -> bool:
        """Return True if the owner multiplies with the weight in float8."""
        owner, weight = product.owner, product.weight
        try:
            form: Any = form_of(type(owner))
        except TypeError:  # The owner cannot be in float8.
            return False
        if isinstance(owner, Float8Mixin):
            form = type(owner)
        if form is None:  # Then by a product that is recognised.
            own = self._products.get(id(owner), ())
            return any(x.owner is owner and x.weight is weight for x in own)
        return (
            issubclass(form, Float8Mixin)
            and form.float8_trains
            and form.is_float8_kernel(owner, weight)
        )


def _public_record(product: _Product, layer: keras.Layer) -> RecordedProduct:
    """Return the public record of a product."""
    is_own = product.owner is layer
    return RecordedProduct(
        path=product.weight.path,
        equation=product.equation,
        is_moved=product.is_moved,
        owner=None if is_own else weakref.ref(product.owner),
    )
