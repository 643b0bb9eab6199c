"""Attention: projections in float8, and on request its two products."""

import inspect
import json

import h5py
import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from attention_layers import (
    LAYERS,
    PRODUCTS_ONLY,
    X,
    float_weights,
    mha,
    policy,
)
from keras_policy_ext.ext.delayed.observations import UNIT
from keras_policy_ext.layers import class_swap
from saving_models import (
    assert_equal,
    assert_same_policies,
    matrices,
    randomized,
    twin_of,
)
from steps import gradients, mean_square, normal, numpy, state_of

JIT = keras.backend.backend() == "jax"  # XLA takes longer than it saves.


# Names, configs, errors


def test_every_name_that_keras_has_is_a_float8_layer():
    stock = [keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention]
    found = 0
    for name in dir(keras.layers):
        for cls in stock:
            if getattr(keras.layers, name) is cls:
                ours = getattr(kpe.layers, name)
                assert issubclass(ours, (kpe.layers.Float8Mixin, cls))
                assert ours.__name__ == cls.__name__
                found += 1
    assert found >= len(stock)


@pytest.mark.parametrize("name", ["MultiHeadAttention", "GroupQueryAttention"])
def test_the_signature_is_the_stock_one_and_attention(name):
    stock = inspect.signature(getattr(keras.layers, name)).parameters
    ours = dict(inspect.signature(getattr(kpe.layers, name)).parameters)
    attention = ours.pop("attention")
    assert attention.kind is attention.KEYWORD_ONLY
    assert attention.default is None
    assert list(ours.items()) == list(stock.items())


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_a_config_names_attention_only_where_it_is_set(make):
    layer = make(policy("mixed_bfloat16"), attention="float8")
    config = json.loads(json.dumps(keras.layers.serialize(layer)))
    again = keras.layers.deserialize(config)
    assert type(again) is type(layer)
    assert again.get_config()["attention"] == "float8"
    assert again.dtype_policy == layer.dtype_policy
    config = make("float32").get_config()
    stock = next(c for c in type(layer).__mro__ if "keras.src" in c.__module__)
    assert type(stock.from_config(config)) is stock


@pytest.mark.parametrize("wrong", ["float16", "", True, 8])
def test_an_unknown_kind_of_attention_is_refused(wrong):
    with pytest.raises(ValueError, match=r"Allowed: 'float8' .* or None"):
        mha(attention=wrong)


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_flash_attention_is_refused_beside_attention_in_float8(make):
    with pytest.raises(ValueError, match="flash_attention=True"):
        make(attention="float8", flash_attention=True)
    make(flash_attention=True)
    make(attention="float8", flash_attention=False)


def modes(layer):
    """The quantization modes of the projections, by name."""
    projections = [
        x
        for x in layer._flatten_layers(include_self=False)
        if isinstance(x, keras.layers.EinsumDense)
    ]
    return {x.name: x.quantization_mode for x in projections}


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_the_projections_are_float8_and_the_layer_where_it_contracts(make):
    for attention in (None, "float8"):
        layer = make("float8/4_from_mixed_bfloat16", attention=attention)
        layer.build((2, 5, 8), (2, 5, 8))
        assert layer.quantization_mode == attention
        assert modes(layer) == {
            "query": "float8",
            "key": "float8",
            "value": "float8",
            "attention_output": "float8",
        }
        sizes = [np.prod(v.shape) for v in float_weights(layer)]
        assert layer.count_params() == sum(sizes)
        paths = [v.path for v in layer.weights]
        assert len(set(paths)) == len(paths) == len(sizes) + 4


def test_rules_take_out_a_projection_or_the_products_by_path():
    rules = [(".*/query", None), ("mha", None)]
    layer = mha(policy(rules=rules), attention="float8", name="mha")
    layer.build((2, 5, 8), (2, 5, 8))
    assert layer.quantization_mode is None
    found = modes(layer)
    assert found.pop("query") is None
    assert set(found.values()) == {"float8"}
    assert layer.float8_policy is None


def test_a_layer_becomes_stock_and_float8_again():
    layer = mha(policy(rules=PRODUCTS_ONLY), attention="float8")
    layer.build(X.shape, X.shape)
    found = []
    for change in (None, class_swap.to_stock_class, class_swap.to_float8_class):
        for part in (layer, *projections(layer)) if change else ():
            arguments = (
                (policy(),) if change is class_swap.to_float8_class else ()
            )
            change(part, *arguments)
        found.append((type(layer), layer.quantization_mode))
    assert found == [
        (kpe.layers.MultiHeadAttention, "float8"),
        (keras.layers.MultiHeadAttention, None),
        # A stock layer has no `attention` to come back to.
        (kpe.layers.MultiHeadAttention, None),
    ]
    layer.choose_attention("float8")
    assert layer.quantization_mode == "float8"


# Files


def attention_model(layers, dtype, **kwargs):
    inputs = keras.Input((5, 8))
    x = layers.MultiHeadAttention(2, 3, dtype=dtype, **kwargs)(
        inputs, inputs, use_causal_mask=True
    )
    x = layers.GroupQueryAttention(3, 4, 2, dtype=dtype, **kwargs)(x, inputs)
    return keras.Model(inputs, x)


@pytest.fixture(scope="module")
def observed():
    rules = [(".*/key", None)]
    dtype = policy("mixed_bfloat16", rules=rules)
    model = attention_model(kpe.layers, dtype, attention="float8")
    return randomized(model)


def through_keras(model, folder):
    model.save(folder / "model.keras")
    return keras.saving.load_model(folder / "model.keras")


def through_weights(model, folder):
    model.save_weights(folder / "model.weights.h5")
    other = twin_of(model)
    other.load_weights(folder / "model.weights.h5")
    return other


def through_json(model, folder):
    other = keras.models.model_from_json(model.to_json())
    other.set_weights(model.get_weights())
    return other


@pytest.mark.full_except("through_json", "through_weights")
@pytest.mark.parametrize(
    "route", [through_keras, through_weights, through_json]
)
def test_a_model_comes_back_as_it_was(observed, route, tmp_path):
    assert len(matrices(observed)) == 6
    other = route(observed, tmp_path)
    assert_same_policies(observed, other)
    assert_equal(observed.weights, other.weights)
    for layer in other.layers[1:]:
        assert layer.quantization_mode == "float8"


def keys_of(path):
    """The names of all datasets in a file."""
    keys = set()
    with h5py.File(path) as file:
        file.visititems(
            lambda name, x: keys.add(name) if hasattr(x, "shape") else None
        )
    return keys


@pytest.mark.full_except(".weights.h5")
@pytest.mark.parametrize("ending", [".weights.h5", ".keras"])
def test_stock_files_load_here_and_ours_in_stock_layers(ending, tmp_path):
    ours = randomized(attention_model(kpe.layers, policy()), seed=1)
    stock = randomized(attention_model(keras.layers, "float32"), seed=2)
    for model, name in ((ours, "ours"), (stock, "stock")):
        save = model.save if ending == ".keras" else model.save_weights
        save(tmp_path / (name + ending))
    wanted = [numpy(v) for v in float_weights(ours)]
    other = [numpy(v) for v in stock.weights]
    stock.load_weights(tmp_path / f"ours{ending}")
    ours.load_weights(tmp_path / f"stock{ending}")
    for v, value in zip(stock.weights, wanted, strict=True):
        np.testing.assert_array_equal(numpy(v), value)
    for v, value in zip(float_weights(ours), other, strict=True):
        np.testing.assert_array_equal(numpy(v), value)
    for v in matrices(ours):
        assert np.all(numpy(v)[:, 1:] == 0), "state of a file that has none"
    if ending == ".weights.h5":
        keys = keys_of(tmp_path / "ours.weights.h5")
        extra = keys - keys_of(tmp_path / "stock.weights.h5")
        assert keys - extra == keys_of(tmp_path / "stock.weights.h5")
        assert extra and all("/float8_state/" in key for key in extra)


# Training


def projections(layer):
    return [
        x
        for x in layer._flatten_layers(include_self=False)
        if isinstance(x, kpe.layers.EinsumDense)
    ]


@pytest.mark.full
@pytest.mark.parametrize(
    "kind, source, recipe, attention",
    [
        ("mha", "mixed_float16", "current", "float8"),
        ("gqa", "mixed_bfloat16", "4", None),
    ],
)
@pytest.mark.slow_except("mha-mixed_float16-current-float8")
def test_a_layer_that_is_used_twice_learns(kind, source, recipe, attention):
    layer = LAYERS[kind](policy(source, recipe), attention=attention)
    inputs = keras.Input((5, 8), dtype="float32")
    x = layer(inputs, inputs, use_causal_mask=True)
    x = keras.layers.Dense(8, dtype="float32")(layer(x, inputs))
    model = keras.Model(inputs, x)
    optimizer = keras.optimizers.Adam(0.01)
    if source == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    model.compile(optimizer, "mse", jit_compile=JIT)
    x = normal(8, 5, 8)
    history = model.fit(x, 0.5 * x, epochs=8, batch_size=8, verbose=0)
    losses = history.history["loss"]
    assert np.all(np.isfinite(losses)) and losses[-1] < 0.9 * losses[0]
    for projection in projections(layer) if recipe == "4" else ():
        for scale, amaxes in state_of(projection).values():
            assert scale > 0 and np.all(amaxes > 0)
            assert np.max(amaxes) < 100  # not the sum over all uses


@pytest.mark.full
def test_without_a_word_on_training_a_gradient_observes():
    layer = mha(policy())
    model = keras.Sequential([keras.Input((5, 8)), SelfAttention(layer)])
    variables = model.trainable_variables
    _, _, grads = gradients(model, X, mean_square, None, compiled=True)
    states = {id(v) for v in matrices(layer)}
    observed = [
        numpy(gradient)
        for variable, gradient in zip(variables, grads, strict=True)
        if id(variable) in states
    ]
    assert len(observed) == 4
    for observation in observed:
        np.testing.assert_array_equal(observation[:, 0], UNIT)


class SelfAttention(keras.layers.Layer):
    """Calls a layer with the same tensor for all of its inputs, by name."""

    def __init__(self, layer, **kwargs):
        super().__init__(**kwargs)
        self.layer = layer

    def build(self, input_shape):
        if not self.layer.built:
            self.layer.build(input_shape, input_shape)

    def call(self, inputs):
        return self.layer(query=inputs, value=inputs, use_causal_mask=True)


@pytest.mark.full
def test_rematerialization_changes_no_gradient():
    found = []
    for scope in (keras.RematScope(mode=None), keras.RematScope(mode="full")):
        with scope:
            layer = mha(policy("float32", "current"), attention="float8")
            layer.build((2, 5, 8), (2, 5, 8))
        stack = [keras.Input((5, 8)), SelfAttention(layer)]
        model = keras.Sequential(stack)
        rng = np.random.default_rng(0)
        for v in layer.weights:
            v.assign(rng.normal(size=tuple(v.shape)))
        _, dx, grads = gradients(model, X, mean_square, compiled=True)
        found.append([numpy(dx), *map(numpy, grads)])
    for plain, rematerialized in zip(*found, strict=True):
        assert np.any(plain != 0)
        # Another program may sum in another order.
        np.testing.assert_allclose(rematerialized, plain, rtol=1e-4, atol=1e-6)


@pytest.mark.full_except("True")
@pytest.mark.parametrize("masked", [False, True])
def test_scores_beyond_float16_give_the_outputs_of_float32(masked):
    """Of 400 to 150,000: softmax chooses one key."""
    rng = np.random.default_rng(1)
    x = (rng.normal(size=(2, 6, 16)) * 150).astype("float32")
    mask = np.tril(np.ones((2, 6, 6), "bool")) if masked else None
    found = []
    for dtype in ("mixed_float16", "float32"):
        layer = kpe.layers.MultiHeadAttention(
            2, 8, dtype=policy(dtype), attention="float8"
        )
        layer.build(x.shape, x.shape)
        seeded = np.random.default_rng(2)
        for weight in layer.trainable_weights:
            if "amax" not in weight.path:
                weight.assign(seeded.normal(size=weight.shape) * 0.25)
        found.append(
            numpy(keras.ops.cast(layer(x, x, attention_mask=mask), "float32"))
        )
    half, exact = found
    assert np.isfinite(half).all()
    assert np.abs(half - exact).max() < 0.05 * np.abs(exact).max()
