"""Record the products of layers whose class has no float8 form."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras

from keras_policy_ext._keras import stock_float8, walking
from keras_policy_ext.conversion import work
from keras_policy_ext.layers import by_operation
from keras_policy_ext.layers.by_operation import Recorded
from keras_policy_ext.layers.operands import is_floating


def record(model: keras.Layer, unknown: list[keras.Layer]) -> None:
    """Record the products of some layers of a model, once for each layer.

    The model is traced with shapes only; see `conversion.traced`. If it cannot
    be traced, nothing is recorded, and the next call tries again.

    Args:
        model: A built model.
        unknown: Layers of it whose class has no float8 form.
    """
    wanted = [
        layer
        for layer in unknown
        if by_operation.record_of(layer) is None and _may_multiply(layer)
    ]
    if not wanted:
        return
    with by_operation.recording() as notes:
        if not work.traced_once(model):
            return
    # The tracer runs one of several layers that are alike.
    known = {_kind(layer): layer for layer in wanted if id(layer) in notes}
    for layer in wanted:
        run = layer if id(layer) in notes else known.get(_kind(layer), layer)
        found = _recorded(notes.get(id(run), []))
        by_operation.remember(layer, _moved(found, run, layer))


def _may_multiply(layer: keras.Layer) -> bool:
    """Return True if a layer has a weight of its own that may be a kernel."""
    if not layer.built or stock_float8.is_quantized(layer):
        return False
    own = walking.own_weights(layer)
    return any(len(v.shape) >= 2 and is_floating(v.dtype) for v in own)


def _kind(layer: keras.Layer) -> Any:
    own = walking.own_weights(layer)
    return type(layer), tuple((v.name, tuple(v.shape)) for v in own)


def _moved(found: Recorded, run: Any, layer: keras.Layer) -> Recorded:
    """Return what was recorded of one layer, for weights of a similar one."""
    pairs = zip(
        walking.own_weights(run), walking.own_weights(layer), strict=True
    )
    paths = {one.path: other.path for one, other in pairs}
    products = tuple(
        dataclasses.replace(each, path=paths[each.path])
        for each in found.products
    )
    return dataclasses.replace(found, products=products)


def _recorded(noted: list[Any]) -> Recorded:
    branches = [each for each in noted if isinstance(each, str)]
    products = [each for each in noted if not isinstance(each, str)]
    distinct = tuple(dict.fromkeys(products))
    return Recorded(distinct, branches[0] if branches else "")
