"""Scales inside attention: none is of two queries, keys or examples."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from attention_layers import LAYERS, PRODUCTS_ONLY, float_weights, policy
from keras_policy_ext import recipes, reference
from keras_policy_ext.contractions.weighted_sum import (
    WeightedSum,
    weighted_sum_of,
)
from keras_policy_ext.numerics import quantized
from keras_policy_ext.recipes import Quantization, Tile
from steps import gradients, mean_square, no_grad, normal, numpy, relative_rms
from ways import FASTEST, compiled

APART = ("rowwise", "rowwise(power_of_two=False)", "block", "mxfp8")
"""Recipes with a scale per row or per block of a row."""

STEPS, PAST = 40, 35
"""A block of 32 keys ends within the past."""

X = normal(2, STEPS, 8)

WEIGHTED_SUM = "bhqk,bkhv->bqhv"


def outputs_of(layer, x, training=False):
    with no_grad():
        return numpy(layer(x, x, use_causal_mask=True, training=training))


def made(kind, recipe, rules=()):
    keras.utils.set_random_seed(1)
    layer = LAYERS[kind](policy(recipe=recipe, rules=rules), attention="float8")
    layer.build(X.shape, X.shape)
    return layer


def with_other_future():
    x = X.copy()
    x[:, PAST:] *= 50.0
    return x


def with_other_mates():
    x = X.copy()
    x[1] *= 50.0
    return x


def moves(layer, training):
    """How far the past, and how far an example, is moved by others."""
    y = outputs_of(layer, X, training)
    future = outputs_of(layer, with_other_future(), training)
    mates = outputs_of(layer, with_other_mates(), training)
    past = np.abs(future[:, :PAST] - y[:, :PAST]).max()
    return past, np.abs(mates[0] - y[0]).max()


@pytest.mark.slow_except(
    "block-gqa-True", "mxfp8-mha-False", "rowwise-gqa-True"
)
@pytest.mark.full_except("rowwise-mha-False")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", ["mha", "gqa"])
@pytest.mark.parametrize("recipe", APART)
def test_outputs_depend_on_no_later_token_and_no_other_example(
    recipe, kind, training
):
    assert moves(made(kind, recipe), training) == (0.0, 0.0)


@pytest.mark.full_except("current")
@pytest.mark.parametrize("recipe", ["current", "nvfp4"])
def test_a_scale_of_the_tensor_sees_both(recipe):
    past, example = moves(made("mha", recipe), training=False)
    assert past > 0.0 and example > 0.0


@pytest.mark.slow_except("block")
@pytest.mark.full
@pytest.mark.parametrize("recipe", APART)
def test_a_prefix_alone_gives_the_outputs_of_the_whole(recipe):
    layer = made("mha", recipe)
    alone = outputs_of(layer, X[:, :PAST])
    whole = outputs_of(layer, X)[:, :PAST]
    # Codes and scales are the same; sums of 40 numbers may have another order.
    assert relative_rms(alone, whole) < 40 * 2.0**-24


@pytest.mark.slow_except("rowwise")
@pytest.mark.full
@pytest.mark.parametrize("recipe", APART)
def test_compiled_attention_sees_neither(recipe):
    layer = made("mha", recipe)
    call = compiled(
        lambda x: layer(x, x, use_causal_mask=True, training=False), FASTEST
    )
    y, future, mates = (
        numpy(call(ops.convert_to_tensor(x)))
        for x in (X, with_other_future(), with_other_mates())
    )
    np.testing.assert_array_equal(future[:, :PAST], y[:, :PAST])
    np.testing.assert_array_equal(mates[0], y[0])


@pytest.mark.slow_except(
    "block-float16", "mxfp8-mixed_bfloat16", "rowwise-float32"
)
@pytest.mark.full
@pytest.mark.parametrize("source", ["float32", "mixed_bfloat16", "float16"])
@pytest.mark.parametrize("recipe", APART)
def test_outputs_are_those_of_floats_nearly(recipe, source):
    layer = LAYERS["gqa"](
        policy(source, recipe, PRODUCTS_ONLY), attention="float8"
    )
    layer.build(X.shape, X.shape)
    stock = keras.layers.GroupQueryAttention(4, 6, 3)
    stock.build(X.shape, X.shape)
    for ours, theirs in zip(float_weights(layer), stock.weights, strict=True):
        theirs.assign(ops.cast(ours, "float32"))
    y = outputs_of(layer, X).astype("float32")
    # Four operands, each rounded to four bits.
    assert 1e-3 < relative_rms(y, outputs_of(stock, X)) < 4 * 2.0**-4


class Sum(kpe.layers.Float8Mixin, keras.layers.Layer):
    """A sum of values over keys."""

    def call(self, weights, values):
        return self.float8_weighted_sum(WEIGHTED_SUM, weights, values)


def probabilities():
    """(2, 3, 5, 6), a row each; its values sum to 1."""
    rng = np.random.default_rng(4)
    weights = np.exp(3 * rng.normal(size=(2, 3, 5, 6)))
    weights *= np.tri(5, 6, dtype=bool)
    return (weights / weights.sum(-1, keepdims=True)).astype("float32")


def values_of_keys():
    """(2, 6, 3, 4), of very different sizes, and one of zeros."""
    values = normal(2, 6, 3, 4, seed=5)
    values *= np.float32(10.0) ** np.arange(-2, 4)[:, None, None]
    values[:, 3] = 0.0
    return values


def scales_of_keys(values):
    amax = np.abs(values).max(-1)
    return reference.scale_from_amax(amax, "float8_e4m3fn", power_of_two=True)


@pytest.mark.full_except("rowwise")
@pytest.mark.parametrize("recipe", APART)
def test_the_weighted_sum_is_that_of_the_reference(recipe):
    weights, values = probabilities(), values_of_keys()
    layer = Sum(dtype=policy(recipe=recipe))
    with no_grad():
        y = numpy(layer(weights, values))
    scale = scales_of_keys(values)
    expected = reference.einsum(
        WEIGHTED_SUM,
        weights * scale.transpose(0, 2, 1)[:, :, None, :],
        values / scale[..., None],
        np.zeros_like(y),
        weighted_sum_of(recipes.get(recipe).for_activations),
    )
    np.testing.assert_allclose(y, expected.y, rtol=1e-5, atol=1e-6)
    read = expected.matrices["kernel", "forward"]
    assert np.all(read.scales.astype("float32") == 1.0)
    largest = np.abs(read.codes.astype("float32")).max(-1)
    assert np.all((largest == 0.0) | (largest > 216.0))


@pytest.mark.slow_except("mxfp8")
@pytest.mark.full
@pytest.mark.parametrize("recipe", APART)
def test_gradients_of_the_weighted_sum_are_those_of_floats_nearly(recipe):
    class OfWeights(keras.layers.Layer):
        def build(self, input_shape):
            self.sum = Sum(dtype=policy(recipe=recipe))
            self.v = self.add_weight(name="v", shape=(2, 6, 3, 4))

        def call(self, weights, training=None):
            return self.sum(weights, self.v)

    weights, values = probabilities(), values_of_keys()
    layer = OfWeights()
    layer.build(weights.shape)
    layer.v.assign(values)
    y, of_weights, (of_values,) = gradients(layer, weights, mean_square)
    g = 2.0 * numpy(y) / np.prod(y.shape)
    expected = np.einsum("bqhv,bkhv->bhqk", g, values)
    assert relative_rms(numpy(of_weights), expected) < 2 * 2.0**-4
    expected = np.einsum("bqhv,bhqk->bkhv", g, weights)
    assert relative_rms(numpy(of_values), expected) < 2 * 2.0**-4


@pytest.mark.parametrize("wrong", [np.inf, -np.inf, np.nan])
def test_a_value_that_is_not_finite_shows_in_the_outputs(wrong):
    weights, values = probabilities(), values_of_keys()
    values[0, 2, 1, 3] = wrong
    with no_grad():
        y = numpy(Sum(dtype=policy(recipe="rowwise"))(weights, values))
    assert np.isnan(y[0, :, 1]).any()
    assert np.isfinite(y[1]).all() and np.isfinite(y[0, :, [0, 2]]).all()


def test_float16_keeps_weights_that_are_small_with_their_scales():
    # 2**-20 times a scale of 2**-8 is no float16.
    weights = np.full((1, 1, 1, 4), 2.0**-20, "float32")
    values = np.ones((1, 4, 1, 2), "float32")
    layer = Sum(dtype=policy("float16", "rowwise"))
    with no_grad():
        y = layer(ops.cast(weights, "float16"), ops.cast(values, "float16"))
    assert keras.backend.standardize_dtype(y.dtype) == "float16"
    assert np.all(numpy(y) == np.float16(2.0**-18))


def test_a_plain_policy_sums_as_keras_does():
    weights, values = probabilities(), values_of_keys()
    expected = numpy(ops.einsum(WEIGHTED_SUM, weights, values))
    y = numpy(Sum(dtype="float32")(weights, values))
    np.testing.assert_array_equal(y, expected)


def test_an_axis_of_the_values_alone_is_refused():
    class Alone(Sum):
        def call(self, weights, values):
            return self.float8_weighted_sum("qk,kva->qv", weights, values)

    layer = Alone(dtype=policy(recipe="rowwise"))
    with pytest.raises(ValueError, match="a key has no single scale"):
        layer(normal(2, 3), normal(3, 4, 5))


@pytest.mark.full
def test_graphs_of_unknown_sizes_and_of_torch_compile_compute_it():
    layer = made("mha", "rowwise")

    def call(x):
        return layer(x, x, use_causal_mask=True, training=False)

    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        graph = jax.jit(call)
    elif backend == "tensorflow":
        import tensorflow as tf

        unknown = tf.TensorSpec([None, None, X.shape[-1]])
        graph = tf.function(call, input_signature=[unknown])
    else:
        import torch

        graph = torch.compile(call, backend="aot_eager", fullgraph=True)
    for x in (X, X[:1, :PAST]):
        with no_grad():
            y = numpy(graph(ops.convert_to_tensor(x)))
        np.testing.assert_allclose(y, outputs_of(layer, x), atol=1e-6)


@pytest.mark.full
def test_a_frozen_model_with_dynamic_inputs_sees_neither():
    x = keras.Input((STEPS, 8))
    layer = keras.layers.MultiHeadAttention(2, 4)
    y = layer(x, x, use_causal_mask=True)
    model = keras.Model(x, keras.layers.Dense(8)(y))
    kpe.convert(model, "current", attention="float8")
    kpe.freeze(model, activations="dynamic")

    def outputs(x):
        with no_grad():
            return numpy(model(x, training=False))

    y = outputs(X)
    past = outputs(with_other_future())[:, :PAST]
    np.testing.assert_array_equal(past, y[:, :PAST])
    np.testing.assert_array_equal(outputs(with_other_mates())[0], y[0])


TILES = [
    {},
    {"tile": Tile(free=1)},
    {"tile": Tile(1, 4)},
    {
        "tile": Tile(1, 4),
        "scale_format": "float8_e8m0fnu",
        "scale_rounding": "up",
    },
]


@pytest.mark.parametrize("how", TILES)
def test_a_constant_scale_gives_the_codes_of_the_reference(how):
    asked = Quantization(format="float8_e4m3fn", constant_scale=0.5, **how)
    x = normal(2, 3, 10, scale=100.0)
    x[0, 1, 2], x[1, 2, 3] = np.inf, np.nan
    found, _ = quantized.quantize(ops.convert_to_tensor(x), asked)
    expected = reference.quantize_matrices(x, asked)
    np.testing.assert_array_equal(
        numpy(found.values), expected.codes.astype("float32")
    )
    np.testing.assert_array_equal(
        numpy(found.scale), expected.scales.astype("float32")
    )
    assert np.all(numpy(found.scale) == 0.5)


@pytest.mark.any_backend
def test_recipes_of_attention():
    for rows in (
        recipes.RowwiseScaling(power_of_two=False),
        recipes.MXFP8Scaling(rounding="floor"),
    ):
        assert rows.for_activations is rows
    given = {"power_of_two": False, "kernel_grad": "high_precision"}
    block = recipes.BlockScaling(**given).for_activations
    assert block.get_config() == recipes.BlockScaling(**given).get_config()
    assert block.for_activations is block
    assert block != recipes.BlockScaling(**given)
    assert block.quantization("outputs_grad", "kernel_grad") is None
    assert block.quantization("kernel", "forward").tile == recipes.Tile(1, 128)
    frozen = recipes.FrozenKernels(activations="dynamic").for_activations
    assert frozen.quantization("kernel", "forward").tile == recipes.Tile(1)
    assert frozen.quantization("kernel", "inputs_grad") is None
    static = recipes.FrozenKernels(activations="static").for_activations
    assert static.quantization("kernel", "forward").has_one_scale
    plain = recipes.FrozenKernels().for_activations
    assert plain.quantization("kernel", "forward") is None


@pytest.mark.any_backend
def test_only_values_in_the_forward_matmul_have_a_constant_scale():
    recipe = weighted_sum_of(recipes.RowwiseScaling())
    assert isinstance(recipe, WeightedSum)
    constant = {
        (operand, matmul)
        for matmul, operands in recipes.MATMULS.items()
        for operand in operands
        if recipe.quantization(operand, matmul).constant_scale is not None
    }
    assert constant == {("kernel", "forward")}
    for whole in (
        recipes.CurrentScaling(),
        recipes.RowwiseScaling(forward="high_precision"),
    ):
        assert weighted_sum_of(whole) is whole


@pytest.mark.any_backend
@pytest.mark.parametrize(
    "how",
    [
        {"constant_scale": 0.0},
        {"constant_scale": np.inf},
        {"constant_scale": 3.0, "scale_rounding": "up"},
        {
            "constant_scale": 1.0,
            "tile": Tile(1, 16),
            "scale_format": "float8_e4m3fn",
        },
    ],
)
def test_a_constant_scale_that_cannot_be_is_refused(how):
    with pytest.raises(ValueError, match="`constant_scale` of this"):
        Quantization(format="float8_e4m3fn", **how)


@pytest.mark.any_backend
def test_a_history_and_a_constant_scale_exclude_each_other():
    class Constant(recipes.DelayedScaling):
        def quantization(self, operand, matmul):
            return Quantization(format="float8_e4m3fn", constant_scale=1.0)

    with pytest.raises(ValueError, match="a history has no use where"):
        Constant()
