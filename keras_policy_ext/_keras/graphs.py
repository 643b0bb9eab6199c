"""The calls in the graph of a Functional model, one after the other."""

from collections.abc import Callable
from typing import Any

import keras

from keras_policy_ext._keras import versions


def follow_graph(
    model: keras.Model, inputs: list[Any], call: Callable[..., Any]
) -> list[Any]:
    """Call what a Functional model calls, on values of the caller's own.

    `model.operations` is public and has each operation once, without what it
    was called on; that is in `_nodes_by_depth` (keras 3.0 to 3.15). Expires
    with a public way to read the graph.

    Args:
        model: A Functional model.
        inputs: A value for each of `model.inputs`; of any type that
            `keras.tree` has as a leaf.
        call: Called as `call(operation, *args, **kwargs)`, with values in
            place of symbolic tensors; returns what the operation does.

    Returns:
        A value for each of `model.outputs`.

    Raises:
        ImportError: If models of this Keras keep their graph elsewhere.
    """
    levels = getattr(model, "_nodes_by_depth", None)
    if levels is None:
        raise versions.missing(
            "Functional._nodes_by_depth", "reading the graph of a model"
        )
    values = dict(zip(map(id, model.inputs), inputs, strict=True))
    for depth in sorted(levels, reverse=True):
        for node in levels[depth]:
            needed = node.input_tensors
            if node.is_input or any(id(x) not in values for x in needed):
                continue
            args, kwargs = node.arguments.fill_in(values)
            results = keras.tree.flatten(call(node.operation, *args, **kwargs))
            values.update(zip(map(id, node.outputs), results, strict=True))
    return [values[id(x)] for x in model.outputs]
