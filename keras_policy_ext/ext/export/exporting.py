"""Check the arguments of `export`, and call the writer of the format."""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Iterable, Sequence
from typing import Any

import keras

from keras_policy_ext.conversion.candidates import check as check_convertible
from keras_policy_ext.ext.export import _keras as hub
from keras_policy_ext.ext.export import (
    exported_kernels,
    hugging_face,
    language_models,
    plain,
    readers,
    safetensors_files,
)
from keras_policy_ext.ext.export.exported_kernels import ExportedKernel, Scheme
from keras_policy_ext.ext.export.readers import Reader
from keras_policy_ext.ext.export.report import ExportReport


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """The arguments of `export`, except the model.

    Attributes:
        path, format, include, exclude, tokenizer, max_shard_size, overwrite:
            As for `export`.
        asked: `weights`, `granularity` and `activations`.
        options: More arguments for one format.
    """

    path: str | os.PathLike[str]
    format: str
    asked: tuple[str | None, str | None, str | None]
    include: Any
    exclude: Any
    tokenizer: Any
    max_shard_size: int | str
    overwrite: bool
    options: dict[str, Any]


def run(
    model: keras.Layer, request: ExportRequest, formats: Sequence[str]
) -> Any:
    """Write a model in the requested format, which must be in `formats`."""
    _check_format(request.format, request.options, formats)
    if request.format == "onnx":
        return _to_onnx(model, request)
    check_convertible(model, "can be exported")
    if request.format == "safetensors":
        return _to_file(model, request)
    return _to_folder(model, request)


def _to_onnx(model: keras.Layer, request: ExportRequest) -> Any:
    write = importlib.import_module("keras_policy_ext.ext.onnx").write
    weights, granularity, activations = request.asked
    report = write(
        model,
        request.path,
        weights=weights,
        granularity=granularity,
        activations=activations,
        include=request.include,
        exclude=request.exclude,
        overwrite=request.overwrite,
        **request.options,
    )
    merged = exported_kernels.merged_notes(
        model, request.include, request.exclude
    )
    if not merged:
        return report
    return dataclasses.replace(report, notes=(*report.notes, *merged))


def _to_file(model: keras.Layer, request: ExportRequest) -> ExportReport:
    found = exported_kernels.of_model(model, request.include, request.exclude)
    scheme = exported_kernels.scheme_of(
        found.values(), *request.asked, exported_kernels.USUAL
    )
    _check_static(found.values(), scheme)
    whole = language_models.whole(
        request.path, folder=False, overwrite=request.overwrite
    )
    with whole as place:
        written = plain.write(model, place, found, scheme)
    notes = exported_kernels.merged_notes(
        model, request.include, request.exclude
    )
    return ExportReport.of(request.path, request.format, scheme, written, notes)


def _to_folder(model: keras.Layer, request: ExportRequest) -> ExportReport:
    size = safetensors_files.size_of(request.max_shard_size)
    backbone, tokenizer = language_models.parts(model, request.format)
    found = exported_kernels.of_model(
        backbone, request.include, request.exclude
    )
    scheme = exported_kernels.scheme_of(
        found.values(), *request.asked, readers.USUAL[request.format]
    )
    reader = Reader(request.format, str(hub.family(backbone)), scheme)
    reader.check()
    folder = hugging_face.Folder(backbone, found, reader)
    kernels = [k for entry in folder.entries for k in entry.kernels]
    _check_static(kernels, scheme)
    reader.check_scales({k.scale_format(scheme) for k in kernels})
    whole = language_models.whole(
        request.path, folder=True, overwrite=request.overwrite
    )
    with whole as place:
        written = folder.write(place, size, request.tokenizer or tokenizer)
    merged = exported_kernels.merged_notes(
        backbone, request.include, request.exclude
    )
    notes = (*reader.notes, *folder.notes(), *merged)
    return ExportReport.of(request.path, request.format, scheme, written, notes)


def _check_format(
    format: object, options: dict[str, Any], formats: Sequence[str]
) -> None:
    if format not in formats:
        raise ValueError(
            f"{format!r} is not a format of `export`. Received: "
            f"format={format!r}. Allowed: {', '.join(map(repr, formats))}. "
            "Pass one of them."
        )
    if options and format != "onnx":
        raise TypeError(
            f"`export` has no argument {' and '.join(sorted(options))} for "
            f"format={format!r}. Received: {sorted(options)} with "
            f"format={format!r}. Allowed: the arguments in the signature of "
            "`export`; others only with format='onnx'. Leave them out."
        )


def _check_static(found: Iterable[ExportedKernel], scheme: Scheme) -> None:
    """Raise if static activations are requested, but a scale is missing."""
    if scheme.activations != "static":
        return
    lacking = [
        kernel.path
        for kernel in found
        if kernel.left_out is None
        and kernel.input_scale() is None
        and not kernel.is_looked_up
    ]
    if lacking:
        raise ValueError(
            "activations='static' needs scales of inputs, which this model "
            "does not have. Received: activations='static', and "
            f"{len(lacking)} kernels without one, such as {lacking[0]!r}. "
            "Allowed: a model that was frozen with static scales. Call "
            "`kpe.freeze(model, activations='static')` after training in "
            "float8 or `kpe.calibrate`, or leave layers out with `exclude`."
        )
