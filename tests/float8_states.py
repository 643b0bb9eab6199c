"""States of delayed scaling, and what may be assigned to them."""

import numpy as np
import torch

from keras_policy_ext import recipes
from keras_policy_ext.ext.delayed.observations import SLOTS, UNSEEN, VALID_MARK

SOURCES = [
    recipes.DelayedScaling(),
    recipes.DelayedScaling(amax_history_length=1),
    recipes.DelayedScaling(amax_history_length=5, margin=3),
    recipes.DelayedScaling(amax_history_length=16, amax_compute="most_recent"),
    recipes.DelayedScaling(amax_history_length=4, initial_scale=1.0),
]


def states_of(source, rng):
    """Settled states, one that was never observed, and one that was moved."""
    rows, width = source.state_shape
    state = torch.zeros(rows, width)
    state[:, 0] = UNSEEN
    yield state.clone()
    state[:, 0] = VALID_MARK
    yield state.clone()
    history = rng.random((rows, width - 2 - SLOTS)).astype("float32")
    history[2] = 0.0
    state[:, 2 + SLOTS :] = torch.tensor(history)
    yield state.clone()
    state[0, 1 + SLOTS] = 0.37
    yield state.clone()
    state[1, 0] = 1.5 * VALID_MARK
    yield state


def values_of(source, rng):
    """What may be assigned to a state."""
    rows, width = source.state_shape
    yield torch.zeros(rows, width)
    for slots in ([0], [0, 1, 2], [7]):
        value = torch.zeros(rows, width)
        kernel = rng.random()  # which is the same in all uses of a step
        for slot in slots:
            amaxes = torch.tensor(rng.random(rows).astype("float32"))
            amaxes[1] = kernel
            value = value + source.layout.observation(amaxes, slot)
        yield value
        yield value * 0.5
        value = value.clone()
        value[0, 1], value[2, 3] = torch.inf, torch.nan
        yield value
    yield from states_of(source, rng)


def assert_settles_as_the_source(states, source):
    """That kernels for states compute what the source does.

    Args:
        states: A `StateKernels`.
        source: A source of delayed scaling.
    """
    rng = np.random.default_rng(0)
    for previous in states_of(source, rng):
        expected = source.history_scales(previous)
        found = states.history_scales(source, previous)
        np.testing.assert_array_equal(found.scales, expected.scales)
        assert (found.unseen is None) == (expected.unseen is None)
        if expected.unseen is not None:
            np.testing.assert_array_equal(found.unseen, expected.unseen)
        for value in values_of(source, rng):
            given = value.clone().nan_to_num(), previous.clone()
            expected = source.settle(value, previous)
            settled = states.settle(source, value, previous)
            np.testing.assert_array_equal(settled, expected)
            assert torch.equal(value.nan_to_num(), given[0])
            assert torch.equal(previous, given[1])
