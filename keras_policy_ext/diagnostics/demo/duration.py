"""How long the demo is going to take where a precision is slow."""

from __future__ import annotations

from typing import NamedTuple

import keras

from keras_policy_ext.diagnostics import bfloat16_speed
from keras_policy_ext.diagnostics.demo import train
from keras_policy_ext.diagnostics.demo.settings import Settings
from keras_policy_ext.diagnostics.demo.text import Corpus

MANY = 4.0
"""A run that takes so many times as long as in float32 is slow."""

PATIENCE = 150.0
"""Seconds that the demo is to take where steps are left out."""

FEWEST = 20
"""The fewest steps: in fewer nothing is learned."""


class Forecast(NamedTuple):
    """The time of a step in seconds, by precision."""

    seconds: dict[str, float]

    @property
    def slowest(self) -> str:
        """The precision with the longest steps."""
        return max(self.seconds, key=lambda name: self.seconds[name])

    @property
    def times(self) -> float:
        """How many times as long as in float32 its steps take."""
        return self.seconds[self.slowest] / self.seconds["float32"]

    def total(self, settings: Settings) -> float:
        """Seconds of all runs."""
        runs = len(settings.seeds)
        return settings.steps * runs * sum(self.seconds.values())

    def steps(self, settings: Settings) -> int:
        """How many steps take no longer than `PATIENCE`."""
        share = PATIENCE / self.total(settings)
        return min(settings.steps, max(FEWEST, int(settings.steps * share)))


def forecast(
    compared: dict[str, keras.DTypePolicy],
    corpus: Corpus,
    settings: Settings,
    start: train.Start,
) -> Forecast | None:
    """Time the first steps of each precision.

    That compiles them once more, so it is only done where a matmul in
    bfloat16 is slow.

    Returns:
        None where no precision is slow.
    """
    if bfloat16_speed.slowdown() < bfloat16_speed.SLOW:
        return None
    found = Forecast(
        {
            name: train.seconds_per_step(policy, corpus, settings, start)
            for name, policy in compared.items()
        }
    )
    return found if found.times >= MANY else None


def told(found: Forecast, settings: Settings, steps: int) -> str:
    """What is slow, how long all takes, and how many steps are taken."""
    slow = (
        f"A step in {found.slowest} takes {found.times:.0f} times as long as "
        f"in float32 on this machine: {settings.steps} steps in every "
        f"precision would take about {minutes(found.total(settings))}."
    )
    if steps == settings.steps:
        return f"{slow} `--steps` takes fewer."
    return (
        f"{slow} Taking {steps} steps instead; `--steps {settings.steps}` "
        "takes all."
    )


def minutes(seconds: float) -> str:
    """A duration as text."""
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes"
