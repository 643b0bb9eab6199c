"""Loss scales as data: a fixed number, or a rule for one that adapts."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping
from typing import Any, TypeGuard

#: The largest power of two in float32: the next doubling would be infinite.
LARGEST = 2.0**127

_ALLOWED = (
    "'dynamic', None, a finite number >= 1, FixedLossScale(...) or "
    "DynamicLossScale(...)"
)


class LossScale:
    """What `FixedLossScale` and `DynamicLossScale` have in common."""

    def get_config(self) -> dict[str, Any]:
        """The fields, as JSON types; as tf_keras has them."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
        }


@dataclasses.dataclass(frozen=True)
class FixedLossScale(LossScale):
    """A loss scale that never changes.

    Args:
        loss_scale_value: The factor, from 1 to 2**127.

    Raises:
        TypeError: If it is no number.
        ValueError: If it is out of range.
    """

    loss_scale_value: float

    def __post_init__(self) -> None:
        value = scale_number(self.loss_scale_value, "loss_scale_value", 1.0)
        object.__setattr__(self, "loss_scale_value", value)


@dataclasses.dataclass(frozen=True)
class DynamicLossScale(LossScale):
    """A loss scale that grows while gradients are finite.

    Args:
        initial_loss_scale: The first scale, from 1 to 2**127.
        increment_period: Steps with finite gradients after which the scale
            is multiplied, int >= 1.
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
        """Another name of `increment_period`."""
        return self.increment_period


_CLASSES = {cls.__name__: cls for cls in (FixedLossScale, DynamicLossScale)}


def get(identifier: object) -> LossScale | None:
    """Turn anything that means a loss scale into one.

    Args:
        identifier: `"dynamic"`, None, a number >= 1, a loss scale, or its
            config, which may be tf_keras's.

    Returns:
        A `FixedLossScale`, a `DynamicLossScale`, or None for no scaling.

    Raises:
        TypeError: If the identifier has the wrong type.
        ValueError: If its value means no loss scale.
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
    """The config of a loss scale; `get` reads it back."""
    if loss_scale is None:
        return None
    return {
        "class_name": type(loss_scale).__name__,
        "config": loss_scale.get_config(),
    }


def scale_number(value: object, name: str, least: float) -> float:
    """A scale as a float.

    Raises:
        TypeError: If it is no number; bool is none.
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
    """A number of steps as an int.

    Raises:
        TypeError: If it is no integer; bool is none.
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
    """The multiplier of a dynamic loss scale as a float.

    Raises:
        TypeError: If it is no number.
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
        raise ValueError(_wrong(config, f" Cause: {error}")) from error


def _wrong_number(name: str, value: object, least: float) -> str:
    power = int(math.log2(LARGEST))
    return (
        f"Wrong {name} of a loss scale. Received: {value!r}. Allowed: a "
        f"finite number from {least:g} to 2**{power}. Pass for instance "
        "2.0**15."
    )


def _wrong(received: object, cause: str = "") -> str:
    return (
        f"Cannot interpret this as a loss scale. Received: {received!r} (of "
        f"type {type(received).__name__}). Allowed: {_ALLOWED}. Pass one of "
        f"these.{cause}"
    )
