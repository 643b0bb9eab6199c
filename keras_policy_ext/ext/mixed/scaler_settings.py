"""The arguments of `LossScaleOptimizer`: their checks, and other sources."""

from __future__ import annotations

from typing import Any, NamedTuple

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
