"""The sum-safe state of delayed scaling, against the reference's histories."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from keras import ops

from keras_policy_ext import reference
from keras_policy_ext.ext.delayed.observations import SLOTS, StateLayout
from keras_policy_ext.ext.delayed.sources import DelayedSource
from keras_policy_ext.numerics import quantized
from keras_policy_ext.numerics.scale_sources import source_of
from keras_policy_ext.recipes import CurrentScaling, DelayedScaling
from observing import (
    FORMATS,
    LENGTHS,
    ROWS,
    delayed,
    fresh,
    histories,
    observed,
    random_state,
    scale_and_amax,
    scales,
    settle,
    settled,
)
from steps import numpy
from ways import WAYS, run, same_bits

# What leaves the state alone


@LENGTHS
@WAYS
def test_zeros_keep_the_state_bit_for_bit(length, way):
    rule = delayed(length)
    for state in (fresh(rule), random_state(rule)):
        same_bits(settle(rule, np.zeros_like(state), state, way), state)


@LENGTHS
@WAYS
@pytest.mark.parametrize("factor", [0.5, 1.5, 2.0**-30])
def test_an_observation_that_was_scaled_leaves_no_history(length, way, factor):
    """It stood still else, and would cut a kernel that grows."""
    rule = delayed(length)
    value = factor * observed(rule, [1, 2, 3])
    same_bits(settle(rule, value, random_state(rule), way), fresh(rule))


@LENGTHS
@WAYS
def test_a_settled_value_is_taken_as_it_is(length, way):
    rule = delayed(length)
    for value in (fresh(rule), random_state(rule, 1)):
        once = settle(rule, value, random_state(rule, 2), way)
        same_bits(once, value)
        same_bits(settle(rule, once, once, way), value)


@WAYS
def test_each_operand_is_judged_alone(way):
    rule = delayed(2)
    state, other = random_state(rule, 1), random_state(rule, 2)
    third = observed(rule, [0, 0, 5])[2]
    value = np.stack([np.zeros_like(state[0]), other[1], third])
    result = settle(rule, value, state, way)
    same_bits(result[:2], np.stack([state[0], other[1]]))
    newest = [5.0, histories(rule, state)[2, 0]]
    same_bits(histories(rule, result)[2], np.float32(newest))


# What is observed


@LENGTHS
@pytest.mark.parametrize("slot", [0, 1, SLOTS - 1, SLOTS, 3 * SLOTS + 2])
def test_an_observation_is_one_use_in_one_slot(length, slot):
    rule = delayed(length)
    amaxes = [ops.convert_to_tensor(np.float32(a)) for a in (1, 2, 3)]
    observation = rule.observation(amaxes, slot)
    same_bits(observation, observed(rule, [1, 2, 3], slots=[slot]))


@WAYS
@pytest.mark.parametrize("uses", range(1, SLOTS + 1))
def test_the_largest_amax_of_eight_uses_is_exact(uses, way):
    rule = delayed(2)
    amaxes = np.random.default_rng(uses).uniform(0.1, 9, (uses, ROWS))
    amaxes = amaxes.astype("float32")
    amaxes[:, 1] = np.float32(0.3)
    result = settle(rule, observed(rule, *amaxes), random_state(rule), way)
    newest = histories(rule, result)[:, 0]
    largest = amaxes.max(axis=0)
    same_bits(newest[[0, 2]], largest[[0, 2]])
    # The mean of equal numbers, summed and divided in float32.
    assert newest[1] == pytest.approx(largest[1], rel=uses * 2.0**-24)


def test_an_amax_of_zero_hides_no_other_use():
    rule = delayed(1)
    total = observed(rule, [0, 0, 0], [3, 1, 2], [0, 2, 0])
    assert settle(rule, total, fresh(rule))[:, -1].tolist() == [3, 1, 2]


def test_more_than_eight_uses_give_an_upper_bound():
    rule = delayed(1)
    uses = [[1.0 + i / 100, 2.0, 3.0 + i] for i in range(20)]
    newest = settle(rule, observed(rule, *uses), fresh(rule))[:, -1]
    assert 1.19 <= newest[0] <= 3 * 1.19
    assert newest[1] == 2
    assert 22 <= newest[2] <= 3 * 22


def test_uses_in_one_slot_add_up_as_in_a_scanned_layer():
    rule = delayed(1)
    total = observed(rule, *[[1.0, 2.0, 3.0]] * 5, slots=[0] * 5)
    assert settle(rule, total, fresh(rule))[:, -1].tolist() == [5, 2, 15]


def test_the_kernel_row_is_the_mean_over_the_uses():
    rule = delayed(1)
    total = observed(rule, [1, 2, 1], [1, 4, 1], [1, 6, 1])
    assert settle(rule, total, fresh(rule))[:, -1].tolist() == [1, 4, 1]


@WAYS
def test_an_amax_of_zero_is_entered(way):
    rule = delayed(2)
    state = settled(rule, [1, 1, 1], [[3, 4]] * ROWS)
    result = settle(rule, observed(rule, [0, 0, 0]), state, way)
    assert histories(rule, result).tolist() == [[0, 3]] * ROWS


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("uses", [1, 3])
@WAYS
def test_what_is_not_finite_never_enters(poison, uses, way):
    rule = delayed(2)
    state = settled(rule, [0.5, 0.5, 0.5], [[3, 4], [5, 6], [7, 8]])
    amaxes = np.ones((uses, ROWS), "float32")
    amaxes[-1, 0] = poison
    result = settle(rule, observed(rule, *amaxes), state, way)
    expected = [[3, 4], [1, 5], [1, 7]]
    assert histories(rule, result).tolist() == expected
    assert np.all(np.isfinite(result))


@WAYS
def test_the_sum_of_opposite_infinities_never_enters(way):
    rule = delayed(2)
    state = random_state(rule)
    with np.errstate(invalid="ignore"):
        total = observed(rule, [np.inf] * 3) + observed(rule, [-np.inf] * 3)
    result = settle(rule, total, state, way)
    same_bits(histories(rule, result), histories(rule, state))


# The history


@LENGTHS
@WAYS
def test_the_ring_turns_as_in_the_reference(length, way):
    rule = delayed(length)
    state, expected = fresh(rule), np.zeros(length, "float32")
    for amax in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0):
        state = settle(rule, observed(rule, [amax] * ROWS), state, way)
        expected = reference.update_history(expected, amax)
        for row in histories(rule, state):
            same_bits(row, expected)


def test_the_columns_are_uses_slots_scale_history():
    layout = StateLayout(4)
    assert layout.width == 1 + SLOTS + 1 + 4
    row = np.arange(layout.width, dtype="float32")[None]
    assert layout.scale(row).tolist() == [1 + SLOTS]
    assert layout.history(row).tolist() == [[10, 11, 12, 13]]


# The scales


def prior(rule, state, way="eager"):
    def scales_and_unseen(state):
        result = rule.history_scales(state)
        if result.unseen is None:
            return (result.scales,)
        return result.scales, result.unseen

    result = run(scales_and_unseen, way, np.asarray(state, "float32"))
    return [ops.convert_to_numpy(x) for x in result]


@pytest.mark.parametrize("amax_compute", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, 3])
@WAYS
def test_scales_are_those_of_the_reference(amax_compute, margin, way):
    rule = delayed(4, amax_compute=amax_compute, margin=margin)
    state = random_state(rule)
    got, unseen = prior(rule, state, way)
    expected = [
        reference.delayed_scale(
            row,
            dtype,
            current_amax=np.nan,
            margin=margin,
            amax_compute=amax_compute,
        )
        for row, dtype in zip(histories(rule, state), FORMATS, strict=True)
    ]
    same_bits(got, np.float32(expected))
    assert not unseen.any()


@WAYS
def test_most_recent_forgets_a_spike_at_once(way):
    state = settled(delayed(2), [1] * ROWS, [[448.0, 4480.0]] * ROWS)
    newest, _ = prior(delayed(2, amax_compute="most_recent"), state, way)
    largest, _ = prior(delayed(2), state, way)
    assert newest[0] == 1
    assert largest[0] == 10


@pytest.mark.parametrize("initial_scale", ["current", 1.0])
@WAYS
def test_an_all_zero_history_keeps_the_previous_scale(initial_scale, way):
    rule = delayed(2, initial_scale=initial_scale)
    previous = [0.3, 0.7, 1e-20]
    state = settled(rule, previous, np.zeros((ROWS, 2)))
    got, *unseen = prior(rule, state, way)
    same_bits(got, np.float32(previous))
    assert not np.any(unseen)
    result = settle(rule, observed(rule, [0, 0, 0]), state, way)
    same_bits(scales(rule, result), np.float32(previous))


@WAYS
def test_a_fresh_layer_takes_its_scale_from_the_tensor_itself(way):
    rule = delayed(2)
    x = np.float32([[3.0, -5.0]])
    for observe in (True, False):

        def scale(state, x, observe=observe):
            return scale_and_amax(rule, state, x, observe)[0]

        expected = reference.scale_of_multiplier(5.0, FORMATS[0])
        same_bits(run(scale, way, fresh(rule), x), expected)


@WAYS
def test_a_fresh_layer_with_initial_scale_one_has_scale_one(way):
    rule = delayed(2, initial_scale=1.0)
    (got,) = prior(rule, fresh(rule), way)
    assert got.tolist() == [1, 1, 1]


@WAYS
def test_only_zeros_seen_is_as_good_as_nothing_seen(way):
    rule = delayed(2)
    state = settle(rule, observed(rule, [0, 0, 0]), fresh(rule), way)
    _, unseen = prior(rule, state, way)
    assert unseen.all()


@WAYS
def test_the_scale_in_the_state_is_the_one_that_was_used(way):
    rule = delayed(2)
    state = settled(rule, [9, 9, 9], [[448.0, 0], [896.0, 0], [57344.0, 0]])
    result = settle(rule, observed(rule, [1e6, 1e6, 1e6]), state, way)
    assert scales(rule, result).tolist() == [1, 2, 1]


def test_scales_that_gradients_read_tell_what_was_not_finite():
    x = np.ones((1, 2, 3), "float32")
    asked = CurrentScaling().quantization("inputs", "forward")
    read, amax = quantized.quantize(ops.convert_to_tensor(x), asked)
    same_bits(read.with_nan_scales(amax).scale, read.scale)
    for poison in (np.inf, np.nan):
        x[0, 1, 1] = poison
        read, amax = quantized.quantize(ops.convert_to_tensor(x), asked)
        assert np.isfinite(numpy(read.scale)).all()
        assert np.isnan(numpy(read.with_nan_scales(amax).scale)).all()


def test_equal_recipes_share_a_source_and_strangers_have_none():
    assert source_of(DelayedScaling()) is source_of(DelayedScaling())
    assert isinstance(source_of(DelayedScaling()), DelayedSource)
    with pytest.raises(TypeError, match="recipes"):
        source_of(object())


@WAYS
def test_a_state_that_was_moved_counts_for_nothing(way):
    """Neither as an observation, whatever its count, nor as what was seen."""
    rule = delayed(16)
    before = random_state(rule)
    moved = before.copy()
    moved[:, 0] = 3.0
    same_bits(settle(rule, moved, before, way), fresh(rule))
    scales(rule, moved)[:] = 0.0
    same_bits(settle(rule, moved, before, way), fresh(rule))

    after = settle(rule, observed(rule, [1, 2, 3]), moved, way)
    newest, others = np.split(histories(rule, after), [1], axis=1)
    np.testing.assert_array_equal(newest[:, 0], [1, 2, 3])
    assert not others.any()


@WAYS
@pytest.mark.parametrize("part", [0.5, 0.005, 1e-5])
def test_an_average_with_what_was_never_observed_is_not_believed(part, way):
    """Its amaxes are a fraction of what they are of, and would cut it."""
    rule = delayed(4)
    seen, part = random_state(rule), np.float32(part)
    average = (1 - part) * fresh(rule) + part * seen
    state = settle(rule, average, fresh(rule), way)
    _, unseen = prior(rule, state, way)
    assert unseen.all()
    after = settle(rule, observed(rule, [1, 2, 3]), state, way)
    same_bits(after, settle(rule, observed(rule, [1, 2, 3]), fresh(rule), way))

    for _ in range(24):
        state = settle(rule, 0.5 * state + 0.5 * seen, state, way)
    _, unseen = prior(rule, state, way)
    assert not unseen.any()
    np.testing.assert_allclose(state, seen, rtol=1e-5)


@WAYS
@pytest.mark.parametrize("rate", [1.0, 0.01, 1e-4, 1e-6])
def test_a_step_of_gradient_descent_moves_a_state(rate, way):
    """By an observation, as small as it is."""
    rule = delayed(2)
    before = random_state(rule)
    after = before - np.float32(rate) * observed(rule, [1, 2, 3])
    for scale, expected in zip(
        prior(rule, after, way), (0.0, True), strict=True
    ):
        same_bits(scale, np.array([expected] * ROWS, scale.dtype))


@given(
    amaxes=st.lists(
        st.floats(2.0**-102, float(np.float32(3.4e38)), width=32),
        min_size=3,
        max_size=3,
    )
)
def test_an_observation_loses_no_bit_of_an_amax(amaxes):
    rule = delayed(1)
    tensors = [ops.convert_to_tensor(np.float32(a)) for a in amaxes]
    value = ops.convert_to_numpy(rule.observation(tensors, 0))
    same_bits(settle(rule, value, fresh(rule))[:, -1], np.float32(amaxes))


@WAYS
@pytest.mark.parametrize("length", [1, 4])
def test_observations_of_replicas_lie_side_by_side(length, way):
    rule = delayed(length)
    one = observed(rule, [1, 7, 5])
    other = observed(rule, [4, 7, 2], [3, 7, 6])
    wide = np.concatenate([one[:, :1] + other[:, :1], one[:, 1:]], axis=1)
    wide = np.concatenate([wide, other[:, 1:]], axis=1)
    after = settle(rule, wide, fresh(rule), way)
    np.testing.assert_array_equal(histories(rule, after)[:, 0], [4, 7, 6])
