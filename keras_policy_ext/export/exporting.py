"""`export`: the checks, and the way to the writer of each format."""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Iterable
from typing import Any

import keras

from keras_policy_ext._keras import keras_hub_export as hub
from keras_policy_ext.conversion import models
from keras_policy_ext.export import (
    hugging_face,
    kernels,
    language_models,
    outputs,
    plain,
    readers,
    shards,
)
from keras_policy_ext.export.kernels import Kernel, Scheme
from keras_policy_ext.export.readers import Reader
from keras_policy_ext.export.report import ExportReport, Written

FORMATS = ("compressed-tensors", "fp8", "modelopt", "safetensors", "onnx")

_USUAL = Scheme(
    weights="float8_e4m3fn", granularity="channel", activations=None
)


def export(
    model: keras.Layer,
    path: str | os.PathLike[str],
    format: str = "compressed-tensors",
    *,
    weights: str | None = None,
    granularity: str | None = None,
    activations: str | None = "auto",
    include: Any = None,
    exclude: Any = None,
    tokenizer: Any = None,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
    **options: Any,
) -> Any:
    """Write a model with float8 kernels, for a reader without Keras.

    A frozen kernel is written with the bytes that it has; any other is
    quantized while it is written, one at a time. The adapters of LoRA are
    merged into the kernel, which is then quantized again. The model stays as
    it is. What is written appears under its name when it is whole.

    Args:
        model: A built model. For the formats of Hugging Face a language model
            of KerasHub, or its backbone; for the others any.
        path: The folder to write, or for `"safetensors"` and `"onnx"` the
            file.
        format: `"compressed-tensors"` (vLLM, transformers), `"fp8"`
            (transformers, vLLM; blocks of 128x128 or per tensor),
            `"modelopt"` (TensorRT-LLM, vLLM; per tensor, static),
            `"safetensors"` (one file with the model's own names) or
            `"onnx"`.
        weights: The format of the numbers. None: that of frozen kernels, else
            `"float8_e4m3fn"`.
        granularity: `"channel"`, `"tensor"` or `"block"`. None: that of
            frozen kernels, else what the format is mostly read in.
        activations: None, `"dynamic"` or `"static"`: how a reader quantizes
            inputs. `"auto"`: as the frozen layers do, else not. Static scales
            are those of frozen layers.
        include: Regular expressions, one of which must be found in the path
            of a layer that is quantized; None for any.
        exclude: Regular expressions of layers that are written in float.
        tokenizer: Of KerasHub, to be written too; None for that of the task.
        max_shard_size: The most bytes in one file, such as `"5GB"`.
        overwrite: Whether an earlier export at `path` is replaced.
        **options: More arguments of the format `"onnx"`.

    Returns:
        An `ExportReport`, or what the writer of ONNX returns.

    Raises:
        ValueError: If the reader of the format cannot take the model, or an
            argument is wrong.
        TypeError: If the model is none for this format.
        OSError: If it cannot be written; FileExistsError if something is at
            `path`.
    """
    _check_format(format, options)
    request = _Request(
        path,
        format,
        (weights, granularity, activations),
        include,
        exclude,
        overwrite,
    )
    if format == "onnx":
        return _to_onnx(model, request, options)
    if format == "safetensors":
        return _to_file(model, request)
    size = shards.size_of(max_shard_size)
    return _to_folder(model, request, size, tokenizer)


@dataclasses.dataclass(frozen=True)
class _Request:
    """Arguments of `export`; `asked` are those that make a `Scheme`."""

    path: str | os.PathLike[str]
    format: str
    asked: tuple[str | None, str | None, str | None]
    include: Any
    exclude: Any
    overwrite: bool


def _to_onnx(model: Any, request: _Request, options: dict[str, Any]) -> Any:
    write = importlib.import_module("keras_policy_ext.export.onnx").write
    weights, granularity, activations = request.asked
    return write(
        model,
        request.path,
        weights=weights,
        granularity=granularity,
        activations=activations,
        include=request.include,
        exclude=request.exclude,
        overwrite=request.overwrite,
        **options,
    )


def _to_file(model: Any, request: _Request) -> ExportReport:
    models.check(model)
    found = kernels.of_model(model, request.include, request.exclude)
    scheme = kernels.scheme_of(found.values(), *request.asked, _USUAL)
    _check_static(found.values(), scheme)
    whole = outputs.whole(
        request.path, folder=False, overwrite=request.overwrite
    )
    with whole as place:
        written = plain.write(model, place, found, scheme)
    return _report(request, scheme, written, ())


def _to_folder(
    model: Any, request: _Request, shard_size: int, tokenizer: Any
) -> ExportReport:
    backbone, own_tokenizer = language_models.parts(model, request.format)
    found = kernels.of_model(backbone, request.include, request.exclude)
    scheme = kernels.scheme_of(
        found.values(), *request.asked, readers.USUAL[request.format]
    )
    reader = Reader(request.format, str(hub.family(backbone)), scheme)
    reader.check()
    folder = hugging_face.Folder(backbone, found, reader)
    _check_static(
        [k for entry in folder.entries for k in entry.kernels], scheme
    )
    whole = outputs.whole(
        request.path, folder=True, overwrite=request.overwrite
    )
    with whole as place:
        written = folder.write(place, shard_size, tokenizer or own_tokenizer)
    return _report(request, scheme, written, reader.notes)


def _report(
    request: _Request,
    scheme: Scheme,
    written: list[Written],
    notes: tuple[str, ...],
) -> ExportReport:
    return ExportReport(
        os.fspath(request.path),
        request.format,
        f"{scheme.weights} per {scheme.granularity}, "
        f"inputs {scheme.activations or 'not quantized'}",
        tuple(written),
        notes,
    )


def _check_format(format: object, options: dict[str, Any]) -> None:
    if format not in FORMATS:
        raise ValueError(
            f"This is no format of `export`. Received: format={format!r}. "
            f"Allowed: {', '.join(map(repr, FORMATS))}. Pass one of them."
        )
    if options and format != "onnx":
        raise TypeError(
            f"`export` has no such argument. Received: {sorted(options)} with "
            f"format={format!r}. Allowed: the named ones; more go to "
            "format='onnx' alone."
        )


def _check_static(found: Iterable[Kernel], scheme: Scheme) -> None:
    """Raise if inputs have no scale that was observed."""
    if scheme.activations != "static":
        return
    lacking = [
        kernel.path
        for kernel in found
        if kernel.left_out is None and kernel.input_scale() is None
    ]
    if lacking:
        raise ValueError(
            "Static scales of inputs are those of frozen layers. Received: "
            f"activations='static', and {len(lacking)} kernels without one, "
            f"such as {lacking[0]!r}. Allowed: a model that was frozen with "
            "them. Call `kpe.freeze(model, activations='static')` after "
            "training in float8 or `kpe.calibrate`, or leave layers out with "
            "`exclude`."
        )
