"""The weights of a model, from the order and the names that tf_keras gave.

Layers are found by name, so that no order of layers in Keras 3 matters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import h5py
import keras

from keras_policy_ext.migration import changes, files
from keras_policy_ext.migration.problems import Config

Variables = list[keras.Variable]


def load(model: keras.Model, config: Config, file: files.LegacyFile) -> None:
    """Give a fresh model the weights of a file.

    Raises:
        ValueError: If arrays and weights do not correspond one to one.
    """
    if file.is_archive:
        loaded = _load_tree(model, config, file.weights, "the model")
    else:
        loaded = _load_layers(model, config, file.weights)
    if loaded != len(model.weights):
        raise ValueError(
            "The file does not have one array for each weight. Received: "
            f"{loaded} arrays. Allowed: {len(model.weights)}. Check that "
            "custom layers are those of the file."
        )


def legacy_order(
    layer: keras.Layer, config: Config
) -> tuple[Variables, Variables]:
    """Trainable and other weights, in the order that tf_keras had.

    The legacy config of the layer has the order of nested layers.
    """
    inner = _nested(layer, config)
    if inner is None:
        return list(layer.trainable_weights), list(layer.non_trainable_weights)
    trainable, others = _own_weights(layer)
    for child, child_config in inner:
        more, rest = legacy_order(child, child_config)
        trainable += more
        others += rest
    return _unique(trainable), _unique(others)


def _own_weights(layer: keras.Layer) -> tuple[Variables, Variables]:
    """Trainable and other weights that a wrapper has itself."""
    if not isinstance(layer, keras.layers.Wrapper):
        return [], []
    inner = {id(x) for x in layer.layer.weights}
    if isinstance(layer, keras.layers.SpectralNormalization):
        # It has the kernel of the layer too, and that comes first.
        inner.discard(id(layer.kernel))
    trainable = [x for x in layer.trainable_weights if id(x) not in inner]
    others = [x for x in layer.non_trainable_weights if id(x) not in inner]
    return trainable, others


def _unique(variables: Variables) -> Variables:
    return list({id(x): x for x in variables}.values())


def _nested(
    layer: keras.Layer, config: Config
) -> list[tuple[keras.Layer, Config]] | None:
    """The layers within, in legacy order; None for a layer of its own."""
    fields = config["config"]
    if isinstance(layer, keras.layers.Wrapper) and "layer" in fields:
        # Bidirectional has two copies of it, and Keras has their order.
        if isinstance(layer, keras.layers.Bidirectional):
            return None
        return [(layer.layer, fields["layer"])]
    inner = changes.inner_layers(fields)
    if not isinstance(layer, keras.Model) or inner is None:
        return None
    by_name = {child.name: child for child in layer.layers}
    names = changes.safe_names(map(_name, inner))
    # An operation is no layer: it has no weights, and is not in `layers`.
    return [
        (by_name[name], child_config)
        for child_config in inner
        if (name := names[_name(child_config)]) in by_name
    ]


def _name(config: Config) -> str:
    """The name in a config of a layer, as a model or the layer has it."""
    return str((config if "name" in config else config["config"])["name"])


def _load_layers(model: keras.Model, config: Config, group: h5py.Group) -> int:
    """From HDF5: each layer of the model has one list of arrays."""
    children = _nested(model, config)
    if children is None:
        raise ValueError(
            "A subclassed model cannot take its weights from HDF5. Received: "
            f"the subclassed model {model.name!r}. Allowed: functional and "
            "sequential models. Save it in tf_keras with save_weights and "
            "load these."
        )
    count = 0
    for child, child_config in children:
        weights, saved = _paired(child, child_config, group)
        for variable, (path, dataset) in zip(weights, saved, strict=True):
            variable.assign(files.array(dataset, variable.shape, path))
        if weights and hasattr(child, "finalize_state"):
            child.finalize_state()
        count += len(saved)
    return count


def _paired(
    layer: keras.Layer, config: Config, group: h5py.Group
) -> tuple[Variables, list[tuple[str, h5py.Dataset]]]:
    """The weights of a layer, and what the file has for each, in one order."""
    name = _name(config)
    trainable, others = legacy_order(layer, config)
    weights = _unique([*trainable, *others])
    saved = files.saved_weights(files.member(group, name))
    if len(saved) != len(weights):
        raise ValueError(
            f"The layer {name!r} has another number of weights. Received: "
            f"{len(saved)} arrays. Allowed: {len(weights)}. Check that custom "
            "layers are those of the file."
        )
    if isinstance(layer, keras.layers.Bidirectional):
        return _forward_first(layer, config, weights, saved)
    return weights, saved


def _forward_first(
    layer: keras.layers.Bidirectional,
    config: Config,
    weights: Variables,
    saved: list[tuple[str, h5py.Dataset]],
) -> tuple[Variables, list[tuple[str, h5py.Dataset]]]:
    """Weights and arrays of one direction, then those of the other.

    A direction that was not trainable comes last in the file. No config says
    so, only the names do.
    """
    own = {id(x) for x in layer.forward_layer.weights}
    forward = f"forward_{_name(config['config']['layer'])}"
    found = [forward in path.split("/") for path, _ in saved]
    if sum(found) != len(own):
        return weights, saved
    order = sorted(range(len(saved)), key=lambda i: not found[i])
    weights = sorted(weights, key=lambda x: id(x) not in own)
    return weights, [saved[i] for i in order]


def _load_tree(
    layer: keras.Layer, config: Config, group: h5py.Group | None, where: str
) -> int:
    """From an archive: groups named by attributes, or by class in a list."""
    if group is None:
        return 0  # the number of arrays will tell
    count = _load_own(layer, files.member(group, "vars"), where)
    if count and isinstance(layer, keras.layers.SpectralNormalization):
        count -= 1  # the kernel, which the layer within has too
    nested = _nested(layer, config)
    if nested is not None and isinstance(layer, keras.Model):
        names = _group_names(c["class_name"] for _, c in nested)
        for name, (child, child_config) in zip(names, nested, strict=True):
            inner = files.member(group, f"layers/{name}")
            count += _load_tree(child, child_config, inner, name)
        return count
    for name in group:
        inner = files.member(group, name)
        if name == "vars" or not isinstance(inner, h5py.Group):
            continue
        count += _load_attribute(layer, name, inner, f"{where}/{name}")
    return count


def _load_attribute(
    layer: keras.Layer, name: str, group: h5py.Group, where: str
) -> int:
    """A layer, or a list of layers, that another layer holds."""
    value = None if name.startswith("__") else getattr(layer, name, None)
    no_config: Config = {"config": {}}
    if isinstance(value, keras.Layer):
        return _load_tree(value, no_config, group, where)
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, Sequence) or isinstance(value, str):
        return 0  # nothing there: the number of arrays will tell
    layers = [x for x in value if isinstance(x, keras.Layer)]
    names = _group_names(type(x).__name__ for x in layers)
    return sum(
        _load_tree(x, no_config, files.member(group, key), f"{where}/{key}")
        for key, x in zip(names, layers, strict=True)
    )


def _load_own(layer: keras.Layer, group: h5py.Group | None, where: str) -> int:
    """The variables that belong to a layer itself."""
    if group is None or not len(group):
        return 0
    store = {
        str(i): files.array(files.member(group, str(i)), None, f"{where}/{i}")
        for i in range(len(group))
    }
    layer.load_own_variables(store)
    return len(store)


def _group_names(class_names: Iterable[str]) -> Iterator[str]:
    """Groups of a list of layers: class names in snake case, counted."""
    counts: dict[str, int] = {}
    for class_name in class_names:
        # In snake case as tf_keras has it: ConvLSTM2D is conv_lstm2d.
        name = class_name.rsplit(">", 1)[-1]
        name = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", name)
        name = re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()
        name = f"private{name}" if name.startswith("_") else name
        counts[name] = counts.get(name, -1) + 1
        yield f"{name}_{counts[name]}" if counts[name] else name
