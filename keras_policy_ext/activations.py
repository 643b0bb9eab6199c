"""Activation functions that only models of earlier Keras versions use."""

from keras_policy_ext.ext.migration.old_activations import (
    tf_keras_hard_sigmoid,
)

__all__ = ["tf_keras_hard_sigmoid"]
