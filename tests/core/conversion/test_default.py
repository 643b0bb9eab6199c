"""What `convert` does where no recipe is named: it adds no weights."""

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from keras_policy_ext import recipes
from steps import normal, numpy

LAYERS = keras.layers
BACKEND = keras.backend.backend()


def dense():
    return (8,), [LAYERS.Dense(8, "relu"), LAYERS.LayerNormalization()]


def convolutions():
    return (8, 4), [
        LAYERS.Conv1D(6, 3),
        LAYERS.BatchNormalization(),
        LAYERS.SeparableConv1D(4, 3),
    ]


def attention():
    inputs = keras.Input((6, 8))
    x = LAYERS.MultiHeadAttention(2, 4)(inputs, inputs)
    x = LAYERS.EinsumDense("abc,cd->abd", (6, 4), bias_axes="d")(x + inputs)
    return inputs, x


def recurrent():
    return (6, 4), [LAYERS.Bidirectional(LAYERS.GRU(4)), LAYERS.Dense(2)]


def nested():
    inner = keras.Sequential([keras.Input((8,)), LAYERS.Dense(4)], name="inner")
    return (8,), [inner, LAYERS.Dropout(0.5), LAYERS.Dense(2)]


MODELS = {f.__name__: f for f in (dense, convolutions, attention, recurrent)}
MODELS["nested"] = nested


def twins(name):
    """A stock model, and a converted one like it, under the same names."""
    models = []
    for _ in range(2):
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        start, rest = MODELS[name]()
        if isinstance(start, tuple):
            model = keras.Sequential([keras.Input(start), *rest], name="model")
        else:
            model = keras.Model(start, rest, name="model")
        models.append(model)
    stock, converted = models
    assert kpe.convert(converted).converted
    return stock, converted


def named(variables):
    return [(v.path, tuple(v.shape), v.dtype) for v in variables]


@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_has_the_weights_of_a_stock_one(name, tmp_path):
    stock, converted = twins(name)
    assert converted.count_params() == stock.count_params()
    for kind in ("variables", "weights", "trainable_variables"):
        pair = getattr(converted, kind), getattr(stock, kind)
        assert named(pair[0]) == named(pair[1])
    shapes = [w.shape for w in converted.get_weights()]
    assert shapes == [w.shape for w in stock.get_weights()]
    if BACKEND == "torch":
        assert [*converted.state_dict()] == [*stock.state_dict()]
    # Each reads the weights of the other.
    for model in (stock, converted):
        model.save_weights(tmp_path / "model.weights.h5")
        for other in (stock, converted):
            other.load_weights(tmp_path / "model.weights.h5")
    kpe.loops.settle(converted)  # It has nothing to do.


@pytest.mark.full_except("dense", "nested")
@pytest.mark.parametrize("name", MODELS)
def test_an_optimizer_has_the_slots_of_a_stock_one(name):
    slots = []
    for model in twins(name):
        x = normal(2, *model.input_shape[1:])
        y = np.zeros((2, *model.output_shape[1:]), "float32")
        optimizer = keras.optimizers.Adam(name="adam")
        model.compile(optimizer, "mse", jit_compile=BACKEND == "jax")
        assert np.isfinite(np.ravel(model.train_on_batch(x, y))[0])
        slots.append(named(model.optimizer.variables))
        assert all(np.isfinite(numpy(v)).all() for v in model.weights)
    assert slots[0] == slots[1]
    assert len(slots[0]) > 2


CURRENT, DELAYED = recipes.CurrentScaling(), recipes.DelayedScaling()
POLICIES = {
    "float8": CURRENT,
    "mixed_float8": CURRENT,
    "float8/current_from_float32": CURRENT,
    "float8/float8_from_float32": CURRENT,
    "float8_from_float32": DELAYED,
    "float8_from_mixed_bfloat16": DELAYED,
    "float8/16_from_float32": recipes.DelayedScaling(amax_history_length=16),
    "float8/delayed_from_float32": DELAYED,
}


@pytest.mark.any_backend
@pytest.mark.parametrize("name", POLICIES)
def test_the_recipe_that_the_name_of_a_policy_means(name):
    recipe = POLICIES[name]
    assert kpe.get(name).recipe == recipe
    assert LAYERS.Dense(2, dtype=kpe.get(name)).dtype_policy.recipe == recipe
    full_name = kpe.get(name).full_name
    assert kpe.get(full_name) == kpe.get(name)


OF_KERAS = keras.dtype_policies.QuantizedFloat8DTypePolicy
OBJECTS = {
    "Keras's policy": lambda: kpe.get(OF_KERAS("float8", "float32")),
    "its config": lambda: kpe.get(
        keras.dtype_policies.serialize(OF_KERAS("float8", "float32"))
    ),
    "a source": lambda: kpe.Float8DTypePolicy("float32"),
    "no source": kpe.Float8DTypePolicy,
    "Keras's mode": lambda: kpe.Float8DTypePolicy("float8", "float32"),
    "a length": lambda: kpe.Float8DTypePolicy(amax_history_length=1024),
    "an old config": lambda: kpe.Float8DTypePolicy.from_config(
        {"source_name": "float32", "amax_history_length": 1024}
    ),
    "a config without a recipe": lambda: kpe.Float8DTypePolicy.from_config(
        {"source_name": "mixed_bfloat16", "recipe": None, "rules": []}
    ),
    "a name in a config": lambda: kpe.Float8DTypePolicy.from_config(
        {"source_name": "float8_from_float32"}
    ),
}


@pytest.mark.any_backend
@pytest.mark.parametrize("what", OBJECTS)
def test_what_means_delayed_scaling_in_keras_does_here(what):
    assert OBJECTS[what]().recipe == DELAYED


def test_a_model_that_keras_quantized_stays_delayed():
    model = keras.Sequential([keras.Input((16,)), LAYERS.Dense(16)])
    model.quantize("float8")
    (entry,) = kpe.convert(model).converted
    assert model.layers[0].float8_policy.recipe == DELAYED, entry.policy


def test_a_global_float8_policy_is_followed():
    model = keras.Sequential([keras.Input((8,)), LAYERS.Dense(4)])
    with kpe.policy_scope(kpe.Float8DTypePolicy("mixed_bfloat16")):
        (entry,) = kpe.convert(model).converted
    assert entry.policy == "float8_from_float32"
