"""The graphs of functional models, and the layers of sequential ones.

tf_keras wrote a call of a layer as nested lists of `[layer name, index of the
call, index of the output, keyword arguments]`; Keras 3 writes positional and
keyword arguments, with a record for each tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from keras_policy_ext.migration import changes, classes, masks, operations
from keras_policy_ext.migration.problems import Config, Rewriting

_GRAPH = frozenset({"layers", "input_layers", "output_layers"})
_CONSTANT = "_CONSTANT_VALUE"

Tensor = list[Any]
"""Name of a layer, index of its call, index of the output, maybe kwargs."""


def is_functional(fields: object) -> bool:
    """Return True if the config of a model holds a graph of layers."""
    return isinstance(fields, Mapping) and fields.keys() >= _GRAPH


def functional(rewriter: Rewriting, fields: Config) -> dict[str, Any]:
    """The Keras 3 config of a functional model."""
    graph = SavedGraph(rewriter, fields["layers"])
    rewriter.problems.notes.extend(graph.masks.notes())
    others = {
        key: rewriter.rewrite(value)
        for key, value in fields.items()
        if key not in _GRAPH and key != "name"
    }
    return {
        "name": changes.safe_name(fields.get("name") or "model"),
        "trainable": others.pop("trainable", True),
        **others,
        "layers": [graph.layer(layer) for layer in fields["layers"]],
        "input_layers": graph.ends(fields["input_layers"]),
        "output_layers": graph.ends(fields["output_layers"]),
    }


def sequential(
    rewriter: Rewriting, fields: Config | list[Config]
) -> dict[str, Any]:
    """The Keras 3 config of a sequential model."""
    if not isinstance(fields, Mapping):  # before Keras 2.2: the layers alone
        fields = {"layers": fields}
    layers = [rewriter.rewrite(layer) for layer in fields["layers"]]
    names = changes.safe_names(
        x["config"]["name"] for x in fields["layers"] if _has_name(x)
    )
    for old, new in zip(fields["layers"], layers, strict=True):
        if new and _has_name(old):
            new["config"]["name"] = names[old["config"]["name"]]
    first = fields["layers"][0] if fields["layers"] else {"config": {}}
    shape = first["config"].get("batch_input_shape")
    if shape is not None and not _is_input(first):
        layers.insert(0, _input_layer(first["config"], rewriter.rewrite(shape)))
    return {
        "name": changes.safe_name(fields.get("name") or "sequential"),
        "layers": layers,
        "build_input_shape": rewriter.rewrite(fields.get("build_input_shape")),
    }


class SavedGraph:
    """The graph of these layers, being rewritten."""

    def __init__(self, rewriter: Rewriting, layers: list[Config]):
        self._rewriter = rewriter
        self._layers = {layer["name"]: layer for layer in layers}
        self._names = changes.safe_names(self._layers)
        sources = {
            name: [self._sources(node) for node in layer["inbound_nodes"]]
            for name, layer in self._layers.items()
        }
        self.masks = masks.Masks(self._layers, sources)

    def layer(self, layer: Config) -> dict[str, Any]:
        """One layer with its calls."""
        name = self._names[layer["name"]]
        calls = [self._call(layer, node) for node in layer["inbound_nodes"]]
        if layer["class_name"] in operations.LAYERS:
            found = operations.rewrite(layer, calls, name)
            if isinstance(found, str):
                self._rewriter.problems.unsupported.append(found)
                return {}
            migrated, calls = found
        else:
            graph = ("name", "inbound_nodes")
            own = {k: v for k, v in layer.items() if k not in graph}
            migrated = self._rewriter.rewrite(own) or {}
            self._give_name(layer, migrated, name)
        return {**migrated, "name": name, "inbound_nodes": calls}

    def ends(self, ends: object) -> object:
        """The inputs or outputs of the graph.

        tf_keras wrote one tensor as a list of one, and made no other lists
        of one; for Keras 3 those are different models.
        """
        if isinstance(ends, list) and len(ends) == 1:
            (end,) = ends
            ends = end if self._is_tensor(end) else ends
        return self._map(ends, self._end)

    def _call(self, layer: Config, node: Any) -> dict[str, Any]:
        """The arguments of one call of a layer."""
        kwargs: dict[str, Any] = {}

        def tensor(leaf: Tensor) -> object:
            if len(leaf) > 3:
                kwargs.update(leaf[3])
            if leaf[0] == _CONSTANT:
                return self._rewriter.rewrite(leaf[2])
            return self._tensor(leaf)

        is_layer = layer["class_name"] not in operations.LAYERS
        if is_layer and isinstance(node, list) and len(node) == 1:
            node = node[0]
        first = self._map(node, tensor)
        arguments = {
            key: self._map(value, self._tensor)
            for key, value in kwargs.items()
            # tf_keras wrote `constants: None` for a layer that has none.
            if value is not None or self._takes(layer, key)
        }
        if layer["class_name"] in masks.RECURRENT and isinstance(first, list):
            first, *states = first
            arguments["initial_state"] = states
            if self.masks.origins(node[0][0]):
                self._rewriter.problems.notes.append(
                    f"Keras 3 ignores the mask of a sequence where "
                    f"{layer['class_name']} {layer['name']!r} is given "
                    "states, and predicts otherwise for masked steps. Pass "
                    "the mask to that layer yourself, in a model that you "
                    "build anew."
                )
        return {"args": [first], "kwargs": arguments}

    def _class(self, layer: Config) -> Any:
        """The class of a layer; None if it is unknown or none of Keras."""
        found = classes.find(layer, "layers", self._rewriter.custom_objects)
        return found.cls if found is not None and found.is_layer else None

    def _give_name(
        self, layer: Config, migrated: dict[str, Any], name: str
    ) -> None:
        """A caller's class may leave its name out of its config."""
        fields = migrated.get("config")
        if isinstance(fields, dict):
            cls = self._class(layer)
            if "name" in fields or (cls and _accepts(cls.__init__, "name")):
                fields["name"] = name

    def _takes(self, layer: Config, key: str) -> bool:
        """True if a layer can be called with an argument of this name."""
        cls = self._class(layer)
        return cls is None or _accepts(cls.call, key)

    def _map(self, value: Any, of_tensor: Callable[[Tensor], object]) -> Any:
        """Replace the tensors in nested lists and dicts."""
        if self._is_tensor(value):
            return of_tensor(value)
        if isinstance(value, (list, tuple)):
            return [self._map(v, of_tensor) for v in value]
        if isinstance(value, Mapping) and "class_name" not in value:
            return {k: self._map(v, of_tensor) for k, v in value.items()}
        return self._rewriter.rewrite(value)

    def _sources(self, value: Any) -> list[str]:
        """Names of the layers whose outputs are in nested calls."""
        if self._is_tensor(value):
            own = [] if value[0] == _CONSTANT else [value[0]]
            return own + self._sources(value[3:])  # keyword arguments
        if isinstance(value, Mapping):
            value = list(value.values())
        if not isinstance(value, (list, tuple)):
            return []
        return [name for item in value for name in self._sources(item)]

    def _is_tensor(self, value: object) -> bool:
        return (
            isinstance(value, (list, tuple))
            and len(value) in (3, 4)
            and isinstance(value[0], str)
            and (value[0] in self._layers or value[0] == _CONSTANT)
            and isinstance(value[1], int)
        )

    # tf_keras counts the making of a model as its call 0. Keras 3 does so
    # for a functional model, and only in the ends of a graph.

    def _end(self, leaf: Tensor) -> Tensor:
        name, call, output = self._history(leaf)
        counts = is_functional(self._layers[leaf[0]]["config"])
        return [name, call + counts, output]

    def _history(self, leaf: Tensor) -> Tensor:
        name, call, output = leaf[:3]
        counted = _counts_its_making(self._layers[name])
        return [self._names[name], call - counted, output]

    def _tensor(self, leaf: Tensor) -> dict[str, Any]:
        # Keras takes the tensor from the history, and reads no shape.
        config = {
            "shape": [],
            "dtype": "float32",
            "keras_history": self._history(leaf),
        }
        return {"class_name": "__keras_tensor__", "config": config}


def _accepts(function: Callable[..., object], key: str) -> bool:
    parameters = inspect.signature(function).parameters
    return key in parameters or any(
        p.kind is p.VAR_KEYWORD for p in parameters.values()
    )


def _has_name(layer: Config) -> bool:
    fields = layer["config"]
    return isinstance(fields, Mapping) and isinstance(fields.get("name"), str)


def _is_input(layer: Config) -> bool:
    return bool(layer["class_name"] == "InputLayer")


def _counts_its_making(layer: Config) -> bool:
    fields = layer["config"]
    if layer["class_name"] != "Sequential":
        return is_functional(fields)
    inner = changes.inner_layers(fields)
    if not inner:
        return False
    return _is_input(inner[0]) or "batch_input_shape" in inner[0]["config"]


def _input_layer(fields: Config, shape: object) -> dict[str, Any]:
    """What Keras before 2.5 left to the first layer of a sequential model."""
    name = changes.safe_name(f"{fields.get('name', 'layer')}_input")
    return {
        "module": "keras.layers",
        "class_name": "InputLayer",
        "config": {"batch_shape": shape, "dtype": "float32", "name": name},
        "registered_name": None,
    }
