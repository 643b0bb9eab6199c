"""Classes and functions of the user in configs of tf_keras."""

import codecs
import marshal

import keras
import numpy as np
import pytest
from keras import ops

from keras_policy_ext.migration import migrate_config
from legacy_configs import DTYPE, layer


@keras.saving.register_keras_serializable("test_migration")
class Scaled(keras.layers.Layer):
    """A layer of a user, ported to Keras 3."""

    def __init__(self, by, **kwargs):
        super().__init__(**kwargs)
        self.by = by

    def call(self, x):
        return x * self.by


@pytest.mark.parametrize(
    "name, custom_objects",
    [
        ("test_migration>Scaled", None),
        ("Custom>Scaled", {"Custom>Scaled": Scaled}),
        ("Scaled", {"Scaled": Scaled}),
    ],
)
def test_custom_layers_are_found(name, custom_objects):
    config = layer(name, by=3, dtype=DTYPE, batch_input_shape=[None, 2])

    migrated = migrate_config(config, custom_objects=custom_objects)
    found = keras.saving.deserialize_keras_object(migrated, custom_objects)

    assert isinstance(found, Scaled)
    assert found.by == 3
    assert found.compute_dtype == "float16"


class OwnNorm(keras.layers.BatchNormalization):
    pass


class OwnConv(keras.layers.SeparableConv1D):
    pass


class OwnLSTM(keras.layers.LSTM):
    pass


class OwnGroups(keras.layers.Dense):
    def __init__(self, units, groups=1, **kwargs):
        super().__init__(units, **kwargs)
        self.groups = groups


def test_class_of_the_caller_drops_what_its_base_dropped():
    objects = {"OwnNorm": OwnNorm, "OwnConv": OwnConv, "OwnGroups": OwnGroups}

    def own(config):
        return keras.saving.deserialize_keras_object(
            migrate_config(config, custom_objects=objects),
            custom_objects=objects,
        )

    norm = own(layer("OwnNorm", axis=[1], renorm=False, fused=None))
    conv = own(
        layer("OwnConv", filters=2, kernel_size=[3], groups=1, dynamic=False)
    )
    groups = own(layer("OwnGroups", units=2, groups=3))

    assert norm.axis == 1
    assert conv.filters == 2
    assert groups.groups == 3


def test_class_of_the_caller_keeps_nothing_without_a_counterpart():
    with pytest.raises(ValueError, match="time_major=True of OwnLSTM 'it'"):
        migrate_config(
            layer("OwnLSTM", units=2, time_major=True),
            custom_objects={"OwnLSTM": OwnLSTM},
        )


def bytecode(function):
    """A function as tf_keras 2.13 and later writes one."""
    code = codecs.encode(marshal.dumps(function.__code__), "base64")
    return [code.decode("ascii"), list(function.__defaults__ or ()), None]


def run(config):
    migrated = migrate_config(config)
    made = keras.saving.deserialize_keras_object(migrated, safe_mode=False)
    return ops.convert_to_numpy(made(np.ones((1, 2), "float32")))


def test_bytecode_with_default_arguments_is_a_function():
    code = bytecode(lambda x, k=3.0: x * k)

    result = run(layer("Lambda", function=code, function_type="lambda"))

    np.testing.assert_array_equal(result, np.full((1, 2), 3.0))


def test_bytecode_as_an_activation_is_a_function():
    code = bytecode(lambda x: x * 2.0)

    result = run(layer("Activation", activation={"value": code}))

    np.testing.assert_array_equal(result, np.full((1, 2), 2.0))
