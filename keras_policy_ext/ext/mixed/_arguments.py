"""Check arguments of loss scaling; read configs and public class names."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import keras

from keras_policy_ext._keras import optimizer_variables
from keras_policy_ext.ext.mixed import loss_scales
from keras_policy_ext.ext.mixed.loss_scales import (
    LARGEST,
    DynamicLossScale,
    FixedLossScale,
    LossScale,
    growth_factor,
    scale_number,
    step_count,
)


def public_class(optimizer: object) -> type | None:
    """Return the public class for an optimizer of a private class, or None.

    None for public classes and custom ones.
    """
    cls, *bases = type(optimizer).__mro__
    named: Any = getattr(keras.optimizers, cls.__name__, None)
    private = cls.__module__.startswith("keras.") and named is not cls
    return named if private and named in bases else None


ELEMENTWISE = (
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Lion",
    "Nadam",
    "RMSprop",
    "SGD",
)
"""Optimizers of Keras that update each number of a weight by itself."""


def updates_elementwise(optimizer: Any) -> bool:
    """Return True if each number of a weight is updated by itself.

    Known of classes of Keras, and of those with moments in one byte a number,
    whose `stock_class` is one.
    """
    cls = getattr(optimizer, "stock_class", None)
    cls = cls or public_class(optimizer) or type(optimizer)
    return cls in _elementwise()


@functools.cache
def _elementwise() -> tuple[type, ...]:
    return tuple(getattr(keras.optimizers, name) for name in ELEMENTWISE)


def updates_apart(optimizer: Any) -> bool:
    """Return True if weights can be updated in groups, one after the other.

    The optimizer updates each number by itself, and an update changes nothing
    that the update of another weight reads. Nadam's changes a variable of the
    optimizer.
    """
    return updates_elementwise(optimizer) and not isinstance(
        optimizer, keras.optimizers.Nadam
    )


def for_private_names(config: object) -> AbstractContextManager[None]:
    """Return a scope in which files may name private optimizer classes.

    Only the private class names in the file are included: in such a scope,
    Keras reads every string that is one of these names as the class, also the
    "SGD" that a `compile_from_config` reads.

    Args:
        config: The content of the file, of JSON types; None for all names.
    """
    names = None if config is None else set(_names_of_private(config))
    found = {
        name: value
        for name, value in vars(keras.optimizers).items()
        if (names is None or name in names)
        and isinstance(value, type)
        and issubclass(value, keras.optimizers.Optimizer)
    }
    return keras.saving.custom_object_scope(found)


def _names_of_private(config: object) -> Iterator[str]:
    """Yield the names of private Keras classes in a nested config."""
    if isinstance(config, dict):
        if str(config.get("module")).startswith("keras.src."):
            yield str(config.get("class_name"))
        config = list(config.values())
    if isinstance(config, list):
        for each in config:
            yield from _names_of_private(each)


def with_public_class(
    config: dict[str, Any], optimizer: object
) -> dict[str, Any]:
    """Return an optimizer's config with the public name of the class.

    The optimizer that it wraps is treated alike: Keras's own scaler writes the
    private class of the wrapped one.
    """
    fields = config.get("config") or {}
    inner = fields.get("inner_optimizer")
    if isinstance(inner, Mapping):
        inside = getattr(optimizer, "inner_optimizer", None)
        named = with_public_class(dict(inner), inside)
        config = {**config, "config": {**fields, "inner_optimizer": named}}
    cls = public_class(optimizer)
    if cls is None:
        return config
    return {
        **config,
        "module": "keras.optimizers",
        "class_name": cls.__name__,
        "registered_name": None,
    }


def read_inner(
    config: object, custom_objects: Mapping[str, object] | None = None
) -> keras.optimizers.Optimizer:
    """Return the optimizer for the entry `inner_optimizer` in a config."""
    if not isinstance(config, Mapping):
        return config
    return keras.optimizers.deserialize(
        dict(config), custom_objects=custom_objects
    )


#: 2**-126, the smallest normal float32: below it compilers flush to 0.
SMALLEST = 2.0**-126


class ScalerSettings(NamedTuple):
    """The arguments of `LossScaleOptimizer`, except the inner optimizer."""

    dynamic: bool = True
    initial_scale: float | None = None
    dynamic_growth_steps: int | None = None
    multiplier: float = 2.0
    minimum_scale: float = 1.0
    maximum_scale: float = LARGEST
    max_skipped_steps: int | None = None


def variables_of(
    optimizer: keras.optimizers.Optimizer,
    given: Iterable[keras.Variable] | None,
    gradients: int,
) -> list[keras.Variable]:
    """Return the variables for the gradients passed to `apply`, in order.

    Raises:
        ValueError: If there are no variables, or their number differs from
            that of the gradients.
    """
    if given is None and not optimizer.built:
        raise ValueError(
            "The optimizer does not know its variables yet. Received: "
            "gradients with trainable_variables=None. Allowed: that, once "
            "the optimizer is built. Call "
            "optimizer.build(model.trainable_variables), or pass the "
            "variables too."
        )
    known = optimizer_variables.known_to_optimizer(optimizer) or []
    variables = known if given is None else list(given)
    if gradients != len(variables):
        raise ValueError(
            "The numbers of gradients and variables differ. Received: "
            f"{gradients} gradients and {len(variables)} variables. Allowed: "
            "one gradient for each variable. Pass them in the same order."
        )
    return variables


def checked(given: ScalerSettings) -> ScalerSettings:
    """Check the arguments of `LossScaleOptimizer`, and fill in defaults.

    Raises:
        TypeError: If one has the wrong type.
        ValueError: If one is out of range, or two exclude one another.
    """
    if not isinstance(given.dynamic, bool):
        raise TypeError(
            "`dynamic` is neither True nor False. Received: "
            f"{given.dynamic!r}. Allowed: True, if the scale adapts, or "
            "False. Pass a number as `initial_scale=`, and with it "
            "`dynamic=False` for a scale that never changes."
        )
    least, most = _range(given.minimum_scale, given.maximum_scale)
    limit = given.max_skipped_steps
    if limit is not None:
        limit = step_count(limit, "max_skipped_steps")
    return ScalerSettings(
        dynamic=given.dynamic,
        initial_scale=_initial(given, least, most),
        dynamic_growth_steps=_growth_steps(given),
        multiplier=growth_factor(given.multiplier),
        minimum_scale=least,
        maximum_scale=most,
        max_skipped_steps=limit,
    )


def of_loss_scale(loss_scale: LossScale) -> dict[str, Any]:
    """Convert a loss scale to keyword arguments of `LossScaleOptimizer`."""
    if isinstance(loss_scale, FixedLossScale):
        return {"dynamic": False, "initial_scale": loss_scale.loss_scale_value}
    if isinstance(loss_scale, DynamicLossScale):
        return {
            "dynamic": True,
            "initial_scale": loss_scale.initial_loss_scale,
            "dynamic_growth_steps": loss_scale.increment_period,
            "multiplier": loss_scale.multiplier,
        }
    raise TypeError(
        "`loss_scale` is not a known kind of loss scale. Received: "
        f"{loss_scale!r}. Allowed: a FixedLossScale or a DynamicLossScale. "
        "Pass one of these."
    )


def of_legacy_config(config: dict[str, Any]) -> dict[str, Any]:
    """Replace the tf_keras keys `optimizer` and `loss_scale` in a config."""
    if "loss_scale" not in config:
        return config
    config = dict(config)
    loss_scale = loss_scales.get(config.pop("loss_scale"))
    if loss_scale is None:
        raise ValueError(
            "The config of this LossScaleOptimizer has no loss scale. "
            "Received: 'loss_scale': None. Allowed: a number, 'dynamic', or "
            "the config of a loss scale. Load the optimizer that it wraps."
        )
    if "optimizer" in config:
        config["inner_optimizer"] = config.pop("optimizer")
    return {**config, **of_loss_scale(loss_scale)}


# The wrapper of each optimizer that has one, a LossScaleOptimizer or a
# StochasticRounding: an optimizer in two of them would be updated by both.
_wrappers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def wrapper_of(
    optimizer: keras.optimizers.Optimizer,
) -> keras.optimizers.Optimizer | None:
    """Return the loss scaler that wraps an optimizer, or None."""
    reference = _wrappers.get(optimizer)
    return None if reference is None else reference()


def register_wrapper(
    optimizer: keras.optimizers.Optimizer, wrapper: keras.optimizers.Optimizer
) -> None:
    """Record which loss scaler wraps an optimizer, while both exist."""
    _wrappers[optimizer] = weakref.ref(wrapper)


def check_inner(optimizer: object) -> None:
    """Raise if an object is not an optimizer that can be wrapped.

    Raises:
        TypeError: If it is no optimizer, or a loss scaler itself.
        ValueError: If it scales the loss itself or has a wrapper.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            "`inner_optimizer` is not a Keras optimizer. Received: "
            f"{optimizer!r} (of type {type(optimizer).__name__}). Allowed: an "
            "instance of a class of keras.optimizers. Pass for instance "
            "keras.optimizers.Adam()."
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise TypeError(
            "`inner_optimizer` is a LossScaleOptimizer itself, and the loss "
            f"would be scaled twice. Received: {optimizer!r}. Allowed: an "
            "optimizer that does not scale the loss. Pass its "
            "`inner_optimizer`, or use it as it is."
        )
    if optimizer.loss_scale_factor is not None:
        raise ValueError(
            "`inner_optimizer` scales the loss itself. Received: an optimizer "
            f"with loss_scale_factor={optimizer.loss_scale_factor!r}. Allowed: "
            "an optimizer with loss_scale_factor=None. Leave "
            "loss_scale_factor out, and pass to the wrapper dynamic=False, "
            f"initial_scale={optimizer.loss_scale_factor!r}."
        )
    check_not_wrapped(optimizer, "LossScaleOptimizer")


def check_not_wrapped(optimizer: keras.optimizers.Optimizer, by: str) -> None:
    """Raise if another optimizer already wraps this optimizer.

    Raises:
        ValueError: If it is wrapped.
    """
    wrapper = wrapper_of(optimizer)
    if wrapper is not None:
        there = type(wrapper).__name__
        raise ValueError(
            "`inner_optimizer` is wrapped already, and would be updated "
            f"twice. Received: {optimizer.name!r}, which {wrapper.name!r} (of "
            f"type {there}) wraps. Allowed: an optimizer that nothing wraps. "
            f"Use the existing {there}, or make a new optimizer."
        )


def _range(minimum: object, maximum: object) -> tuple[float, float]:
    least = scale_number(minimum, "minimum_scale", SMALLEST)
    most = scale_number(maximum, "maximum_scale", SMALLEST)
    if least > most:
        raise ValueError(
            f"`minimum_scale` is above `maximum_scale`. Received: {minimum!r} "
            f"and {maximum!r}. Allowed: minimum_scale <= maximum_scale. "
            "Exchange them."
        )
    return least, most


def _initial(given: ScalerSettings, least: float, most: float) -> float:
    value = given.initial_scale
    if value is None:
        if not given.dynamic:
            raise ValueError(
                "`initial_scale` is missing: a fixed loss scale needs its "
                "value. Received: dynamic=False without initial_scale. "
                "Allowed: dynamic=False with a number. Pass for instance "
                "initial_scale=2.0**10."
            )
        default = DynamicLossScale().initial_loss_scale
        return min(max(default, least), most)
    value = scale_number(value, "initial_scale", SMALLEST)
    if not least <= value <= most:
        raise ValueError(
            f"`initial_scale` is out of range. Received: {value!r}. Allowed: "
            f"from minimum_scale={least!r} to maximum_scale={most!r}. Change "
            "one of the three."
        )
    return value


def _growth_steps(given: ScalerSettings) -> int | None:
    steps = given.dynamic_growth_steps
    if given.dynamic:
        if steps is None:
            return DynamicLossScale().increment_period
        return step_count(steps, "dynamic_growth_steps")
    if steps is not None:
        raise ValueError(
            "`dynamic_growth_steps` has no effect on a fixed loss scale. "
            f"Received: dynamic=False with dynamic_growth_steps={steps!r}. "
            "Allowed: None. Leave it out, or pass dynamic=True."
        )
    return None
