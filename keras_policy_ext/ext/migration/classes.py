"""Classes of tf_keras with their Keras 3 names, and problems of a config."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import keras

Config = Mapping[str, Any]
"""A tf_keras config as from `json.loads`; it is not changed."""


@dataclasses.dataclass
class Problems:
    """The problems of a config, collected for one error message."""

    unknown: list[str] = dataclasses.field(default_factory=list)
    """Classes and functions that neither Keras nor the caller provides."""
    unsupported: list[str] = dataclasses.field(default_factory=list)
    """Known parts without a counterpart in Keras 3."""
    loss_scales: list[str] = dataclasses.field(default_factory=list)
    """Loss scales, and where they are."""
    code: list[str] = dataclasses.field(default_factory=list)
    """Bytecode of Python functions, and where it is."""
    notes: list[str] = dataclasses.field(default_factory=list)
    """Notes on what Keras 3 accepts but computes differently."""

    def check(self) -> None:
        """Raise one ValueError that names all that cannot be migrated."""
        parts = []
        if self.unknown:
            parts.append(
                f"Unknown: {_listed(self.unknown)}. Pass them in "
                "`custom_objects`, as Keras 3 classes and functions, or "
                "register them with "
                "keras.saving.register_keras_serializable."
            )
        if self.unsupported:
            parts.append(
                f"Without a counterpart in Keras 3: "
                f"{_listed(self.unsupported)}. Change these parts in tf_keras "
                "and save again."
            )
        if parts:
            raise ValueError("Cannot migrate this config. " + " ".join(parts))

    def refuse_code(self) -> None:
        """Raise a ValueError that names each function saved as bytecode."""
        if self.code:
            raise ValueError(
                "Loading this file would run Python bytecode that is stored "
                f"in it. Received: {_listed(self.code)}. Allowed: functions "
                "by name. If you trust who wrote the file, pass "
                "safe_mode=False; bytecode also needs the Python version "
                "that wrote it."
            )

    def report(self, on_loss_scale: str) -> None:
        """Warn of layers that compute differently, and of dropped loss scales.

        The warnings point to the caller of the migration function.

        Raises:
            ValueError: If `on_loss_scale` is `"error"` and there is a loss
                scale.
        """
        for note in self.notes:
            warnings.warn(note, stacklevel=3)
        if not self.loss_scales or on_loss_scale == "keep":
            return
        met = _listed(self.loss_scales)
        advice = "Pass on_loss_scale='keep' to keep it"
        if on_loss_scale == "error":
            raise ValueError(
                f"This model has a loss scale. Received: {met}. Allowed with "
                "on_loss_scale='error': a model without a loss scale. "
                f"{advice} or 'drop' to go without."
            )
        warnings.warn(
            f"A loss scale was dropped. Received: {met}. {advice}, or wrap "
            "the optimizer in mixed_precision.LossScaleOptimizer before you "
            "train in float16.",
            stacklevel=3,
        )


class Rewriting(Protocol):
    """The interface of `configs.Rewriter`, for functions that it calls."""

    keeps_loss_scale: bool
    custom_objects: Config
    problems: Problems

    def rewrite(self, value: object, hint: str = ..., where: str = ...) -> Any:
        """Return any part of a tf_keras config in the form of Keras 3."""

    def rewrite_function(self, name: str, where: str) -> object:
        """Return the Keras 3 config of a function, looked up by its name."""


def named(config: Config) -> str:
    """Return the text for an object in messages, such as `Dense 'head'`."""
    fields = config["config"]
    name = fields.get("name") if isinstance(fields, Mapping) else None
    kind = str(config["class_name"])
    return f"{kind} {name!r}" if isinstance(name, str) else kind


def _listed(entries: list[str]) -> str:
    return "; ".join(dict.fromkeys(entries))


ANY = object()
"""Any value."""


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
"""What is dropped without a note if a Keras 3 class has no such argument."""

NOTES: dict[str, str] = {
    "RandomCrop": (
        "crops in training only: Keras 3 passes images on as they are in "
        "inference, where tf_keras resized them. Put a Resizing layer "
        "with crop_to_aspect_ratio=True after it, in a model that you "
        "build anew."
    )
}
"""Layers that Keras 3 accepts but computes differently, with a note."""

RENAMED: dict[str, dict[str, str]] = {
    "LeakyReLU": {"alpha": "negative_slope"},
    "InputLayer": {"batch_input_shape": "batch_shape"},
}


def revise(
    kind: str, name: str, config: dict[str, Any], known: frozenset[str]
) -> None:
    """Rename arguments of one tf_keras object, in place, as Keras 3 calls them.

    Args:
        kind: A key of `classes.MODULES`.
        name: The class name in the legacy config.
        config: Its arguments; a copy that belongs to the caller.
        known: Arguments of a custom class, which are not renamed.
    """
    for old, new in RENAMED.get(name, {}).items():
        if old in config and new not in config and old not in known:
            config[new] = config.pop(old)
    special = _SPECIAL.get(name) or _SPECIAL.get(kind)
    if special is not None:
        special(config)


def safe_name(name: str) -> str:
    """Replace the slashes in a layer name, which Keras 3 does not allow."""
    return name.replace("/", "_")


def safe_names(names: Iterable[str]) -> dict[str, str]:
    """Map the layer names of a tf_keras model to distinct Keras 3 names."""
    names = list(names)
    safe = {name: name for name in names if "/" not in name}
    for name in names:
        # Keras 3 takes no name twice: `a/b` next to `a_b` gets a number.
        new, count = safe_name(name), 0
        while name not in safe and new in safe.values():
            count += 1
            new = f"{safe_name(name)}_{count}"
        safe.setdefault(name, new)
    return safe


def inner_layers(fields: Config | list[Config]) -> list[Config] | None:
    """Return the layer configs in a model's config; None without layers."""
    # Before Keras 2.2 the config of a sequential model was a list of layers.
    return fields.get("layers") if isinstance(fields, Mapping) else fields


def bytecode(value: object) -> list[Any] | None:
    """Return [code, defaults, closure] of a function's bytecode, or None."""
    if not isinstance(value, (list, tuple)) or len(value) != 3:
        return None
    code, defaults, closure = value
    if not isinstance(code, str):
        return None
    # Python needs the defaults as a tuple, which tf_keras has as a list.
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


MODULES = {
    "layers": keras.layers,
    "initializers": keras.initializers,
    "regularizers": keras.regularizers,
    "constraints": keras.constraints,
    "losses": keras.losses,
    "metrics": keras.metrics,
    "optimizers": keras.optimizers,
    "optimizers.schedules": keras.optimizers.schedules,
}
"""Public modules by the last part of their names, in order of search."""

_MODELS = {"Functional": "Model", "Model": "Model", "Sequential": "Sequential"}
_RENAMED = {
    "BatchNormalizationV1": "BatchNormalization",
    "BatchNormalizationV2": "BatchNormalization",
    "SyncBatchNormalization": "BatchNormalization",
}
# tf_keras files its own optimizers of the second generation under these.
_PREFIXES = ("Custom>", "Experimental>", "Experimental", "experimental")
_VARIABLE = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


class Found(NamedTuple):
    """A class, and the fields by which a Keras 3 config names it."""

    cls: Any
    kind: str
    """`"custom"`, `"models"`, or a key of `MODULES`."""
    fields: dict[str, str | None]
    """`module`, `class_name` and `registered_name` of the config."""

    @property
    def is_layer(self) -> bool:
        """True if the class is a layer class."""
        return inspect.isclass(self.cls) and issubclass(self.cls, keras.Layer)


def find(config: Config, hint: str, custom_objects: Config) -> Found | None:
    """Return the class that a tf_keras config names, or None if it is unknown.

    The module that the config names is never imported: it only helps to
    choose between public modules of Keras.

    Args:
        config: Has `class_name`, and maybe `registered_name` and `module`.
        hint: A key of `MODULES` to look into first.
        custom_objects: The caller's classes by name.
    """
    found = _custom(config, custom_objects)
    if found is not None:
        return found
    name = _without_prefix(config["class_name"])
    name = _RENAMED.get(name, name)
    if name in _MODELS:
        name = _MODELS[name]
        return _found(getattr(keras, name), "models", "keras", name)
    module = config.get("module") or ""
    hints = [hint, *(k for k in MODULES if module.endswith(f".{k}"))]
    for kind in [*reversed(hints), *MODULES]:
        cls = getattr(MODULES.get(kind), name, None)
        if inspect.isclass(cls):
            return _found(cls, kind, f"keras.{kind}", name)
    return None


def is_custom(name: str, custom_objects: Config) -> bool:
    """Return True if a name is in `custom_objects` or registered with Keras."""
    found = keras.saving.get_registered_object(name, custom_objects)
    return found is not None


def find_function(name: str, custom_objects: Config) -> object:
    """Return the Keras 3 config of a function, by name; None if unknown."""
    if is_custom(name, custom_objects):
        return {
            "module": "builtins",
            "class_name": "function",
            "config": name,
            "registered_name": "function",
        }
    for module in (keras.activations, keras.losses, keras.metrics):
        found = getattr(module, name, None)
        if found is None:  # maybe an alias, such as "mse"
            with contextlib.suppress(ValueError):
                found = module.get(name)
        if inspect.isfunction(found):
            return keras.saving.serialize_keras_object(found)
    return None


def base(found: Found, name: str) -> tuple[str, str]:
    """Return (kind, name) of the Keras class from which a class inherits."""
    # A custom class has the arguments of its base too, also in a config. A
    # built-in class keeps the legacy name.
    if found.kind == "custom" and inspect.isclass(found.cls):
        for cls in found.cls.__mro__:
            for kind, module in MODULES.items():
                if getattr(module, cls.__name__, None) is cls:
                    return kind, cls.__name__
    return found.kind, name


@functools.cache
def arguments(cls: type) -> frozenset[str]:
    """Return the names of the arguments of a class and its base classes."""
    names: set[str] = set()
    for base in cls.__mro__:
        if base is object or "__init__" not in base.__dict__:
            continue
        init: Any = base.__dict__["__init__"]
        _, *parameters = inspect.signature(init).parameters.values()
        names |= {p.name for p in parameters if p.kind not in _VARIABLE}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return frozenset(names)


def _custom(config: Config, custom_objects: Config) -> Found | None:
    name = config["class_name"]
    short = name.rsplit(">", 1)[-1]
    for key in dict.fromkeys([config.get("registered_name"), name, short]):
        cls = key and keras.saving.get_registered_object(key, custom_objects)
        if cls:
            return _found(cls, "custom", None, short, key)
    return None


def _found(
    cls: type, kind: str, module: str | None, name: str, key: str | None = None
) -> Found:
    fields = {"module": module, "class_name": name, "registered_name": key}
    return Found(cls, kind, fields)


def _without_prefix(name: str) -> str:
    for prefix in _PREFIXES:
        rest = name.removeprefix(prefix)
        if rest != name and hasattr(keras.optimizers, rest):
            return rest
    return name
