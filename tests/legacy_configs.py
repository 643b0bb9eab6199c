"""Configs of tf_keras, and what becomes of them."""

import json

import keras

from keras_policy_ext.migration import migrate_config

DTYPE = {"class_name": "Policy", "config": {"name": "mixed_float16"}}


def made(config, **kwargs):
    """The object that a migrated config means, by way of JSON."""
    migrated = migrate_config(config, **kwargs)
    return keras.saving.deserialize_keras_object(
        json.loads(json.dumps(migrated))
    )


def layer(class_name, **config):
    return {"class_name": class_name, "config": {"name": "it", **config}}
