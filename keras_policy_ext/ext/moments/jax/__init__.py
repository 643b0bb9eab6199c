"""Update weights with quantized moments in a loop, with JAX on a CPU."""

from __future__ import annotations

import keras

from keras_policy_ext import backends
from keras_policy_ext._types import Tensor, override
from keras_policy_ext.ext.moments.moment_kernels import MomentKernels


class JaxMoments(MomentKernels):
    """The kernels of JAX."""

    @override
    def loops_over_parts(self, x: Tensor) -> bool:
        # A loop over parts of tensors that are cut would gather them.
        cut = keras.distribution.distribution() is not None
        framework = backends.current
        return framework.is_traced(x) and framework.on_cpu(x) and not cut


KERNELS = JaxMoments()
