"""States on JAX, where gradients return observations to the caller."""

from __future__ import annotations

import functools

import jax
import keras

from keras_policy_ext._types import Tensor, override
from keras_policy_ext.ext.delayed.frameworks import Settle, States


class JaxStates(States):
    """States whose values compiled steps take and return."""

    steps_take_values = True

    @override
    def known_value(self, variable: keras.Variable) -> Tensor | None:
        value = variable.value
        return None if isinstance(value, jax.core.Tracer) else value

    @override
    def settle_here(
        self, settle: Settle, value: Tensor, previous: Tensor
    ) -> Tensor:
        # Compiled once for each shape.
        return _settled(settle, value, previous)


STATES = JaxStates()


@functools.partial(jax.jit, static_argnums=0)
def _settled(settle: Settle, value: Tensor, previous: Tensor) -> Tensor:
    return settle(value, previous)
