"""Which cases of a parametrized test every run shows."""

import keras
import pytest

SLOW = () if keras.backend.backend() == "torch" else (pytest.mark.slow,)
"""Marks of a case that differs from others in what no framework computes.

JAX and TensorFlow compile or trace each case for seconds. There it runs by
name, and PyTorch always runs it.
"""


BEFORE_3_15 = tuple(map(int, keras.__version__.split(".")[:2])) < (3, 15)

needs_whole_graphs = pytest.mark.skipif(
    BEFORE_3_15,
    reason=f"Keras {keras.__version__} itself breaks graphs of PyTorch 2.13",
)

FROM_3_16 = tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 16)

needs_sums_in_float64 = pytest.mark.skipif(
    FROM_3_16 and keras.backend.backend() == "torch",
    reason=f"Keras {keras.__version__} itself adds float64 in float32 there",
)


def mostly(cases, *always):
    """Parameters of a test, of which some run always and the others on torch.

    Args:
        cases: All of them: names, or other values that are told apart by `==`.
        always: Those that every backend runs.
    """
    assert set(always) <= set(cases)
    return [
        pytest.param(case, marks=() if case in always else SLOW)
        for case in cases
    ]
