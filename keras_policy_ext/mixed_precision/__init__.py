"""Mixed precision: loss scaling, under the names of tf_keras and new ones.

`Policy`, `global_policy`, `set_global_policy` and `LossScaleOptimizer` are
names of `tf.keras.mixed_precision`; `experimental` has names of TensorFlow
2.3. `wrap_optimizer`, `compile` and `LossScaleMixin` scale the loss of every
model that has a layer in float16.
"""

from keras_policy_ext.ext.mixed.loss_scale_monitor import LossScaleMonitor
from keras_policy_ext.ext.mixed.loss_scales import (
    DynamicLossScale,
    FixedLossScale,
)
from keras_policy_ext.ext.mixed.optimizer import LossScaleOptimizer
from keras_policy_ext.ext.mixed.policy import (
    Policy,
    global_policy,
    set_global_policy,
)
from keras_policy_ext.ext.mixed.stochastic_rounding import (
    StochasticRounding,
)
from keras_policy_ext.ext.mixed.wrapping import (
    LossScaleMixin,
    compile,
    wrap_optimizer,
)
from keras_policy_ext.mixed_precision import experimental

__all__ = [
    "DynamicLossScale",
    "FixedLossScale",
    "LossScaleMixin",
    "LossScaleMonitor",
    "LossScaleOptimizer",
    "Policy",
    "StochasticRounding",
    "compile",
    "experimental",
    "global_policy",
    "set_global_policy",
    "wrap_optimizer",
]
