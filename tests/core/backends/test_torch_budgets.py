"""What a step of a Dense layer moves on a GPU with PyTorch, held to budgets.

Counted by `torch_counts`. A step in bfloat16 has 5 large kernels, 3 small
ones and moves 10.0 bytes per element of its three matrices.
"""

import keras
import pytest

if keras.backend.backend() != "torch":
    pytest.skip(
        f"PyTorch's operations; the backend is {keras.backend.backend()}",
        allow_module_level=True,
    )

from torch_counts import dense_step, summary

SIZE = 4096

BUDGETS = {  # recipe: large kernels, small kernels, bytes per element
    "delayed": (5, 7, 8.72),
    "current": (8, 19, 11.39),
}
FIRST_STEPS = (5, 10, 8.72)
"""Of delayed scaling, until the GPU has told what it has observed."""


@pytest.mark.parametrize("recipe", BUDGETS)
def test_a_step_stays_within_its_budget(recipe):
    assert_within(dense_step(SIZE, recipe, triton=True), BUDGETS[recipe])


def test_the_first_steps_ask_for_what_was_not_observed():
    found = dense_step(SIZE, "delayed", triton=True, seen_lately=False)
    assert_within(found, FIRST_STEPS)


def assert_within(step, budget):
    found = summary(step, SIZE)
    large, small, moved = budget
    assert found["float8_matmuls"] == 3
    assert found["large_kernels"] <= large
    assert found["small_kernels"] <= small
    assert found["bytes_per_element"] <= moved


def test_the_counter_sees_what_bfloat16_moves():
    found = summary(dense_step(SIZE, None, triton=False), SIZE)
    assert found["bytes_per_element"] == 10.0
    assert (found["large_kernels"], found["small_kernels"]) == (5, 3)


@pytest.mark.parametrize("recipe", BUDGETS)
def test_without_triton_a_step_moves_three_times_as_much(recipe):
    found = summary(dense_step(SIZE, recipe, triton=False), SIZE)
    assert found["bytes_per_element"] > 34.0
