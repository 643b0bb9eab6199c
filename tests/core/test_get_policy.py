"""`get` makes a policy of whatever means one."""

import importlib

import keras
import ml_dtypes
import numpy as np
import pytest

from keras_policy_ext import policies
from keras_policy_ext.policies import Float8DTypePolicy, get
from refusals import refused
from stock_policies import FLOAT8_DTYPES, NOT_FLOATING, SOURCES, stock_float8


@pytest.mark.parametrize("name", [*SOURCES, *NOT_FLOATING, *FLOAT8_DTYPES])
def test_get_makes_plain_policies_of_dtype_names(name):
    policy = get(name)
    assert type(policy) is keras.DTypePolicy
    assert policy.name == name


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (np.float32, "float32"),
        (np.dtype("float16"), "float16"),
        (np.dtype("int8"), "int8"),
        (ml_dtypes.bfloat16, "bfloat16"),
        (np.dtype(ml_dtypes.bfloat16), "bfloat16"),
        (ml_dtypes.float8_e4m3fn, "float8_e4m3fn"),
        (float, "float32"),
        (bool, "bool"),
    ],
)
def test_get_takes_dtype_objects(dtype, name):
    assert get(dtype) == keras.DTypePolicy(name)


@pytest.mark.parametrize(
    ("module", "attributes"),
    [
        ("torch", {"bfloat16": "bfloat16", "float8_e5m2": "float8_e5m2"}),
        ("jax.numpy", {"bfloat16": "bfloat16", "float32": "float32"}),
        ("tensorflow", {"bfloat16": "bfloat16", "float16": "float16"}),
    ],
)
def test_get_takes_the_dtypes_of_each_framework(module, attributes):
    if module.split(".")[0] != keras.backend.backend():
        pytest.skip("only the framework in use is certain to be installed")
    framework = importlib.import_module(module)
    for attribute, name in attributes.items():
        dtype = getattr(framework, attribute)
        assert get(dtype) == keras.DTypePolicy(name)


def test_get_returns_policies_as_they_are():
    for policy in (
        keras.DTypePolicy("int32"),
        Float8DTypePolicy("float32"),
        keras.dtype_policies.get("int8_from_float32"),
        keras.dtype_policies.DTypePolicyMap(),
    ):
        assert get(policy) is policy


def test_get_none_is_the_global_policy():
    keras.config.set_dtype_policy("mixed_float16")
    assert get(None) is keras.config.dtype_policy()


@pytest.mark.parametrize("name", ["int8_from_float32", "int4_from_float32"])
def test_get_leaves_other_quantized_names_to_keras(name):
    assert get(name) == keras.dtype_policies.get(name)


@pytest.mark.parametrize("class_name", ["Policy", "PolicyV1"])
@pytest.mark.parametrize("name", ["mixed_float16", "float32"])
def test_get_reads_the_dicts_of_tf_keras(class_name, name):
    config = {"class_name": class_name, "config": {"name": name}}
    assert get(config) == keras.DTypePolicy(name)


@pytest.mark.parametrize(
    "config",
    [
        None,
        {},
        {"name": "_infer"},
        {"name": "mixed_float16", "loss_scale": {"class_name": "X"}},
        {"name": "float32", "other": 1},
        {"name": 3},
    ],
)
def test_dicts_of_tf_keras_that_say_more_are_refused(config):
    with pytest.raises(ValueError, match="Received"):
        get({"class_name": "Policy", "config": config})


@pytest.mark.parametrize(
    "wrong",
    [
        "banana",
        "Policy",
        "",
        "float8/",
        "float8_e4m3",
        "int8_from_banana",
        "from_",
        "a_from_b",
        3,
        1.5,
        True,
        [],
        object(),
        {},
        {"class_name": "Policy"},
        {"class_name": "banana", "config": {}},
        {"class_name": "Dense", "config": {"units": 2}},
        ml_dtypes.float4_e2m1fn,
    ],
)
def test_what_means_no_policy_is_a_value_error_and_never_a_string(wrong):
    with pytest.raises(ValueError, match="Allowed"):
        get(wrong)


def test_the_float8_policy_of_keras_means_delayed_scaling():
    policy = policies.as_float8(stock_float8("mixed_float16", 7))
    assert policy == get("float8/7_from_mixed_float16")
    assert get(stock_float8("mixed_float16", 7)) == policy


@pytest.mark.parametrize("length", [0, -3, True])
def test_a_history_that_only_keras_accepts_is_refused(length):
    policy = stock_float8("float32", length)
    kind = TypeError if length is True else ValueError
    with refused(kind, "amax_history_length", str(length), "an integer"):
        get(policy)
