import copy
import json
import pickle
import warnings

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from keras_policy_ext import LossScaleDTypePolicy
from keras_policy_ext.mixed_precision import DynamicLossScale, FixedLossScale

DYNAMIC = DynamicLossScale()


# The loss scale


@pytest.mark.parametrize(
    "name", ["mixed_float16", "float16", "mixed_bfloat16", "float32"]
)
def test_auto_is_dynamic_if_and_only_if_the_policy_is_mixed_float16(name):
    expected = DYNAMIC if name == "mixed_float16" else None
    assert LossScaleDTypePolicy(name).loss_scale == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("dynamic", DYNAMIC),
        (None, None),
        (1, FixedLossScale(1)),
        (np.float32(128), FixedLossScale(128.0)),
        (FixedLossScale(64), FixedLossScale(64)),
        (DynamicLossScale(8, 3, 4), DynamicLossScale(8.0, 3, 4.0)),
    ],
)
def test_a_loss_scale_is_kept(given, expected):
    policy = LossScaleDTypePolicy("mixed_float16", given)
    assert policy.loss_scale == expected
    assert type(policy.loss_scale) is type(expected)


def test_a_dynamic_loss_scale_starts_at_2_15_and_doubles_after_2000_steps():
    assert DYNAMIC.get_config() == {
        "initial_loss_scale": 2.0**15,
        "increment_period": 2000,
        "multiplier": 2.0,
    }
    assert DYNAMIC.growth_steps == 2000


@pytest.mark.parametrize(
    "wrong",
    [
        *(True, False, "static", 0, 0.5, -1, [1], np.inf, np.nan, {}),
        pytest.param(10**400, id="no float"),
    ],
)
def test_what_is_no_loss_scale_is_refused(wrong):
    kind = TypeError if isinstance(wrong, bool | list) else ValueError
    with pytest.raises(kind, match=r"Received.*Allowed"):
        LossScaleDTypePolicy("mixed_float16", wrong)


@pytest.mark.parametrize(
    ("cls", "arguments"),
    [
        (FixedLossScale, [0.5]),
        (FixedLossScale, [2.0**128]),
        (FixedLossScale, ["dynamic"]),
        (DynamicLossScale, [True]),
        (DynamicLossScale, [2, 0]),
        (DynamicLossScale, [2, 1.5]),
        (DynamicLossScale, [2, 1, 1]),
        (DynamicLossScale, [2, 1, 10**400]),
    ],
)
def test_loss_scales_check_their_fields(cls, arguments):
    with pytest.raises((TypeError, ValueError), match="Received"):
        cls(*arguments)


@pytest.mark.parametrize("name", ["float32", "mixed_bfloat16"])
def test_a_loss_scale_that_is_of_no_use_warns(name):
    with pytest.warns(UserWarning, match="small float16 gradients"):
        LossScaleDTypePolicy(name, 128)


@pytest.mark.parametrize("name", ["mixed_float16", "float16"])
def test_a_loss_scale_for_float16_does_not_warn(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LossScaleDTypePolicy(name, 128)
        LossScaleDTypePolicy("float32")


@pytest.mark.parametrize(
    "source",
    ["int32", "int8_from_float32", "mixed_float8", "banana", 3],
)
def test_the_policy_below_must_be_plain_and_floating(source):
    with pytest.raises(ValueError, match="Received"):
        LossScaleDTypePolicy(source)


def test_a_float8_policy_does_not_swallow_a_loss_scale():
    policy = LossScaleDTypePolicy("mixed_float16", 128)
    with pytest.raises(ValueError, match=r"plain policy.*wrap_optimizer"):
        kpe.Float8DTypePolicy(policy)


# A policy like any other


def test_no_name_means_the_global_policy_and_its_loss_scale():
    with kpe.policy_scope("mixed_float16"):
        assert LossScaleDTypePolicy() == LossScaleDTypePolicy("mixed_float16")
    fixed = LossScaleDTypePolicy("mixed_float16", 128)
    with kpe.policy_scope(fixed):
        assert kpe.dtype_policy() is fixed
        assert LossScaleDTypePolicy() == fixed
        assert keras.layers.Dense(2).compute_dtype == "float16"
        assert keras.DTypePolicy().name == "mixed_float16"


def test_equality_and_hash_see_all_fields():
    make = LossScaleDTypePolicy
    policies = [
        make("mixed_float16"),
        make("mixed_float16", None),
        make("mixed_float16", 128),
        make("float16", 128),
        make("float16"),
    ]
    assert len(set(policies)) == len(policies)
    for policy in policies:
        assert policy == LossScaleDTypePolicy.from_config(policy.get_config())
        assert policy != keras.DTypePolicy(policy.name)
        assert eval(repr(policy)) == policy


EACH = [
    LossScaleDTypePolicy("mixed_float16"),
    LossScaleDTypePolicy("mixed_float16", None),
    LossScaleDTypePolicy("float16", 128),
    LossScaleDTypePolicy("mixed_float16", DynamicLossScale(8, 3)),
]


@pytest.mark.parametrize("policy", EACH, ids=repr)
def test_nothing_is_lost_in_configs_and_copies(policy):
    config = json.loads(json.dumps(kpe.serialize(policy)))
    assert kpe.deserialize(config) == policy
    assert keras.dtype_policies.deserialize(config) == policy
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert copy.deepcopy(policy) == policy
    assert kpe.get(policy) is policy
    assert policy, "not an empty map"


@pytest.mark.parametrize("policy", EACH, ids=repr)
def test_the_loss_scale_survives_layers_clones_and_files(policy, tmp_path):
    dense = keras.layers.Dense(2, dtype=policy)
    again = keras.layers.Dense.from_config(dense.get_config())
    assert again.dtype_policy == policy
    attention = keras.layers.MultiHeadAttention(1, 2, dtype=policy)
    stack = keras.Sequential([keras.Input((3, 4)), dense])
    inputs = keras.Input((3, 4))
    x = attention(inputs, inputs)
    model = keras.Model(inputs, stack(x))
    model.save(tmp_path / "model.keras")
    for other in (
        keras.models.clone_model(model),
        keras.models.model_from_json(model.to_json()),
        keras.saving.load_model(tmp_path / "model.keras"),
    ):
        layers = (other.layers[1], other.layers[2].layers[0])
        assert [layer.dtype_policy for layer in layers] == [policy] * 2
        assert layers[1].compute_dtype == "float16"
        assert layers[1].variable_dtype == policy.variable_dtype


def test_one_layer_can_be_given_another_policy():
    policy = LossScaleDTypePolicy("mixed_float16", 128)
    layers = [keras.layers.Dense(2, dtype=policy) for _ in range(2)]
    for layer in layers:
        layer.build((None, 3))
    kpe.policies.set_layer_policy(layers[0], "float32")
    assert layers[0].compute_dtype == "float32"
    assert layers[1].dtype_policy == policy
    assert layers[1].compute_dtype == "float16"
    with pytest.raises(TypeError, match="immutable"):
        policy["path"] = keras.DTypePolicy("float32")


# tf_keras


@pytest.mark.parametrize("class_name", ["Policy", "PolicyV1"])
@pytest.mark.parametrize(
    ("loss_scale", "expected"),
    [
        ("dynamic", DYNAMIC),
        (None, None),
        (128.0, FixedLossScale(128)),
        (
            {
                "class_name": "DynamicLossScale",
                "config": {
                    "initial_loss_scale": 8.0,
                    "increment_period": 3,
                    "multiplier": 2.0,
                },
            },
            DynamicLossScale(8, 3),
        ),
        (
            {
                "class_name": "FixedLossScale",
                "config": {"loss_scale_value": 4.0},
            },
            FixedLossScale(4),
        ),
    ],
)
def test_the_loss_scale_of_a_tf_keras_policy_is_read(
    class_name, loss_scale, expected
):
    config = {"name": "mixed_float16", "loss_scale": loss_scale}
    policy = kpe.get({"class_name": class_name, "config": config})
    assert policy == LossScaleDTypePolicy("mixed_float16", expected)


def test_read_as_a_plain_policy_it_drops_its_loss_scale_with_a_warning():
    config = LossScaleDTypePolicy("mixed_float16", 128).get_config()
    with pytest.warns(UserWarning, match=r"dropped.*128"):
        policy = kpe.mixed_precision.Policy.from_config(config)
    assert policy == keras.DTypePolicy("mixed_float16")
    auto = LossScaleDTypePolicy("mixed_float16").get_config()
    assert kpe.mixed_precision.Policy.from_config(auto) == policy
