"""The state after random training runs, against the reference."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import ops

from keras_policy_ext import reference
from keras_policy_ext.numerics.scale_sources import source_of
from keras_policy_ext.recipes import DelayedScaling
from observing import (
    FORMATS,
    LENGTHS,
    delayed,
    fresh,
    histories,
    observed,
    scale_and_amax,
    scales,
    settle,
)
from ways import FASTEST, compiled, same_bits

_COMPILED = {}

amaxes = st.one_of(
    st.floats(2.0**-60, 2.0**60, width=32),
    st.sampled_from([0.0, np.inf, np.nan]),
)
steps = st.lists(
    st.one_of(
        st.none(),  # not observed
        st.lists(st.tuples(amaxes, amaxes), min_size=1, max_size=3),
    ),
    min_size=1,
    max_size=10,
)


class Simulated:
    """What the reference makes of one operand."""

    def __init__(self, rule, dtype):
        self.recipe, self.dtype = rule.recipe, dtype
        self.history = np.zeros(rule.layout.length, "float32")
        self.scale = None

    def observe(self, uses):
        """Enter one step, the largest amax of its uses."""
        scale = reference.delayed_scale(
            self.history,
            self.dtype,
            current_amax=np.nan,
            previous=self.scale,
            margin=self.recipe.margin,
            amax_compute=self.recipe.amax_compute,
        )
        if self.scale is not None or self.history.any():
            self.scale = scale
        amax = max(uses) if np.all(np.isfinite(uses)) else np.nan
        self.history = reference.update_history(self.history, amax)


@pytest.mark.full_except("max-2")
@LENGTHS
@pytest.mark.parametrize("amax_compute", ["max", "most_recent"])
@settings(max_examples=40)
@given(steps=steps)
def test_any_training_run_ends_as_in_the_reference(length, amax_compute, steps):
    rule = delayed(length, amax_compute=amax_compute, margin=1)
    state = fresh(rule)
    rows = {0: Simulated(rule, FORMATS[0]), 2: Simulated(rule, FORMATS[2])}
    for uses in steps:
        if uses is None:
            value = np.zeros_like(state)
        else:
            value = observed(rule, *[(x, 1.0, g) for x, g in uses])
            rows[0].observe([x for x, _ in uses])
            rows[2].observe([g for _, g in uses])
        state = settle(rule, value, state)
        for row, expected in rows.items():
            same_bits(histories(rule, state)[row], expected.history)
            known = np.float32(expected.scale or 0)
            same_bits(scales(rule, state)[row], known)


@pytest.mark.parametrize("initial_scale", ["current", 1.0])
@settings(max_examples=40)
@given(
    xs=st.lists(st.sampled_from([0.0, 0.1, 7.0, 3e4]), min_size=1, max_size=8)
)
def test_the_scales_of_any_run_are_those_of_the_reference_layer(
    initial_scale, xs
):
    recipe = DelayedScaling(amax_history_length=2, initial_scale=initial_scale)
    rule, layer = source_of(recipe), reference.DelayedLinear(recipe)

    def of_inputs(state, x):
        return scale_and_amax(rule, state, x, True)

    run_scale = _COMPILED.setdefault(
        initial_scale, compiled(of_inputs, FASTEST)
    )
    state = fresh(rule)
    for x in xs:
        x = np.full((1, 1), x, "float32")
        layer.forward(x, np.ones((1, 1)))
        scale, amax = run_scale(*map(ops.convert_to_tensor, (state, x)))
        same_bits(scale, layer.scales["inputs"])
        value = observed(rule, [ops.convert_to_numpy(amax), 1.0, 1.0])
        state = settle(rule, value, state)
