"""Attention of KerasHub's language models, whose products are recognised."""

import hub_models as hub
import keras
import keras_hub
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe

BACKEND = keras.backend.backend()
STEPS, PAST = 40, 35
"""A block of 32 keys ends within the past."""

SIZES = {
    "vocabulary_size": hub.TOKENS,
    "num_layers": 2,
    "num_query_heads": 4,
    "num_key_value_heads": 2,
    "hidden_dim": 16,
    "intermediate_dim": 32,
}


def llama3(dtype=None):
    return keras_hub.models.Llama3Backbone(**SIZES, dtype=dtype)


def qwen3(dtype=None):
    return keras_hub.models.Qwen3Backbone(**SIZES, head_dim=8, dtype=dtype)


def gemma3(dtype=None):
    return keras_hub.models.Gemma3Backbone(
        **SIZES,
        head_dim=8,
        image_size=16,
        attention_logit_soft_cap=50.0,
        use_sliding_window_attention=True,
        sliding_window_size=16,
        query_head_dim_normalize=True,
        use_query_key_norm=True,
        use_post_ffw_norm=True,
        use_post_attention_norm=True,
        vision_encoder=None,
        dtype=dtype,
    )


FAMILIES = {f.__name__: f for f in (llama3, qwen3, gemma3)}


def backbone(family, dtype=None):
    keras.utils.set_random_seed(0)
    return FAMILIES[family](dtype)


def attentions_of(model):
    layers = hub.layers_of(model)
    return [x for x in layers if type(x).__name__.endswith("Attention")]


def inputs():
    """Tokens, and no padding."""
    tokens = np.random.default_rng(1).integers(0, hub.TOKENS, (2, STEPS))
    return {
        "token_ids": tokens.astype("int32"),
        "padding_mask": np.ones((2, STEPS), "int32"),
    }


def outputs_of(layer, x):
    causal = np.tri(STEPS, dtype=bool)[None].repeat(2, axis=0)
    return hub.numpy(layer(x, attention_mask=ops.convert_to_tensor(causal)))


@pytest.fixture
def products():
    """The products of two activations that are computed in float8."""
    found = []

    def note(call):
        if call.weight is None:
            found.append(call.contraction.equation)
        return call.run()

    with kpe.seams.on_contraction(note):
        yield found


@pytest.mark.parametrize("recipe", ["rowwise", "block", "mxfp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_later_token_and_no_other_example_moves_outputs(
    family, recipe, products
):
    model = backbone(family)
    report = kpe.convert(model, recipe, attention="float8")
    layers = attentions_of(model)
    named = [x.class_name for x in report.converted]
    assert named.count(type(layers[0]).__name__) == len(layers) == 2
    rng = np.random.default_rng(2)
    x = rng.normal(size=(2, STEPS, 16)).astype("float32")
    future, mates = x.copy(), x.copy()
    future[:, PAST:] *= 50.0
    mates[1] *= 50.0
    y = outputs_of(layers[0], x)
    assert len(products) == 2  # Scores and weighted sum, and both in float8.
    moved = outputs_of(layers[0], future)
    assert np.abs(moved[:, :PAST] - y[:, :PAST]).max() == 0.0
    assert np.abs(moved[:, PAST:] - y[:, PAST:]).max() > 0.0
    assert np.abs(outputs_of(layers[0], mates)[0] - y[0]).max() == 0.0


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_are_nearly_those_of_floats(family, dtype, products):
    model = backbone(family, dtype)
    kpe.convert(model, "rowwise")
    y = hub.numpy(model(inputs())).astype("float32")
    assert not products
    kpe.convert(model, "rowwise", attention="float8")
    found = hub.numpy(model(inputs())).astype("float32")
    assert len(products) == 4  # Two layers.
    error = np.sqrt(np.mean((found - y) ** 2) / np.mean(y**2))
    # Four operands of two layers, each rounded to four bits.
    assert 1e-3 < error < 8 * 2.0**-4


@pytest.mark.parametrize(
    ("family", "recipe"), [("llama3", "delayed"), ("gemma3", "rowwise")]
)
def test_it_trains_is_saved_and_comes_back(family, recipe, tmp_path, products):
    model = backbone(family)
    classes = [type(x) for x in attentions_of(model)]
    kpe.convert(model, recipe, attention="float8")
    model.compile(
        keras.optimizers.Adam(1e-3), "mse", jit_compile=BACKEND == "jax"
    )
    x, target = inputs(), np.zeros((2, STEPS, 16), "float32")
    losses = [model.train_on_batch(x, target) for _ in range(3)]
    assert losses[-1] < losses[0]

    model.save(tmp_path / "model.keras")
    loaded = kpe.load_model(tmp_path / "model.keras")
    products.clear()
    y = hub.numpy(loaded(x))
    assert len(products) == 4
    np.testing.assert_array_equal(y, hub.numpy(model(x)))
    again = model.train_on_batch(x, target)
    assert loaded.train_on_batch(x, target) == again

    kept = [hub.numpy(v) for v in kpe.loops.weights(model)]
    kpe.revert(model)
    assert [type(x) for x in attentions_of(model)] == classes
    for one, other in zip(model.weights, kept, strict=True):
        np.testing.assert_array_equal(hub.numpy(one), other)
    products.clear()
    model(x)
    assert not products


@pytest.mark.parametrize("family", FAMILIES)
def test_frozen_with_dynamic_inputs_it_sees_neither(family, products):
    model = backbone(family)
    kpe.convert(model, "current", attention="float8")
    kpe.freeze(model, activations="dynamic")
    layer = attentions_of(model)[0]
    x = np.random.default_rng(2).normal(size=(2, STEPS, 16)).astype("float32")
    future = x.copy()
    future[:, PAST:] *= 50.0
    y, moved = outputs_of(layer, x), outputs_of(layer, future)
    assert len(products) == 4  # Two calls.
    np.testing.assert_array_equal(moved[:, :PAST], y[:, :PAST])


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_with_a_cache_outputs_are_those_without(family, products):
    model = backbone(family)
    kpe.convert(model, "rowwise", attention="float8")
    layer = attentions_of(model)[0]
    x = np.random.default_rng(2).normal(size=(2, STEPS, 16)).astype("float32")
    y = outputs_of(layer, x)
    size = layer._key_dense.kernel.shape[-1]
    cache = ops.zeros((2, 2, STEPS, 2, size))
    causal = np.tri(STEPS, dtype=bool)[None].repeat(2, axis=0)
    products.clear()
    for start, stop in ((0, PAST), (PAST, PAST + 1), (PAST + 1, PAST + 2)):
        found, cache = layer(
            ops.convert_to_tensor(x[:, start:stop]),
            attention_mask=ops.convert_to_tensor(causal[:, start:stop]),
            cache=cache,
            cache_update_index=start,
        )
        # Codes are the same, sums may have another order.
        error = np.abs(hub.numpy(found) - y[:, start:stop]).max()
        assert error < 1e-5 * np.abs(y).max()
    assert len(products) == 6
