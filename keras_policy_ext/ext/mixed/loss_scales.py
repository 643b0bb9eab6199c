"""Loss scales, and a dtype policy that has one."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping
from typing import Any, TypeGuard

import keras

from keras_policy_ext import user_code
from keras_policy_ext.policies import (
    FLOATS,
    SourceMap,
    dtype_policy,
    floating,
    is_full_name,
    is_plain,
)

#: The largest power of two in float32: the next doubling would be infinite.
LARGEST = 2.0**127

_ALLOWED = (
    "'dynamic', None, a finite number >= 1, FixedLossScale(...) or "
    "DynamicLossScale(...)"
)


class LossScale:
    """The common base of `FixedLossScale` and `DynamicLossScale`."""

    def get_config(self) -> dict[str, Any]:
        """Return the fields as JSON types, under tf_keras's names."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
        }


@dataclasses.dataclass(frozen=True)
class FixedLossScale(LossScale):
    """A loss scale that is the same in every step.

    Args:
        loss_scale_value: The factor, from 1 to 2**127.

    Raises:
        TypeError: If it is not a number.
        ValueError: If it is out of range.
    """

    loss_scale_value: float

    def __post_init__(self) -> None:
        value = scale_number(self.loss_scale_value, "loss_scale_value", 1.0)
        object.__setattr__(self, "loss_scale_value", value)


@dataclasses.dataclass(frozen=True)
class DynamicLossScale(LossScale):
    """A loss scale that grows while gradients are finite, else shrinks.

    Args:
        initial_loss_scale: The first scale, from 1 to 2**127.
        increment_period: The number of steps with finite gradients after which
            the scale grows, int >= 1.
        multiplier: The factor of growth, and the divisor after a step whose
            gradients were not finite; above 1.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If one is out of range.
    """

    initial_loss_scale: float = 2.0**15
    increment_period: int = 2000
    multiplier: float = 2.0

    def __post_init__(self) -> None:
        checked = {
            "initial_loss_scale": scale_number(
                self.initial_loss_scale, "initial_loss_scale", 1.0
            ),
            "increment_period": step_count(
                self.increment_period, "increment_period"
            ),
            "multiplier": growth_factor(self.multiplier),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def growth_steps(self) -> int:
        """Another name for `increment_period`."""
        return self.increment_period


_CLASSES = {cls.__name__: cls for cls in (FixedLossScale, DynamicLossScale)}


def get(identifier: object) -> LossScale | None:
    """Convert a string, number, dict or None to a loss scale.

    Args:
        identifier: `"dynamic"`, None, a number >= 1, a loss scale, or its
            config, which may be tf_keras's.

    Returns:
        A `FixedLossScale`, a `DynamicLossScale`, or None for no scaling.

    Raises:
        TypeError: If the identifier has the wrong type.
        ValueError: If its value does not describe a loss scale.
    """
    if identifier is None or isinstance(identifier, LossScale):
        return identifier
    if isinstance(identifier, str):
        if identifier == "dynamic":
            return DynamicLossScale()
        raise ValueError(_wrong(identifier))
    if isinstance(identifier, Mapping):
        return _from_config(identifier)
    if _is_number(identifier):
        return FixedLossScale(identifier)
    raise TypeError(_wrong(identifier))


def serialize(loss_scale: LossScale | None) -> dict[str, Any] | None:
    """Return a loss scale as a config dict, which `get` reads."""
    if loss_scale is None:
        return None
    return {
        "class_name": type(loss_scale).__name__,
        "config": loss_scale.get_config(),
    }


def scale_number(value: object, name: str, least: float) -> float:
    """Return a loss scale's value as a float; raise if it is invalid.

    Raises:
        TypeError: If it is not a number, or is a bool.
        ValueError: If it is below `least`, above 2**127 or not finite.
    """
    if not _is_number(value):
        raise TypeError(_wrong_number(name, value, least))
    number = _as_float(value)
    # Rounded to float32 by the variable that holds it: 2**127 is exact.
    if not least <= number <= LARGEST:
        raise ValueError(_wrong_number(name, value, least))
    return number


def step_count(value: object, name: str) -> int:
    """Return a number of steps as an int; raise if it is invalid.

    Raises:
        TypeError: If it is not an integer, or is a bool.
        ValueError: If it is below 1.
    """
    message = (
        f"Wrong {name}. Received: {value!r}. Allowed: an integer >= 1. Pass "
        "a number of training steps."
    )
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(message)
    if value < 1:
        raise ValueError(message)
    return int(value)


def growth_factor(value: object) -> float:
    """Return a loss scale's growth factor as a float; raise if invalid.

    Raises:
        TypeError: If it is not a number.
        ValueError: If it is not finite and above 1.
    """
    message = (
        f"Wrong multiplier of a dynamic loss scale. Received: {value!r}. "
        "Allowed: a finite number > 1. Pass 2.0, which rounds nothing."
    )
    if not _is_number(value):
        raise TypeError(message)
    number = _as_float(value)
    if not 1.0 < number <= LARGEST:
        raise ValueError(message)
    return number


def _is_number(value: object) -> TypeGuard[float]:
    # numpy's floats and integers register as Real; its bool does not.
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # An integer from 2**1024 on, which is no scale.
        return math.inf


def _from_config(config: Mapping[str, Any]) -> LossScale:
    cls = _CLASSES.get(config.get("class_name", ""))
    fields = config.get("config")
    if cls is None or not isinstance(fields, Mapping):
        raise ValueError(_wrong(config))
    try:
        return cls(**fields)
    except TypeError as error:
        raise ValueError(_wrong(config, error)) from error


def _wrong_number(name: str, value: object, least: float) -> str:
    power = int(math.log2(LARGEST))
    return (
        f"Wrong {name} of a loss scale. Received: {value!r}. Allowed: a "
        f"finite number from {least:g} to 2**{power}. Pass for instance "
        "2.0**15."
    )


def _wrong(received: object, cause: object = None) -> str:
    fault = "This is not a loss scale"
    if cause is not None:
        fault = f"This config of a loss scale cannot be read: {cause}"
    return (
        f"{fault}. Received: {received!r} (of type "
        f"{type(received).__name__}). Allowed: {_ALLOWED}. Pass one of these."
    )


AUTO = "auto"


@keras.saving.register_keras_serializable(package="keras_policy_ext")
class LossScaleDTypePolicy(SourceMap):
    """A plain dtype policy with a loss scale for the model.

    Layers compute as under the plain policy. The loss scale is used when a
    model is compiled: by `mixed_precision.wrap_optimizer`, `compile` and
    `LossScaleMixin`. It works wherever Keras takes a policy, and is saved with
    it. Keras's own `Model.compile` ignores the loss scale: it wraps the
    optimizer dynamically if the model's policy name is `"mixed_float16"`.

    Args:
        name: A plain floating policy or its name, such as `"mixed_float16"`;
            None for the global policy. A `LossScaleDTypePolicy`, given or
            global, also passes its loss scale on, unless another one is given.
        loss_scale: `"auto"` (dynamic if and only if the name is
            `"mixed_float16"`), `"dynamic"`, None (no scaling), a number
            >= 1, a `FixedLossScale` or a `DynamicLossScale`.

    Raises:
        TypeError: If the loss scale has the wrong type.
        ValueError: If it has a wrong value, or the policy is not a plain
            floating one.

    Examples:
        >>> policy = kpe.LossScaleDTypePolicy("mixed_float16", loss_scale=128)
        >>> policy.compute_dtype, policy.loss_scale
        ('float16', FixedLossScale(loss_scale_value=128.0))
    """

    def __init__(self, name: object = None, loss_scale: object = AUTO) -> None:
        given = _read_policy(name)
        if isinstance(given, LossScaleDTypePolicy):
            inherited = given.requested_loss_scale
            given = given.source_policy
        else:
            inherited = AUTO
        # Keras renames policies that it finds in a map: keep an own object.
        super().__init__(keras.DTypePolicy(given.name))
        if isinstance(loss_scale, str) and loss_scale == AUTO:
            self._requested = inherited
        else:
            self._requested = get(loss_scale)
        if self.loss_scale is not None and self.compute_dtype != "float16":
            user_code.warn(
                "A loss scale keeps small float16 gradients from becoming 0; "
                f"this policy computes in {self.compute_dtype}. Received: "
                f"{self!r}. Allowed, and of use: 'mixed_float16' and "
                "'float16'. Leave the loss scale out."
            )

    @property
    def loss_scale(self) -> LossScale | None:
        """The loss scale; `"auto"`: dynamic for mixed_float16, else None."""
        if self._requested != AUTO:
            return self._requested
        return DynamicLossScale() if self.name == "mixed_float16" else None

    @property
    def requested_loss_scale(self) -> Any:
        """The loss scale as you gave it: `"auto"`, None or a loss scale."""
        return self._requested

    @property
    def quantization_mode(self) -> None:
        """None, since this policy does not quantize."""
        return None

    def get_config(self) -> dict[str, Any]:
        """Return the policy's fields as JSON types, as tf_keras's `Policy`."""
        requested = self._requested
        if requested != AUTO:
            requested = serialize(requested)
        return {"name": self._source_name, "loss_scale": requested}

    def __repr__(self) -> str:
        if self._requested == AUTO:
            return f"LossScaleDTypePolicy({self._source_name!r})"
        scale = getattr(self._requested, "loss_scale_value", self._requested)
        if scale == DynamicLossScale():
            scale = "dynamic"
        return (
            f"LossScaleDTypePolicy({self._source_name!r}, loss_scale={scale!r})"
        )

    def _key(self) -> tuple[object, ...]:
        return self._source_name, self._requested


def _read_policy(identifier: object) -> keras.DTypePolicy:
    if identifier is None:
        policy = dtype_policy()
    elif isinstance(identifier, str) and is_full_name(identifier):
        raise ValueError(_not_plain(identifier))
    else:
        try:
            policy = keras.dtype_policies.get(identifier)
        except (TypeError, ValueError) as error:
            raise ValueError(_not_plain(identifier, error)) from error
    if not isinstance(policy, LossScaleDTypePolicy):
        if not is_plain(policy):
            raise ValueError(_not_plain(policy))
        floating(policy, "A LossScaleDTypePolicy")
    return policy


def _not_plain(received: object, cause: Exception | None = None) -> str:
    suffix = "" if cause is None else f" Cause: {cause}"
    floats = ", ".join(map(repr, FLOATS))
    return (
        "A LossScaleDTypePolicy needs a plain floating policy as its source. "
        f"Received: {received!r}. Allowed: 'mixed_float16', 'mixed_bfloat16', "
        f"{floats}. For a float8 policy pass the loss scale to the "
        "optimizer: mixed_precision.LossScaleOptimizer(optimizer, "
        f"dynamic=False, initial_scale=...).{suffix}"
    )
