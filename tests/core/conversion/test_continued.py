"""Compiled models go on training after conversion."""

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from cases import SLOW
from steps import numpy, state_of

POLICY = "float8/4_from_float32"
JIT = keras.backend.backend() == "jax"

OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "accumulating": lambda: keras.optimizers.Adam(
        0.01, gradient_accumulation_steps=2, weight_decay=0.01
    ),
    "averaging": lambda: keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True),
    "factored": lambda: keras.optimizers.Adafactor(0.01),
    "scaling": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.9)
    ),
}

averaging = pytest.mark.skipif(
    keras.backend.backend() == "jax",
    reason="Keras on JAX fails in a second fit with use_ema (3.15)",
)
MARKS = {"adam": SLOW, "averaging": averaging}  # Accumulating is Adam too.
NAMES = [pytest.param(name, marks=MARKS.get(name, ())) for name in OPTIMIZERS]


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(16, 6)).astype("float32")
    return x, x[:, :2] * 0.5


def trained(make=OPTIMIZERS["adam"], epochs=2):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.Dense(2),
        ]
    )
    model.compile(make(), "mse", jit_compile=JIT)
    fit(model, epochs)
    return model


def fit(model, epochs=2):
    x, y = data()
    history = model.fit(
        x, y, epochs=epochs, batch_size=8, shuffle=False, verbose=0
    )
    return history.history["loss"]


def values(optimizer):
    return [numpy(v) for v in optimizer.variables]


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow_except("averaging", "scaling")
def test_conversion_and_back_leave_no_trace_in_training(name):
    plain, converted = trained(OPTIMIZERS[name]), trained(OPTIMIZERS[name])
    optimizer = converted.optimizer
    before = [v.value for v in optimizer.variables]
    kpe.convert(converted, POLICY)
    assert converted.optimizer is optimizer
    now = {id(v.value) for v in optimizer.variables}
    assert now.issuperset(map(id, before))  # nothing was copied
    kpe.revert(converted)
    for variable, value in zip(optimizer.variables, before, strict=True):
        assert variable.value is value
    assert fit(plain) == fit(converted)
    for first, second in zip(
        values(plain.optimizer), values(optimizer), strict=True
    ):
        np.testing.assert_array_equal(first, second)


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow_except("averaging", "scaling")
def test_a_converted_model_goes_on_with_its_slots(name):
    """As with an optimizer that was made for it and got the same numbers."""
    model, other = trained(OPTIMIZERS[name]), trained(OPTIMIZERS[name])
    iterations = int(numpy(model.optimizer.iterations))
    for each in (model, other):
        kpe.convert(each, POLICY)
    numbers = values(other.optimizer)
    other.compile(OPTIMIZERS[name](), "mse", jit_compile=JIT)
    other.optimizer.build(other.trainable_variables)
    for variable, value in zip(other.optimizer.variables, numbers, strict=True):
        variable.assign(value)
    assert fit(model) == fit(other)
    steps = 2 if name == "accumulating" else 4
    assert int(numpy(model.optimizer.iterations)) == iterations + steps
    for layer in model.layers:
        for scale, history in state_of(layer).values():
            assert scale > 0 and np.count_nonzero(history) >= 2


def test_the_optimizer_equals_one_that_was_built_in_float8():
    """Files keep its variables by number."""
    model = trained(OPTIMIZERS["accumulating"])
    kpe.convert(model, POLICY)
    fresh = OPTIMIZERS["accumulating"]()
    fresh.build(model.trainable_variables)
    assert [v.path.partition("/")[2] for v in fresh.variables] == [
        v.path.partition("/")[2] for v in model.optimizer.variables
    ]


@pytest.mark.full
def test_layers_frozen_since_keep_their_slots():
    model = trained()
    model.layers[0].trainable = False
    kpe.convert(model, POLICY)
    model.layers[0].trainable = True
    assert np.isfinite(fit(model)).all()


def test_an_optimizer_that_has_not_trained_is_built_by_training():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
    model.compile("adam", "mse", jit_compile=JIT)
    kpe.convert(model, POLICY)
    assert np.isfinite(fit(model)).all()


@pytest.mark.full
def test_evaluation_and_prediction_are_traced_anew():
    model = trained()
    x, y = data()
    loss, outputs = model.evaluate(x, y, verbose=0), model.predict(x, verbose=0)
    kpe.convert(model, POLICY)
    assert model.evaluate(x, y, verbose=0) != loss
    assert not np.array_equal(model.predict(x, verbose=0), outputs)
    kpe.revert(model)
    assert model.evaluate(x, y, verbose=0) == loss
    np.testing.assert_array_equal(model.predict(x, verbose=0), outputs)


@pytest.mark.skipif(
    keras.backend.backend() != "torch",
    reason="only PyTorch has a second list of parameters",
)
def test_pytorch_sees_the_parameters_that_there_are():
    model = trained()
    for change in (
        lambda: kpe.convert(model, POLICY),
        lambda: kpe.revert(model),
    ):
        change()
        seen = {id(p) for p in model.parameters()}
        assert seen == {id(v.value) for v in model.variables}
