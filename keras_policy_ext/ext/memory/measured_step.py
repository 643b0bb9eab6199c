"""The forward pass of a model as a function, to be measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras

from keras_policy_ext._keras import calls
from keras_policy_ext._types import Tensor
from keras_policy_ext.ext.memory.saved_tensors import MeasuredStep
from keras_policy_ext.ext.sampling.symbolic_batches import map_arrays
from keras_policy_ext.layers.state_of import is_state
from keras_policy_ext.layers.stored_weights import held


def step_of(
    model: keras.Layer, layers: Sequence[keras.Layer], batch: Any
) -> MeasuredStep:
    """Return the training step of a model as functions that can be measured.

    Args:
        model: A model or layer with a `call`.
        layers: The layers in it, in the order of their numbers.
        batch: Nested `keras.KerasTensor`.
    """
    trained = {id(v) for v in model.trainable_variables}
    weights = {id(held(v)) for v in model.weights if not is_state(v)}
    # What frameworks trace has no None, which may stand for an input.
    structure = None
    if any(x is None for x in keras.tree.flatten(batch)):
        leaves: list[Any] = []
        map_arrays(leaves.append, batch)
        structure, batch = batch, leaves
    return MeasuredStep(
        call=_Forward(model, layers, structure),
        variables=model.variables,
        trained=[id(v) in trained for v in model.variables],
        weights=[id(v) in weights for v in model.variables],
        batch=batch,
        for_xla=bool(getattr(model, "jit_compile", False)),
        held=_held(model),
    )


def _held(model: keras.Layer) -> list[Tensor]:
    """Return a model's PyTorch parameters and buffers; [] on other backends."""
    if keras.backend.backend() != "torch":
        return []
    return [*model.parameters(), *model.buffers()]


class _Forward:
    """A function that calls a model with the values of variables passed in.

    See `MeasuredStep.call`. A `structure` is a batch with None in it: what is
    called with is then a list of the tensors in the others' places, in the
    order of `map_arrays`.
    """

    def __init__(
        self, model: keras.Layer, layers: Sequence[keras.Layer], structure: Any
    ):
        self._model, self._structure = model, structure
        self._variables = model.variables
        self._numbers = {id(layer): n for n, layer in enumerate(layers)}

    def __call__(
        self,
        values: Sequence[Tensor],
        batch: Any,
        inside: Callable[[int], AbstractContextManager[Any]],
    ) -> list[Tensor]:
        def call(stock: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
            number = self._numbers.get(id(layer))
            if number is None:
                return stock(layer, *args, **kwargs)
            with inside(number):
                return stock(layer, *args, **kwargs)

        if self._structure is not None:
            tensors = iter(batch)
            batch = map_arrays(lambda _: next(tensors), self._structure)
        state = list(zip(self._variables, values, strict=True))
        with (
            keras.StatelessScope(state, collect_losses=True) as stateless,
            calls.instead_of_each_call(call),
        ):
            outputs = self._model(batch, training=True)
        found = [*keras.tree.flatten(outputs), *stateless.losses]
        return [x for x in found if keras.backend.is_float_dtype(x.dtype)]
