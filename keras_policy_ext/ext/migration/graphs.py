"""Rewrite graphs of Functional tf_keras models: masks and operations."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras

from keras_policy_ext.ext.migration import classes
from keras_policy_ext.ext.migration._keras import operation_class
from keras_policy_ext.ext.migration.classes import (
    Config,
    Rewriting,
    inner_layers,
)

_RECURRENT = """
    Bidirectional ConvLSTM1D ConvLSTM2D ConvLSTM3D GRU LSTM RNN SimpleRNN
"""
_OTHER_USERS = """
    AdditiveAttention Attention GlobalAveragePooling1D MultiHeadAttention
    TimeDistributed
"""
RECURRENT = frozenset(_RECURRENT.split())
_USERS = RECURRENT.union(_OTHER_USERS.split())


class Masks:
    """The flow of Keras masks through the graph of a tf_keras model.

    Args:
        layers: Legacy configs of the layers, by name.
        calls: For each layer and call, the names of its input layers.
    """

    def __init__(
        self, layers: Mapping[str, Config], calls: Mapping[str, list[list[str]]]
    ):
        self._layers = layers
        self._calls = calls

    def origins(self, name: str) -> set[str]:
        """Return the layers whose masks may reach the outputs of a layer."""
        return {
            found
            for found in self._back(name, masked_only=True)
            if _makes_mask(self._layers[found])
        }

    def notes(self) -> Iterator[str]:
        """Yield a note on each layer that uses masks differently in Keras 3."""
        for name, layer in self._layers.items():
            if layer["class_name"] == "Concatenate":
                yield from self._concatenate(name, layer["config"])
            elif layer["class_name"] == "MultiHeadAttention":
                yield from self._attention(name)

    def _concatenate(self, name: str, fields: Config) -> Iterator[str]:
        # compute_mask: `all` over the features in tf_keras, `any` in Keras 3.
        differ = any(
            len({frozenset(self.origins(source)) for source in call}) > 1
            for call in self._calls[name]
        )
        if fields.get("axis") != 1 and differ and self._is_used(name):
            yield (
                f"Keras 3 masks a step after Concatenate {name!r} only where "
                "all of its inputs mask it, tf_keras where one did: the model "
                "predicts otherwise for steps that one input masks. Pass the "
                "mask to the layers after it yourself, in a model that you "
                "build anew."
            )

    def _attention(self, name: str) -> Iterator[str]:
        earlier = [
            found
            for call in self._calls[name]
            for source in call
            for found in self._back(source)
            if self._layers[found]["class_name"] == "MultiHeadAttention"
        ]
        if earlier and self.origins(name):
            yield (
                "Keras 3 lets masked steps into MultiHeadAttention "
                f"{name!r}, which follows another one, and predicts "
                "otherwise for sequences with such steps. Pass the mask to "
                "it yourself, in a model that you build anew."
            )

    def _is_used(self, name: str) -> bool:
        return any(
            (layer["class_name"] in _USERS or _inner(layer))
            and other != name
            and name in self._back(other)
            for other, layer in self._layers.items()
        )

    def _back(self, name: str, masked_only: bool = False) -> set[str]:
        """Return the layers upstream of a layer, including the layer itself."""
        found: set[str] = set()
        open_ends = [name]
        while open_ends:
            name = open_ends.pop()
            if name in found or (
                masked_only and _ends_mask(self._layers[name])
            ):
                continue
            found.add(name)
            open_ends += [x for call in self._calls[name] for x in call]
        return found


def _inner(layer: Config) -> list[Config]:
    """Return the layer configs inside a model's config; [] for a layer."""
    inner = inner_layers(layer["config"])
    return inner if isinstance(inner, list) else []


def _makes_mask(layer: object) -> bool:
    if not isinstance(layer, Mapping) or "config" not in layer:
        return False
    fields = layer["config"]
    looks_up = isinstance(fields, Mapping) and fields.get("mask_zero")
    if layer.get("class_name") == "Masking" or looks_up:
        return True
    return any(map(_makes_mask, _inner(layer)))


def _ends_mask(layer: Config) -> bool:
    """Return True if a layer's outputs have no time axis, and so no mask."""
    fields = layer["config"]
    if not isinstance(fields, Mapping):
        return False
    inner = fields.get("layer")
    if layer["class_name"] == "Bidirectional" and isinstance(inner, Mapping):
        fields = inner.get("config") or {}
    if layer["class_name"] in RECURRENT:
        return not fields.get("return_sequences")
    return layer["class_name"].startswith("Global")


Operation = tuple[dict[str, Any], list[dict[str, Any]]]
"""The Keras 3 config of an operation, and its calls."""

_LAYERS = """
    TFOpLambda SlicingOpLambda TensorFlowOpLayer ClassMethod InstanceMethod
    InstanceProperty
"""
LAYERS = frozenset(_LAYERS.split())


@dataclasses.dataclass(frozen=True)
class Counterpart:
    """The `keras.ops` function for a TensorFlow function, and its arguments."""

    name: str
    tensors: tuple[str, ...] = ()
    """Keyword arguments that are operands after the first one."""
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Keras's keyword arguments by those of TensorFlow."""
    example: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Options with which it can be called on a tensor of shape (3, 3)."""
    takes_list: bool = False


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


# Where the last part of TensorFlow's name is not that of Keras.
_OTHER_NAMES = {"abs": "absolute", "pow": "power", "truediv": "true_divide"}


def _named_alike(functions: str, *fields: Any) -> dict[str, Counterpart]:
    """Map functions to `keras.ops` of that name, less module and `reduce_`."""
    return {
        function: Counterpart(_OTHER_NAMES.get(name, name), *fields)
        for function in functions.split()
        for name in [function.rpartition(".")[2].removeprefix("reduce_")]
    }


_UNARY = """
    math.abs math.cos math.exp math.log math.negative math.rsqrt math.sigmoid
    math.sin math.softplus math.sqrt math.square math.tanh nn.elu nn.relu
    nn.relu6 nn.selu nn.sigmoid nn.softplus nn.softsign nn.tanh stop_gradient
"""
_BINARY = """
    __operators__.add math.add math.divide math.equal math.greater math.less
    math.maximum math.minimum math.multiply math.pow math.subtract math.truediv
"""
_REDUCTIONS = """
    math.reduce_max math.reduce_mean math.reduce_min math.reduce_prod
    math.reduce_sum
"""
_AXIS = _same("axis")

COUNTERPARTS = {
    **_named_alike(_UNARY),
    **_named_alike(_BINARY, ("y",)),
    **_named_alike(_REDUCTIONS, (), _same("axis", "keepdims")),
    "cast": Counterpart("cast", (), _same("dtype"), {"dtype": "float32"}),
    "clip_by_value": Counterpart(
        "clip",
        (),
        {"clip_value_min": "x_min", "clip_value_max": "x_max"},
        {"x_min": 0, "x_max": 1},
    ),
    "compat.v1.squeeze": Counterpart("squeeze", (), _AXIS),
    "compat.v1.transpose": Counterpart("transpose", (), {"perm": "axes"}),
    "concat": Counterpart("concatenate", (), _AXIS, {}, takes_list=True),
    "expand_dims": Counterpart("expand_dims", (), _AXIS, {"axis": 0}),
    "linalg.matmul": Counterpart("matmul", ("b",)),
    "nn.gelu": Counterpart("gelu", (), _same("approximate")),
    "nn.leaky_relu": Counterpart("leaky_relu", (), {"alpha": "negative_slope"}),
    "nn.log_softmax": Counterpart("log_softmax", (), _AXIS),
    "nn.softmax": Counterpart("softmax", (), _AXIS),
    "reshape": Counterpart(
        "reshape", (), {"shape": "newshape"}, {"newshape": (9,)}
    ),
    "squeeze": Counterpart("squeeze", (), _AXIS),
    "stack": Counterpart("stack", (), _AXIS, {}, takes_list=True),
    "tile": Counterpart(
        "tile", (), {"multiples": "repeats"}, {"repeats": (1, 1)}
    ),
    "transpose": Counterpart("transpose", (), {"perm": "axes"}),
    "where": Counterpart("where", ("x", "y")),
}
"""Counterparts by the exported name of the TensorFlow function."""

_SLICE = "__operators__.getitem"


def rewrite(
    layer: Config, calls: list[dict[str, Any]], name: str
) -> Operation | str:
    """Return the `keras.ops` operation that replaces a layer, or what has none.

    Args:
        layer: Legacy config of the layer.
        calls: Its calls, already as `{"args": [first], "kwargs": {...}}`.
        name: Its name for Keras 3.
    """
    function = layer["config"].get("function")
    counterpart = COUNTERPARTS.get(function)
    found = None
    if len(calls) == 1:
        if layer["class_name"] == "SlicingOpLambda" and function == _SLICE:
            found = _slice(name, calls[0])
        elif layer["class_name"] == "TFOpLambda" and counterpart:
            found = _operation(name, counterpart, calls[0])
    return found or described(layer)


def described(layer: Config) -> str:
    """Return a text on an operation: `TFOpLambda 'tf.fft' (tf.signal.fft)`."""
    fields = layer["config"]
    function = fields.get("function") or fields.get("node_def") or "?"
    if isinstance(function, Mapping):
        function = function.get("op", "?")
    name = layer.get("name") or fields.get("name")
    return f"{layer['class_name']} {name!r} (tf.{function})"


def _operation(
    name: str, counterpart: Counterpart, call: Config
) -> Operation | None:
    (first,) = call["args"]
    kwargs = {
        key: value
        for key, value in call["kwargs"].items()
        if key != "name" and value is not None
    }
    operands = [kwargs.pop(key, None) for key in counterpart.tensors]
    options = {}
    for old, new in counterpart.options.items():
        if old in kwargs:
            value = kwargs.pop(old)
            options[new] = tuple(value) if isinstance(value, list) else value
    # What is left is an option that Keras has not, unless it is off.
    if any(value is not False for value in kwargs.values()):
        return None
    if not all(_is_operand(x) for x in operands) or _has_tensor(options):
        return None
    if isinstance(first, list) != counterpart.takes_list:
        return None
    operation = operation_class(
        getattr(keras.ops, counterpart.name),
        operands=1 + len(operands),
        takes_list=counterpart.takes_list,
        **counterpart.example,
    )(**options, name=name)
    config = keras.saving.serialize_keras_object(operation)
    return config, [{"args": [first, *operands], "kwargs": {}}]


def _slice(name: str, call: Config) -> Operation | None:
    (first,) = call["args"]
    spec = call["kwargs"].get("slice_spec")
    entries = spec if isinstance(spec, list) else [spec]
    key = [_slice_entry(entry) for entry in entries]
    if any(entry is NotImplemented for entry in key):
        return None
    operation = operation_class(lambda x: x[0])(name=name)
    config = keras.saving.serialize_keras_object(operation)
    return config, [{"args": [first, key], "kwargs": {}}]


def _slice_entry(entry: object) -> Any:
    if entry is None or isinstance(entry, int):
        return entry
    if not isinstance(entry, Mapping):
        return NotImplemented
    if entry.get("class_name") == "__ellipsis__":
        return dict(entry)
    bounds = {key: entry.get(key) for key in ("start", "stop", "step")}
    if all(b is None or isinstance(b, int) for b in bounds.values()):
        return {"class_name": "__slice__", "config": bounds}
    return NotImplemented


def _is_operand(value: object) -> bool:
    # An array of constants has lost its dtype in the file.
    return isinstance(value, (int, float, Mapping))


def _has_tensor(value: object) -> bool:
    if isinstance(value, Mapping):
        return "class_name" in value or any(map(_has_tensor, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_has_tensor, value))


_GRAPH = frozenset({"layers", "input_layers", "output_layers"})
_CONSTANT = "_CONSTANT_VALUE"

Tensor = list[Any]
"""Name of a layer, index of its call, index of the output, maybe kwargs."""


def is_functional(fields: object) -> bool:
    """Return True if a model's config holds a graph of layers."""
    return isinstance(fields, Mapping) and fields.keys() >= _GRAPH


def functional(rewriter: Rewriting, fields: Config) -> dict[str, Any]:
    """Convert the config of a functional tf_keras model to Keras 3."""
    graph = SavedGraph(rewriter, fields["layers"])
    rewriter.problems.notes.extend(graph.masks.notes())
    others = {
        key: rewriter.rewrite(value)
        for key, value in fields.items()
        if key not in _GRAPH and key != "name"
    }
    return {
        "name": classes.safe_name(fields.get("name") or "model"),
        "trainable": others.pop("trainable", True),
        **others,
        "layers": [graph.layer(layer) for layer in fields["layers"]],
        "input_layers": graph.ends(fields["input_layers"]),
        "output_layers": graph.ends(fields["output_layers"]),
    }


def sequential(
    rewriter: Rewriting, fields: Config | list[Config]
) -> dict[str, Any]:
    """Convert the config of a sequential tf_keras model to Keras 3."""
    if not isinstance(fields, Mapping):  # before Keras 2.2: the layers alone
        fields = {"layers": fields}
    layers = [rewriter.rewrite(layer) for layer in fields["layers"]]
    names = classes.safe_names(
        x["config"]["name"] for x in fields["layers"] if _has_name(x)
    )
    for old, new in zip(fields["layers"], layers, strict=True):
        if new and _has_name(old):
            new["config"]["name"] = names[old["config"]["name"]]
    first = fields["layers"][0] if fields["layers"] else {"config": {}}
    shape = first["config"].get("batch_input_shape")
    # Keras before 2.5 saved the input shape in the first layer instead.
    if shape is not None and not _is_input(first):
        layers.insert(0, _input_layer(first["config"], rewriter.rewrite(shape)))
    return {
        "name": classes.safe_name(fields.get("name") or "sequential"),
        "layers": layers,
        "build_input_shape": rewriter.rewrite(fields.get("build_input_shape")),
    }


class SavedGraph:
    """Converts the graph of a functional tf_keras model to Keras 3."""

    def __init__(self, rewriter: Rewriting, layers: list[Config]):
        self._rewriter = rewriter
        self._layers = {layer["name"]: layer for layer in layers}
        self._names = classes.safe_names(self._layers)
        sources = {
            name: [self._sources(node) for node in layer["inbound_nodes"]]
            for name, layer in self._layers.items()
        }
        self.masks = Masks(self._layers, sources)

    def layer(self, layer: Config) -> dict[str, Any]:
        """Convert the config of one layer, and its calls, to Keras 3."""
        name = self._names[layer["name"]]
        calls = [self._call(layer, node) for node in layer["inbound_nodes"]]
        if layer["class_name"] in LAYERS:
            found = rewrite(layer, calls, name)
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
        """Convert the input or output tensors of the graph to Keras 3."""
        # tf_keras wrote one tensor as a list of one, and no other such lists.
        # Keras 3 takes a tensor and a list of one for different structures.
        if isinstance(ends, list) and len(ends) == 1:
            (end,) = ends
            ends = end if self._is_tensor(end) else ends
        return self._map(ends, self._end)

    def _call(self, layer: Config, node: Any) -> dict[str, Any]:
        """Convert the arguments of one call of a layer to Keras 3."""
        kwargs: dict[str, Any] = {}

        def tensor(leaf: Tensor) -> object:
            if len(leaf) > 3:
                kwargs.update(leaf[3])
            if leaf[0] == _CONSTANT:
                return self._rewriter.rewrite(leaf[2])
            return self._tensor(leaf)

        is_layer = layer["class_name"] not in LAYERS
        if is_layer and isinstance(node, list) and len(node) == 1:
            node = node[0]
        first = self._map(node, tensor)
        arguments = {
            key: self._map(value, self._tensor)
            for key, value in kwargs.items()
            # tf_keras wrote `constants: None` for a layer that has none.
            if value is not None or self._takes(layer, key)
        }
        if layer["class_name"] in RECURRENT and isinstance(first, list):
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
        """Return the class of a layer; None if unknown or not a layer class."""
        found = classes.find(layer, "layers", self._rewriter.custom_objects)
        return found.cls if found is not None and found.is_layer else None

    def _give_name(
        self, layer: Config, migrated: dict[str, Any], name: str
    ) -> None:
        """Set `name` in a layer's config, unless the class takes no name."""
        fields = migrated.get("config")
        if isinstance(fields, dict):
            cls = self._class(layer)
            if "name" in fields or (cls and _accepts(cls.__init__, "name")):
                fields["name"] = name

    def _takes(self, layer: Config, key: str) -> bool:
        """Return True if `call` of a layer has an argument called `key`."""
        cls = self._class(layer)
        return cls is None or _accepts(cls.call, key)

    def _map(self, value: Any, of_tensor: Callable[[Tensor], object]) -> Any:
        """Apply `of_tensor` to each tensor in nested lists and dicts."""
        if self._is_tensor(value):
            return of_tensor(value)
        if isinstance(value, (list, tuple)):
            return [self._map(v, of_tensor) for v in value]
        if isinstance(value, Mapping) and "class_name" not in value:
            return {k: self._map(v, of_tensor) for k, v in value.items()}
        return self._rewriter.rewrite(value)

    def _sources(self, value: Any) -> list[str]:
        """Return the names of the layers that produce the tensors in a call."""
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
    inner = classes.inner_layers(fields)
    if not inner:
        return False
    return _is_input(inner[0]) or "batch_input_shape" in inner[0]["config"]


def _input_layer(fields: Config, shape: object) -> dict[str, Any]:
    """Return the config of an `InputLayer` of this shape, for Sequential."""
    name = classes.safe_name(f"{fields.get('name', 'layer')}_input")
    return {
        "module": "keras.layers",
        "class_name": "InputLayer",
        "config": {"batch_shape": shape, "dtype": "float32", "name": name},
        "registered_name": None,
    }
