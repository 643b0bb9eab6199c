"""Models with an optional input that is None, in dicts and in lists."""

import keras
import numpy as np
import pytest
from keras import layers

import keras_policy_ext as kpe
from steps import normal


class Optional(layers.Layer):
    """Adds the product of a second tensor, if there is one."""

    def __init__(self):
        super().__init__(name="optional")
        self.first = layers.Dense(8, name="first")
        self.second = layers.Dense(8, name="second")

    def build(self, x_shape, y_shape=None):
        self.first.build((None, 6))
        self.second.build((None, 4))

    def call(self, x, y=None):
        found = self.first(x)
        return found if y is None else found + self.second(y)


def model_of(nested):
    keras.utils.set_random_seed(0)
    a = keras.Input((6,), name="a")
    b = keras.Input((4,), name="b", optional=True)
    given = {"a": a, "b": b} if nested is dict else [a, b]
    outputs = layers.Dense(3, name="head")(Optional()(a, b))
    model = keras.Model(given, outputs, name="model")
    kpe.convert(model, "delayed")
    return model


def data_of(nested, x):
    return {"a": x, "b": None} if nested is dict else [x, None]


X = normal(8, 6)
RUNS = {
    "calibrate": lambda m, d, s: kpe.calibrate(m, d),
    "calibrate batches": lambda m, d, s: kpe.calibrate(
        m, iter([(d, np.zeros((8, 3)))] * 2)
    ),
    "audit": lambda m, d, s: kpe.audit(m, d),
    "memory": lambda m, d, s: kpe.memory(m, d),
    "memory of shapes": lambda m, d, s: kpe.memory(m, s),
    "plan": lambda m, d, s: kpe.plan(m, d, "h200", compiled=True),
    "plan of shapes": lambda m, d, s: kpe.plan(m, s, "h200", compiled=True),
}


@pytest.mark.parametrize("nested", [dict, list])
@pytest.mark.parametrize("run", RUNS)
def test_an_input_may_be_none(run, nested):
    model = model_of(nested)
    model.predict(data_of(nested, X), verbose=0)  # Stock takes it.
    RUNS[run](model, data_of(nested, X), data_of(nested, (8, 6)))


@pytest.mark.parametrize("nested", [dict, list])
def test_calibration_looks_at_the_input_that_is_there(nested):
    model = model_of(nested)
    kpe.calibrate(model, data_of(nested, X))
    first = model.get_layer("optional").first
    (state,) = first.float8_state.matrices
    assert state.newest("inputs") == pytest.approx(np.abs(X).max())


def test_nothing_but_none_is_no_data():
    with pytest.raises((TypeError, ValueError), match="Allowed"):
        kpe.audit(model_of(dict), {"a": "x", "b": None})
