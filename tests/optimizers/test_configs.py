"""Configs of optimizers whose state is stored in one byte a number."""

import keras
import pytest

from keras_policy_ext.optimizers import QuantizedState, quantize_state


@keras.saving.register_keras_serializable("test_configs", name="Adam")
class Adam(keras.optimizers.Adam):
    """A class of one's own with the name of a class of Keras."""


@pytest.mark.parametrize("cls", [keras.optimizers.Lamb, Adam])
def test_a_config_brings_back_the_class(cls):
    optimizer = quantize_state(cls(1e-3))
    config = keras.saving.serialize_keras_object(optimizer)
    again = keras.saving.deserialize_keras_object(config)
    assert isinstance(again, QuantizedState) and again.stock_class is cls
    assert again.get_config() == optimizer.get_config()
