"""The forward pass of a model as a function, for those who look into it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras

from keras_policy_ext._keras import calls
from keras_policy_ext._types import Tensor
from keras_policy_ext.backends.tracing import MeasuredStep
from keras_policy_ext.layers.state import Float8State
from keras_policy_ext.layers.stored_weights import held, is_state


def step_of(
    model: keras.Layer, layers: Sequence[keras.Layer], batch: Any
) -> MeasuredStep:
    """A training step of a model.

    Args:
        model: A model or layer that can be called.
        layers: The layers in it, in the order of their numbers.
        batch: Nested `keras.KerasTensor`.
    """
    trained = {id(v) for v in model.trainable_variables}
    weights = {id(held(v)) for v in model.weights if not is_state(v)}
    return MeasuredStep(
        call=_Forward(model, layers),
        variables=model.variables,
        trained=[id(v) in trained for v in model.variables],
        weights=[id(v) in weights for v in model.variables],
        batch=batch,
        for_xla=bool(getattr(model, "jit_compile", False)),
        held=_held(model),
    )


def _held(model: keras.Layer) -> list[Tensor]:
    """What a model holds as a module of PyTorch."""
    if keras.backend.backend() != "torch":
        return []
    return [*model.parameters(), *model.buffers()]


class _Forward:
    """Calls a model on values for its variables; see `MeasuredStep.call`."""

    def __init__(self, model: keras.Layer, layers: Sequence[keras.Layer]):
        self._model = model
        self._variables = model.variables
        self._numbers = {id(layer): n for n, layer in enumerate(layers)}

    def __call__(
        self,
        values: Sequence[Tensor],
        batch: Any,
        inside: Callable[[int], AbstractContextManager[Any]],
    ) -> list[Tensor]:
        def scope(layer: keras.Layer) -> AbstractContextManager[Any]:
            number = self._numbers.get(id(layer))
            return (
                contextlib.nullcontext() if number is None else inside(number)
            )

        state = list(zip(self._variables, values, strict=True))
        with (
            keras.StatelessScope(state, collect_losses=True) as stateless,
            calls.around_each_call(scope),
        ):
            outputs = self._model(batch, training=True)
        found = [*keras.tree.flatten(outputs), *stateless.losses]
        return [x for x in found if keras.backend.is_float_dtype(x.dtype)]


@contextlib.contextmanager
def unchanged_counters(layers: list[keras.Layer]) -> Iterator[None]:
    """Put back what float8 layers count and note in a call."""
    states = [
        layer.float8_state
        for layer in layers
        if isinstance(getattr(layer, "float8_state", None), Float8State)
    ]
    plans = [state.last_call.plan for state in states]
    matrices = [matrix for state in states for matrix in state.matrices]
    uses = [matrix.uses for matrix in matrices]
    try:
        yield
    finally:
        for state, plan in zip(states, plans, strict=True):
            state.last_call.plan = plan
        for matrix, number in zip(matrices, uses, strict=True):
            matrix.uses = number
