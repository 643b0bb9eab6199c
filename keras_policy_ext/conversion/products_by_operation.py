"""Record the products of layers whose class has no float8 form."""

from __future__ import annotations

import functools
import weakref
from typing import Any, NamedTuple

import keras

from keras_policy_ext._keras import products, quantization, walking
from keras_policy_ext.backends.traced_programs import NONE, Sources
from keras_policy_ext.conversion import model_calls, traced_calls
from keras_policy_ext.layers import by_operation
from keras_policy_ext.layers.attention_products import (
    Attention,
    Fused,
    Multiplied,
    Softmax,
    role_in_attention,
)
from keras_policy_ext.layers.by_operation import (
    LikeCall,
    Recorded,
    RecordedProduct,
)
from keras_policy_ext.layers.drop_in import form_of
from keras_policy_ext.layers.mixin import Float8Mixin
from keras_policy_ext.layers.operands import is_floating


def record(
    model: keras.Layer, unknown: list[keras.Layer], attention: bool = False
) -> None:
    """Record the products of some layers of a model, once for each layer.

    The model is traced with shapes only; see `conversion.traced_calls`. If it
    cannot be traced, nothing is recorded, and the next call tries again. It is
    not traced if no layer can have such products: a product with a weight of
    another layer is looked for only in a model with an embedding.

    Args:
        model: A built model.
        unknown: Layers of it whose class has no float8 form of the package.
        attention: Whether to look for products of two activations too.
    """
    unknown = [x for x in unknown if _is_wanted(x, attention)]
    with_own = [x for x in unknown if _may_multiply(x)]
    others = [x for x in unknown if _may_read_others(x)]
    if not with_own:
        are_tables = map(_is_table, walking.layers_within(model))
        if not (others and (attention or any(are_tables))):
            return
    notes = _Notes(model)
    with by_operation.recording(notes.take):
        # Where sources cannot be followed, only products with weights count.
        follows = attention and bool(
            model_calls.trace(model, tracer=_tracer_of_attention)
        )
        if not follows and model_calls.trace(model) is None:
            return
    for layer in {id(x): x for x in (*with_own, *others)}.values():
        if notes.has(layer):
            by_operation.remember(layer, notes.of(layer, attention=follows))


_OF_ATTENTION = (keras.layers.Softmax, keras.layers.Dropout)
"""Layers between the two products of an attention."""

_tracer_of_attention = functools.partial(
    traced_calls.Tracer, follows=True, within=_OF_ATTENTION
)


def _is_wanted(layer: keras.Layer, attention: bool) -> bool:
    """Return True if a layer has no record, or none of its attention."""
    found = by_operation.record_of(layer)
    return found is None or (attention and found.attention is None)


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


_PRODUCT = "product of two activations"
"""The first entry of the source that such a product is in a traced call."""


class _Notes:
    """Collects the products of the layers of a model in a traced call."""

    def __init__(self, model: keras.Layer) -> None:
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
        self._called: set[int] = set()  # Layers that the call has reached.
        self._activations: dict[int, list[Multiplied | Fused]] = {}
        self._like: dict[int, int] = {}  # The equal layer that was traced.
        self._scores: set[object] = set()  # Sources that reach a softmax.

    def take(self, layer: Any, found: Any) -> Any:
        """Add a note; of activations, return how to mark what they make."""
        if isinstance(found, (Multiplied, Fused, Softmax)):
            return self._take_activations(layer, found)
        if isinstance(found, str) and found not in products.BRANCHES:
            self._choosing.add(id(layer))  # By a top-k, for instance.
        elif isinstance(found, str):
            self._branches.setdefault(id(layer), found)
        elif isinstance(found, LikeCall):
            self._take_call(layer, found.other)
        elif id(found.variable) in self._places:  # A product with a weight.
            owner, number = self._places[id(found.variable)]
            product = _Product(owner, number, found.equation, found.is_moved)
            self._products.setdefault(id(layer), []).append(product)

    def _take_activations(
        self, layer: Any, found: Multiplied | Fused | Softmax
    ) -> Any:
        """Add a note on activations; return how to mark what they make."""
        known = self._activations.setdefault(id(layer), [])
        source = (_PRODUCT, id(layer), len(known))
        if not isinstance(found, Softmax):
            known.append(found)

        # From what reaches the operands to what reaches the result.
        def of_product(sources: Sources) -> Sources:
            return frozenset([source])

        def of_softmax(sources: Sources) -> Sources:
            self._scores.update(sources)
            return NONE

        is_softmax = isinstance(found, Softmax)
        through = of_softmax if is_softmax else of_product
        return lambda operands, result: traced_calls.mark(
            operands, result, through
        )

    def _attention(self, layer: keras.Layer) -> Attention:
        """Return what the products of two activations in a layer are."""
        # A layer that is like another one was not traced itself.
        key = self._like.get(id(layer), id(layer))
        noted = self._activations.get(key, ())
        fused = [x for x in noted if isinstance(x, Fused)]
        roles = []
        for number, each in enumerate(noted):
            if isinstance(each, Multiplied):
                reaches_softmax = (_PRODUCT, key, number) in self._scores
                role = role_in_attention(each, reaches_softmax)
                roles.append((each.equation, role))
        needs_flash = any(each.needs_flash for each in fused)
        return Attention(
            tuple(roles), is_fused=bool(fused), needs_flash=needs_flash
        )

    def _take_call(self, layer: keras.Layer, other: keras.Layer) -> None:
        """Note a call of `layer`, with all that was noted of its equal."""
        self._called.add(id(layer))
        if isinstance(layer, keras.layers.RNN):
            # The calls of its cell are counted, and not traced.
            self._called.update(map(id, walking.layers_within(layer)))
        if layer is other:
            return
        inner = map(walking.layers_within, (other, layer))
        pairs = [(a, b) for a, b in zip(*inner, strict=True) if a is not b]
        equal = {id(noted): new for noted, new in pairs}
        for noted, new in pairs:
            key, old = id(new), id(noted)
            if old in self._called:
                self._called.add(key)
            if old in self._branches:
                self._branches.setdefault(key, self._branches[old])
            if old in self._choosing:
                self._choosing.add(key)
            if key not in self._activations:
                self._like[key] = self._like.get(old, old)
            for each in self._products.get(old, ()):
                owner = equal.get(id(each.owner))
                owner = owner or _alike(each.owner, noted, new)
                if owner is not None:
                    its_own = each._replace(owner=owner)
                    self._products.setdefault(key, []).append(its_own)

    def has(self, layer: keras.Layer) -> bool:
        """Return True if the traced call reached a layer."""
        return id(layer) in self._called

    def of(self, layer: keras.Layer, attention: bool) -> Recorded:
        """Return the products and choices that were noted of a layer.

        Args:
            layer: A layer that the traced call reached.
            attention: Whether products of two activations were followed.
        """
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
            attention=self._attention(layer) if attention else None,
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


def _alike(
    owner: keras.Layer, old: keras.Layer, new: keras.Layer
) -> keras.Layer | None:
    """Return the layer that `new` holds where `old` holds `owner`, or None."""
    held = walking.attributes(new)
    for name, value in walking.attributes(old).items():
        found = held.get(name)
        if value is owner and type(found) is type(owner):
            return found
    return None


def _public_record(product: _Product, layer: keras.Layer) -> RecordedProduct:
    """Return the public record of a product."""
    is_own = product.owner is layer
    return RecordedProduct(
        path=product.weight.path,
        equation=product.equation,
        is_moved=product.is_moved,
        owner=None if is_own else weakref.ref(product.owner),
    )
