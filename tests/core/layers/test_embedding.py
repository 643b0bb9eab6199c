"""ReversibleEmbedding: the projection to the vocabulary in float8."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from keras_policy_ext import reference
from keras_policy_ext.layers.class_swap import to_float8_class, to_stock_class
from saving_models import JIT, assert_equal, float8, own_weights
from steps import gradients, mean_square, normal, numpy, state_of, step

WORDS, SIZE = 11, 4

TIES = pytest.mark.parametrize("tied", [True, False])

TOKENS = np.array([[1, 4, 4], [7, 0, 10]])


def made(policy=None, layers=kpe.layers, **kwargs):
    keras.utils.set_random_seed(0)
    layer = layers.ReversibleEmbedding(
        WORDS, SIZE, dtype=policy, name="words", **kwargs
    )
    layer.build()
    return layer


class Projection(keras.Model):
    """The projection alone, as a model of one input."""

    def __init__(self, layer):
        super().__init__(dtype=layer.dtype_policy)
        self.layer = layer
        self.build((None, 3, SIZE))

    def build(self, input_shape):
        pass

    def call(self, x, training=None):
        return self.layer(x, reverse=True, training=training)


class Language(keras.Model):
    """Looks the tokens up, adds its input, and projects back."""

    def __init__(self, layer):
        super().__init__(dtype=layer.dtype_policy)
        self.layer = layer
        self.build((2, 3, SIZE))

    def build(self, input_shape):
        pass

    def call(self, x, training=None):
        found = self.layer(ops.convert_to_tensor(TOKENS))
        return self.layer(found + x, reverse=True)


def project(layer, x):
    return numpy(ops.cast(layer(x, reverse=True), "float32"))


def quantized(x, dtype):
    scale = reference.scale_from_amax(reference.amax(x), dtype)
    return reference.quantize_dequantize(x, scale, dtype)


# Under any other policy


@TIES
def test_under_a_plain_policy_a_layer_is_the_stock_one(tied):
    options = {"tie_weights": tied, "logit_soft_cap": 2.0, "mask_zero": True}
    ours, stock = (
        made("mixed_bfloat16", layers, **options)
        for layers in (kpe.layers, keras.layers)
    )
    assert ours.quantization_mode is None
    assert ours.get_config() == stock.get_config()
    assert_equal(ours.weights, stock.weights)
    assert_equal([ours(TOKENS)], [stock(TOKENS)])
    x = normal(2, 3, SIZE)
    np.testing.assert_array_equal(project(ours, x), project(stock, x))
    for layer in (ours, stock):
        layer.quantize("int8")
    assert ours.quantization_mode == stock.quantization_mode == "int8"
    np.testing.assert_array_equal(project(ours, x), project(stock, x))
    assert_equal([ours(TOKENS)], [stock(TOKENS)])


def test_a_float8_layer_refuses_another_quantization():
    layer = made(float8())
    with pytest.raises(NotImplementedError, match="Received: 'int8'"):
        layer.quantize("int8")
    assert layer.quantization_mode == "float8"


# The arithmetic


@pytest.mark.full_except("mixed_bfloat16-False", "mixed_bfloat16-True")
@TIES
@pytest.mark.parametrize("source", ["float32", "mixed_bfloat16"])
def test_projection_and_gradients_are_of_quantized_tensors(tied, source):
    policy = float8(source, recipe="current")
    layer = made(policy, tie_weights=tied, reverse_dtype="float32")
    assert layer.quantization_mode == "float8"
    table, *kernel = map(numpy, layer.weights)
    g = normal(2, 3, WORDS, seed=1)
    logits, hidden_grad, grads = gradients(
        Language(layer),
        np.zeros((2, 3, SIZE), "float32"),
        lambda y: ops.sum(ops.multiply(y, g)),
        compiled=True,
    )
    x = numpy(ops.cast(ops.cast(table, layer.compute_dtype), "float32"))
    x_q = quantized(x[TOKENS], "float8_e4m3fn")
    kernel_q = quantized(kernel[0] if kernel else table.T, "float8_e4m3fn")
    g_q = quantized(g, "float8_e5m2")
    np.testing.assert_allclose(numpy(logits), x_q @ kernel_q, atol=1e-6)
    x_grad = g_q @ kernel_q.T
    looked_up = np.zeros_like(table)
    np.add.at(looked_up, TOKENS, x_grad)
    projected = np.einsum("abi,abo->io", x_q, g_q)
    expected = [looked_up + projected.T] if tied else [looked_up, projected]
    # To the lookup the gradient goes in the compute dtype: a rounding for
    # itself, and one for the sum of the word that is there twice.
    rounding = 2**-20 if source == "float32" else 2 * 2**-8
    for grad, wanted in zip(
        [hidden_grad, *grads], [x_grad, *expected], strict=True
    ):
        atol = rounding * np.abs(wanted).max()
        np.testing.assert_allclose(numpy(grad), wanted, rtol=0, atol=atol)


def test_logits_have_the_dtype_and_the_cap_that_were_asked_for():
    x = normal(2, 3, SIZE)
    plain, float32, capped = (
        made(float8("mixed_bfloat16", recipe="current"), **options)
        for options in (
            {},
            {"reverse_dtype": "float32"},
            {"reverse_dtype": "float32", "logit_soft_cap": 0.1},
        )
    )
    symbolic = keras.Input((3, SIZE))
    for layer, dtype in ((plain, "bfloat16"), (float32, "float32")):
        for logits in (
            layer(x, reverse=True),
            layer(symbolic, reverse=True),
            keras.Model(symbolic, layer(symbolic, reverse=True))(x),
        ):
            assert keras.backend.standardize_dtype(logits.dtype) == dtype
    exact = project(float32, x)
    rounded = numpy(ops.cast(ops.cast(exact, "bfloat16"), "float32"))
    assert np.any(exact != rounded)
    np.testing.assert_allclose(
        project(capped, x), 0.1 * np.tanh(exact / 0.1), atol=1e-7
    )


def test_adapters_stay_beside_the_float8_kernel(tmp_path):
    layer, stock = made(float8()), made(None, keras.layers)
    x = normal(2, 3, SIZE)
    before = project(layer, x)
    layer.enable_lora(2)
    assert_equal([project(layer, x)], [before])
    a, b = layer.lora_embeddings_a, layer.lora_embeddings_b
    b.assign(normal(2, SIZE, seed=3) * 1e-4)
    added = x @ (numpy(a) @ numpy(b)).T
    # Less than a step of float8 at the kernel's scale, and there.
    np.testing.assert_allclose(
        project(layer, x) - before, added, rtol=0, atol=1e-6
    )
    merged = numpy(layer._embeddings) + numpy(a) @ numpy(b)
    np.testing.assert_array_equal(numpy(layer(TOKENS)), merged[TOKENS])
    model = keras.Sequential([keras.Input((3,), dtype="int32"), layer])
    model.save_weights(tmp_path / "model.weights.h5")
    stock = keras.Sequential([keras.Input((3,), dtype="int32"), stock])
    stock.load_weights(tmp_path / "model.weights.h5")
    np.testing.assert_array_equal(numpy(stock.weights[0]), merged)


# The state


def language_model(policy=None, layers=kpe.layers, **kwargs):
    keras.utils.set_random_seed(0)
    words = layers.ReversibleEmbedding(
        WORDS, SIZE, dtype=policy, name="words", **kwargs
    )
    tokens = keras.Input((3,), dtype="int32")
    return keras.Model(tokens, words(words(tokens), reverse=True), name="model")


@pytest.mark.full
@TIES
def test_fit_observes_the_operands_of_the_projection(tied):
    policy = float8("mixed_bfloat16")
    model = language_model(policy, tie_weights=tied, reverse_dtype="float32")
    layer = model.layers[1]
    model.compile(
        keras.optimizers.SGD(0.0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=JIT,
    )
    history = model.fit(TOKENS, TOKENS, epochs=2, verbose=0)
    assert np.all(np.isfinite(history.history["loss"]))
    table = numpy(layer.weights[0])
    kernel = table if tied else numpy(layer.weights[1])
    x = numpy(ops.cast(ops.cast(table, "bfloat16"), "float32"))[TOKENS]
    state = state_of(layer)
    assert state["inputs"][1][0] == np.abs(x).max()
    assert state["kernel"][1][0] == np.abs(kernel).max()
    assert 0 < state["outputs_grad"][1][0] <= 1


@pytest.mark.full
def test_amaxes_are_observed_where_training_says_so():
    layer = made(float8())
    model, x = Projection(layer), normal(2, 3, SIZE)
    optimizer = keras.optimizers.SGD(0.0)
    seen = []
    for training in (False, True):
        step(model, optimizer, x, mean_square, training=training)
        seen.append(state_of(layer)["inputs"][1][0])
    assert seen == [0, np.abs(x).max()]
    frozen = numpy(layer.float8_state.matrices[0])
    layer.trainable = False
    _, x_grad, _ = gradients(model, 2 * x, mean_square)
    assert np.abs(numpy(x_grad)).max() > 0
    assert_equal(layer.float8_state.matrices, [frozen])


def test_a_rule_takes_a_layer_out_by_its_path():
    rules = [("other/words", None)]
    with keras.name_scope("other"):
        plain = made(float8(rules=rules))
    assert plain.quantization_mode is None
    x = normal(2, 3, SIZE)
    stock = made(None, keras.layers)
    np.testing.assert_array_equal(project(plain, x), project(stock, x))


# In files, and in place


@pytest.mark.full_except("True")
@TIES
def test_models_and_weights_are_saved_and_loaded(tied, tmp_path):
    options = {"tie_weights": tied}
    model = language_model(float8("mixed_bfloat16"), **options)
    layer = model.layers[1]
    optimizer = keras.optimizers.SGD(0.1)
    step(Language(layer), optimizer, normal(2, 3, SIZE), mean_square)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert type(again.layers[1]) is kpe.layers.ReversibleEmbedding
    assert again.layers[1].dtype_policy == layer.dtype_policy
    assert_equal(again.weights, model.weights)
    assert_equal([again(TOKENS)], [model(TOKENS)])
    stock = language_model(None, keras.layers, **options)
    model.save_weights(tmp_path / "float8.weights.h5")
    stock.load_weights(tmp_path / "float8.weights.h5")
    assert_equal(stock.weights, own_weights(model))
    stock.save_weights(tmp_path / "stock.weights.h5")
    other = language_model(float8(), **options)
    other.load_weights(tmp_path / "stock.weights.h5")
    assert_equal(own_weights(other), stock.weights)


class Own(keras.layers.ReversibleEmbedding):
    """A library's subclass that changes nothing."""


@pytest.mark.full_except("Own-False", "Own-True", "ReversibleEmbedding-True")
@TIES
@pytest.mark.parametrize("cls", [keras.layers.ReversibleEmbedding, Own])
def test_an_adopted_layer_is_one_that_was_made_in_float8(cls, tied):
    keras.utils.set_random_seed(0)
    layer = cls(WORDS, SIZE, tie_weights=tied, name="words")
    layer.build()
    x = normal(2, 3, SIZE)
    before = project(layer, x)
    to_float8_class(layer, float8())
    twin = made(float8(), tie_weights=tied)
    assert isinstance(layer, kpe.layers.ReversibleEmbedding)
    assert [v.path for v in layer.weights] == [v.path for v in twin.weights]
    some, others = (
        gradients(Language(each), x, mean_square, compiled=True)
        for each in (layer, twin)
    )
    assert_equal([*some[:2], *some[2]], [*others[:2], *others[2]])
    to_stock_class(layer)
    assert type(layer) is cls
    np.testing.assert_array_equal(project(layer, x), before)
