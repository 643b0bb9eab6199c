"""TensorFlow operations in the graph of a functional model.

tf_keras made a layer of each `tf.` function that was called on a symbolic
tensor. Keras 3 does the same with `keras.ops`; this is which is which.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import keras

from keras_policy_ext._keras import operation_classes
from keras_policy_ext.migration.problems import Config

Operation = tuple[dict[str, Any], list[dict[str, Any]]]
"""The Keras 3 config of an operation, and its calls."""

_LAYERS = """
    TFOpLambda SlicingOpLambda TensorFlowOpLayer ClassMethod InstanceMethod
    InstanceProperty
"""
LAYERS = frozenset(_LAYERS.split())


@dataclasses.dataclass(frozen=True)
class Counterpart:
    """An operation of `keras.ops`, and where its arguments come from."""

    name: str
    tensors: tuple[str, ...] = ()
    """Keyword arguments that are operands after the first one."""
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """From TensorFlow's keyword arguments to those of Keras."""
    example: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Options with which it can be called on a tensor of shape (3, 3)."""
    takes_list: bool = False


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


# Where the last part of TensorFlow's name is not that of Keras.
_OTHER_NAMES = {"abs": "absolute", "pow": "power", "truediv": "true_divide"}


def _named_alike(functions: str, *fields: Any) -> dict[str, Counterpart]:
    """Functions whose last part is, but for `reduce_`, the name in Keras."""
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
"""By the name that TensorFlow exports the function under."""

_SLICE = "__operators__.getitem"


def rewrite(
    layer: Config, calls: list[dict[str, Any]], name: str
) -> Operation | str:
    """The operation that a layer stands for, or what has no counterpart.

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
    """Name an operation: `TFOpLambda 'tf.fft' (tf.signal.fft)`."""
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
    operation = operation_classes.operation_class(
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
    operation = operation_classes.operation_class(lambda x: x[0])(name=name)
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
