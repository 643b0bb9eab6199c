"""States on TensorFlow, whose graphs keep the variables that they read."""

from __future__ import annotations

import functools

import keras
import tensorflow as tf

from keras_policy_ext._types import Tensor, override
from keras_policy_ext.backends.interface import Shape
from keras_policy_ext.backends.tensorflow.gradients import CompiledPass
from keras_policy_ext.ext.delayed.frameworks import Settle, States


class TensorFlowStates(States):
    """States that graphs read, and that replicas have copies of."""

    keeps_variables_in_graphs = True

    @override
    def known_value(self, variable: keras.Variable) -> Tensor | None:
        # `init_scope` reads it as it is now, also while a graph is made. It is
        # read from TensorFlow's variable, to which foreign optimizers assign.
        value = variable.value
        on_cpu = "CPU" in str(getattr(value, "device", ""))
        with tf.init_scope():
            if not on_cpu or not tf.executing_eagerly():
                return None
            try:
                return value.numpy()
            except (AttributeError, tf.errors.FailedPreconditionError):
                return None  # a part of another replica, or not made yet

    @override
    def combine_replicas(self, observation: Tensor) -> Tensor:
        context = tf.distribute.get_replica_context()
        replicas = 1 if context is None else context.num_replicas_in_sync
        if replicas == 1:
            return observation
        # The first column counts uses. The others lie side by side, and are not
        # added up: the first use on one replica may be the second on another.
        gathered = context.all_gather(observation[tf.newaxis], axis=0)
        values = tf.unstack(gathered, replicas)
        uses = tf.reduce_sum(gathered[:, :, :1], axis=0)
        # A settled state has a negative mark there, which is not added up.
        mark = values[0][:, :1]
        uses = tf.where(mark < 0.0, mark, uses)
        return tf.concat([uses, *(value[:, 1:] for value in values)], axis=1)

    @override
    def settle_here(
        self, settle: Settle, value: Tensor, previous: Tensor
    ) -> Tensor:
        # All states of a shape share one graph. Variables are read here: the
        # graph would keep the variable of the first replica.
        value = tf.convert_to_tensor(value)
        previous = tf.convert_to_tensor(previous)
        shapes = (tuple(value.shape), tuple(previous.shape))
        return _shared_settle(settle, shapes)(value, previous)


STATES = TensorFlowStates()


@functools.lru_cache(maxsize=1024)
def _shared_settle(settle: Settle, shapes: tuple[Shape, Shape]) -> CompiledPass:
    # `shapes` is only in the key of the cache, as in `_shared_forward`.
    return CompiledPass(settle)
