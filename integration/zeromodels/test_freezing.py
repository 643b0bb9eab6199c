"""Each family frozen: outputs near those of float32, and text as before."""

import numpy as np
import pytest
import zoo_models as zoo

import keras_policy_ext as kpe


def error_of_frozen(products):
    """Relative, where one operand of each product has an error of 2^-4."""
    return np.sqrt(products / 3) * 2.0**-4


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_frozen_outputs_are_near_those_of_float32(family):
    model = zoo.model_of(family)
    inputs = zoo.data(model)
    outputs = zoo.outputs(model, inputs)

    report = kpe.freeze(model)

    got = zoo.outputs(model, inputs)
    kernels = len(report.stored)
    assert 1e-3 < zoo.error(got, outputs) < error_of_frozen(kernels)


@pytest.mark.parametrize(
    ("family", "change"),
    [("gpt2", kpe.convert), *((family, kpe.freeze) for family in zoo.LANGUAGE)],
)
def test_generated_tokens_are_the_likeliest_of_a_call(family, change):
    """A loop with a cache, compiled once before, reads what a call reads."""
    model = zoo.model_of(family)
    inputs = zoo.data(model)
    tokens = inputs["input_ids"][:, :3]
    options = {"max_new_tokens": 4, "eos_token_id": ()}
    model.generate(tokens, **options)
    change(model)
    if change is kpe.convert:  # Then all calls have the same scales.
        kpe.calibrate(model, inputs)

    generated = np.asarray(zoo.numpy(model.generate(tokens, **options)), int)

    for each in generated.T:
        mask = np.ones_like(tokens)
        outputs = model({"input_ids": tokens, "attention_mask": mask})
        likeliest = np.argmax(zoo.numpy(outputs["logits"])[:, -1], axis=-1)
        np.testing.assert_array_equal(each, likeliest)
        tokens = np.concatenate([tokens, each[:, None]], 1).astype("int32")
