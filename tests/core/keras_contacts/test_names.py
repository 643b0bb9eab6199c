"""Why the names in `_keras/global_policy.py` are needed."""

import keras
import pytest

import keras_policy_ext as kpe
from public_api import functions_about


def stock(function):
    """What a function was before another one was put around it."""
    return function.__wrapped__


def test_keras_refuses_names_of_other_policies():
    with pytest.raises(ValueError, match="Cannot convert 'mixed_float8'"):
        stock(keras.DTypePolicy.__init__)(keras.DTypePolicy(), "mixed_float8")
    kpe.policies.names_in_keras(False)
    try:
        for each in ("mixed_float8", "float8/16_from_float32", "float8"):
            with pytest.raises(ValueError, match="does not read such names"):
                keras.dtype_policies.get(each)
    finally:
        kpe.policies.names_in_keras(True)


def test_keras_has_no_public_registry_of_policy_names():
    assert functions_about("register_dtype", "register_policy") == []
