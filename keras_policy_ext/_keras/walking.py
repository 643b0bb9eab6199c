"""Walk over layers, compiled steps and graphs."""

from __future__ import annotations

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


def forget_compiled_functions(model: keras.Model) -> None:
    """Make a model trace its training, test and prediction steps again."""
    # `compile` does this too, but needs the loss and the metrics again (keras
    # 3.0 to 3.15). KerasHub's generating models have one more step, which
    # `compile` also sets to None (keras_hub 0.32).
    has_trained = getattr(model, "train_function", None) is not None
    generates = hasattr(model, "make_generate_function")
    for name in STEPS if generates else STEPS[:-1]:
        if hasattr(model, name):
            # On TensorFlow a model tracks a step as long as the attribute
            # exists, and the step keeps the weights that it reads.
            if getattr(model, name) is not None:
                delattr(model, name)
            setattr(model, name, None)
    # A `fit` that runs now, if a callback called this, does not make the step.
    if has_trained:
        model.make_train_function()


def forget_gone_layers(model: keras.Model) -> None:
    """Release layers that a compiled model no longer contains."""
    # Keras stores whether each layer was trainable, and so keeps it and its
    # kernel alive (`_compiled_trainable_state`, keras 3.15).
    trainable = getattr(model, "_compiled_trainable_state", None)
    if isinstance(trainable, dict):
        for layer in trainable.keys() - set(layers_within(model)):
            del trainable[layer]


def follow_graph(
    model: keras.Model, inputs: list[Any], call: Callable[..., Any]
) -> list[Any]:
    """Evaluate a Functional model's graph, with `call` for each operation.

    `model.operations` is public and lists each operation once, but without its
    inputs. These are in `_nodes_by_depth` (keras 3.0 to 3.15). There is an
    input for each of `model.inputs`, of any type that is a leaf of
    `keras.tree`. `call(operation, *args, **kwargs)` gets values in place of
    symbolic tensors, and returns the results of the operation.

    Returns:
        A value for each of `model.outputs`.
    """
    levels = getattr(model, "_nodes_by_depth", None)
    if levels is None:
        what = "Functional._nodes_by_depth"
        raise versions.missing(what, "reading the graph of a model")
    values = dict(zip(map(id, model.inputs), inputs, strict=True))
    for depth in sorted(levels, reverse=True):
        for node in levels[depth]:
            needed = node.input_tensors
            if node.is_input or any(id(x) not in values for x in needed):
                continue  # Known already, or not computable: as Keras does.
            args, kwargs = node.arguments.fill_in(values)
            results = keras.tree.flatten(call(node.operation, *args, **kwargs))
            values.update(zip(map(id, node.outputs), results, strict=True))
    return [values[id(x)] for x in model.outputs]


def layers_within(layer: keras.Layer) -> list[keras.Layer]:
    """Return a layer and all layers inside it, without repeats, outer first."""
    # `model.layers` has one level only. `_flatten_layers` (keras 3.0 to 3.15)
    # is called for one level at a time, because it reverses the order of the
    # deeper ones. If it is missing, the layers are found in the attributes.
    layers: dict[int, Any] = {}
    waiting = [layer]
    while waiting:
        each = waiting.pop()
        if id(each) not in layers:
            layers[id(each)] = each
            waiting.extend(reversed(layers_directly_in(each)))
    return list(layers.values())


def layers_directly_in(layer: keras.Layer) -> list[keras.Layer]:
    """Return the layers one level below a layer, without deeper layers."""
    if hasattr(layer, "_flatten_layers"):
        return list(layer._flatten_layers(include_self=False, recursive=False))
    if isinstance(layer, keras.Model):
        return list(layer.layers)
    layers = {id(each): each for each in _layers_in(attributes(layer))}
    return [each for each in layers.values() if each is not layer]


def _layers_in(value: Any) -> Iterator[keras.Layer]:
    """Yield the layers in a value: the value itself, or in lists and dicts."""
    if isinstance(value, keras.Layer):
        yield value
    elif isinstance(value, dict):
        yield from _layers_in(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _layers_in(each)


def attributes(layer: keras.Layer) -> dict[str, Any]:
    """Return the attributes of a layer by name, including sublayers."""
    # On torch a module stores the modules in it separately (`named_children`,
    # public there; keras 3.0 to 3.15). TensorFlow tracks values of attributes
    # once more in `_self_unconditional_…` (tensorflow 2.21).
    children = getattr(layer, "named_children", dict)
    held = {**vars(layer), **dict(children())}
    tracking = "_self_unconditional_"
    return {k: v for k, v in held.items() if not k.startswith(tracking)}


def own_weights(layer: keras.Layer) -> list[keras.Variable]:
    """Return a layer's weights; `weights` has those of inner layers too."""
    inner = layers_within(layer)[1:]
    others = {id(weight) for each in inner for weight in each.weights}
    return [weight for weight in layer.weights if id(weight) not in others]


def tracked_variables(layer: keras.Layer) -> list[keras.Variable]:
    """Return the variables that a layer tracks, not those of inner layers.

    They may be in attributes, lists or dicts (`_trainable_variables` and
    `_non_trainable_variables`, keras 3.0 to 3.15). Without these, variables
    count only from their assignment to an attribute on.
    """
    names = ("_trainable_variables", "_non_trainable_variables")
    return [v for name in names for v in getattr(layer, name, ())]


def captured_variables(layer: keras.Layer) -> list[keras.Variable]:
    """Return variables that a layer's functions read, untracked by Keras."""
    # These are closure variables, globals and defaults of its functions, such
    # as that of a `Lambda`, and arguments of operations in the graph of a
    # Functional model (`_nodes_by_depth` as for `follow_graph`).
    values: list[Any] = []
    for function in filter(inspect.isfunction, vars(layer).values()):
        with contextlib.suppress(ValueError):  # A name that has no value yet.
            outside = inspect.getclosurevars(function)
            values += [*outside.nonlocals.values(), *outside.globals.values()]
        values += function.__defaults__ or ()
        values += (function.__kwdefaults__ or {}).values()
    levels = getattr(layer, "_nodes_by_depth", None) or {}
    for node in itertools.chain.from_iterable(levels.values()):
        given = getattr(node, "arguments", None)
        values += keras.tree.flatten(
            (getattr(given, "args", ()), getattr(given, "kwargs", {}))
        )
    return [each for each in values if isinstance(each, keras.Variable)]
