"""Walk over layers, compiled steps and graphs."""

from __future__ import annotations

import collections
import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_policy_ext._keras import versions

# Attributes of models that keep a compiled step; the last one is KerasHub's.
STEPS = (
    "train_function",
    "test_function",
    "predict_function",
    "generate_function",
)


class OwnReturnedLogs:
    """A model that says which logs `train_on_batch` returns as a list.

    Keras lists whatever `train_step` logs (`_flatten_metrics_in_order`,
    keras 3.0 to 3.15). Where it no longer asks, all logs are returned.
    """

    def returned_logs(self, logs: dict[str, Any]) -> dict[str, Any]:
        """The logs to return; all, unless a subclass leaves some out."""
        return logs

    def _flatten_metrics_in_order(self, logs: dict[str, Any]) -> Any:
        above: Any = super()
        return above._flatten_metrics_in_order(self.returned_logs(logs))


def forget_compiled_functions(model: keras.Model) -> None:
    """Let a model trace its training, test and prediction steps anew.

    As `compile` does, which would also ask for the loss and the metrics
    again (keras 3.0 to 3.15). KerasHub's models that generate keep one step
    more, which `compile` sets to None too (keras_hub 0.32). A `fit` that is
    under way, and has called back, makes no training step by itself.

    On TensorFlow a model tracks a step as long as the attribute is there, and
    the step keeps the weights that it reads.
    """
    trains = getattr(model, "train_function", None) is not None
    generates = hasattr(model, "make_generate_function")
    for name in STEPS if generates else STEPS[:-1]:
        if hasattr(model, name):
            if getattr(model, name) is not None:
                delattr(model, name)
            setattr(model, name, None)
    if trains:
        model.make_train_function()


def forget_gone_layers(model: keras.Model) -> None:
    """Let go the layers that were in a model when it was compiled.

    It keeps for each whether it was trainable (`_compiled_trainable_state`,
    keras 3.15), and with a float8 state the kernel. Where that is gone, so are
    they. Expires when Keras keeps no layers there.
    """
    kept = getattr(model, "_compiled_trainable_state", None)
    if isinstance(kept, dict):
        for layer in kept.keys() - set(layers_within(model)):
            del kept[layer]


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


def layers_within(layer: keras.Layer) -> list[keras.Layer]:
    """A layer and all layers in it, each once, in order, outer ones first.

    `model.layers` has one level only. `_flatten_layers` was seen in keras
    3.0 to 3.15, and is asked for one level at a time, since it turns the
    order of the deeper ones around; where it is gone, the layers in the
    attributes are followed. Expires with a public way to walk a model.
    """
    found: dict[int, Any] = {}
    waiting = [layer]
    while waiting:
        each = waiting.pop()
        if id(each) not in found:
            found[id(each)] = each
            waiting.extend(reversed(layers_directly_in(each)))
    return list(found.values())


def layers_directly_in(layer: keras.Layer) -> list[keras.Layer]:
    """The layers of one level below a layer; see `layers_within`."""
    if hasattr(layer, "_flatten_layers"):
        return list(layer._flatten_layers(include_self=False, recursive=False))
    if isinstance(layer, keras.Model):
        return list(layer.layers)
    found = {id(each): each for each in _layers_in(attributes(layer))}
    return [each for each in found.values() if each is not layer]


def _layers_in(value: Any) -> Iterator[keras.Layer]:
    """The layers in an attribute: itself, or in lists and dicts."""
    if isinstance(value, keras.Layer):
        yield value
    elif isinstance(value, dict):
        yield from _layers_in(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _layers_in(each)


def attributes(layer: keras.Layer) -> dict[str, Any]:
    """The attributes of a layer by name, its layers among them.

    On torch a layer is a module, which keeps the modules in it apart
    (`named_children`, public there; keras 3.0 to 3.15).
    """
    children = getattr(layer, "named_children", dict)
    return {**vars(layer), **dict(children())}


def uses_in_graph(model: keras.Layer) -> dict[int, int]:
    """How often a Functional model calls each of its layers, by their ids.

    From `_nodes_by_depth` (keras 3.0 to 3.15), since `model.layers` and
    `model.operations` have each layer once. Empty for other models; where
    the attribute is gone, every layer counts as called once. Expires with a
    public way to read the graph.
    """
    levels = getattr(model, "_nodes_by_depth", None) or {}
    nodes = itertools.chain.from_iterable(levels.values())
    return collections.Counter(id(node.operation) for node in nodes)


def own_weights(layer: keras.Layer) -> list[keras.Variable]:
    """The weights of a layer that are not those of a layer in it.

    `layer.weights` has both (keras 3.0 to 3.15).
    """
    inner = layers_within(layer)[1:]
    others = {id(weight) for each in inner for weight in each.weights}
    return [weight for weight in layer.weights if id(weight) not in others]


def tracked_variables(layer: keras.Layer) -> list[keras.Variable]:
    """The variables that a layer has outside of the layers in it.

    However they came into its attributes, lists and dicts. `variables` has
    those of the inner layers too (`_trainable_variables` and
    `_non_trainable_variables`, keras 3.0 to 3.15); where these are gone,
    nothing: variables then count from their assignment to an attribute on.
    """
    kept = ("_trainable_variables", "_non_trainable_variables")
    return [v for name in kept for v in getattr(layer, name, ())]


def captured_variables(layer: keras.Layer) -> list[keras.Variable]:
    """The variables that a layer reads, and does not track.

    Those that its functions find outside, such as that of a `Lambda`, or have
    as defaults, and those that the graph of a Functional model has as
    arguments of operations (`_nodes_by_depth` as for `uses_in_graph`). Expires
    when Keras tracks them.
    """
    found: list[Any] = []
    for function in filter(inspect.isfunction, vars(layer).values()):
        with contextlib.suppress(ValueError):  # A name that has no value yet.
            outside = inspect.getclosurevars(function)
            found += [*outside.nonlocals.values(), *outside.globals.values()]
        found += function.__defaults__ or ()
        found += (function.__kwdefaults__ or {}).values()
    levels = getattr(layer, "_nodes_by_depth", None) or {}
    for node in itertools.chain.from_iterable(levels.values()):
        given = getattr(node, "arguments", None)
        found += keras.tree.flatten(
            (getattr(given, "args", ()), getattr(given, "kwargs", {}))
        )
    return [each for each in found if isinstance(each, keras.Variable)]


def tracked_metrics(layer: keras.Layer) -> list[keras.metrics.Metric]:
    """The metrics that a layer has outside of the layers in it.

    `metrics` of a model is often a property of its author, which may read
    what the constructor has not set yet (`_metrics`, keras 3.0 to 3.15).
    Where it is gone, nothing: metrics are then updated as in Keras.
    """
    return list(getattr(layer, "_metrics", ()))
