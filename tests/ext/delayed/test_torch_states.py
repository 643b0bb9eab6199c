"""The arithmetic of states on numbers is that of the source."""

import warnings

import keras
import numpy as np
import pytest

if keras.backend.backend() != "torch":
    pytest.skip(
        f"PyTorch's states; the backend is {keras.backend.backend()}",
        allow_module_level=True,
    )

import torch

from float8_states import SOURCES, assert_settles_as_the_source
from keras_policy_ext import recipes
from keras_policy_ext.ext.delayed import frameworks
from keras_policy_ext.ext.delayed.observations import (
    FIRST,
    ROUNDING,
    SLOTS,
    UNIT,
    UNSEEN,
    VALID_MARK,
)
from keras_policy_ext.ext.delayed.torch.kernels import CpuStates
from keras_policy_ext.numerics.scale_sources import CurrentSource, source_of

ODD = [
    *(0.0, 0.0, 1.0, -1.0, torch.inf, -torch.inf, torch.nan, 1e-45, 3e38),
    *(UNIT, 2.0 * UNIT, 0.5 * UNIT, 1e-3 * UNIT, VALID_MARK, UNSEEN),
    *(VALID_MARK + ROUNDING / 2.0, VALID_MARK + 2.0 * ROUNDING),
]
"""What a number of a state may be that a loop or a mistake has changed."""


@pytest.mark.parametrize("recipe", SOURCES, ids=repr)
def test_states_settle_as_in_the_source(recipe):
    assert_settles_as_the_source(CpuStates(), source_of(recipe))


@pytest.mark.full_except("1", "2")
@pytest.mark.parametrize("uses", range(1, 9))
def test_amaxes_of_many_uses_are_added_up_in_the_same_order(uses):
    source = source_of(recipes.DelayedScaling(amax_history_length=2))
    previous = torch.zeros(source.state_shape)
    previous[:, 0] = VALID_MARK
    for amax in np.random.default_rng(0).random(200).astype("float32"):
        amaxes = [torch.tensor(amax)] * 3
        value = sum(source.observation(amaxes, i) for i in range(uses))
        expected = source.settle(value, previous)
        found = CpuStates().settle(source, value, previous)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.full
@pytest.mark.parametrize("recipe", SOURCES, ids=repr)
def test_any_numbers_settle_as_in_the_source(recipe):
    source, rng = source_of(recipe), np.random.default_rng(0)
    for _ in range(300):
        previous, value = _any_state(source, rng), _any_value(source, rng)
        expected = source.settle(value, previous)
        with warnings.catch_warnings(action="error"):
            found = CpuStates().settle(source, value, previous)
            scales = CpuStates().history_scales(source, previous).scales
        np.testing.assert_array_equal(found, expected)
        expected = source.history_scales(previous).scales
        np.testing.assert_array_equal(scales, expected)


def _any_value(source, rng):
    if rng.random() < 0.3:
        return _any_state(source, rng)
    uses, value = rng.integers(1, 9), torch.zeros(source.state_shape)
    value[:, 0] = UNIT * uses
    size = UNIT * rng.choice([1.0, 1e-3, 1e30])
    value[:, 1 : 1 + uses] = size * torch.tensor(rng.random((3, uses)))
    return _with_odd_numbers(value, rng)


def _any_state(source, rng):
    rows, width = source.state_shape
    state = torch.zeros(rows, width)
    state[:, 0] = torch.tensor(
        rng.choice([VALID_MARK, VALID_MARK, UNSEEN, 0.3], rows)
    )
    state[:, FIRST - 1] = torch.tensor(rng.choice([0.0, 0.25], rows))
    state[:, FIRST:] = torch.tensor(rng.random((rows, width - FIRST)))
    return _with_odd_numbers(state, rng)


def _with_odd_numbers(state, rng):
    for _ in range(rng.integers(0, 3)):
        column = rng.choice([0, 1, 2, SLOTS, FIRST - 1, FIRST, -1])
        state[rng.integers(3), column] = rng.choice(ODD)
    return state


@pytest.mark.parametrize("slot", [0, 3, 7, 9])
def test_an_observation_is_that_of_the_source(slot):
    source = source_of(recipes.DelayedScaling(amax_history_length=3))
    amaxes = [torch.tensor(x) for x in (0.5, torch.inf, torch.nan)]
    found = CpuStates().observation(source, amaxes, slot)
    np.testing.assert_array_equal(found, source.observation(amaxes, slot))


@pytest.mark.parametrize("amax", [1e-45, 2.0**-126, 3e-38, 448.0, 3e38])
def test_scales_of_extreme_amaxes_are_those_of_the_source(amax):
    source = source_of(recipes.DelayedScaling(amax_history_length=2))
    state = torch.zeros(source.state_shape)
    state[:, 0], state[:, -1] = VALID_MARK, amax
    found = CpuStates().history_scales(source, state)
    expected = source.history_scales(state)
    np.testing.assert_array_equal(found.scales, expected.scales)
    np.testing.assert_array_equal(found.unseen, expected.unseen)


def test_it_is_chosen_for_float32_on_a_cpu():
    source = source_of(recipes.DelayedScaling())
    state = torch.zeros(source.state_shape)
    kernels_for = frameworks.current.kernels_for
    assert isinstance(kernels_for(source, state), CpuStates)
    assert kernels_for(source, state.bfloat16()) is None
    assert kernels_for(source, state.to("meta").float()) is None
    current = CurrentSource(recipes.CurrentScaling())
    assert kernels_for(current, state) is None
