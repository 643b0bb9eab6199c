"""Names of `tf.keras.mixed_precision.experimental` of TensorFlow 2.3."""

from keras_policy_ext.ext.mixed.experimental import (
    LossScaleOptimizer,
    Policy,
    get_layer_policy,
    global_policy,
    set_policy,
)

__all__ = [
    "LossScaleOptimizer",
    "Policy",
    "get_layer_policy",
    "global_policy",
    "set_policy",
]
