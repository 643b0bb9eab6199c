"""Each family of models: converted, trained, generating, and back."""

import hub_models as hub
import keras
import numpy as np
import pytest

import keras_policy_ext as kpe

# Of two blocks: 6 or 7 products each, and what is before and behind them.
CONVERTED = {
    "gpt2": 13,
    "llama": 15,
    "gemma": 15,
    "bert": 15,
    "vit": 14,
    "resnet": 4,
}
WITHOUT_PRODUCT = {
    "BatchNormalization",
    "Embedding",
    "LayerNormalization",
    "LlamaLayerNorm",
    "MaskedLMHead",  # A bias; it multiplies through the token embedding.
    "PositionEmbedding",
    "RMSNormalization",
    "ViTPatchingAndEmbedding",  # Adds; its convolution is a layer in it.
}
PRODUCTS = (
    keras.layers.Conv2D,
    keras.layers.Dense,
    keras.layers.EinsumDense,
    keras.layers.ReversibleEmbedding,
)


def error(got, expected):
    return np.sqrt(np.mean((got - expected) ** 2) / np.mean(expected**2))


def error_of_float8(products):
    """Relative, of as many products one after the other.

    Both operands have three bits of fraction: rounding is off by at most
    2^-4, evenly distributed. Independent errors add up in squares.
    """
    return np.sqrt(2 * products / 3) * 2.0**-4


@pytest.mark.parametrize("name", CONVERTED)
def test_converted_family_trains_generates_and_reverts(name):
    source = "mixed_bfloat16" if name in ("llama", "vit") else "float32"
    model = hub.compiled(hub.task(name, source), rate=0.02)
    hub.randomize(model)
    inputs, targets = hub.data(name)
    before = model.predict_on_batch(inputs)
    classes = [type(layer) for layer in hub.layers_of(model)]

    report = kpe.convert(model, "float8/4_from_float32")

    products = [x for x in hub.layers_of(model) if isinstance(x, PRODUCTS)]
    assert {e.path for e in report.converted} == {x.path for x in products}
    assert len(products) == CONVERTED[name]
    assert {e.policy for e in report.converted} == {f"float8/4_from_{source}"}
    assert {e.class_name for e in report.skipped} <= WITHOUT_PRODUCT
    got = model.predict_on_batch(inputs)
    assert 1e-3 < error(got, before) < error_of_float8(len(products))
    assert all(layer.kernel_choice for layer in products)

    losses = hub.train(model, inputs, targets, 30)
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0] / 2
    if name in hub.LANGUAGE:
        assert_tokens_are_the_likeliest(model, hub.prompt(inputs))

    trained = hub.arrays(model, state=False)
    kpe.revert(model)
    assert [type(layer) for layer in hub.layers_of(model)] == classes
    assert not hub.followed(model)
    hub.assert_same_arrays(hub.arrays(model), trained)


def assert_tokens_are_the_likeliest(model, prompt):
    """Token by token with a cache, and all at once: the same scales hold."""
    tokens = model.generate(prompt, stop_token_ids=None)["token_ids"]
    given = prompt["padding_mask"].sum(axis=1)[0]
    assert (tokens[:, :given] == prompt["token_ids"][:, :given]).all()
    everything = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}
    logits = model.predict_on_batch(everything)
    likeliest = np.argmax(logits, axis=-1)[:, given - 1 : -1]
    np.testing.assert_array_equal(tokens[:, given:], likeliest)


def test_generation_follows_a_later_conversion():
    model = hub.compiled(hub.task("gpt2"))
    prompt = hub.prompt(hub.data("gpt2")[0])
    model.generate(prompt, stop_token_ids=None)
    # A recipe without state: the model's variables are the same as before.
    report = kpe.convert(model, "float8/current_from_float32")
    model.generate(prompt, stop_token_ids=None)
    ran = [x.path for x in hub.layers_of(model) if hub.ran_in_float8(x)]

    assert sorted(ran) == sorted(e.path for e in report.converted)


def test_scores_of_attention_with_a_cache_are_float8_on_request():
    model = hub.task("gpt2")
    kpe.convert(model, "delayed", attention="float8")
    model.generate(hub.prompt(hub.data("gpt2")[0]), stop_token_ids=None)
    ran = [x.name for x in hub.layers_of(model) if hub.ran_in_float8(x)]
    assert ran.count("self_attention") == 2
