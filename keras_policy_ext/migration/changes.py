"""Arguments that Keras 3 has dropped or renamed, as tables.

Taken from the `get_config` methods of tf_keras 2.21 and the constructors of
keras 3.12 to 3.15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras

ANY = object()
"""Whatever the value."""

_OPTIMIZER = {"is_legacy_optimizer": ANY, "jit_compile": ANY}
_OFF = (None, False)

DROPPED: dict[str, dict[str, Any]] = {
    "layers": {
        "batch_input_shape": ANY,  # an InputLayer says it
        "build_input_shape": ANY,
        "dynamic": _OFF,
        "fused": ANY,
        "groups": (1,),
        "implementation": ANY,  # the same numbers by another kernel
        "input_dtype": ANY,
        "input_length": ANY,
        "noise_shape": (None,),
        "num_constants": (None, 0),
        "query_shape": ANY,
        "key_shape": ANY,
        "value_shape": ANY,
        "ragged": _OFF,
        "renorm": _OFF,
        "renorm_clipping": ANY,
        "renorm_momentum": ANY,
        "rng_type": ANY,
        "robust_masking": _OFF,
        "softmax_robust_masking": _OFF,
        "stateful": _OFF,
        "time_major": _OFF,
        "type_spec": (None,),
        "virtual_batch_size": (None,),
        "trainable": ANY,  # of layers without weights
        "vocabulary_size": ANY,
        "kernel_constraint": (None,),  # of SeparableConv, which has two
        "kernel_initializer": ANY,
        "kernel_regularizer": (None,),
    },
    "initializers": {"dtype": ANY},
    "losses": {"fn": ANY},
    "metrics": {"fn": ANY},
    "optimizers": _OPTIMIZER,
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
    ),
}
"""Of layers that Keras 3 takes, but computes otherwise."""

RENAMED: dict[str, dict[str, str]] = {
    "LeakyReLU": {"alpha": "negative_slope"},
    "InputLayer": {"batch_input_shape": "batch_shape"},
}


def revise(
    kind: str,
    name: str,
    config: dict[str, Any],
    known: frozenset[str] = frozenset(),
) -> dict[str, Any]:
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
    return config


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


def inner_layers(fields: Any) -> Any:
    """The configs of the layers of a model; None if it has none.

    Args:
        fields: The config of the model. Before Keras 2.2 that of a sequential
            model was the list of its layers.
    """
    return fields.get("layers") if isinstance(fields, Mapping) else fields


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
        config["learning_rate"] = {
            "module": "keras.optimizers.schedules",
            "class_name": "InverseTimeDecay",
            "config": schedule.get_config(),
            "registered_name": None,
        }


def _schedule(config: dict[str, Any]) -> None:
    # Keras 3 has names of its own as defaults, and takes None, but fails.
    if config.get("name") is None:
        config.pop("name", None)


def _loss(config: dict[str, Any]) -> None:
    if config.get("reduction") == "auto":
        config["reduction"] = "sum_over_batch_size"


def _lambda(config: dict[str, Any]) -> None:
    for key in ("module", "function_type", "output_shape_type"):
        config.pop(key, None)
    for key in ("output_shape_module", "mask_type", "mask_module"):
        config.pop(key, None)
    for key in ("function", "output_shape", "mask"):
        code = config.get(key)
        if is_bytecode(code):
            config[key] = {
                "class_name": "__lambda__",
                "config": dict(
                    zip(
                        ("code", "defaults", "closure"),
                        bytecode(code),
                        strict=True,
                    )
                ),
            }


def bytecode(code: Any) -> list[Any]:
    """Code, defaults and closure of a function: Python wants a tuple."""
    text, defaults, closure = code
    return [text, None if defaults is None else tuple(defaults), closure]


def is_bytecode(code: Any) -> bool:
    """Whether it is a function as tf_keras writes one without a name."""
    return (
        isinstance(code, (list, tuple))
        and len(code) == 3
        and isinstance(code[0], str)
    )


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
