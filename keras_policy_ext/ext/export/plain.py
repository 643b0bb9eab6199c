"""The plain format: one file with the model's own weight names.

The name of a weight is its path. A quantized weight has its codes in the shape
of the kernel, and its scales in `<name>_scale`. The metadata list the summed
axes of each, which define the blocks of 128x128.
"""

from __future__ import annotations

import json
import os
from typing import Any

import keras
import numpy as np

from keras_policy_ext import formats, loops, stored_kernels
from keras_policy_ext._version import __version__
from keras_policy_ext.ext.export import exported_kernels, safetensors_files
from keras_policy_ext.ext.export.exported_kernels import ExportedKernel, Scheme
from keras_policy_ext.ext.export.report import Written
from keras_policy_ext.ext.export.safetensors_files import (
    CODES,
    DTYPES,
    OneAtATime,
    Tensor,
)
from keras_policy_ext.files import input_files
from keras_policy_ext.stored_kernels import Axes, StoredKernel

Array = np.ndarray[Any, Any]

FORMAT = "keras_policy_ext"
VERSION = 1

_KEY = "kernels"
_SCALE, _INPUT_SCALE = "_scale", "_input_scale"


def write(
    model: keras.Layer,
    path: str | os.PathLike[str],
    found: dict[int, ExportedKernel],
    scheme: Scheme,
) -> list[Written]:
    """Write the weights of a model to one safetensors file."""
    tensors: list[Tensor] = []
    written: list[Written] = []
    about: dict[str, Any] = {}
    owners = exported_kernels.owners(model)
    for name, variable in _weights(model).items():
        kernel = found.get(id(variable))
        if kernel is not None and kernel.left_out is None:
            made = _quantized(name, kernel, scheme)
            about[name] = _about(kernel, scheme)
            reason = ""
        else:
            made = [_float(name, owners.get(id(variable)), variable)]
            reason = (
                getattr(kernel, "left_out", None) or exported_kernels.NO_KERNEL
            )
        tensors += made
        nbytes = sum(tensor.nbytes for tensor in made)
        dtype = str(DTYPES[made[0].dtype])
        written.append(
            Written(name, name, made[0].shape, dtype, reason, nbytes)
        )
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "writer": f"keras_policy_ext {__version__}",
        _KEY: json.dumps(about),
    }
    safetensors_files.write(path, tensors, metadata)
    return written


def read(path: str | os.PathLike[str]) -> dict[str, Array | StoredKernel]:
    """Read a file of the plain format: arrays and `StoredKernel`s by name.

    Returns:
        Weights by name: arrays, which are views of the file, and for
        quantized weights a `StoredKernel`, with `dequantized()`. Scales of
        inputs are arrays named `<name>_input_scale`.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is damaged, or has another format.
    """
    slots, metadata = safetensors_files.read(path)
    if metadata.get("format") != FORMAT or metadata.get("version") != "1":
        raise ValueError(
            "This file was not written in the plain form. Received: "
            f"{str(path)!r} with the metadata {metadata}. Allowed: a file that "
            "`export(model, path, format='safetensors')` wrote. To read a "
            "folder of Hugging Face, call `load_quantized`."
        )
    arrays: dict[str, Any] = {n: slot.read() for n, slot in slots.items()}
    try:
        for name, about in input_files.json_in(metadata[_KEY], path).items():
            arrays[name] = _stored(
                arrays[name], arrays.pop(name + _SCALE), about
            )
    except safetensors_files.OF_DAMAGE as error:
        raise ValueError(
            "The metadata of this file does not fit its tensors. Received: "
            f"{str(path)!r}: {error!r}. Allowed: the file as `export` wrote "
            "it. Export it again."
        ) from error
    return arrays


def _weights(model: keras.Layer) -> dict[str, Any]:
    """Return the variables to write, by path; equal paths get a number."""
    merged = exported_kernels.adapters_within(model)
    of_kernels = {
        id(part)
        for variable in model.weights
        if exported_kernels.is_frozen(variable)
        for part in (variable.scale, variable.inputs_scale)
        if part is not None
    }
    found: dict[str, Any] = {}
    for variable in loops.weights(model):
        if id(variable) in merged | of_kernels:
            continue
        name, number = variable.path, 1
        while name in found:
            number += 1
            name = f"{variable.path}#{number}"
        found[name] = variable
    return found


def _float(name: str, layer: keras.Layer, variable: keras.Variable) -> Tensor:
    dtype = keras.backend.standardize_dtype(variable.dtype)
    if exported_kernels.is_frozen(variable):
        dtype = layer.variable_dtype

    def make() -> Array:
        value = exported_kernels.float_value(layer, variable)
        return value.astype(DTYPES[CODES[dtype]])

    return Tensor(name, CODES[dtype], tuple(variable.shape), make)


def _quantized(
    name: str, kernel: ExportedKernel, scheme: Scheme
) -> list[Tensor]:
    one = OneAtATime(lambda: kernel.stored(scheme))
    kept = kernel.variable if kernel.frozen else scheme
    shape = tuple(kernel.variable.shape)
    of_scale = stored_kernels.scale_shape(shape, kernel.axes, kept.granularity)
    made = [
        Tensor(
            name,
            CODES[_dtype_of(kept.weights)],
            shape,
            lambda: one.kernel().codes.view(_dtype_of(kept.weights)),
        ),
        Tensor(name + _SCALE, "F32", of_scale, lambda: one.scales()),
    ]
    scale = kernel.input_scale()
    if scale is not None:
        array = np.full((), scale, "float32")
        made.append(Tensor(name + _INPUT_SCALE, "F32", (), lambda: array))
    return made


def _dtype_of(weights: str) -> str:
    """Return the dtype of codes in a file, of which each has a byte."""
    form = formats.get(weights)
    if form.is_integer:
        return "int8"
    return "uint8" if form.bits < 8 else str(form.dtype)


def _about(kernel: ExportedKernel, scheme: Scheme) -> dict[str, Any]:
    kept = kernel.variable if kernel.frozen else scheme
    return {
        "weights": kept.weights,
        "granularity": kept.granularity,
        "summed": list(kernel.axes.summed),
        "free": list(kernel.axes.free),
    }


def _stored(values: Array, scale: Array, about: Any) -> StoredKernel:
    """Return codes, scales and metadata of a file as a kernel, or raise."""
    axes = Axes(tuple(about["summed"]), tuple(about["free"]))
    if sorted(axes.summed + axes.free) != list(range(values.ndim)):
        raise ValueError(f"axes {axes} of {values.ndim}")
    if str(values.dtype) != _dtype_of(about["weights"]):
        raise ValueError(f"{values.dtype} for {about['weights']}")
    if about["granularity"] not in stored_kernels.GRANULARITIES:
        raise ValueError(f"granularity {about['granularity']!r}")
    expected = stored_kernels.scale_shape(
        values.shape, axes, about["granularity"]
    )
    if scale.shape != expected or scale.dtype != np.float32:
        raise ValueError(f"scales {scale.shape} for {expected}")
    return StoredKernel(
        codes=values.view("uint8"),
        scale=scale,
        weights=about["weights"],
        granularity=about["granularity"],
        axes=axes,
    )
