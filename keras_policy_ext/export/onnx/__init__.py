"""Models as ONNX files, with kernels in float8."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Collection
from typing import Any

import keras

from keras_policy_ext import stored_kernels

PathLike = str | os.PathLike[str]

OPSETS = range(19, 26)
"""Versions of the operators with which what is written was run."""

OPSET = 21
"""What is taken unless another is asked for: the first that has blocks."""


def write(
    model: keras.Model,
    path: PathLike,
    *,
    weights: str = "float8_e4m3fn",
    granularity: str = "channel",
    activations: str | None = None,
    include: Any = None,
    exclude: Any = None,
    opset: int | None = None,
) -> None:
    """Write a model to an ONNX file with kernels of one byte a number.

    The file computes in float32, whatever the compute dtype of the model.
    Kernels of frozen layers are written as they are, with the rounding of
    their inputs; all others are quantized, one at a time, as the arguments
    say. The adapters of LoRA are added to a kernel before.

    The file appears at its path when it is whole and checked, and replaces
    what was there. A model of more than 2 GB has its numbers in a second file
    beside it, `path + ".data"`.

    Args:
        model: A built Functional or Sequential model, of layers that ONNX has
            operators for. Models in it are such models too.
        path: Where the file belongs.
        weights: The format of kernels that are not frozen.
        granularity: What has a scale: `"channel"`, `"tensor"` or `"block"`.
        activations: None, or `"dynamic"`: inputs of kernels that are not
            frozen are rounded to float8, with a scale for each token.
            `"static"` is for frozen layers, which have such scales.
        include: Patterns of paths of layers; others stay float32. None: all.
        exclude: Patterns of paths of layers that stay float32.
        opset: The version of the operators. 19 to 25; None: 21.
            Blocks need 21.

    Raises:
        ImportError: If `onnx` is not installed.
        ValueError: If an argument is something else.
        NotImplementedError: If a layer cannot be written; it is named.
        FileExistsError: If there is a file where the numbers belong.
    """
    _check_installed()
    _check("weights", weights, stored_kernels.WEIGHTS)
    _check("granularity", granularity, stored_kernels.GRANULARITIES)
    _check("activations", activations, (None, "dynamic", "static"))
    opset = OPSET if opset is None else opset
    _check("opset", opset, OPSETS)
    from keras_policy_ext.export.onnx import kernels, walk, writing

    walk.check(model)
    chosen = kernels.Kernels(
        weights=weights,
        granularity=granularity,
        activations=activations,
        left_out=writing.left_out(model, include, exclude),
        takes_blocks=opset >= OPSET,
    )
    writing.write(model, path, chosen, opset)


def _check_installed() -> None:
    if importlib.util.find_spec("onnx") is None:
        raise ImportError(
            "ONNX files are written with the package onnx, which is not "
            "installed. Allowed: onnx 1.18 or later. Install it with "
            "`pip install keras-policy-ext[export]`."
        )


def _check(name: str, value: object, allowed: Collection[Any]) -> None:
    if value not in allowed:
        raise ValueError(
            f"Wrong {name} of an ONNX file. Received: {value!r}. Allowed: "
            f"{', '.join(map(repr, allowed))}. Pass one of them."
        )
