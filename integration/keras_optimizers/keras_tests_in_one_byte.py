"""A plugin of pytest: optimizers that are built have one-byte state.

`test_keras_optimizer_tests.py` runs the tests of Keras's optimizers, which are
in its wheel, with it.
"""

import keras
import numpy as np
from keras.src import testing

import keras_policy_ext as kpe
from keras_policy_ext.ext.moments.quantized import make_quantized
from keras_policy_ext.ext.moments.settings import Settings

TOLERANCE = 0.02
"""Of weights, relative and absolute. A step is off by a sixteenth where its
moments are, and the steps of these tests are 0.001 to 0.5."""

WRAPPERS = (
    keras.optimizers.LossScaleOptimizer,
    keras.optimizers.MultiOptimizer,
)

#: Tests that do not hold for one-byte state, and why.
LEFT_OUT = {
    "test_sparse_gradients_": "it replaces the method that assigns to slots",
    "test_tf_checkpointing": "a step changes less than `TOLERANCE`",
    "test_serialization": "it compares the names of classes",
}

build = keras.optimizers.Optimizer.build
assert_close = testing.TestCase.assertAllClose
quantized = []


def build_quantized(optimizer, variables):
    """Quantize the state of an optimizer, just before it makes its slots.

    Without the trial of `quantize_state`, as some are built in a graph.
    """
    known = (kpe.optimizers.QuantizedState, *WRAPPERS)
    if not optimizer.built and not isinstance(optimizer, known):
        make_quantized(optimizer, Settings(minimum_size=1))
        quantized.append(optimizer)
    return build(optimizer, variables)


def assert_closer(case, found, wanted, atol=0.0, rtol=0.0, **options):
    """Compare as Keras's tests do, with more room."""
    options |= {"atol": max(atol, TOLERANCE), "rtol": max(rtol, TOLERANCE)}
    assert_close(case, found, wanted, **options)


keras.optimizers.Optimizer.build = build_quantized
testing.TestCase.assertAllClose = assert_closer


def pytest_runtest_setup(item):
    """Seed NumPy, as some of Keras's tests draw gradients without a seed."""
    np.random.seed(0)


def pytest_collection_modifyitems(config, items):
    """Leave out what cannot hold."""
    out = [i for i in items if any(name in i.name for name in LEFT_OUT)]
    config.hook.pytest_deselected(items=out)
    items[:] = [each for each in items if each not in out]


def pytest_terminal_summary(terminalreporter):
    """Say how many optimizers were quantized."""
    terminalreporter.write_line(f"{len(quantized)} in one byte")
