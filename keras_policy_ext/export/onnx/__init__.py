"""Models as ONNX files, with kernels in float8."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any

import keras

if TYPE_CHECKING:
    from keras_policy_ext.conversion.requested import PathPatterns

PathLike = str | os.PathLike[str]

OPSETS = range(19, 26)
"""Versions of the operators with which what is written was run."""

OPSET = 21
"""The default opset: the first that has blocks."""


def write(
    model: keras.Model,
    path: PathLike,
    *,
    weights: str | None = None,
    granularity: str | None = None,
    activations: str | None = "auto",
    include: PathPatterns | None = None,
    exclude: PathPatterns | None = None,
    overwrite: bool = False,
    opset: int | None = None,
) -> Any:
    """Write a model to an ONNX file with kernels of one byte a number.

    The file computes in float32, whatever the compute dtype of the model.
    Frozen kernels are written with their bytes. Those of a model without any
    are quantized, one at a time. The adapters of LoRA are added before.

    The file appears at its path when it is whole and checked. A model of more
    than 2 GB has its numbers in a second file beside it, `path + ".data"`.

    Args:
        model: A built Functional or Sequential model, of layers that ONNX has
            operators for. Models in it are such models too.
        path: Where the file belongs.
        weights: As for `keras_policy_ext.export`.
        granularity: As for `keras_policy_ext.export`; else per channel.
        activations: As for `keras_policy_ext.export`.
        include: As for `keras_policy_ext.export`.
        exclude: As for `keras_policy_ext.export`.
        overwrite: Whether a file at `path` is replaced.
        opset: The version of the operators, 19 to 25; None for 21, and no
            less for scales of blocks.

    Returns:
        An `ExportReport`.

    Raises:
        ImportError: If `onnx` is not installed.
        ValueError: If an argument is something else, or the model is no graph.
        NotImplementedError: If a layer cannot be written; it is named.
        FileExistsError: If there is a file that is not to be replaced.
    """
    _check_installed()
    opset = OPSET if opset is None else opset
    _check_opset(opset)
    from keras_policy_ext.export import kernels
    from keras_policy_ext.export.onnx import walk
    from keras_policy_ext.export.onnx.kernels import Kernels
    from keras_policy_ext.export.report import ExportReport

    walk.check(model)
    found = kernels.of_model(model, include, exclude)
    scheme = kernels.scheme_of(
        found.values(), weights, granularity, activations, kernels.USUAL
    )
    _check_blocks(scheme.granularity, opset)
    chosen = Kernels(found, scheme)
    walk.write(model, path, chosen, opset, overwrite)
    return ExportReport.of(path, "onnx", scheme, chosen.written.values())


def _check_installed() -> None:
    if importlib.util.find_spec("onnx") is None:
        raise ImportError(
            "The package onnx is not installed, which writes ONNX files. "
            "Allowed: onnx 1.18 or later. Install it with `pip install "
            "keras-policy-ext[export]`."
        )


def _check_opset(opset: object) -> None:
    from onnx import defs

    last = min(OPSETS[-1], defs.onnx_opset_version())
    if opset not in OPSETS[: last - OPSETS[0] + 1]:
        raise ValueError(
            "`opset` is not supported: it was not tried with float8, or is "
            "newer than the onnx that is installed. Received: "
            f"opset={opset!r}. Allowed: {OPSETS[0]} to {last}. Leave it out "
            "for the default."
        )


def _check_blocks(granularity: str, opset: int) -> None:
    if granularity == "block" and opset < OPSET:
        raise ValueError(
            f"This `opset` has no scales of blocks. Received: opset={opset}. "
            f"Allowed: {OPSET} to {OPSETS[-1]}. Leave it out, or take another "
            "granularity."
        )
