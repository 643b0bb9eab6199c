"""`set_weights` sets all weights or none."""

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe

CHANGES = {
    "float8": lambda m: kpe.convert(m, "delayed"),
    "frozen": kpe.freeze,
    "widened": lambda m: (kpe.freeze(m), kpe.widen(m)),
}


class Outer(keras.Model):
    """A stock class around the layers."""

    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(4)
        self.norm = keras.layers.LayerNormalization()
        self.last = keras.layers.Dense(2)

    def call(self, x):
        return self.last(self.norm(self.first(x)))


def made(change):
    model = Outer()
    model(np.ones((1, 6), "float32"))
    CHANGES[change](model)
    return model


def broken(values):
    """Lists that are wrong in their last array, or in one of the last."""
    yield "shape", [*values[:-1], values[-1][None]]
    yield "length", values[:-1]
    yield "text", [*values[:-1], np.full(values[-1].shape, "a")]
    for number, value in enumerate(values):
        if value.ndim == 2:
            wrong = [0 * v + 3 for v in values]
            wrong[number] = np.full_like(value, np.nan)
            yield f"NaN in {number}", wrong


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_refused_changes_nothing(change):
    model = made(change)
    before = model.get_weights()
    for name, wrong in broken(before):
        if change == "float8" and name.startswith("NaN"):
            # Kernels that train take any numbers, as in Keras.
            number = int(name.split()[-1])
            if not model.weights[number].path.endswith("_state/kernel"):
                continue
        with pytest.raises(ValueError, match="was set"):
            model.set_weights(wrong)
        for old, new in zip(before, model.get_weights(), strict=True):
            np.testing.assert_array_equal(old, new, name)


@pytest.mark.full_except(
    "float32-channel", "float32-tensor", "mixed_bfloat16-tensor"
)
@pytest.mark.parametrize("granularity", ["channel", "tensor", "block"])
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "bfloat16"])
def test_numbers_that_were_read_are_set_again_to_the_bit(granularity, policy):
    with kpe.policy_scope(policy):
        models = Outer(), Outer()
    for seed, model in enumerate(models):
        keras.utils.set_random_seed(seed)
        model(np.ones((1, 6), "float32"))
        for layer in (model.first, model.last):
            layer.kernel.assign(
                np.random.default_rng(seed).normal(size=layer.kernel.shape)
            )
        kpe.freeze(model, granularity=granularity)
    one, other = models
    other.set_weights(one.get_weights())
    for name in ("first", "last"):
        a, b = (getattr(m, name)._kernel.stored for m in models)
        np.testing.assert_array_equal(a.codes, b.codes)
        np.testing.assert_array_equal(a.scale, b.scale)


def test_other_numbers_are_refused_by_a_frozen_model():
    model = made("frozen")
    values = model.get_weights()
    wide = [v.ndim == 2 and v.shape[0] > 1 for v in values]
    values[wide.index(True)] *= np.float32(1.01)
    with pytest.raises(ValueError, match=r"is frozen.*thaw"):
        model.set_weights(values)


def test_models_without_float8_are_left_to_keras():
    model = Outer()
    model(np.ones((1, 6), "float32"))
    values = [v + 1 for v in model.get_weights()]
    model.set_weights(values)
    for old, new in zip(values, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
