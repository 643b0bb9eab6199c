"""The counter of steps, by which a layer rounds at random, is float8 state."""

import h5py
import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from cases import SLOW, mostly
from keras_policy_ext import recipes
from keras_policy_ext.ext.delayed.entries import MOST_STEPS
from keras_policy_ext.ext.delayed.observations import UNIT, VALID_MARK
from keras_policy_ext.numerics.scale_sources import source_of
from steps import gradients, mean_square, no_grad, normal, numpy

COMPILED = keras.backend.backend() == "jax"
NVFP4 = "float8/nvfp4_from_float32"
KERNEL_GRAD_ALONE = (
    "float8/nvfp4(forward='high_precision',inputs_grad='high_precision')"
    "_from_float32"
)
"""Counts as well, and is sooner compiled."""
DELAYED = "float8_from_float32"


def slow(test):
    """Marks a test that PyTorch always runs; see `cases`."""
    for mark in SLOW:
        test = mark(test)
    return test


def counters(model):
    return [w for w in model.weights if w.path.endswith("_steps")]


def counts(model):
    """Of each kernel; fails unless the state is settled."""
    found = [numpy(each) for each in counters(model)]
    for matrix in found:
        assert matrix.shape == (1, 11)
        assert matrix[0, 0] == VALID_MARK
        assert not matrix[0, 1:-1].any()
    return [float(matrix[0, -1]) for matrix in found]


def set_count(variable, steps):
    matrix = np.zeros(tuple(variable.shape), "float32")
    matrix[0, 0], matrix[0, -1] = VALID_MARK, steps
    with no_grad():
        variable.assign(matrix)


class Uses(kpe.layers.Float8Mixin, keras.layers.Layer):
    """Multiplies by one kernel some times."""

    def __init__(self, times, dtype=KERNEL_GRAD_ALONE, **kwargs):
        super().__init__(dtype=dtype, **kwargs)
        self.times = times

    def build(self, input_shape):
        self.kernel = self.add_weight(shape=(4, 4), name="kernel")

    def call(self, x, training=None):
        for _ in range(self.times):
            x = self.float8_matmul(x, self.kernel, training=training)
        return x


def dense(policy=NVFP4, **kwargs):
    layer = kpe.layers.Dense(3, dtype=policy, name="dense", **kwargs)
    return keras.Sequential([keras.Input((4,)), layer])


def fit(model, optimizer=None, batches=3, bad=()):
    """Train; numbers of bad batches are those with infinite inputs."""
    model.compile(optimizer or "sgd", "mse", jit_compile=COMPILED)
    x = normal(batches, 4, *model.input_shape[1:])
    x[list(bad)] = np.inf
    x = x.reshape(-1, *x.shape[2:])
    y = normal(len(x), *model.output_shape[1:], seed=1)
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    return model


# What a step is


@pytest.mark.full
@pytest.mark.parametrize("times", mostly([1, 5, 12], 12))
def test_a_step_counts_once_however_often_a_kernel_is_used(times):
    model = keras.Sequential([keras.Input((4,)), Uses(times)])
    assert counts(model) == [0]
    assert counts(fit(model)) == [3]


@pytest.mark.full
@pytest.mark.parametrize("unroll", mostly([False, True], False))
def test_the_steps_of_a_loop_count_once(unroll):
    layer = kpe.layers.SimpleRNN(4, dtype=NVFP4, unroll=unroll)
    model = keras.Sequential([keras.Input((12, 4)), layer])
    assert counts(fit(model)) == [3, 3]


@pytest.mark.full
def test_micro_batches_count_once():
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    assert counts(fit(dense(), optimizer, batches=6)) == [3]


@pytest.mark.full
@pytest.mark.extension("mixed")
def test_a_skipped_step_does_not_count():
    optimizer = kpe.mixed_precision.LossScaleOptimizer(
        keras.optimizers.SGD(0.1)
    )
    model = fit(dense(), optimizer, batches=5, bad=[1, 3, 4])
    assert int(optimizer.skipped_steps) == 2, "in a row"
    assert counts(model) == [2]


@pytest.mark.full
def test_frozen_layers_and_passes_without_training_do_not_count():
    last = kpe.layers.Dense(2, dtype=NVFP4, name="last")
    model = keras.Sequential([*dense().layers, last])
    model.build((None, 4))
    model.layers[0].trainable = False
    assert counts(fit(model)) == [0, 3]
    model.predict(normal(4, 4), verbose=0)
    assert counts(model) == [0, 3]
    (counter,) = counters(last)
    (place,) = (
        i for i, v in enumerate(last.trainable_variables) if v is counter
    )
    for training in (False, True):
        _, _, found = gradients(
            last, normal(4, 3), mean_square, training, compiled=COMPILED
        )
        assert numpy(found[place]).any() == training


@pytest.mark.parametrize("times", mostly([1, 5], 1))
def test_the_count_starts_anew_where_float32_ends(times):
    model = keras.Sequential([keras.Input((4,)), Uses(times)])
    set_count(*counters(model), MOST_STEPS - 3)
    assert counts(fit(model, batches=2)) == [MOST_STEPS - 1]
    assert counts(fit(model, batches=2)) == [1]


@pytest.mark.full
def test_the_count_of_many_uses_is_exact():
    """Their sum is beyond what float32 holds exactly."""
    source = source_of(recipes.NVFP4Scaling())
    previous = np.zeros(source.state_shape, "float32")
    previous[0, 0] = VALID_MARK
    observation = np.zeros_like(previous)
    for uses in (3, 50, 1000):
        for steps in (1234567, 4000001, 8388605):
            previous[0, -1] = steps
            observation[0, 0] = uses * UNIT
            total = np.float32(0)
            for _ in range(uses):
                total = np.float32(total + np.float32(steps + 1))
            observation[0, 1] = total * UNIT
            value, state = map(ops.convert_to_tensor, (observation, previous))
            found = numpy(source.settle(value, state))
            assert found[0, -1] == steps + 1, (uses, steps)


# What is no training leaves it alone


@slow
@pytest.mark.extension("calibrate", "inspect")
def test_reports_calibration_and_conversion_leave_it_alone():
    model = counting(3)
    assert "nvfp4" in str(kpe.inspect(model))
    kpe.calibrate(model, normal(8, 4))
    assert counts(model) == [3]
    variables = counters(model)
    kpe.convert(model, NVFP4)
    assert counts(model) == [3]
    assert [id(v) for v in counters(model)] == [id(v) for v in variables]


@pytest.mark.full
def test_optimizers_and_averages_leave_it_alone():
    optimizer = keras.optimizers.Adam(
        0.01, use_ema=True, ema_overwrite_frequency=2
    )
    model = fit(dense(), optimizer, batches=4)
    assert counts(model) == [4]
    # A plain model has as many variables in its optimizer.
    plain = keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=2)
    plain.build(dense("float32").trainable_variables)
    sizes = [
        sorted(np.prod(v.shape) for v in each.variables if v.shape)
        for each in (optimizer, plain)
    ]
    assert sizes[0] == sizes[1]


# Files


PATH = "layers/dense/float8_state/vars"


def entries(path):
    with h5py.File(path, "r") as file:
        return {key: value[()] for key, value in file[PATH].items()}


def saved(tmp_path, model, **changes):
    """A file of weights with entries changed, None for one removed."""
    path = tmp_path / "model.weights.h5"
    model.save_weights(path)
    with h5py.File(path, "r+") as file:
        for key, value in changes.items():
            name = key.replace("__", ".")
            del file[PATH][name]
            if value is not None:
                file[PATH][name] = value
    return path


def counting(steps):
    model = dense()
    set_count(*counters(model), steps)
    return model


def test_a_file_has_the_number_of_steps(tmp_path):
    path = saved(tmp_path, counting(41))
    found = entries(path)
    assert {key for key in found if key[0] == "0"} == {"0.steps"}
    assert found["0.steps"].dtype == "int32"
    assert found["0.steps"] == 41
    other = counting(7)
    other.load_weights(path)
    assert counts(other) == [41]


def test_a_whole_model_comes_back_with_its_steps(tmp_path):
    model = counting(3)
    model.save(tmp_path / "model.keras")
    assert counts(kpe.load_model(tmp_path / "model.keras")) == [3]


def test_a_file_without_steps_starts_anew(tmp_path):
    model = counting(7)
    model.load_weights(saved(tmp_path, counting(41), **{"0__steps": None}))
    assert counts(model) == [0]


@pytest.mark.parametrize(
    "damaged",
    [
        np.float32(3),
        np.int32(-1),
        np.array([3], "int32"),
        np.int64(MOST_STEPS),
        np.bool_(True),
        b"3",
    ],
    ids=["float", "negative", "vector", "too large", "bool", "text"],
)
def test_damaged_steps_are_refused(tmp_path, damaged):
    model = counting(7)
    path = saved(tmp_path, counting(41), **{"0__steps": damaged})
    with pytest.raises(ValueError, match=r"0\.steps.*integer"):
        model.load_weights(path)
    assert counts(model) == [7]


def test_a_file_of_amaxes_and_one_of_steps_load_into_each_other(tmp_path):
    delayed = fit(dense(DELAYED))
    counted = counting(7)
    counted.load_weights(saved(tmp_path, delayed))
    assert counts(counted) == [0]
    np.testing.assert_array_equal(
        numpy(counted.layers[0].kernel), numpy(delayed.layers[0].kernel)
    )
    delayed.load_weights(saved(tmp_path, counting(41)))
    (state,) = delayed.layers[0].float8_state.matrices
    assert not numpy(state)[:, 1:].any()


@pytest.mark.full
def test_the_number_of_steps_goes_on_after_loading(tmp_path):
    model = counting(41)
    fit(model, batches=2)
    assert counts(model) == [43]


@slow
def test_a_delayed_model_converts_and_back():
    model = fit(dense(DELAYED))
    kpe.convert(model, NVFP4)
    assert counts(fit(model)) == [3]
    kpe.convert(model, DELAYED)
    assert not counters(model)
    assert np.isfinite(numpy(fit(model).layers[0].kernel)).all()
