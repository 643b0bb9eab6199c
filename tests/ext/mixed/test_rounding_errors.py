"""What `StochasticRounding` refuses, and what it says."""

import json

import keras
import numpy as np
import pytest

from keras_policy_ext.mixed_precision import (
    LossScaleOptimizer,
    StochasticRounding,
    wrap_optimizer,
)
from steps import numpy


def built():
    optimizer = keras.optimizers.SGD(0.5)
    optimizer.build([keras.Variable(0.0)])
    return optimizer


@pytest.mark.parametrize(
    "inner, error, says",
    [
        (lambda: "adam", TypeError, "'adam'"),
        (lambda: None, TypeError, "None"),
        (built, ValueError, "built"),
        (
            lambda: keras.optimizers.LossScaleOptimizer(
                keras.optimizers.SGD(0.5)
            ),
            ValueError,
            "LossScaleOptimizer(StochasticRounding",
        ),
        (
            lambda: StochasticRounding(keras.optimizers.SGD(0.5)),
            ValueError,
            "StochasticRounding",
        ),
    ],
    ids=["a name", "None", "built", "a loss scaler", "wrapped twice"],
)
def test_what_cannot_be_wrapped_is_refused(inner, error, says):
    with pytest.raises(error) as raised:
        StochasticRounding(inner())
    assert says in str(raised.value)
    assert "Allowed: " in str(raised.value)


def test_an_optimizer_has_one_wrapper():
    kinds = [StochasticRounding, LossScaleOptimizer]
    for first in kinds:
        inner = keras.optimizers.SGD(0.5)
        wrapper = first(inner)
        for second in kinds:
            with pytest.raises(ValueError, match="nothing wraps") as raised:
                second(inner)
            assert f"{wrapper.name!r} (of type" in str(raised.value)
    inner = keras.optimizers.SGD(0.5)
    wrapper = StochasticRounding(inner)
    with pytest.raises(ValueError, match="nothing wraps"):
        wrap_optimizer(inner, "mixed_float16")
    assert wrap_optimizer(wrapper, "mixed_float16").inner_optimizer is wrapper


def test_a_seed_may_be_an_integer_of_numpy():
    optimizer = StochasticRounding(keras.optimizers.SGD(0.5), np.int64(3))
    config = json.loads(json.dumps(optimizer.get_config()))
    assert config["seed"] == 3
    same = StochasticRounding(keras.optimizers.SGD(0.5), 3)
    states = [numpy(x.seed_generator.state) for x in (optimizer, same)]
    np.testing.assert_array_equal(*states)


@pytest.mark.parametrize(
    "seed, error", [(True, TypeError), (1.0, TypeError), (-1, ValueError)]
)
def test_what_is_no_seed_is_refused(seed, error):
    with pytest.raises(error, match=f"Received: seed={seed}"):
        StochasticRounding(keras.optimizers.SGD(0.5), seed=seed)
