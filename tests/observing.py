"""States of delayed scaling, and what is observed in them."""

import numpy as np
import pytest
from keras import ops

from keras_policy_ext.ext.delayed.observations import (
    SLOTS,
    UNIT,
    UNSEEN,
    VALID_MARK,
)
from keras_policy_ext.numerics.scale_sources import Amax, source_of
from keras_policy_ext.recipes import OPERANDS, DelayedScaling
from ways import FASTEST, compiled

ROWS = len(OPERANDS)
LENGTHS = pytest.mark.parametrize("length", [1, 2, 4])


def delayed(length=4, **kwargs):
    return source_of(DelayedScaling(amax_history_length=length, **kwargs))


def fresh(rule):
    """The state of a layer that was just built."""
    state = np.zeros(rule.state_shape, "float32")
    state[:, 0] = UNSEEN
    return state


def settled(rule, scale, history):
    """A state with these scales (3,) and histories (3, length)."""
    state = fresh(rule)
    state[:, 0] = VALID_MARK
    rule.layout.scale(state)[:] = scale
    rule.layout.history(state)[:] = history
    return state


def random_state(rule, seed=0):
    rng = np.random.default_rng(seed)
    history = rng.uniform(0.1, 9, (ROWS, rule.layout.length))
    return settled(rule, rng.uniform(0.01, 1, ROWS), history)


def observed(rule, *uses, slots=None):
    """The sum over uses, each with the amaxes of the three operands."""
    total = np.zeros(rule.state_shape, "float32")
    for slot, amaxes in zip(slots or range(len(uses)), uses, strict=True):
        total[:, 0] += 1
        total[:, 1 + slot % SLOTS] += np.asarray(amaxes, "float32")
    return UNIT * total


_COMPILED = {}


def settle(rule, value, previous, way=FASTEST):
    key = rule.recipe, way
    if key not in _COMPILED:
        _COMPILED[key] = compiled(rule.settle, way)
    arrays = np.asarray(value, "float32"), np.asarray(previous, "float32")
    result = _COMPILED[key](*map(ops.convert_to_tensor, arrays))
    return ops.convert_to_numpy(result)


def histories(rule, state):
    return np.asarray(rule.layout.history(state))


def scales(rule, state):
    return np.asarray(rule.layout.scale(state))


def scale_and_amax(rule, state, x, observe):
    """The scale of inputs, and their amax where that is observed."""
    asked = rule.recipe.quantization("inputs", "forward")
    amax = Amax(x, wanted=observe)
    known = rule.history_scales(state)
    return rule.scale("inputs", asked, amax, known), amax.value


FORMATS = [DelayedScaling().format_of(operand) for operand in OPERANDS]
