"""What float8 in stock Keras does wrong, and what must hold here instead.

Seen on keras 3.15.1, on every backend. Rematerialization and moving averages
are in `test_training.py`.
"""

import math

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from float8_dense import dense, policy, same_state
from keras_policy_ext import reference
from keras_policy_ext.layers.stored_weights import is_state
from keras_policy_ext.recipes import CurrentScaling, DelayedScaling
from steps import mean_square, normal, numpy, state_of, step

SOURCES = ["float32", "mixed_bfloat16", "mixed_float16"]


# A policy for everything


@pytest.mark.full
def test_a_global_float8_policy_runs_in_every_layer():
    with kpe.policy_scope(policy("mixed_bfloat16")):
        inputs = keras.Input((12,), dtype="int32")
        x = keras.layers.Embedding(20, 16)(inputs)
        x = keras.layers.LayerNormalization()(x)
        x = keras.layers.MultiHeadAttention(2, 8)(x, x)
        x = keras.layers.LSTM(8, return_sequences=True)(x)
        x = keras.layers.Conv1D(8, 3)(x)
        x = kpe.layers.Conv1D(8, 3)(x)
        x = kpe.layers.Dense(8)(x)
        x = keras.layers.GlobalAveragePooling1D()(x)
        model = keras.Model(inputs, keras.layers.Dense(3)(x))
    for layer in model._flatten_layers(include_self=False):
        if isinstance(layer, kpe.layers.Float8Mixin):
            assert layer.quantization_mode == "float8"
        else:
            assert layer.quantization_mode is None
    assert model.layers[1].compute_dtype == "bfloat16"
    assert model.layers[1].variable_dtype == "float32"
    model.compile("sgd", "mse")
    tokens = np.arange(48).reshape(4, 12) % 20
    history = model.fit(tokens, normal(4, 3), epochs=2, verbose=0)
    assert np.all(np.isfinite(history.history["loss"]))


def test_a_float8_policy_can_be_given_to_any_stock_layer():
    layer = keras.layers.LayerNormalization(dtype=policy("mixed_bfloat16"))
    y = layer(normal(2, 8))
    assert keras.backend.standardize_dtype(y.dtype) == "bfloat16"
    assert layer.quantization_mode is None


def test_a_rule_takes_a_layer_out_by_its_path():
    rules = [("outer/exact", None), ("outer/half", "mixed_float16")]
    with kpe.policy_scope(policy("mixed_bfloat16", rules=rules)):
        names = ("exact", "half", "fast")
        layers = {name: kpe.layers.Dense(4, name=name) for name in names}
        model = keras.Sequential(layers.values(), name="outer")
    model.build((None, 4))
    modes = {name: layers[name].quantization_mode for name in names}
    assert modes == {"exact": None, "half": None, "fast": "float8"}
    assert layers["exact"].compute_dtype == "bfloat16"
    assert layers["half"].compute_dtype == "float16"
    assert layers["exact"].float8_state.weights == []
    assert np.all(np.isfinite(numpy(ops.cast(model(normal(2, 4)), "float32"))))


# Float16


def test_scales_stay_float32_in_float16():
    layer = dense(dtype=policy("mixed_float16"))
    layer.kernel.assign(normal(8, 8, scale=1e-7))
    optimizer = keras.optimizers.SGD(0.0)
    for _ in range(6):
        step(layer, optimizer, normal(4, 8), lambda y: 1e-3 * mean_square(y))
    y = numpy(ops.cast(layer(normal(4, 8), training=False), "float32"))
    assert np.all(np.isfinite(y))
    scale, _ = state_of(layer)["kernel"]
    assert 0 < scale < 1e-8  # float16 has nothing below 6e-8


def test_compile_scales_the_loss_of_a_float16_model():
    with kpe.policy_scope(policy("mixed_float16")):
        model = keras.Sequential([keras.Input((8,)), kpe.layers.Dense(4)])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    scaler = keras.optimizers.LossScaleOptimizer
    assert isinstance(model.optimizer, scaler)
    x, y = normal(32, 8), normal(32, 4)
    history = model.fit(x, y, epochs=12, batch_size=8, verbose=0)
    assert np.all(np.isfinite(history.history["loss"]))
    assert history.history["loss"][-1] < history.history["loss"][0]


# Scaled before it is trained


@pytest.mark.parametrize("recipe", [DelayedScaling(), CurrentScaling()])
def test_a_small_kernel_predicts_without_training(recipe):
    layer = dense(64, 64, kpe.Float8DTypePolicy("float32", recipe=recipe))
    layer.kernel.assign(normal(64, 64, scale=0.002))
    x = normal(32, 64, seed=1)
    exact = x @ numpy(layer.kernel)
    error = numpy(layer(x, training=False)) - exact
    assert np.linalg.norm(error) / np.linalg.norm(exact) < 0.04


# State is state


def test_the_parameter_count_is_that_of_the_float_layer():
    layer = dense(8, 8, kpe.Float8DTypePolicy("float32"))
    assert layer.count_params() == 72


@pytest.mark.extension("inspect")
def test_totals_of_a_model_include_the_state_as_those_of_keras_do():
    layers = [
        kpe.layers.Dense(n, dtype="float8/16_from_float32") for n in (26, 3)
    ]
    model = keras.Sequential([keras.Input((3,)), *layers])
    assert [layer.count_params() for layer in layers] == [104, 81]
    states = [v for v in model.weights if is_state(v)]
    numbers = sum(math.prod(v.shape) for v in states)
    assert model.count_params() == 185 + numbers > 185
    inspection = kpe.inspect(model)
    assert (inspection.parameters, inspection.state) == (185, numbers)
    assert f"185 parameters, and {numbers} " in str(inspection)
    assert f"Keras counts {185 + numbers}" in str(inspection)


def test_the_optimizer_has_no_slots_for_state():
    layer = dense()
    optimizer = keras.optimizers.Adam()
    optimizer.build(layer.trainable_variables)
    plain = keras.optimizers.Adam()
    plain.build(layer.trainable_variables[:2])
    assert len(optimizer.variables) == len(plain.variables)


@pytest.mark.full_except("global_clipnorm")
@pytest.mark.parametrize(
    "arguments",
    [
        {"weight_decay": 0.5},
        {"clipnorm": 1e-3},
        {"global_clipnorm": 1e-3},
        {"clipvalue": 1e-3},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_decay_and_clipping_never_see_the_state(arguments):
    plain, other = dense(), dense()
    other.set_weights(plain.get_weights())
    for layer, optimizer in (
        (plain, keras.optimizers.Adam(0.0)),
        (other, keras.optimizers.Adam(0.0, **arguments)),
    ):
        for i in range(3):
            step(layer, optimizer, normal(4, 8, seed=i), mean_square)
    assert same_state(state_of(plain), state_of(other))


def test_weights_have_one_order_however_the_layer_became_float8():
    built = dense()
    names = [v.name for v in built.weights]
    assert names == ["kernel", "bias", "kernel_amax"]


def test_accumulated_gradients_observe_the_largest_amax_of_the_update():
    layer = dense()
    optimizer = keras.optimizers.SGD(0.01, gradient_accumulation_steps=3)
    xs = [normal(4, 8, seed=i, scale=s) for i, s in enumerate((1, 5, 2))]
    for x in xs:
        assert state_of(layer)["inputs"][1][0] == 0
        step(layer, optimizer, x, mean_square)
    amax = max(np.abs(x).max() for x in xs)
    assert state_of(layer)["inputs"][1][0] == np.float32(amax)
    assert state_of(layer)["inputs"][1][1] == 0


# The policy says it all


def test_the_policy_of_a_layer_names_every_parameter():
    given = policy("mixed_bfloat16", length=16)
    layer = dense(dtype=given)
    assert layer.dtype_policy.full_name == "float8/16_from_mixed_bfloat16"
    assert kpe.get(layer.dtype_policy.full_name) == given
    assert layer.float8_state.matrices[0].shape[1] == 16 + 10


def test_a_full_name_can_be_given_as_dtype():
    layer = kpe.layers.Dense(4, dtype="float8/16_from_mixed_bfloat16")
    assert layer.dtype_policy == policy("mixed_bfloat16", length=16)


def test_a_stock_float8_policy_means_delayed_scaling_of_its_length():
    stock = keras.dtype_policies.QuantizedFloat8DTypePolicy(
        "float8", "mixed_bfloat16", amax_history_length=16
    )
    layer = kpe.layers.Dense(4, dtype=stock)
    assert layer.dtype_policy == policy("mixed_bfloat16", length=16)
    layer.build((None, 4))
    assert layer.quantization_mode == "float8"


# Subclasses and adapters


class ScaledDense(kpe.layers.Dense):
    pass


def test_a_subclass_of_a_float8_layer_runs_float8():
    layer = ScaledDense(8, dtype=policy())
    y = numpy(layer(normal(4, 8)))
    assert layer.quantization_mode == "float8"
    exact = normal(4, 8) @ numpy(layer.kernel)
    assert 20 < reference.sqnr_db(exact, y) < 60


# The bias


def test_the_bias_is_not_rounded_to_bfloat16():
    layer = dense()
    layer.kernel.assign(np.zeros((8, 8), "float32"))
    layer.bias.assign(np.full(8, 1.001, "float32"))
    y = numpy(layer(normal(2, 8), training=False))
    assert np.all(y == np.float32(1.001))


# Layers that are called by their `call`


@pytest.mark.full
def test_time_distributed_runs_float8():
    layer = kpe.layers.Dense(8, dtype=policy())
    model = keras.Sequential(
        [keras.Input((3, 8)), keras.layers.TimeDistributed(layer)]
    )
    x = normal(4, 3, 8)
    outer = numpy(model(x, training=False))
    np.testing.assert_allclose(outer, numpy(layer(x)), rtol=0.15, atol=0.15)
    exact = x @ numpy(layer.kernel)
    assert 20 < reference.sqnr_db(exact, outer) < 60
    step(model, keras.optimizers.SGD(0.01), x, mean_square)
    assert state_of(layer)["inputs"][1][0] == np.abs(x).max()


def test_a_layer_as_the_whole_model_trains_in_float8():
    layer = dense()
    model = keras.Sequential([layer])
    model.compile("sgd", "mse")
    model.fit(normal(8, 8), normal(8, 8), verbose=0)
    assert state_of(layer)["outputs_grad"][1][0] > 0


@pytest.mark.full_except("float32")
@pytest.mark.parametrize("source", SOURCES)
def test_a_subclassed_model_without_a_training_argument_observes(source):
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.d = dense(dtype=policy(source))

        def build(self, input_shape):
            pass

        def call(self, x):
            return self.d(x)

    model = Net()
    model.compile(keras.optimizers.SGD(0.01), "mse")
    model.fit(normal(8, 8), normal(8, 8), verbose=0)
    assert state_of(model.d)["inputs"][1][0] > 0
