"""A float8 policy as the `dtype` of a backbone."""

import hub_models as hub
import keras
import numpy as np
import pytest

import keras_policy_ext as kpe

RULES = {"llama": ".*/value", "vit": ".*/mlp/.*", "resnet": "conv1_conv"}


@pytest.mark.parametrize("name", RULES)
def test_policy_of_a_backbone_is_realised_by_convert(name):
    pattern = RULES[name]
    policy = kpe.Float8DTypePolicy("mixed_bfloat16", rules=[(pattern, None)])
    model, stock = (
        hub.BACKBONES[name](dtype) for dtype in (policy, "mixed_bfloat16")
    )
    hub.randomize(model)
    stock.set_weights(model.get_weights())
    inputs, _ = hub.data(name)
    # Stock layers: the source, to the bit.
    got, expected = (x.predict_on_batch(inputs) for x in (model, stock))
    for path, value in keras.tree.flatten_with_path(expected):
        found = dict(keras.tree.flatten_with_path(got))[path]
        np.testing.assert_array_equal(hub.numpy(found), hub.numpy(value))

    report = kpe.convert(model)

    expected = kpe.convert(stock, policy)
    assert report.as_dict() == expected.as_dict()
    kept = [e for e in report.skipped if "rule" in e.reason]
    assert kept
    assert report.converted
    assert model.dtype_policy == policy


def test_partial_conversion_is_said_by_the_policy_of_the_backbone():
    model = hub.gpt2("mixed_bfloat16")
    kpe.convert(model, exclude="value", min_size=300)
    anew = type(model).from_config(model.get_config())
    kpe.convert(anew)
    assert hub.followed(anew) == hub.followed(model)
    assert hub.dtypes(anew) == hub.dtypes(model)
    kpe.revert(model)
    assert model.dtype_policy == keras.DTypePolicy("mixed_bfloat16")
