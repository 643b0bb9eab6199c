"""Names of float8 policies in Keras, and in layers that are forwarded."""

import copy

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from steps import normal, numpy

JIT = keras.backend.backend() == "jax"
KERAS_S = "float8_from_mixed_bfloat16"
OURS = [
    "mixed_float8",
    "float8",
    "float8/current_from_mixed_bfloat16",
    'float8_from_mixed_bfloat16;rules=[[".*/head",null]]',
]


@pytest.fixture(autouse=True)
def names_are_read_again():
    yield
    kpe.policies.names_in_keras(True)


@pytest.mark.any_backend
@pytest.mark.parametrize("name", OURS)
def test_keras_reads_a_name_as_the_policy_object(name):
    policy = kpe.get(name)
    policy_map = keras.dtype_policies.DTypePolicyMap(default_policy="float32")
    policy_map["a"] = name
    keras.config.set_dtype_policy(name)
    found = [
        keras.config.dtype_policy(),
        keras.dtype_policies.get(name),
        keras.layers.Dense(2, dtype=name).dtype_policy,
        keras.DTypePolicy(name),
        keras.DTypePolicy(name=name),
        policy_map["a"],
    ]
    if name == "float8":
        policy = kpe.get("float8/current_from_float32")
    for each in found:
        assert type(each) is kpe.Float8DTypePolicy
        assert each == policy and hash(each) == hash(policy)
        assert copy.deepcopy(each) is each


@pytest.mark.any_backend
def test_names_of_keras_mean_what_they_do_in_keras():
    for name in (KERAS_S, "int8_from_float32", "mixed_bfloat16", "float32"):
        policy = keras.dtype_policies.get(name)
        assert type(policy).__module__.startswith("keras.")
        assert policy.name == name
    for name in ("float9_e4m3fn", "mixed_float9", "float8_from_banana"):
        with pytest.raises(ValueError):
            keras.dtype_policies.get(name)
    layer = keras.layers.Dense(2, dtype=KERAS_S)
    layer.build((None, 3))
    again = keras.layers.Dense.from_config(layer.get_config())
    assert type(again.dtype_policy) is type(layer.dtype_policy)
    assert len(layer.trainable_variables) == 8


@pytest.mark.any_backend
def test_a_name_that_is_switched_off_says_what_to_write():
    kpe.policies.names_in_keras(False)
    for call in (
        lambda: keras.layers.Dense(2, dtype="mixed_float8"),
        lambda: keras.config.set_dtype_policy("float8/16_from_float32"),
        lambda: keras.dtype_policies.get("float8"),
    ):
        with pytest.raises(
            ValueError, match=r"Allowed.*dtype=keras_policy_ext"
        ):
            call()
    assert kpe.layers.Dense(2, dtype="mixed_float8").dtype_policy == kpe.get(
        "mixed_float8"
    )
    layer = keras.layers.LayerNormalization(dtype=KERAS_S)
    with pytest.raises(NotImplementedError):
        layer(normal(2, 3))


def test_a_stock_layer_under_a_name_is_as_with_the_policy_object():
    x = normal(4, 8)
    outputs = []
    for dtype in ("mixed_float8", kpe.get("mixed_float8")):
        keras.utils.set_random_seed(0)
        layer = keras.layers.Dense(8, dtype=dtype, name="dense")
        model = keras.Sequential([keras.Input((8,)), layer])
        assert layer.quantization_mode is None
        assert layer.compute_dtype == "bfloat16"
        plain = numpy(model(x))
        (entry,) = kpe.convert(model).converted
        assert entry.policy == "float8/current_from_mixed_bfloat16"
        outputs.append((plain, numpy(model(x))))
    for first, second in zip(*outputs, strict=True):
        np.testing.assert_array_equal(first, second)


@pytest.mark.full
@pytest.mark.parametrize("name", [KERAS_S, *OURS[:3]])
@pytest.mark.slow_except("mixed_float8")
def test_forwarded_layers_take_every_name_and_train(name):
    layers = kpe.layers
    with kpe.policy_scope("mixed_bfloat16"):
        model = keras.Sequential(
            [
                keras.Input((8,)),
                layers.LayerNormalization(dtype=name),
                layers.Dense(8, dtype=name),
                layers.Dropout(0.1, dtype=name),
                layers.Reshape((2, 4), dtype=name),
                layers.TimeDistributed(layers.Dense(4, dtype=name), dtype=name),
                layers.Bidirectional(layers.LSTM(2, dtype=name), dtype=name),
            ]
        )
    model.compile("sgd", "mse", jit_compile=JIT)
    model.fit(normal(4, 8), normal(4, 4), verbose=0)
    assert {layer.compute_dtype for layer in model.layers} == {"bfloat16"}
    assert model.layers[1].quantization_mode == "float8"
    shown = {each.class_name: each.policy for each in kpe.inspect(model).layers}
    assert shown["LayerNormalization"] == "mixed_bfloat16"
    assert shown["Dense"] == kpe.get(name).full_name.replace(
        "float32", "mixed_bfloat16"
    )


@pytest.mark.parametrize("name", [KERAS_S, "mixed_float8"])
def test_a_functional_model_trains_under_a_global_name(name):
    try:
        keras.config.set_dtype_policy(name)
    except ValueError as error:  # Keras 3.16.
        assert name == KERAS_S and "cannot be quantized" in str(error)
        pytest.skip("this Keras takes no policy of its own float8 globally")
    inputs = keras.Input((8,))
    x = keras.layers.LayerNormalization()(kpe.layers.Dense(8)(inputs))
    model = keras.Model(inputs, keras.layers.Activation("relu")(x))
    model.compile("sgd", "mse", jit_compile=JIT)
    model.fit(normal(4, 8), normal(4, 8), verbose=0)
    assert model.layers[1].float8_policy == kpe.get(name)
    assert model.predict(normal(4, 8), verbose=0).shape == (4, 8)
