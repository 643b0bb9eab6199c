"""TensorFlow: the memory of variables that are gone."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import tensorflow as tf


def let_go(variables: Iterable[Any]) -> None:
    """Empty variables of Keras as soon as nobody has them any more.

    TensorFlow keeps every graph in which a gradient of one's own was traced,
    such as the sum over replicas in each training step of Keras, and with the
    graph the weights that it read (TF 2.21, `gradient_registry`). So a weight
    stays in memory after its variable.
    """
    for variable in variables:
        value = getattr(variable, "value", None)
        for each in getattr(value, "values", None) or (value,):
            if isinstance(each, tf.Variable) and tf.executing_eagerly():
                empty = weakref.finalize(each, _empty, each.handle, each.dtype)
                empty.atexit = False


def _empty(handle: Any, dtype: tf.DType) -> None:
    with tf.init_scope():
        tf.raw_ops.AssignVariableOp(
            resource=handle, value=tf.zeros((0,), dtype), validate_shape=False
        )
