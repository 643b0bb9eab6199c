import keras
import pytest

import keras_policy_ext as kpe
from keras_policy_ext import LossScaleDTypePolicy, mixed_precision
from keras_policy_ext.ext.mixed import experimental
from keras_policy_ext.mixed_precision import Policy


@pytest.mark.parametrize("name", ["mixed_float16", "mixed_bfloat16", "float32"])
def test_a_tf_keras_policy_is_the_policy_of_keras(name):
    policy = Policy(name)
    assert type(policy) is keras.DTypePolicy
    assert policy == keras.DTypePolicy(name)
    assert policy == Policy.from_config({"name": name})
    assert isinstance(policy, Policy)
    assert isinstance(kpe.Float8DTypePolicy("float32"), Policy)
    assert not isinstance(name, Policy)


@pytest.mark.parametrize("wrong", [keras.DTypePolicy("float32"), None, 3])
def test_a_tf_keras_policy_is_made_from_a_name(wrong):
    with pytest.raises(TypeError, match="Received"):
        Policy(wrong)


def test_the_global_policy_has_tf_keras_names():
    mixed_precision.set_global_policy("mixed_float16")  # a fixture restores it
    assert mixed_precision.global_policy() == Policy("mixed_float16")
    assert keras.layers.Dense(2).compute_dtype == "float16"
    with pytest.raises(ValueError, match="floating"):
        mixed_precision.set_global_policy("int32")
    mixed_precision.set_global_policy(None)
    assert mixed_precision.global_policy() == Policy("float32")


def test_the_experimental_names_are_those_of_tensorflow_2_3():
    policy = experimental.Policy("mixed_float16", loss_scale=128)
    assert policy == LossScaleDTypePolicy("mixed_float16", 128)
    experimental.set_policy(policy)
    layer = keras.layers.Dense(2)
    assert experimental.get_layer_policy(layer) is policy
    assert experimental.global_policy() is policy
    with pytest.raises(TypeError, match="Received"):
        experimental.get_layer_policy(policy)


def test_the_experimental_scaler_takes_a_loss_scale():
    def scaler(loss_scale):
        sgd = keras.optimizers.SGD()
        return experimental.LossScaleOptimizer(sgd, loss_scale)

    assert isinstance(scaler(2), mixed_precision.LossScaleOptimizer)
    assert (scaler(2).dynamic, scaler(2).initial_scale) == (False, 2.0)
    assert scaler("dynamic").dynamic_growth_steps == 2000
    for wrong in (None, True, 0.5, "static"):
        with pytest.raises((TypeError, ValueError), match="Received"):
            scaler(wrong)


def test_the_experimental_scaler_takes_the_optimizer_by_both_names():
    scaler = experimental.LossScaleOptimizer
    sgd = keras.optimizers.SGD()
    assert scaler(optimizer=sgd, loss_scale=2).inner_optimizer is sgd
    other = keras.optimizers.SGD()
    assert scaler(inner_optimizer=other, loss_scale=2).inner_optimizer is other
    with pytest.raises(TypeError, match=r"one of the two"):
        scaler(keras.optimizers.SGD(), 2, optimizer=keras.optimizers.SGD())
    with pytest.raises(TypeError, match=r"Received: None"):
        scaler(loss_scale=2)
