"""Update weights with quantized moments in a loop, with TensorFlow and XLA."""

from __future__ import annotations

import tensorflow as tf

from keras_policy_ext import backends
from keras_policy_ext._types import Tensor, override
from keras_policy_ext.ext.moments.moment_kernels import MomentKernels


class TensorFlowMoments(MomentKernels):
    """The kernels of TensorFlow."""

    @override
    def loops_over_parts(self, x: Tensor) -> bool:
        # Gradients of some rows alone (`tf.IndexedSlices`) are no tensor.
        one = isinstance(x, tf.Tensor) and not tf.distribute.has_strategy()
        framework = backends.current
        return one and framework.traces_for_xla() and framework.on_cpu(x)


KERNELS = TensorFlowMoments()
