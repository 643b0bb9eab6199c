"""Scales without training."""

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from steps import numpy, state_of

POLICY = "float8/4_from_float32"


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def model():
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(2),
        ]
    )


def test_amaxes_of_each_batch_enter_the_histories():
    stack = model()
    kpe.convert(stack, POLICY)
    first, second = normal(32, 6), 3 * normal(32, 6, seed=1)
    paths = kpe.calibrate(stack, [(first, None), (second, None)])
    assert paths == (stack.layers[0].path, stack.layers[2].path)
    _, history = state_of(stack.layers[0])["inputs"]
    amaxes = np.abs(second).max(), np.abs(first).max()
    np.testing.assert_array_equal(history, [amaxes[0], 0, 0, amaxes[1]])
    _, history = state_of(stack.layers[0])["kernel"]
    kernel = np.abs(numpy(stack.layers[0].kernel)).max()
    np.testing.assert_array_equal(history, [kernel, 0, 0, 0])
    scale, history = state_of(stack.layers[0])["outputs_grad"]
    assert scale == 0 and not history.any()


@pytest.mark.parametrize("form", ["array", "dict", "dataset"])
def test_data_is_what_predict_takes(form):
    x = normal(70, 6)
    inputs = keras.Input((6,), name="x")
    dense = kpe.layers.Dense(2, dtype=POLICY)
    stack = keras.Model(
        {"x": inputs} if form == "dict" else inputs, dense(inputs)
    )

    class Batches(keras.utils.PyDataset):
        num_batches = 2

        def __getitem__(self, index):
            return x[32 * index : 32 * index + 32], np.zeros((32, 2))

    data = {"array": x, "dict": {"x": x}, "dataset": Batches()}[form]
    kpe.calibrate(stack, data, steps=2)
    _, history = state_of(dense)["inputs"]
    amaxes = np.abs(x[32:64]).max(), np.abs(x[:32]).max()
    np.testing.assert_array_equal(history, [amaxes[0], 0, 0, amaxes[1]])
    # Never converted, so its kernel had not been looked at.
    assert state_of(dense)["kernel"][1][0] == np.abs(numpy(dense.kernel)).max()


def test_recurrent_layers_are_seen_step_by_step():
    stack = keras.Sequential(
        [keras.Input((5, 3)), kpe.layers.SimpleRNN(4, dtype=POLICY)]
    )
    x = normal(2, 5, 3)
    kpe.calibrate(stack, x)
    cell = stack.layers[0].cell
    kernel, recurrent = cell.float8_contracted
    seen = cell.float8_state.of(kernel).rows()["inputs"][1][0]
    assert seen == np.abs(x).max()
    seen = cell.float8_state.of(recurrent).rows()["inputs"][1][0]
    assert 0 < seen <= 1  # of tanh, over all steps and not their sum


def test_current_scaling_has_nothing_to_fill():
    stack = model()
    kpe.convert(stack, "float8/current_from_float32")
    assert kpe.calibrate(stack, normal(4, 6)) == ()


def test_bad_arguments_change_nothing():
    stack = model()
    with pytest.raises(ValueError, match="No layer"):
        kpe.calibrate(stack, normal(4, 6))
    kpe.convert(stack, POLICY)
    before = numpy(stack.layers[0].float8_state.matrices[0])
    with pytest.raises(ValueError, match="no inputs"):
        kpe.calibrate(stack, [])
    with pytest.raises(TypeError, match="no inputs"):
        kpe.calibrate(stack, 3)
    for steps in (0, -1, True, 1.5):
        with pytest.raises(TypeError, match="`steps`"):
            kpe.calibrate(stack, normal(4, 6), steps=steps)
    after = numpy(stack.layers[0].float8_state.matrices[0])
    np.testing.assert_array_equal(before, after)
