"""ONNX files: written beside their place, checked, and moved there."""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile
from typing import Any

import keras
import onnx
from onnx import helper

from keras_policy_ext._keras import walking
from keras_policy_ext._version import __version__
from keras_policy_ext.conversion.candidates import Candidate
from keras_policy_ext.conversion.selection import Selection
from keras_policy_ext.export.onnx.graph import Graph
from keras_policy_ext.export.onnx.initializers import Initializers
from keras_policy_ext.export.onnx.kernels import (
    Kernels,
    has_kernel,
    variable_of,
)
from keras_policy_ext.export.onnx.walk import Walk

PathLike = str | os.PathLike[str]


def write(
    model: keras.Model, path: PathLike, kernels: Kernels, opset: int
) -> None:
    """Write a model; see `keras_policy_ext.export.onnx.write`."""
    target = pathlib.Path(path).absolute()
    with tempfile.TemporaryDirectory(
        prefix=f".{target.name}.", suffix=".partial", dir=target.parent
    ) as folder:
        made = pathlib.Path(folder) / target.name
        data = made.with_name(f"{made.name}.data")
        _write(model, made, data, kernels, opset)
        onnx.checker.check_model(str(made), full_check=True)
        if data.exists():
            beside = target.with_name(data.name)
            _check_free(beside)
            os.replace(data, beside)
        os.replace(made, target)


def left_out(model: keras.Model, include: Any, exclude: Any) -> frozenset[int]:
    """The ids of the layers whose kernels stay float32.

    Raises:
        ValueError: If `include` matches no layer that could be stored.
    """
    selection = Selection.read(include, exclude, None, None)
    candidates = [
        Candidate(layer, type(layer), (variable_of(layer),))
        for layer in walking.layers_within(model)
        if has_kernel(layer)
    ]
    reasons = selection.reasons(candidates)
    return frozenset(id(candidates[number].layer) for number in reasons)


def _write(
    model: keras.Model,
    path: pathlib.Path,
    data: pathlib.Path,
    kernels: Kernels,
    opset: int,
) -> None:
    """Write a file, and one of numbers beside it if they are too many."""
    with contextlib.closing(Initializers(data)) as initializers:
        graph = Graph(initializers)
        inputs, outputs = Walk(graph, kernels).model(model)
        initializers.finish()
        opsets = [helper.make_opsetid("", opset)]
        whole = helper.make_model(
            helper.make_graph(
                graph.nodes, model.name, inputs, outputs, initializers.tensors
            ),
            opset_imports=opsets,
            ir_version=helper.find_min_ir_version_for(opsets),
            producer_name="keras-policy-ext",
            producer_version=__version__,
        )
        path.write_bytes(whole.SerializeToString())


def _check_free(path: pathlib.Path) -> None:
    if path.exists():
        raise FileExistsError(
            "The numbers of this model need a file of their own, and there "
            f"is one of its name. Received: {str(path)!r}. Allowed: a path "
            "that is free. Remove the file, or choose another name for the "
            "model."
        )
