"""Observations of replicas whose gradients a framework averages."""

import numpy as np
import pytest
from keras import ops

from keras_policy_ext.numerics.observations import SLOTS, Layout
from steps import numpy

ROWS = 3


def averaged(layout, amaxes):
    """The mean over replicas of what each observed.

    Args:
        layout: Of the state.
        amaxes: (replicas, uses, rows); NaN in the first row for no use.
    """
    total = np.zeros((ROWS, layout.width), "float32")
    for replica, uses in enumerate(amaxes):
        seen = np.zeros((ROWS, layout.width), "float32")
        for slot, rows in enumerate(uses):
            if not np.isnan(rows[0]):
                rows = ops.convert_to_tensor(rows)
                seen += numpy(layout.observation(rows, slot))
        moved = layout.of_replica(
            ops.convert_to_tensor(seen), replica, len(amaxes)
        )
        total += numpy(moved) / np.float32(len(amaxes))
    return ops.convert_to_tensor(total)


def settled(layout, value):
    previous = layout.settled(
        ops.zeros((ROWS,)), ops.zeros((ROWS, layout.length))
    )
    state = layout.settle(value, previous, ops.ones((ROWS,)))
    return numpy(layout.history(state))[:, 0]


def random_amaxes(replicas, uses):
    rng = np.random.default_rng(replicas)
    amaxes = rng.lognormal(size=(replicas, uses, ROWS)).astype("float32")
    amaxes[:, :, 1] = amaxes[0, 0, 1]  # a kernel is the same everywhere
    return amaxes


@pytest.mark.parametrize(
    ("replicas", "uses", "length"),
    [(1, 8, 1), (2, 1, 1), (2, 8, 16), (4, 3, 4), (8, 1, 1), (64, 1, 64)],
)
def test_the_mean_over_replicas_holds_the_largest_amax(replicas, uses, length):
    amaxes = random_amaxes(replicas, uses)
    newest = settled(Layout(length), averaged(Layout(length), amaxes))
    expected = amaxes.max(axis=(0, 1))
    np.testing.assert_array_equal(newest[[0, 2]], expected[[0, 2]])
    # The kernel's is a mean: as many roundings as there are uses.
    np.testing.assert_allclose(
        newest[1], expected[1], rtol=replicas * uses * 2.0**-24
    )


def test_an_odd_number_of_replicas_rounds_twice():
    amaxes = random_amaxes(3, 2)
    newest = settled(Layout(16), averaged(Layout(16), amaxes))
    np.testing.assert_allclose(
        newest[[0, 2]], amaxes.max(axis=(0, 1))[[0, 2]], rtol=2 * 2.0**-24
    )


def test_a_replica_that_did_not_use_the_layer_does_not_count():
    amaxes = random_amaxes(4, 2)
    amaxes[1] = np.nan
    amaxes[2, 1] = np.nan
    newest = settled(Layout(16), averaged(Layout(16), amaxes))
    np.testing.assert_array_equal(newest, np.nanmax(amaxes, axis=(0, 1)))


def test_more_replicas_than_columns_give_an_upper_bound():
    amaxes = random_amaxes(25, 1)
    newest = settled(Layout(4), averaged(Layout(4), amaxes))
    largest = amaxes.max(axis=(0, 1))[[0, 2]]
    assert np.all(newest[[0, 2]] >= largest)
    assert np.all(newest[[0, 2]] <= 2 * largest)  # 13 columns: two share one


def test_what_is_not_finite_on_one_replica_is_not_entered_on_any():
    amaxes = random_amaxes(2, 1)
    amaxes[1, 0, 0] = np.inf
    newest = settled(Layout(16), averaged(Layout(16), amaxes))
    assert newest[0] == 0.0
    assert newest[2] == amaxes[:, 0, 2].max()


def test_one_replica_writes_as_if_there_were_none():
    layout = Layout(1)
    rows = ops.convert_to_tensor(np.float32([1.0, 2.0, 3.0]))
    for slot in range(SLOTS):
        observation = layout.observation(rows, slot)
        np.testing.assert_array_equal(
            numpy(layout.of_replica(observation, 0, 1)), numpy(observation)
        )
