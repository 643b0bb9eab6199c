"""Layers that know no float8, under Keras's float8 policy, are plain ones."""

from keras_policy_ext import policies
from keras_policy_ext.ext.keras_float8 import _keras

_keras.call_without_float8(policies.are_names_read)
