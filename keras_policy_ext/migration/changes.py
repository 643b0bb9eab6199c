"""Arguments that Keras 3 has dropped or renamed, as tables.

Taken from the `get_config` methods of tf_keras 2.21 and the constructors of
keras 3.12 to 3.15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras

from keras_policy_ext.migration.problems import Config

ANY = object()
"""Whatever the value."""


def _each(names: str, values: object) -> dict[str, Any]:
    return dict.fromkeys(names.split(), values)


DROPPED: dict[str, dict[str, Any]] = {
    "layers": {
        # Some of them an InputLayer says; with others the numbers are the
        # same, by another kernel; `trainable` is of layers without weights.
        **_each(
            "batch_input_shape build_input_shape fused implementation "
            "input_dtype input_length kernel_initializer key_shape "
            "query_shape renorm_clipping renorm_momentum rng_type trainable "
            "value_shape vocabulary_size",
            ANY,
        ),
        **_each(
            "dynamic ragged renorm robust_masking softmax_robust_masking "
            "stateful time_major",
            (None, False),
        ),
        # Names with `kernel` are of SeparableConv, which has two kernels.
        **_each(
            "kernel_constraint kernel_regularizer noise_shape type_spec "
            "virtual_batch_size",
            (None,),
        ),
        "groups": (1,),
        "num_constants": (None, 0),
    },
    "initializers": _each("dtype", ANY),
    "losses": _each("fn", ANY),
    "metrics": _each("fn", ANY),
    "optimizers": _each("is_legacy_optimizer jit_compile", ANY),
}
"""By kind of object: argument and values that may go without a trace.

Looked at only where the Keras 3 class has no such argument.
"""

NOTES: dict[str, str] = {
    "RandomCrop": (
        "crops in training only: Keras 3 passes images on as they are in "
        "inference, where tf_keras resized them. Put a Resizing layer "
        "with crop_to_aspect_ratio=True after it, in a model that you "
        "build anew."
    )
}
"""What Keras 3 computes otherwise in layers that it takes."""

RENAMED: dict[str, dict[str, str]] = {
    "LeakyReLU": {"alpha": "negative_slope"},
    "InputLayer": {"batch_input_shape": "batch_shape"},
}


def revise(
    kind: str, name: str, config: dict[str, Any], known: frozenset[str]
) -> None:
    """Rename and recompute the arguments of one object, in place.

    Args:
        kind: A key of `classes.MODULES`.
        name: The class name in the legacy config.
        config: Its arguments; a copy that belongs to the caller.
        known: What a class of the caller's takes and need not be renamed.
    """
    for old, new in RENAMED.get(name, {}).items():
        if old in config and new not in config and old not in known:
            config[new] = config.pop(old)
    special = _SPECIAL.get(name) or _SPECIAL.get(kind)
    if special is not None:
        special(config)


def safe_name(name: str) -> str:
    """A layer name as Keras 3 takes it: it allows no slash."""
    return name.replace("/", "_")


def safe_names(names: Iterable[str]) -> dict[str, str]:
    """The names of the layers of one model as Keras 3 takes them.

    It takes no name twice: `a/b` next to `a_b` gets a count.
    """
    names = list(names)
    safe = {name: name for name in names if "/" not in name}
    for name in names:
        new, count = safe_name(name), 0
        while name not in safe and new in safe.values():
            count += 1
            new = f"{safe_name(name)}_{count}"
        safe.setdefault(name, new)
    return safe


def inner_layers(fields: Config | list[Config]) -> list[Config] | None:
    """The configs of the layers of a model, by its config; None without any.

    Before Keras 2.2 that of a sequential model was the list of its layers.
    """
    return fields.get("layers") if isinstance(fields, Mapping) else fields


def bytecode(value: object) -> list[Any] | None:
    """Code, defaults and closure of a function that has no name.

    As tf_keras writes one, but for the defaults, of which Python wants a
    tuple; None for anything else.
    """
    if not isinstance(value, (list, tuple)) or len(value) != 3:
        return None
    code, defaults, closure = value
    if not isinstance(code, str):
        return None
    return [code, None if defaults is None else tuple(defaults), closure]


def _batch_normalization(config: dict[str, Any]) -> None:
    axis = config.get("axis")
    if isinstance(axis, (list, tuple)) and len(axis) == 1:
        config["axis"] = axis[0]


def _sync_batch_normalization(config: dict[str, Any]) -> None:
    _batch_normalization(config)
    config["synchronized"] = True


def _discretization(config: dict[str, Any]) -> None:
    # tf_keras wrote the dtype of the outputs. Keras 3 casts the inputs to
    # it, on TensorFlow, where a fraction is lost (keras 3.12 to 3.15).
    dtype = config.get("dtype")
    if isinstance(dtype, dict):
        dtype = (dtype.get("config") or {}).get("name")
    if isinstance(dtype, str) and dtype.startswith(("int", "uint")):
        config["dtype"] = "float32"


def _optimizer(config: dict[str, Any]) -> None:
    if "lr" in config:
        config.setdefault("learning_rate", config.pop("lr"))
    decay = config.pop("decay", 0.0) or 0.0
    rate = config.get("learning_rate")
    if decay and isinstance(rate, (int, float)):
        # learning_rate / (1 + decay · iterations), as OptimizerV2 computes.
        schedule = keras.optimizers.schedules.InverseTimeDecay(
            rate, decay_steps=1, decay_rate=decay
        )
        serialized = keras.saving.serialize_keras_object(schedule)
        config["learning_rate"] = serialized


def _schedule(config: dict[str, Any]) -> None:
    # Keras 3 has names of its own as defaults, and takes None, but fails.
    if config.get("name") is None:
        config.pop("name", None)


def _loss(config: dict[str, Any]) -> None:
    if config.get("reduction") == "auto":
        config["reduction"] = "sum_over_batch_size"


def _lambda(config: dict[str, Any]) -> None:
    unread = "mask_module mask_type module function_type output_shape_module"
    for key in (*unread.split(), "output_shape_type"):
        config.pop(key, None)
    for key in ("function", "output_shape", "mask"):
        parts = bytecode(config.get(key))
        if parts is not None:
            code = zip(("code", "defaults", "closure"), parts, strict=True)
            config[key] = {"class_name": "__lambda__", "config": dict(code)}


_SPECIAL: dict[str, Callable[[dict[str, Any]], None]] = {
    "BatchNormalization": _batch_normalization,
    "BatchNormalizationV1": _batch_normalization,
    "BatchNormalizationV2": _batch_normalization,
    "SyncBatchNormalization": _sync_batch_normalization,
    "Discretization": _discretization,
    "Lambda": _lambda,
    "losses": _loss,
    "optimizers": _optimizer,
    "optimizers.schedules": _schedule,
}
