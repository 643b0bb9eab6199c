"""Load weights and optimizer states of tf_keras."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import h5py
import keras

from keras_policy_ext.ext.migration import classes, files
from keras_policy_ext.ext.migration.classes import Config

Variables = list[keras.Variable]


def load(model: keras.Model, config: Config, file: files.LegacyFile) -> None:
    """Assign the weights in a tf_keras file to the variables of a new model.

    Raises:
        ValueError: If the file does not have one array for each weight.
    """
    if file.is_archive:
        loaded = _load_tree(model, config, file.weights, "the model")
    else:
        loaded = _load_layers(model, config, file.weights)
    if loaded != len(model.weights):
        raise ValueError(
            "The file does not have one array for each weight. Received: "
            f"{loaded} arrays. Allowed: {len(model.weights)}. Check that "
            "custom layers are the same as in the file."
        )


def legacy_order(
    layer: keras.Layer, config: Config
) -> tuple[Variables, Variables]:
    """Return (trainable, other) weights of a layer in tf_keras's order."""
    # The order of nested layers is that of the legacy config.
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
    """Return (trainable, other) weights of a wrapper, not of its layer."""
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
    """Return (layer, config) of inner layers in tf_keras's order, or None."""
    fields = config["config"]
    if isinstance(layer, keras.layers.Wrapper) and "layer" in fields:
        # Bidirectional has two copies of it, and Keras has their order.
        if isinstance(layer, keras.layers.Bidirectional):
            return None
        return [(layer.layer, fields["layer"])]
    inner = classes.inner_layers(fields)
    if not isinstance(layer, keras.Model) or inner is None:
        return None
    by_name = {child.name: child for child in layer.layers}
    names = classes.safe_names(map(_name, inner))
    # An operation is no layer: it has no weights, and is not in `layers`.
    return [
        (by_name[name], child_config)
        for child_config in inner
        if (name := names[_name(child_config)]) in by_name
    ]


def _name(config: Config) -> str:
    """Return the name of the layer that a config describes."""
    return str((config if "name" in config else config["config"])["name"])


def _load_layers(model: keras.Model, config: Config, group: h5py.Group) -> int:
    """Assign the weights in an HDF5 file, by layer; return the array count."""
    children = _nested(model, config)
    if children is None:
        raise ValueError(
            "A subclassed model cannot take its weights from HDF5. Received: "
            f"the subclassed model {model.name!r}. Allowed: functional and "
            "sequential models. In tf_keras, call "
            "model.save_weights('NAME.weights.h5'). In Keras 3, make the same "
            "model and call model.load_weights('NAME.weights.h5')."
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
    """Return a layer's weights and their arrays in the file, in equal order."""
    name = _name(config)
    trainable, others = legacy_order(layer, config)
    weights = _unique([*trainable, *others])
    saved = files.saved_weights(files.member(group, name))
    if len(saved) != len(weights):
        raise ValueError(
            f"The layer {name!r} has another number of weights. Received: "
            f"{len(saved)} arrays. Allowed: {len(weights)}. Check that custom "
            "layers are the same as in the file."
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
    """Sort the weights and arrays of a Bidirectional: forward layer first."""
    # A direction that was not trainable comes last in the file. This is seen
    # from the names only, not from a config.
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
    """Assign the weights in an archive to a layer; return the array count."""
    # Groups are named by attributes, or by class for layers in a list.
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
    """Load the layer, or list of layers, in attribute `name` of a layer."""
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
    """Load the variables of a layer, not of inner layers; return the number."""
    if group is None or not len(group):
        return 0
    store = {
        str(i): files.array(files.member(group, str(i)), None, f"{where}/{i}")
        for i in range(len(group))
    }
    layer.load_own_variables(store)
    return len(store)


def _group_names(class_names: Iterable[str]) -> Iterator[str]:
    """Yield archive group names for layers, such as "dense", "dense_1"."""
    counts: dict[str, int] = {}
    for class_name in class_names:
        # In snake case as tf_keras has it: ConvLSTM2D is conv_lstm2d.
        name = class_name.rsplit(">", 1)[-1]
        name = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", name)
        name = re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()
        name = f"private{name}" if name.startswith("_") else name
        counts[name] = counts.get(name, -1) + 1
        yield f"{name}_{counts[name]}" if counts[name] else name


class SlotLayout(NamedTuple):
    """The order in which tf_keras saves an optimizer's slot variables.

    The slots of one tuple alternate for each variable. The next tuple comes
    after all variables. The names are those of Keras 3.
    """

    blocks: tuple[tuple[str, ...], ...]
    optional: Mapping[str, str] = {}
    """Slots that exist only if an argument of the optimizer is on, by slot."""


_AMSGRAD = {"velocity_hat": "amsgrad"}
_RMS = {"momentum": "momentum", "average_gradient": "centered"}
_MOMENTS = SlotLayout((("momentum", "velocity"), ("velocity_hat",)), _AMSGRAD)
_ACCUMULATED = ("accumulated_grad", "accumulated_delta_var")

# Read off the files that tf_keras 2.21 writes; `legacy` is OptimizerV2, which
# was tf.keras.optimizers until TensorFlow 2.10.
LAYOUTS = {
    "Adadelta": SlotLayout((_ACCUMULATED,)),
    "Adagrad": SlotLayout((("accumulator",),)),
    "Adam": _MOMENTS,
    "AdamW": _MOMENTS,
    "Adamax": SlotLayout((("momentum", "norm"),)),
    "Ftrl": SlotLayout((("accumulator", "linear"),)),
    "Lion": SlotLayout((("momentum",),)),
    "RMSprop": SlotLayout(
        (("velocity",), ("momentum",), ("average_gradient",)), _RMS
    ),
    "SGD": SlotLayout((("momentum",),)),
}
LEGACY_LAYOUTS = {
    "Adadelta": SlotLayout(tuple((name,) for name in _ACCUMULATED)),
    "Adagrad": LAYOUTS["Adagrad"],
    "Adam": SlotLayout(
        (("momentum",), ("velocity",), ("velocity_hat",)), _AMSGRAD
    ),
    "Adamax": SlotLayout((("momentum",), ("norm",))),
    "Ftrl": LAYOUTS["Ftrl"],
    "RMSprop": LAYOUTS["RMSprop"],
    "SGD": SlotLayout((("momentum",),), {"momentum": "momentum"}),
}


def load_optimizer_state(
    optimizer: keras.optimizers.Optimizer,
    trained: list[keras.Variable],
    config: Config,
    variables: list[keras.Variable],
    saved: list[object],
) -> str | None:
    """Assign the optimizer state in a tf_keras file to a built optimizer.

    Args:
        optimizer: An optimizer of Keras 3, not a loss scaler.
        trained: The variables it was built for, in that order.
        config: Its legacy config.
        variables: The same variables in the order of the file.
        saved: The arrays of the file, the number of iterations first.

    Returns:
        None; or a sentence on what is missing, for a warning. In that case
        only the number of iterations is restored, if the file has it.
    """
    if not saved:
        return "The file holds no state of the optimizer."
    iterations = files.array(saved[0], (), "the number of iterations")
    optimizer.iterations.assign(int(iterations))
    slots = _order(config, variables)
    if slots is None:
        return (
            f"The slots of {config['class_name']!r} have no counterpart in "
            "Keras 3 and start anew; the number of iterations is restored."
        )
    if len(slots) != len(saved) - 1:
        return (
            f"The slots of the optimizer start anew: the file has "
            f"{len(saved) - 1} arrays instead of {len(slots)}. The number of "
            "iterations is restored."
        )
    arrays = [
        files.array(data, v.shape, f"the slot {slot!r} of {v.path!r}")
        for (slot, v), data in zip(slots, saved[1:], strict=True)
    ]
    targets = {slot: _targets(optimizer, trained, slot) for slot, _ in slots}
    for (slot, variable), value in zip(slots, arrays, strict=True):
        # SGD without momentum: tf_keras has slots of zeros, Keras 3 none.
        if id(variable) in targets[slot]:
            targets[slot][id(variable)].assign(value)
    return None


def _order(
    config: Config, variables: list[keras.Variable]
) -> list[tuple[str, keras.Variable]] | None:
    """Return (slot name, variable) of each saved slot; None if unknown."""
    fields = config["config"]
    layouts = LEGACY_LAYOUTS
    if not fields.get("is_legacy_optimizer", True):
        layouts = LAYOUTS
    layout = layouts.get(config["class_name"].rsplit(">", 1)[-1])
    if layout is None:
        return None
    off = {s for s, name in layout.optional.items() if not fields.get(name)}
    blocks = [block for block in layout.blocks if off.isdisjoint(block)]
    if fields.get("use_ema"):
        blocks.insert(0, ("average",))
    return [
        (slot, variable)
        for block in blocks
        for variable in variables
        for slot in block
    ]


def _targets(
    optimizer: keras.optimizers.Optimizer,
    trained: list[keras.Variable],
    slot: str,
) -> dict[int, keras.Variable]:
    """Return the optimizer's variables for a slot, by `id` of the weight."""
    ending = f"_{slot}"
    by_name: dict[str, list[keras.Variable]] = {}
    for variable in optimizer.variables:
        by_name.setdefault(variable.name, []).append(variable)
    # Several variables of one path are in the order of the weights.
    return {
        id(variable): by_name[name].pop(0)
        for variable in trained
        if by_name.get(name := variable.path.replace("/", "_") + ending)
    }
