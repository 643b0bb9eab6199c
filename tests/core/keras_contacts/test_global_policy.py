"""Why `_keras/global_policy.py` is needed. See `_keras/__init__.py`."""

import concurrent.futures

import keras
import pytest

from keras_policy_ext._keras import global_policy


def in_new_thread(function):
    """A thread has no policy until it sets or reads one."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_reading_the_global_policy_fixes_it():
    def read():
        assert global_policy.stored_global_policy() is None
        before = keras.config.dtype_policy()
        keras.config.set_floatx("float16")
        return before.name, keras.config.dtype_policy().name

    try:
        assert in_new_thread(read) == ("float32", "float32")
    finally:
        keras.config.set_floatx("float32")


def test_setting_no_policy_raises():
    with pytest.raises(ValueError, match="policy=None"):
        keras.config.set_dtype_policy(None)


def test_setting_the_policy_of_a_layer_writes_into_the_map_of_many():
    shared = keras.dtype_policies.DTypePolicyMap()
    layers = [keras.layers.Dense(1, dtype=shared) for _ in range(2)]
    for layer in layers:
        layer.build((None, 1))
    layers[0].dtype_policy = "bfloat16"
    assert list(shared) == [layers[0].path]
    bfloat16 = keras.DTypePolicy("bfloat16")
    global_policy.replace_layer_policy(layers[1], bfloat16)
    assert layers[1].dtype_policy is bfloat16
    assert list(shared) == [layers[0].path]


class Renamed(keras.DTypePolicy):
    """A policy that says its name by the public property only."""

    name = "renamed"


def test_a_map_is_named_after_a_private_attribute_of_its_default():
    policy = Renamed("float32")
    policy_map = keras.dtype_policies.DTypePolicyMap(policy)
    assert policy_map.name == "map_float32"
    global_policy.name_for_maps(policy, "renamed")
    assert policy_map.name == "map_renamed"
