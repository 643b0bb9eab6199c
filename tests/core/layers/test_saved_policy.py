"""The policy in a file says it all: row A12 of the measured facts.

And layers that make their weights in unusual ways.
"""

import warnings

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from saving_models import (
    JIT,
    LENGTH,
    assert_equal,
    float8,
    float8_layers,
    matrices,
    observed,
    predictions,
)
from steps import normal, numpy


def reloaded(model, folder):
    model.save(folder / "model.keras")
    return keras.saving.load_model(folder / "model.keras")


# The policy says it all


@pytest.mark.parametrize(
    "name",
    [
        "float8/32_from_mixed_bfloat16",
        "float8/delayed(amax_history_length=3,margin=1)_from_float32",
        "float8/delayed(amax_compute='most_recent')_from_bfloat16",
        "float8/current(power_of_two=True)_from_float32",
    ],
)
def test_the_name_in_a_file_says_every_parameter(name, tmp_path):
    policy = kpe.get(name)
    model = keras.Sequential(
        [keras.Input((4,)), kpe.layers.Dense(4, dtype=name)]
    )
    (loaded,) = reloaded(model, tmp_path).layers
    assert loaded.dtype_policy == policy
    assert kpe.get(loaded.dtype_policy.full_name) == policy
    length = policy.amax_history_length
    shapes = [tuple(v.shape) for v in loaded.float8_state.matrices]
    assert shapes == ([] if length is None else [(3, 10 + length)])


@pytest.mark.parametrize(
    "made, given",
    [
        (float8(length=16), float8(length=32)),
        (float8(length=16), "float8_from_float32"),
        (kpe.get("float32"), float8(length=32)),
        (float8(recipe="current"), float8(length=32)),
        (float8(length=16), float8(recipe="nvfp4")),
        (float8(recipe="nvfp4"), float8(length=16)),
    ],
    ids=[
        "longer",
        "by name",
        "from float32",
        "from current",
        "to a counter",
        "from a counter",
    ],
)
def test_a_built_layer_refuses_a_policy_that_its_state_does_not_fit(
    made, given, tmp_path
):
    layer = kpe.layers.Dense(4, dtype=made)
    model = keras.Sequential([keras.Input((4,)), layer])
    before = layer.get_weights()
    refused = r"(?s)does not fit the new policy.*keras_policy_ext\.convert"
    with pytest.raises(ValueError, match=refused):
        layer.dtype_policy = given
    assert layer.dtype_policy == made
    assert_equal(before, layer.weights)
    loaded = reloaded(model, tmp_path)
    np.testing.assert_array_equal(
        numpy(model(np.eye(4))), numpy(loaded(np.eye(4)))
    )
    kpe.convert(model, kpe.get(given))  # What the error says.
    assert layer.float8_policy.recipe == kpe.get(given).recipe


def test_a_layer_that_is_not_built_takes_any_policy():
    layer = kpe.layers.Dense(4, dtype=float8(length=16))
    layer.dtype_policy = float8(length=32)
    layer.build((None, 4))
    assert layer.float8_state.matrices[0].shape[1] == 32 + 10


@pytest.mark.parametrize(
    "given, mode",
    [
        ("float32", None),
        (float8(recipe="current"), "float8"),
        (float8("mixed_bfloat16", length=16), "float8"),
        (float8(recipe="delayed(amax_history_length=16,margin=1)"), "float8"),
    ],
    ids=["plain", "current", "other source", "margin"],
)
def test_a_built_layer_takes_a_policy_that_fits_and_reloads(
    given, mode, tmp_path
):
    layer = kpe.layers.Dense(4, dtype=float8(length=16))
    model = keras.Sequential([keras.Input((4,)), layer])
    layer.dtype_policy = given
    assert layer.quantization_mode == mode
    assert layer.dtype_policy == kpe.get(given)
    before = numpy(ops.cast(layer(np.eye(4)), "float32"))
    loaded = reloaded(model, tmp_path).layers[0]
    assert loaded.dtype_policy == kpe.get(given)
    after = numpy(ops.cast(loaded(np.eye(4)), "float32"))
    np.testing.assert_array_equal(before, after)


def test_a_policy_set_on_a_built_layer_decides_how_observations_settle():
    layer = kpe.layers.Dense(4, dtype=float8(length=16))
    layer.build((None, 4))
    given = float8(recipe="delayed(amax_history_length=16,margin=1)")
    layer.dtype_policy = given
    assert layer.float8_state.matrices[0].recipe == given.recipe


@pytest.mark.full
def test_stock_quantize_leaves_a_float8_layer_as_it_is():
    model = observed("sequential")
    before = model.get_weights()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.quantize("float8")
    assert_equal(before, model.weights)
    (first, *_) = float8_layers(model)
    assert first.dtype_policy.amax_history_length == LENGTH
    assert np.all(np.isfinite(predictions(model)))


# Layers that make their weights early, or name them alike


@keras.saving.register_keras_serializable("test_saving")
class Early(kpe.layers.Float8Mixin, keras.layers.Layer):
    """Makes its kernel before it is built."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.kernel = self.add_weight(shape=(6, 6), name="kernel")

    def call(self, inputs):
        return self.float8_matmul(inputs, self.kernel)

    def get_config(self):
        return super().get_config()


def test_kernels_made_in_the_constructor_have_state_of_their_own(tmp_path):
    model = keras.Sequential(
        [keras.Input((6,)), Early(dtype=float8()), Early(dtype=float8())]
    )
    paths = [v.path for v in matrices(model)]
    assert len(set(paths)) == 2
    assert all(path.endswith("/float8_state/kernel_amax") for path in paths)
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=JIT)
    for i in range(2):
        model.train_on_batch(normal(4, 6, seed=i), normal(4, 6))
    first, second = (numpy(v) for v in matrices(model))
    assert np.all(first[:, 10] > 0)
    assert not np.array_equal(first, second)
    assert_equal(model.weights, reloaded(model, tmp_path).weights)


def test_two_kernels_of_one_name_are_refused():
    class Alike(kpe.layers.Float8Mixin, keras.layers.Layer):
        def build(self, input_shape):
            self.a = self.add_weight(shape=(4, 4), name="kernel")
            self.b = self.add_weight(shape=(4, 4), name="kernel")

    with pytest.raises(ValueError, match="the same name"):
        Alike(dtype=float8()).build((None, 4))
    Alike(dtype="float32").build((None, 4))
