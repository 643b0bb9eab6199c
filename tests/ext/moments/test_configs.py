"""Configs of optimizers whose state is stored in one byte a number."""

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
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


def test_the_stock_class_makes_a_quantized_optimizer_of_its_config():
    optimizer = quantize_state(keras.optimizers.AdamW(1e-3), "mx", exclude="a")
    config = optimizer.get_config()
    again = keras.optimizers.AdamW.from_config(config)
    assert type(again) is type(optimizer)
    assert again.get_config() == optimizer.get_config() == config
    plain = keras.optimizers.AdamW.from_config(
        keras.optimizers.AdamW().get_config()
    )
    assert not isinstance(plain, QuantizedState)
    with pytest.raises(ValueError, match="beta_1"):
        keras.optimizers.SGD.from_config(config)


@pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"),
    reason=f"Keras {keras.__version__} has no MultiOptimizer",
)
def test_beside_an_ftrl_the_other_optimizers_are_quantized():
    def made(*optimizers):
        rules = keras.optimizers.OptimizerMap(optimizers[0])
        rules[".*head/.*"] = optimizers[1]
        return keras.optimizers.MultiOptimizer(rules)

    ftrl, adam = keras.optimizers.Ftrl(name="wide"), keras.optimizers.Adam()
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, name="body"),
            keras.layers.Dense(64, name="head"),
        ]
    )
    model.compile(made(ftrl, adam), "mse")
    with pytest.warns(UserWarning, match="'wide'.*Ftrl has no moments") as told:
        kpe.convert(model, "delayed", optimizer="float8")
    assert sum("'wide'" in str(each.message) for each in told) == 1
    assert type(ftrl) is keras.optimizers.Ftrl
    assert isinstance(adam, QuantizedState)
    x = np.ones((8, 64), "float32")
    model.fit(x, x, verbose=0)
    dtypes = {v.dtype for v in ftrl.variables[2:]}
    assert dtypes == {"float32"}
    assert "uint8" in {v.dtype for v in adam.variables}
    with pytest.raises(ValueError, match="no moments"):
        quantize_state(made(keras.optimizers.Ftrl(), keras.optimizers.SGD()))
