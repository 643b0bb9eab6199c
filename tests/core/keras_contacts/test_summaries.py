"""Why `_keras/saving_hooks.py` is needed. See `_keras/__init__.py`."""

import keras
import pytest

import keras_policy_ext as kpe

pytestmark = pytest.mark.any_backend


class Extra(keras.layers.Dense):
    """A layer whose own count leaves one of its variables out."""

    def build(self, shape):
        super().build(shape)
        self.extra = self.add_weight(shape=(100,), name="extra")

    def count_params(self):
        return super().count_params() - 100


def totals(model):
    """The rows of the layers, and the totals, of a summary."""
    lines = []
    model.summary(print_fn=lines.append, line_length=80)
    text = "\n".join(lines)
    (said,) = [
        int(line.split(":")[1].split()[0].replace(",", ""))
        for line in text.splitlines()
        if "Total params" in line
    ]
    return sum(layer.count_params() for layer in model.layers), said


def test_keras_adds_up_weights_and_not_rows():
    model = keras.Sequential([keras.Input((4,)), Extra(3)])
    rows, total = totals(model)
    assert rows == 15 and total == 115


def model():
    dense = [keras.layers.Dense(8), keras.layers.Dense(2)]
    return keras.Sequential([keras.Input((4,)), *dense])


@pytest.mark.parametrize("trained", [False, True])
def test_totals_of_a_converted_model_are_those_of_its_weights(trained):
    converted = model()
    before = totals(converted)
    kpe.convert(converted, "delayed")
    counted = converted.count_params()
    if trained:
        converted.compile("sgd", "mse")
    assert totals(converted) == before == (58, 58)
    assert converted.count_params() == counted > 58


def test_totals_of_a_frozen_model_are_those_of_its_weights():
    frozen = model()
    kpe.freeze(frozen)
    assert totals(frozen) == (58, 58)


def test_models_in_models_are_counted_alike():
    inner = model()
    kpe.convert(inner, "delayed")
    inputs = keras.Input((4,))
    outer = keras.Model(inputs, keras.layers.Dense(1)(inner(inputs)))
    lines = []
    outer.summary(print_fn=lines.append, expand_nested=True)
    text = "\n".join(lines)
    assert "Total params: 61" in text
    assert f"{inner.count_params():,}" not in text
