"""ONNX files: written beside their place, checked, and moved there."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Callable
from typing import Any

import keras
import onnx
from onnx import helper

from keras_policy_ext._version import __version__
from keras_policy_ext.export import language_models
from keras_policy_ext.export.onnx.graph import OnnxGraph
from keras_policy_ext.export.onnx.initializers import Initializers
from keras_policy_ext.export.onnx.kernels import Kernels
from keras_policy_ext.export.onnx.walk import Walk

PathLike = str | os.PathLike[str]


def write(
    model: keras.Model,
    path: PathLike,
    kernels: Kernels,
    opset: int,
    overwrite: bool,
) -> None:
    """Write a model; see `keras_policy_ext.export.onnx.write`."""
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
    model: Any,
    path: pathlib.Path,
    data: pathlib.Path,
    kernels: Kernels,
    opset: int,
) -> None:
    """Write a file, and one of numbers beside it if they are too many."""
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
    """Removes the numbers of a model that did not get to its place."""

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
