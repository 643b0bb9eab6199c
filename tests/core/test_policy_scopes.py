"""The global policy: how it is set, how scopes nest, and threads."""

import threading

import keras
import pytest

from keras_policy_ext import policies
from keras_policy_ext._keras import global_policy
from keras_policy_ext.policies import Float8DTypePolicy, get
from stock_policies import FLOAT8_DTYPES, NOT_FLOATING, stock_float8

# The global policy


def test_set_dtype_policy_takes_names_and_policies():
    policies.set_dtype_policy("float8/16_from_mixed_bfloat16")
    expected = Float8DTypePolicy("mixed_bfloat16", amax_history_length=16)
    assert policies.dtype_policy() == expected
    assert keras.config.dtype_policy() == expected
    policies.set_dtype_policy(keras.DTypePolicy("float16"))
    assert keras.config.dtype_policy().name == "float16"
    policies.set_dtype_policy(stock_float8())
    assert policies.dtype_policy() == expected


@pytest.mark.parametrize("wrong", [*NOT_FLOATING, *FLOAT8_DTYPES, "banana"])
def test_what_is_refused_leaves_the_global_policy_unchanged(wrong):
    before = keras.DTypePolicy("mixed_float16")
    policies.set_dtype_policy(before)
    with pytest.raises(ValueError):
        policies.set_dtype_policy(wrong)
    assert policies.dtype_policy() is before


def test_none_resets_to_the_live_floatx():
    policies.set_dtype_policy("mixed_bfloat16")
    policies.set_dtype_policy(None)
    assert policies.dtype_policy().name == "float32"
    keras.config.set_floatx("float16")
    assert policies.dtype_policy().name == "float16"
    assert keras.layers.Dense(1).compute_dtype == "float16"


def test_floatx_is_followed_after_keras_has_stored_it():
    policies.set_dtype_policy(None)
    assert keras.config.dtype_policy().name == "float32"  # Stores it.
    keras.config.set_floatx("float16")
    assert policies.dtype_policy().name == "float16"
    assert keras.layers.Dense(1).compute_dtype == "float16"
    keras.config.set_floatx("float32")
    assert policies.dtype_policy().name == "float32"
    assert keras.layers.Dense(1).compute_dtype == "float32"


def test_a_policy_that_was_set_is_not_changed_by_floatx():
    policies.set_dtype_policy(None)
    policies.set_dtype_policy("float32")
    keras.config.set_floatx("float16")
    assert policies.dtype_policy().name == "float32"
    policies.set_dtype_policy(None)
    keras.config.set_dtype_policy("mixed_bfloat16")
    keras.config.set_floatx("float32")
    assert policies.dtype_policy().name == "mixed_bfloat16"


def test_layers_keep_the_policy_they_were_built_with():
    policies.set_dtype_policy(None)
    layer = keras.layers.Dense(1)
    keras.config.set_floatx("float16")
    policies.dtype_policy()
    assert layer.compute_dtype == "float32"


def test_scopes_nest_and_restore_the_very_object():
    outer = keras.DTypePolicy("mixed_float16")
    keras.config.set_dtype_policy(outer)
    with policies.policy_scope("mixed_float8") as policy:
        assert policy == get("mixed_float8")
        assert keras.config.dtype_policy() is policy
        with policies.policy_scope(None):
            assert policies.dtype_policy().name == "float32"
        assert keras.config.dtype_policy() is policy
    assert keras.config.dtype_policy() is outer


def test_a_scope_restores_on_an_exception():
    outer = keras.DTypePolicy("mixed_float16")
    keras.config.set_dtype_policy(outer)
    with pytest.raises(KeyError), policies.policy_scope("float16"):
        raise KeyError
    assert keras.config.dtype_policy() is outer


def test_a_scope_restores_that_no_policy_was_set():
    policies.set_dtype_policy(None)
    with policies.policy_scope("mixed_float16"):
        pass
    keras.config.set_floatx("float16")
    assert keras.layers.Dense(1).compute_dtype == "float16"


def test_a_refused_scope_changes_nothing():
    outer = keras.DTypePolicy("mixed_float16")
    keras.config.set_dtype_policy(outer)
    with pytest.raises(ValueError), policies.policy_scope("int32"):
        pass
    assert keras.config.dtype_policy() is outer


def in_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_the_global_policy_belongs_to_one_thread_unless_carried():
    def name():
        return keras.config.dtype_policy().name

    policies.set_dtype_policy("mixed_float16")
    carried = policies.carry_policy(name)
    policies.set_dtype_policy("mixed_bfloat16")
    assert in_thread(name) == "float32"
    assert in_thread(carried) == "mixed_float16"
    assert in_thread(lambda: (carried(), name())[1]) == "float32"
    assert carried() == "mixed_float16"
    assert name() == "mixed_bfloat16"
    assert carried.__name__ == "name"


def test_a_carried_policy_is_put_back_on_an_exception():
    def fail():
        raise KeyError

    carried = policies.carry_policy(fail)
    policies.set_dtype_policy("mixed_bfloat16")
    with pytest.raises(KeyError):
        carried()
    assert policies.dtype_policy().name == "mixed_bfloat16"


# Where Keras has moved its internals


def test_without_the_store_of_keras_the_public_functions_have_to_do(
    monkeypatch,
):
    monkeypatch.setattr(global_policy, "_global_state", None)
    with policies.policy_scope("mixed_float8"):
        assert keras.config.dtype_policy() == get("mixed_float8")
        policies.set_dtype_policy(None)
        assert keras.config.dtype_policy().name == "float32"
    policies.set_dtype_policy(None)
    keras.config.set_floatx("float16")
    assert policies.dtype_policy().name == "float16"
    assert keras.layers.Dense(1).compute_dtype == "float16"
