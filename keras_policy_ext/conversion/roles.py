"""Find layers that make decisions, such as routers, and first and last ones."""

from __future__ import annotations

from collections.abc import Sequence

import keras

from keras_policy_ext._keras import keras_hub
from keras_policy_ext.conversion.candidates import Candidate
from keras_policy_ext.conversion.traced_model import TracedModel
from keras_policy_ext.layers.by_operation import record_of

FEW = 4
"""The most layers that make one choice together.

A router is one layer, or two if it adds learned noise. If more layers reach a
choice, their sum is what the model computes, such as the residual stream of a
transformer that is then quantized to the nearest vector of a codebook.
"""

DECIDES = "it decides "
"""The first words of the reason for a layer that decides."""

_CHOOSES = (
    f"{DECIDES}instead of computing: a top-k, an argmax or a sort chooses "
    "among its outputs"
)
_HEAD = "it is a head: its outputs are outputs of the model"
_TIED = "it is the head of a language model, which shares its table"


def deciding(found: Sequence[Candidate], traced: TracedModel) -> dict[int, str]:
    """Return why layers are left out that decide, as routers of experts do.

    A layer decides if no other product is between its outputs and a top-k, an
    argmax or a sort in the call of the model, and the model uses the positions
    that are found. The routers of KerasHub are also known by their classes,
    for models that cannot be traced. What code outside of the call chooses
    from, such as a metric or a sampler, does not count.

    Args:
        found: All layers that could be converted, in the model's order.
        traced: The model.

    Returns:
        A reason by the index of each layer that decides.
    """
    routers = keras_hub.routers(traced.model)
    call = traced.call if traced.may_choose else None
    choosing: set[int] = set()
    reached: set[int] = set()
    if call is not None:
        for sources in call.flow.chosen:
            layers = call.layers(sources)
            reached |= layers
            if len(sources) <= FEW:
                choosing |= layers
    reasons = {}
    for number, candidate in enumerate(found):
        key = id(candidate.layer)
        if key in routers:
            reasons[number] = f"{DECIDES}which experts of {routers[key]} run"
        # Also one of many, if it makes the choice itself, as with a codebook.
        elif key in choosing or (key in reached and _chooses(candidate.layer)):
            reasons[number] = _CHOOSES
    return reasons


def ends(found: Sequence[Candidate], traced: TracedModel) -> dict[int, str]:
    """Return why the first layer and the heads of a model are left out.

    Args:
        found: All layers that could be converted, in the model's order.
        traced: The model.

    Returns:
        A reason by the index of the first layer and of each head. If no head
        is known, the last layer counts as one.
    """
    call, heads = traced.call, set[int]()
    if call is not None:
        for sources in call.flow.returned:
            if len(sources) == 1:  # It alone reaches an output of the model.
                heads |= call.layers(sources)
    reasons = {}
    for number, candidate in enumerate(found):
        if _reads_table(candidate.layer):
            reasons[number] = _TIED
        elif id(candidate.layer) in heads:
            reasons[number] = _HEAD
    if not reasons:
        reasons[len(found) - 1] = "it is the last layer"
    others = [n for n in range(len(found)) if n not in reasons]
    return {**reasons, **{n: "it is the first layer" for n in others[:1]}}


def _chooses(layer: keras.Layer) -> bool:
    """Return True if a layer with products of its own makes a choice itself."""
    # Then its own product is the last before the choice, as in a codebook.
    record = record_of(layer)
    return record is not None and record.chooses and bool(record.products)


def _reads_table(layer: keras.Layer) -> bool:
    """Return True for a `ReversibleEmbedding` of Keras or KerasHub."""
    names = [base.__name__ for base in type(layer).__mro__]
    return "ReversibleEmbedding" in names
