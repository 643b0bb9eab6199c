"""The uses of a kernel in a step share what is bound and compiled."""

import numpy as np

from contracting import dense, policy
from keras_policy_ext import contractions, recipes
from keras_policy_ext.contractions.bound_plan import BoundPlan
from keras_policy_ext.ext.delayed.observations import SLOTS, UNIT
from steps import gradients, mean_square, normal, numpy
from ways import BACKEND

# Lengths that no other test has, so that no plan of theirs is bound before.
DELAYED = recipes.DelayedScaling(amax_history_length=37)


def plan_of(slot, recipe=DELAYED):
    contraction = contractions.Einsum("ab,bc->ac")
    how = "float32", "float32", True, slot
    return contractions.make_plan(contraction, recipe, *how)


def test_a_plan_is_bound_once_for_all_slots():
    bound = {id(plan_of(slot).bound) for slot in (3, *range(SLOTS))}
    assert len(bound) == 1


def test_an_observation_is_in_the_slot_of_its_use():
    """Also where the pass was compiled for another slot."""
    layer, x = dense(4, 5, policy(recipe=DELAYED)), normal(3, 5)
    (state,) = layer.float8_state.matrices
    amaxes = [np.abs(each).max() for each in (x, numpy(layer.kernel))]
    for slot in (SLOTS - 1, 0, 3):
        state.uses = slot
        *_, observation = gradients(layer, x, mean_square)[2]
        entries = numpy(observation)[:, 1 : 1 + SLOTS] / UNIT
        np.testing.assert_array_equal(entries[:2, slot], amaxes)
        assert entries[2, slot] > 0.0
        np.testing.assert_array_equal(np.delete(entries, slot, axis=1), 0.0)


def test_later_uses_in_a_step_bind_and_compile_nothing(monkeypatch):
    layer, x = dense(6, 6, policy(recipe=DELAYED)), normal(4, 6)
    (state,) = layer.float8_state.matrices
    gradients(layer, x, mean_square)
    assert state.uses == 1
    calls = []
    for name in ("__init__", "forward", "backward"):
        method = getattr(BoundPlan, name)

        def noted(*args, method=method, name=name, **kwargs):
            calls.append(name)
            return method(*args, **kwargs)

        monkeypatch.setattr(BoundPlan, name, noted)
    gradients(layer, x, mean_square)
    assert state.uses == 2
    # PyTorch compiles nothing: it computes both passes.
    computed = ["forward", "backward"] if BACKEND == "torch" else []
    assert calls == computed
