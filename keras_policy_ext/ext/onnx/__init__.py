"""Write models as ONNX files, with kernels in float8."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any

import keras

if TYPE_CHECKING:
    from keras_policy_ext.conversion.requested import PathPatterns

PathLike = str | os.PathLike[str]

OPSETS = range(19, 26)
"""The opsets with which written files were tested."""

OPSET = 21
"""The default opset: the first with scales per block."""


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
    """Write a model to an ONNX file with kernels of one byte per element.

    The file computes in float32, whatever the compute dtype of the model.
    Frozen kernels are written byte for byte. If no kernel of the model is
    frozen, the kernels are quantized, one at a time. LoRA adapters are merged
    before.

    The file appears at its path only when it is complete and checked. A model
    of more than 2 GB has its weights in a second file beside it, which is
    `path + ".data"`.

    Args:
        model: A built Functional or Sequential model, also nested, of layers
            that ONNX has operators for.
        path: The file to write.
        weights: As for `keras_policy_ext.export`.
        granularity: As for `keras_policy_ext.export`; by default per channel.
        activations: As for `keras_policy_ext.export`.
        include: As for `keras_policy_ext.export`.
        exclude: As for `keras_policy_ext.export`.
        overwrite: Whether to replace a file at `path`.
        opset: The version of the operators, 19 to 25; None for 21. Scales
            per block need at least 21.

    Returns:
        An `ExportReport`.

    Raises:
        ImportError: If `onnx` is not installed.
        ValueError: If an argument is wrong, or the model has no graph.
        NotImplementedError: If a layer cannot be written. The error names it.
        FileExistsError: If there is a file and `overwrite` is False.
    """
    _check_installed()
    opset = OPSET if opset is None else opset
    _check_opset(opset)
    from keras_policy_ext.ext.export import exported_kernels
    from keras_policy_ext.ext.export.report import ExportReport
    from keras_policy_ext.ext.onnx import walk
    from keras_policy_ext.ext.onnx.kernel_nodes import Kernels

    walk.check(model)
    found = exported_kernels.of_model(model, include, exclude)
    scheme = exported_kernels.scheme_of(
        found.values(),
        weights,
        granularity,
        activations,
        exported_kernels.USUAL,
    )
    _check_scheme(scheme.weights, scheme.granularity, opset)
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


def _check_scheme(weights: str, granularity: str, opset: int) -> None:
    if weights in ("int3", "int2", "float4_e2m1fn"):
        # onnxruntime 1.31 runs no `DequantizeLinear` of e2m1fn.
        kind = "integers" if weights.startswith("int") else "floats"
        raise ValueError(
            f"Readers of ONNX have no such {kind}. Received: "
            f"weights={weights!r}. Allowed: 'int8', 'int4', and the formats of "
            "float8. Freeze the model in one of them."
        )
    in_tiles = granularity not in ("channel", "tensor")
    if (in_tiles or weights == "int4") and opset < OPSET:
        what = "scales of blocks" if in_tiles else "integers of four bits"
        raise ValueError(
            f"This `opset` has no {what}. Received: opset={opset}. "
            f"Allowed: {OPSET} to {OPSETS[-1]}. Leave it out, or take another "
            "granularity."
        )
