"""Functions that run when Keras saves, loads or exports a model."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras

from keras_policy_ext import policies, user_code
from keras_policy_ext._keras import global_policy, walking
from keras_policy_ext.conversion.candidates import path_of
from keras_policy_ext.files import input_files, model_files
from keras_policy_ext.files.model_files import (
    CONFIG,
    METADATA,
    PathLike,
    Source,
)
from keras_policy_ext.files.saved_layers import is_float8_layer
from keras_policy_ext.layers.mixin import Float8Mixin
from keras_policy_ext.layers.state import Float8State
from keras_policy_ext.policies.of_layers import layers_in_float8

_file: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "the file that keras_policy_ext loads now", default=None
)


@contextlib.contextmanager
def loading(path: PathLike) -> Iterator[None]:
    """In the block, this package loads a file, and knows what is in it."""
    token = _file.set(str(path))
    try:
        yield
    finally:
        _file.reset(token)


def is_loading(path: PathLike) -> bool:
    """Return True in a block of `loading` for this file."""
    return _file.get() == str(path)


def warn_of_lost_float8(model: keras.Model, path: PathLike) -> None:
    """Warn if a loaded model has fewer float8 layers than the saved model."""
    # Only `.keras` files and folders are checked. Layers that were lost while
    # this package loads a file get float8 again.
    if _file.get() is not None:
        return
    saved = states_in_file(str(path))
    layers = layers_in_float8(model) if saved else []
    now = sum(bool(layer.float8_contracted) for layer in layers)
    if now < saved:
        user_code.warn(
            f"{saved - now} of the {saved} layers that were in float8 when "
            "this model was saved are not in float8 now: their model or "
            "block made stock layers anew, in the source policy. Their "
            f"weights are loaded. Received: {str(path)!r}. "
            "`keras_policy_ext.load_model(path)` brings all of them back, "
            "with their scales. If they are to stay so, `revert` the model "
            "before it is saved."
        )


def states_in_file(source: Source) -> int:
    """Return how many layers of a saved model were in float8."""
    return model_files.count(source, is_float8_layer)


def names_keras_float8(source: Source) -> bool:
    """Return True if the config in a file has Keras's own float8 policy."""
    try:
        config = _member_of(source, CONFIG)
    except model_files.OF_DAMAGE:  # Which the loader says.
        return False
    return b'"QuantizedFloat8DTypePolicy"' in config


FORMATS = {
    "jax": ("tf_saved_model",),
    "tensorflow": ("tf_saved_model",),
    "torch": ("torch",),
}
"""Formats of `Model.export` whose files were tested and give the same outputs.

On TensorFlow, an ONNX file needs an operation that ONNX lacks (tf2onnx 1.17),
and a LiteRT file needs operations that its runtime lacks (2.3), because values
are rounded by operations on their bits.
"""

KNOWN = ("tf_saved_model", "onnx", "openvino", "litert", "torch")
"""Formats of Keras 3.15; for any other, Keras raises."""


def check_export(model: keras.Model, format: str) -> None:
    """Raise NotImplementedError if Keras cannot export a model correctly.

    Files of this format may give other outputs for its float8 layers.
    """
    allowed = FORMATS.get(keras.backend.backend(), ())
    if format in allowed or format not in KNOWN:
        return
    layers = layers_in_float8(model)
    if not layers:
        return
    formats = " or ".join(map(repr, allowed)) or "none"
    raise NotImplementedError(
        f"A file in the format {format!r} does not compute what layers in "
        f"float8 do; nothing was written. Received: format={format!r} and a "
        f"model with {len(layers)} layers in float8, the first of them "
        f"{path_of(layers[0])!r}. Allowed on {keras.backend.backend()}: "
        f"{formats}; any format for a model without float8. For ONNX with "
        "float8 weights call `keras_policy_ext.export(model, path, "
        "format='onnx')`. For other formats save the model, call "
        "`keras_policy_ext.revert(model)`, or `thaw` where it is frozen, and "
        "export it then, in the source policy. `keras_policy_ext.load_model` "
        "has the model in float8 again."
    )


_KEY = "keras_policy_ext"  # Of all that this package adds to the metadata.
_POLICIES = "dtype_policies"
_OF_LAYERS = "layer_policies"


def policies_of_models(model: Any) -> dict[str, Any]:
    """Return the dtype policies of a model and its layers, for its file.

    They are JSON types: the name and policy of each model; the distinct
    policies of other layers; and the class of each, with the number of its
    policy.
    """
    # Keras writes optimizers, losses and metrics by the same function, when
    # they are pickled: they have no policies.
    if not isinstance(model, keras.Layer):
        return {}
    models = [
        [each.name, keras.dtype_policies.serialize(each.dtype_policy)]
        for each in _models(model)
    ]
    distinct: list[Any] = []
    layers: list[list[Any]] = []
    for each in _inner_layers(model):
        number = None  # Of its policy in `distinct`; None: it has no entry.
        policy = each.dtype_policy
        is_float8 = isinstance(policy, policies.Float8DTypePolicy)
        can_follow = is_float8 or is_plain(policy)
        # With the mixin, the state in the file has the policy.
        if can_follow and not isinstance(each, Float8Mixin):
            policy = keras.dtype_policies.serialize(policy)
            if policy not in distinct:
                distinct.append(policy)
            number = distinct.index(policy)
        layers.append([type(each).__name__, number])
    return {_KEY: {_POLICIES: models, _OF_LAYERS: [distinct, layers]}}


def is_plain(policy: Any) -> bool:
    """Return True for a policy that is one pair of dtypes."""
    is_map = isinstance(policy, keras.dtype_policies.DTypePolicyMap)
    return policy.quantization_mode is None and not is_map


def saved_under(saved: SavedPolicies, config: Any) -> keras.DTypePolicy | None:
    """Return the source policy of the model in a file, or None.

    `config` is that of the model.
    """
    # It is made global for loading, since layers that others make in their
    # constructors have the global policy.
    models = saved.models
    outer_name, policy = models[0] if models else (None, None)
    if outer_name != (config.get("config") or {}).get("name"):
        policy = None
    policy = getattr(policy, "source_policy", policy)
    return policy if policy is not None and is_plain(policy) else None


def restore_policies(model: keras.Layer, saved: SavedPolicies) -> None:
    """Give a model and its inner models the dtype policies in a file.

    Layers get theirs if the file lists the same classes in the same order, and
    models if it lists the same names.
    """
    layers = _inner_layers(model)
    classes = [class_name for class_name, _ in saved.layers]
    if classes == [type(layer).__name__ for layer in layers]:
        for layer, (_, number) in zip(layers, saved.layers, strict=True):
            if number is None or isinstance(layer, Float8Mixin):
                continue
            policy = saved.distinct[number]
            if layer.dtype_policy != policy:
                global_policy.replace_layer_policy(layer, policy)
    models = _models(model)
    if [name for name, _ in saved.models] == [each.name for each in models]:
        for each, (_, policy) in zip(models, saved.models, strict=True):
            if each.dtype_policy != policy:
                global_policy.replace_layer_policy(each, policy)


def _models(model: keras.Layer) -> list[Any]:
    """Return a model and the models in it."""
    layers = walking.layers_within(model)
    return [layer for layer in layers if isinstance(layer, keras.Model)]


def _inner_layers(model: keras.Layer) -> list[Any]:
    """Return the layers in a model that are neither models nor states."""
    left_out = keras.Model, Float8State
    layers = walking.layers_within(model)
    return [layer for layer in layers if not isinstance(layer, left_out)]


class SavedPolicies(NamedTuple):
    """What the metadata in a file say of policies."""

    models: list[tuple[str, keras.DTypePolicy]]  # The name and policy of each.
    distinct: list[keras.DTypePolicy]  # Of other layers.
    # The class name of each of these, and the number of its policy, or None.
    layers: list[tuple[str, int | None]]


def read_policies(path: PathLike) -> SavedPolicies:
    """Return what the metadata in a file say of policies.

    Raises:
        ValueError: If they are no list of policies.
    """
    try:
        metadata = input_files.json_in(_member_of(path, METADATA), path)
        if not isinstance(metadata, dict) or _KEY not in metadata:
            return SavedPolicies([], [], [])
        entries = metadata[_KEY][_POLICIES]
        models = [(str(name), policies.get(dict(x))) for name, x in entries]
        configs, numbers = metadata[_KEY].get(_OF_LAYERS, ([], []))
        distinct = [policies.get(dict(each)) for each in configs]
        valid = range(len(distinct))  # A number beyond it is an IndexError.
        layers = [
            (str(name), None if n is None else valid[n]) for name, n in numbers
        ]
        return SavedPolicies(models, distinct, layers)
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"The policies of the models in this file cannot be read. "
            f"Received: {str(path)!r}, and in its {METADATA}: {error}. "
            "Allowed: a file as `model.save` writes it. Save it again, or load "
            "it with `keras.saving.load_model`."
        ) from error


def _member_of(source: Source, name: str) -> bytes:
    """Return a JSON file in a model's file or folder; `{}` if it has none."""
    try:
        return model_files.content(source, name)
    except (KeyError, OSError):
        return b"{}"
