"""What a recipe does to an operand: one rule class per way of scaling.

A rule is the arithmetic of a recipe: which scale an operand gets, what is
observed of it, and how observations become state. Layers and kernels know
rules by this interface only, so that a new recipe is a new dataclass in
`recipes` and, where its arithmetic is new, one class here.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from keras import ops

from keras_policy_ext import formats
from keras_policy_ext.numerics import observations, scaling
from keras_policy_ext.numerics.observations import Layout
from keras_policy_ext.recipes import (
    OPERANDS,
    CurrentScaling,
    DelayedScaling,
    Recipe,
)

Tensor = Any


class Prior(NamedTuple):
    """What the state says before this step.

    Attributes:
        scales: Float32 (3,), one scale per operand.
        unseen: Bool (3,), whether the operand was never observed; None where
            the recipe starts from a fixed scale.
    """

    scales: Tensor
    unseen: Tensor | None


class CurrentRule:
    """One scale per tensor, from the tensor itself; no state."""

    def __init__(self, recipe: Any):
        self.recipe = recipe
        self.state_shape: tuple[int, int] | None = None

    def prior(self, state: Tensor) -> Prior | None:
        """Nothing is known before the tensor is seen."""
        return None

    def scale(
        self, operand: str, x: Tensor, prior: Prior | None, observe: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The scale of an operand, and its amax where it was computed.

        Args:
            operand: `"inputs"`, `"kernel"` or `"outputs_grad"`.
            x: The operand, any shape.
            prior: What `prior` returned.
            observe: Whether the caller needs the amax.

        Returns:
            Float32 scalar, and the float32 scalar amax or None.
        """
        amax = scaling.amax(x)
        return self._from_amax(operand, amax), amax

    def guard(self, amax: Tensor | None) -> Tensor | None:
        """A factor for the gradients: 1, or NaN where `amax` is not finite.

        A saturating cast turns an infinite operand into a finite one.
        A recipe with state carries the infinity out in its observation; one
        without has only the gradients to tell a loss scaler to skip the step.
        """
        return None if amax is None else ops.add(ops.multiply(amax, 0.0), 1.0)

    def _from_amax(self, operand: str, amax: Tensor) -> Tensor:
        limit = formats.get(self.recipe.format_of(operand)).max
        return self._scale(amax, limit, 1.0)

    def _scale(self, amax: Tensor, limit: Any, previous: Tensor) -> Tensor:
        return scaling.scale_for_limit(
            amax, limit, previous=previous, **self.recipe.scale_options
        )


class DelayedRule(CurrentRule):
    """One scale per tensor, from the amaxes of the steps before."""

    def __init__(self, recipe: Any):
        super().__init__(recipe)
        self.layout = Layout(recipe.history_length)
        self.state_shape = (len(OPERANDS), self.layout.width)
        self._from_current = recipe.initial_scale == "current"
        self._initial = 1.0 if self._from_current else recipe.initial_scale
        self._limits = [
            formats.get(recipe.format_of(operand)).max for operand in OPERANDS
        ]

    def prior(self, state: Tensor) -> Prior:
        """Scales from the histories in `state`, (3, width)."""
        return self._prior(state)

    def scale(
        self, operand: str, x: Tensor, prior: Any, observe: bool
    ) -> tuple[Tensor, Tensor | None]:
        """See `CurrentRule.scale`; the amax is computed only if needed."""
        index = OPERANDS.index(operand)
        scale = prior.scales[index]
        if prior.unseen is None:
            return scale, scaling.amax(x) if observe else None
        unseen = prior.unseen[index]
        if observe:
            amax = scaling.amax(x)
            return ops.where(
                unseen, self._from_amax(operand, amax), scale
            ), amax
        return ops.cond(
            unseen,
            lambda: self._from_amax(operand, scaling.amax(x)),
            lambda: scale,
        ), None

    def guard(self, amax: Tensor | None) -> None:
        """No factor: the observation itself carries what is not finite."""
        return None

    def observation(self, amaxes: list[Tensor], slot: int) -> Tensor:
        """The gradient of the state: see `observations`.

        Args:
            amaxes: Float32 scalars, in the order of `OPERANDS`.
            slot: Which use of the layer in this step this is.

        Returns:
            Float32 (3, width).
        """
        return self.layout.observation(ops.stack(amaxes), slot)

    def settle(self, value: Tensor, previous: Tensor) -> Tensor:
        """What the state becomes when `value` is assigned to it.

        Args:
            value: (3, width): an observation, a settled state, or zeros.
            previous: (3, width): the settled state before.

        Returns:
            (3, width), settled.
        """
        prior = self._prior(previous)
        used = prior.scales
        if prior.unseen is not None:
            used = ops.where(prior.unseen, self._stored(previous), used)
        return self.layout.settle(value, previous, used)

    def _scale(self, amax: Tensor, limit: Any, previous: Tensor) -> Tensor:
        margin = self.recipe.margin
        return scaling.scale_of_multiplier(amax, limit, margin, previous)

    def _stored(self, state: Tensor) -> Tensor:
        """The scales last used, (3,); 0 where there is none to believe."""
        intact = self.layout.is_intact(state)
        return ops.where(intact, self.layout.scale(state), 0.0)

    def _reduced(self, state: Tensor) -> Tensor:
        """The amaxes that scales are made of, (3,), likewise."""
        history = self.layout.history(state)
        newest_only = self.recipe.amax_compute == "most_recent"
        reduced = history[:, 0] if newest_only else ops.max(history, axis=1)
        return ops.where(self.layout.is_intact(state), reduced, 0.0)

    def _prior(self, state: Tensor) -> Prior:
        reduced, stored = self._reduced(state), self._stored(state)
        known = ops.greater(stored, 0.0)
        previous = ops.where(known, stored, self._initial)
        limits = ops.convert_to_tensor(self._limits, "float32")
        scales = self._scale(reduced, limits, previous)
        if not self._from_current:
            return Prior(scales, None)
        seen = ops.logical_or(known, scaling.is_positive_finite(reduced))
        return Prior(scales, ops.logical_not(seen))


_RULES: dict[type[Recipe], Any] = {
    DelayedScaling: DelayedRule,
    CurrentScaling: CurrentRule,
}


@functools.cache
def rule_of(recipe: Recipe) -> Any:
    """The rule that carries out a recipe.

    Args:
        recipe: Any recipe of this package.

    Returns:
        Its rule; the same object for equal recipes.

    Raises:
        NotImplementedError: If no rule is registered for the class.
    """
    for base in type(recipe).__mro__:
        if base in _RULES:
            return _RULES[base](recipe)
    allowed = ", ".join(cls.__name__ for cls in _RULES)
    raise NotImplementedError(
        f"No arithmetic for {recipe!r}. Recipes with one: {allowed}. Derive "
        "from one of them, or register a rule with `numerics.rules.register`."
    )


def register(recipe_class: type[Recipe], rule_class: type) -> None:
    """Tell which rule carries out a class of recipes.

    Args:
        recipe_class: A subclass of `Recipe`.
        rule_class: A class with the interface of `CurrentRule`, built from
            the recipe.
    """
    _RULES[recipe_class] = rule_class


__all__ = [
    "CurrentRule",
    "DelayedRule",
    "Prior",
    "observations",
    "register",
    "rule_of",
]
