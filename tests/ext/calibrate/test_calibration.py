"""Scales without training."""

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from steps import normal, numpy, state_of

POLICY = "float8/4_from_float32"


def model():
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(2),
        ]
    )


@pytest.mark.full
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


@pytest.mark.full
def test_kernels_that_were_assigned_are_observed_again():
    """Of weights that are copied into a model the amaxes are not."""
    stack, x = model(), normal(32, 6)
    kpe.convert(stack, POLICY)
    dense = stack.layers[0]
    before = np.abs(numpy(dense.kernel)).max()
    dense.kernel.assign(16 * numpy(dense.kernel))
    for _ in range(2):  # Once is enough.
        kpe.calibrate(stack, x)
        _, history = state_of(dense)["kernel"]
        np.testing.assert_array_equal(history, [16 * before, 0, 0, before])
    exact = np.maximum(x @ numpy(dense.kernel), 0)
    found = numpy(dense(x, training=False))
    assert np.linalg.norm(found - exact) < 0.1 * np.linalg.norm(exact)


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


def two_inputs(structure):
    """A model of two inputs, and the two layers that take one each."""
    first, second = keras.Input((6,)), keras.Input((6,))
    layers = [kpe.layers.Dense(2, dtype=POLICY) for _ in range(2)]
    outputs = layers[0](first) + layers[1](second)
    return keras.Model(structure((first, second)), outputs), layers


class Called(keras.Model):
    """A subclassed model, which knows its inputs by its first call."""

    def __init__(self):
        super().__init__()
        self.dense = kpe.layers.Dense(2, dtype=POLICY)
        self(np.zeros((1, 6), "float32"))

    def call(self, x):
        return self.dense(x)


def functional():
    inputs = keras.Input((6,))
    return keras.Model(inputs, kpe.layers.Dense(2, dtype=POLICY)(inputs))


def in_float8():
    stack = model()
    kpe.convert(stack, POLICY)
    return stack


def first_amaxes(stack):
    (dense, *_) = (x for x in stack.layers if hasattr(x, "float8_state"))
    return state_of(dense)["inputs"][1]


@pytest.mark.full_except(
    "Called-pairs", "functional-pairs", "functional-tuple of pairs"
)
@pytest.mark.parametrize("form", ["inputs", "pairs", "tuple of pairs"])
@pytest.mark.parametrize("make", [in_float8, functional, Called])
def test_a_list_of_batches_is_not_taken_for_inputs(make, form):
    stack = make()
    first, second = normal(4, 6), 3 * normal(4, 6, seed=1)
    batches = [first, second]
    if form != "inputs":
        batches = [(x, x[:, :2]) for x in batches]
    kpe.calibrate(stack, tuple(batches) if "tuple" in form else batches)
    amaxes = np.abs(second).max(), np.abs(first).max()
    np.testing.assert_array_equal(
        first_amaxes(stack), [amaxes[0], 0, 0, amaxes[1]]
    )


@pytest.mark.parametrize("structure", [list, tuple])
@pytest.mark.parametrize("form", ["inputs", "batches", "pairs"])
def test_a_list_with_the_structure_of_the_inputs_is_inputs(structure, form):
    stack, layers = two_inputs(structure)
    inputs = normal(4, 6), 3 * normal(4, 6, seed=1)
    twice = [inputs, inputs]
    if form == "pairs":
        twice = [(list(inputs), inputs[0][:, :2])] * 2
    kpe.calibrate(stack, list(inputs) if form == "inputs" else twice)
    for layer, x in zip(layers, inputs, strict=True):
        amax = np.abs(x).max()
        newest, *_, older = state_of(layer)["inputs"][1]
        assert (newest, older) == (amax, 0 if form == "inputs" else amax)


def test_what_may_be_inputs_and_batches_is_refused():
    layer = kpe.layers.Dense(2, dtype=POLICY)
    layer.build((None, 6))
    unknown = keras.Sequential([layer])
    pair = normal(4, 6), normal(4, 2)
    for stack, data in (
        (unknown, [pair[0], pair[0]]),
        (functional(), pair),
        (in_float8(), pair),
    ):
        with pytest.raises(ValueError, match="of ndarray, ndarray"):
            kpe.calibrate(stack, data)
    assert not state_of(layer)["inputs"][1].any()


@pytest.mark.full
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


@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow",
    reason="only TensorFlow keeps from others what its functions compute",
)
@pytest.mark.parametrize("traced_before", [False, True])
def test_layers_in_functions_of_tensorflow_are_seen(traced_before):
    import tensorflow as tf

    class Compiled(keras.layers.Layer):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def build(self, input_shape):
            self.inner.build(input_shape)

        @tf.function
        def call(self, x):
            return self.inner(x)

    inner = kpe.layers.Dense(4, dtype=POLICY)
    stack = keras.Sequential([keras.Input((3,)), Compiled(inner)])
    x = normal(40, 3)
    if traced_before:
        stack(x[:32], training=False)
    kpe.calibrate(stack, x)
    (variable,) = inner.float8_state.matrices
    newest, before = variable.rows()["inputs"][1][:2]
    assert newest == np.abs(x[32:]).max() and before == np.abs(x[:32]).max()
    assert not tf.config.functions_run_eagerly()


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
