"""Write a Keras model to an ONNX file, layer by layer, and check it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Callable
from typing import Any

import keras
import onnx
from onnx import helper

from keras_policy_ext._keras import walking
from keras_policy_ext._version import __version__
from keras_policy_ext.conversion.candidates import path_of, why_code_differs
from keras_policy_ext.ext.export import language_models
from keras_policy_ext.ext.onnx import (  # noqa: F401  they register
    activations,
    convolutions,
    layers,
    operations,
)
from keras_policy_ext.ext.onnx.graph import (
    Initializers,
    OnnxGraph,
    Refused,
    Value,
    onnx_type,
)
from keras_policy_ext.ext.onnx.kernel_nodes import Kernels
from keras_policy_ext.ext.onnx.registry import LAYERS, OPERATIONS, Context
from keras_policy_ext.layers.drop_in import original_of

PathLike = str | os.PathLike[str]

_HARMLESS = frozenset(
    {"__class__", "__init__", "build", "from_config", "get_config"}
)


def is_functional(layer: keras.Layer) -> bool:
    """Return True for a Functional model that does not override `call`."""
    return _is_graph(layer, "operations") and hasattr(layer, "inputs")


def is_sequential(layer: keras.Layer) -> bool:
    """Return True for a Sequential model that does not override `call`."""
    return isinstance(layer, keras.Sequential) and _is_graph(layer, "layers")


def check(model: keras.Layer) -> None:
    """Raise ValueError unless a model is built Functional or Sequential."""
    if is_sequential(model) and model.built and model.inputs:
        return
    if is_functional(model) and not isinstance(model, keras.Sequential):
        return
    raise ValueError(
        "This model has no graph that could be written to ONNX. Received: "
        f"{model!r}. Allowed: a built Sequential or Functional model, without "
        "a `call` of its own. Build it, or write it as a Functional model: "
        "keras.Model(inputs, outputs)."
    )


def write(
    model: keras.Model,
    path: PathLike,
    kernels: Kernels,
    opset: int,
    overwrite: bool,
) -> None:
    """Write a model as an ONNX file, check it, and move it to `path`."""
    target = pathlib.Path(path).absolute()
    with (
        contextlib.ExitStack() as undo,
        language_models.whole(
            target, folder=False, overwrite=overwrite
        ) as made,
    ):
        data = made.with_name(f"{made.name}.data")
        _write(model, made, data, kernels, opset)
        onnx.checker.check_model(str(made), full_check=True)
        if data.exists():
            beside = target.with_name(data.name)
            _check_free(beside)
            os.replace(data, beside)
            undo.push(_removed_after_error(beside))


def _write(
    model: keras.Layer,
    path: pathlib.Path,
    data: pathlib.Path,
    kernels: Kernels,
    opset: int,
) -> None:
    """Write a model to `path`, with large data in the file `data`."""
    with contextlib.closing(Initializers(data)) as initializers:
        graph = OnnxGraph(initializers)
        inputs, results = Walk(graph, kernels).model(model)
        initializers.finish()
        opsets = [helper.make_opsetid("", opset)]
        whole = helper.make_model(
            helper.make_graph(
                graph.nodes, model.name, inputs, results, initializers.tensors
            ),
            opset_imports=opsets,
            ir_version=helper.find_min_ir_version_for(opsets),
            producer_name="keras-policy-ext",
            producer_version=__version__,
        )
        path.write_bytes(whole.SerializeToString())


def _removed_after_error(path: pathlib.Path) -> Callable[..., None]:
    """Return an exit callback that removes a file after an error."""

    def leave(error: type | None, *_: object) -> None:
        if error is not None:
            path.unlink()

    return leave


def _check_free(path: pathlib.Path) -> None:
    if path.exists():
        raise FileExistsError(
            "The numbers of this model need a file of their own, and there "
            f"is one of its name. Received: {str(path)!r}. Allowed: a path "
            "that is free. Remove the file, or choose another name for the "
            "model."
        )


class Walk:
    """Writes the layers of one model into one ONNX graph."""

    def __init__(self, graph: OnnxGraph, kernels: Kernels):
        self._graph = graph
        self._context = Context(graph, kernels, self.call)

    def model(self, model: keras.Layer) -> tuple[list[Any], list[Any]]:
        """Write a model; return ONNX's descriptions of (inputs, outputs)."""
        inputs = [self._input(tensor) for tensor in model.inputs]
        results = self._run(model, inputs)
        names = getattr(model, "output_names", None) or [
            model.layers[-1].name
        ] * len(results)
        outputs = [
            self._output(*each) for each in zip(names, results, strict=True)
        ]
        return [_described(x, batch="batch") for x in inputs], outputs

    def call(self, layer: keras.Layer, *args: Any, **kwargs: Any) -> Any:
        """Add the nodes for one call of a layer, model or operation.

        Raises:
            NotImplementedError: If it cannot be written.
        """
        try:
            is_model = is_sequential(layer) or is_functional(layer)
            write = None if is_model else _writer_of(layer)
            if isinstance(layer, keras.Layer):
                _check_arguments(args, kwargs)
                kwargs = {}
            if write is None:
                results = self._run(layer, keras.tree.flatten(args))
                return results if len(results) > 1 else results[0]
            with self._graph.scope(_name_of(layer)):
                value = write(self._context, layer, *args, **kwargs)
        except Refused as error:
            raise NotImplementedError(_message(layer, error)) from error
        if value.shape is not None:
            return value
        return dataclasses.replace(value, shape=_shape(layer, args, kwargs))

    def _run(self, model: keras.Layer, inputs: list[Value]) -> list[Value]:
        if not is_sequential(model):
            return walking.follow_graph(model, inputs, self.call)
        (x,) = inputs
        for layer in model.layers:
            x = self.call(layer, x)
        return [x]

    def _input(self, tensor: Any) -> Value:
        dtype = tensor.dtype
        if keras.backend.is_float_dtype(dtype):
            dtype = "float32"
        name = self._graph.unique(tensor.name)
        return Value(self._graph, name, dtype, tuple(tensor.shape))

    def _output(self, name: str, value: Value) -> Any:
        """Add an output of the graph under a name; return its description."""
        name = self._graph.unique(name)
        self._graph.nodes.append(
            helper.make_node("Identity", [value.name], [name], f"{name}:out")
        )
        return _described(dataclasses.replace(value, name=name), batch=None)


def _described(value: Value, batch: str | None) -> Any:
    sizes: list[int | str | None] = list(value.shape or ())
    for axis, size in enumerate(sizes):
        if size is None and batch is not None:
            sizes[axis] = batch if axis == 0 else f"{value.name}_{axis}"
    return helper.make_tensor_value_info(
        value.name, onnx_type(value.dtype), sizes
    )


def _writer_of(layer: keras.Layer) -> Any:
    """Return the registered function that writes a layer or operation."""
    if not isinstance(layer, keras.Layer):
        write = OPERATIONS.get(type(layer).__name__)
        if write is None or not type(layer).__module__.startswith("keras."):
            raise Refused(
                "ONNX files have no such operation here",
                f"the operations {', '.join(sorted(OPERATIONS))}",
            )
        return write
    cls = original_of(type(layer)) or type(layer)
    known = next((base for base in cls.__mro__ if base in LAYERS), None)
    if known is None:
        raise Refused(
            "ONNX files have no such layer here", f"the layers {_known()}"
        )
    replaced = _replaced(layer, cls.__mro__[: cls.__mro__.index(known)], known)
    if replaced:
        raise Refused(
            f"it replaces {replaced[0]!r} of {known.__name__}, and may "
            "compute something else",
            f"the layers {_known()}",
        )
    reason = why_code_differs(layer)
    if reason is not None:
        raise Refused(reason, f"the layers {_known()}")
    return LAYERS[known]


def _replaced(
    layer: keras.Layer, classes: tuple[type, ...], known: type
) -> list[str]:
    """Return the names of methods of a Keras class that a layer overrides."""
    members = [each for cls in classes for each in vars(cls).items()]
    found = {
        name
        for name, member in members
        if (callable(member) or isinstance(member, property))
        and hasattr(known, name)
    }
    return sorted(found - _HARMLESS | vars(layer).keys() & {"call"})


def _check_arguments(args: Any, kwargs: dict[str, Any]) -> None:
    """Raise if a layer's call has arguments besides the inputs."""
    given = {key for key, value in kwargs.items() if value is not None}
    if kwargs.get("training") is False:
        given -= {"training"}
    if len(args) != 1 or given:
        named = ", ".join(f"{key}={kwargs[key]!r}" for key in sorted(given))
        raise Refused(
            f"it is called with {named or f'{len(args)} arguments'}",
            "its inputs alone, for inference",
        )


def _shape(
    layer: keras.Layer, args: Any, kwargs: Any
) -> tuple[int | None, ...]:
    """Return the output shape of a layer or operation, by Keras's rules."""
    symbolic = keras.tree.map_structure(
        lambda x: (
            keras.KerasTensor(x.shape, x.dtype) if isinstance(x, Value) else x
        ),
        args,
    )
    if isinstance(layer, keras.Layer):
        shapes = keras.tree.map_structure(lambda x: x.shape, symbolic[0])
        return tuple(layer.compute_output_shape(shapes))
    return tuple(layer.compute_output_spec(*symbolic, **kwargs).shape)


def _is_graph(model: keras.Layer, attribute: str) -> bool:
    """Return True if a model has `attribute` and does not override `call`."""
    return (
        isinstance(model, keras.Model)
        and hasattr(model, attribute)
        and type(model).call.__module__.startswith("keras.")
    )


def _name_of(layer: keras.Layer) -> str:
    return path_of(layer) if isinstance(layer, keras.Layer) else layer.name


def _known() -> str:
    return ", ".join(sorted({cls.__name__ for cls in LAYERS}))


def _message(layer: keras.Layer, error: Refused) -> str:
    return (
        "A part of this model cannot be written to ONNX; nothing was "
        f"written. Received: {type(layer).__name__} {_name_of(layer)!r}: "
        f"{error.reason}. Allowed: {error.allowed}. Change this part of the "
        "model, or write what is before and behind it as two models."
    )
