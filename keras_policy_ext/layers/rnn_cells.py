"""Recurrent cells in float8: the products with both kernels."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from keras_policy_ext._keras import calls
from keras_policy_ext._types import Tensor
from keras_policy_ext.layers.drop_in import drop_in
from keras_policy_ext.layers.gates import gates_of
from keras_policy_ext.layers.mixin import Float8Mixin


class Float8Cell(Float8Mixin):
    """The common part of the cells.

    A step is cut in two, so that `LSTM` and its like can multiply the inputs
    of all steps at once: `float8_projection`, then `float8_step`.
    """

    float8_kernels = ("kernel", "recurrent_kernel")
    float8_replaces: tuple[str, ...] = ("call", "kernel", "recurrent_kernel")

    float8_gates: int

    def call(
        self, inputs: Tensor, states: Any, training: bool | None = None
    ) -> tuple[Tensor, Any]:
        """One step.

        Args:
            inputs: (batch, features), floating.
            states: As for the stock cell, each (batch, units).
            training: Whether amaxes are observed and units are dropped.

        Returns:
            Outputs, (batch, units), in the compute dtype, and new states.
        """
        if self.float8_policy is None:
            return super().call(inputs, states, training=training)
        projected = self.float8_projection(inputs, training)
        return self.float8_step(projected, states, training)

    def float8_projection(
        self, inputs: Tensor, training: bool | None = None
    ) -> Tensor:
        """The share of the inputs in the gates, with their bias.

        Args:
            inputs: (batch, features), or (batch, steps, features) for all
                steps at once.
            training: As for `call`.

        Returns:
            (..., gates * units), in the compute dtype.
        """
        inputs = self.convert_input(inputs)
        masks = None
        if self._drops(self.dropout) and training:
            step = inputs if len(inputs.shape) == 2 else inputs[:, 0]
            masks = self.get_dropout_mask(step)
        kernel = self.kernel
        x = self._product(kernel, _masked(inputs, masks), training)
        bias = self._bias()[0]
        return x if bias is None else ops.add(x, bias)

    def float8_step(
        self, projected: Tensor, states: Any, training: bool | None = None
    ) -> tuple[Tensor, Any]:
        """The rest of a step.

        Args:
            projected: (batch, gates * units), from `float8_projection`.
            states: As for `call`.
            training: As for `call`.

        Returns:
            As `call`.
        """
        raise NotImplementedError

    def _drops(self, rate: float) -> bool:
        """Return True if the stock cell drops units at this rate."""
        return 0.0 < rate < 1.0

    def _recurrent(self, state: Tensor, training: bool | None) -> Tensor:
        """The state as it is multiplied; each gate may have its own."""
        masks = None
        if self._drops(self.recurrent_dropout) and training:
            masks = self.get_recurrent_dropout_mask(state)
        return _masked(state, masks)

    def _product(
        self,
        kernel: Any,
        x: Tensor,
        training: bool | None,
        first: int = 0,
        last: int | None = None,
    ) -> Tensor:
        """`x @ kernel` for the gates from `first` to before `last`.

        Args:
            kernel: (features, gates * units).
            x: (..., features), or a list of such, one for each gate.
            training: As for `call`.
            first: The first gate.
            last: The gate after the last one, None for all that follow.

        Returns:
            (..., (last - first) * units).
        """
        last = self.float8_gates if last is None else last
        per_gate = isinstance(x, list)
        if not per_gate and last - first == self.float8_gates:
            return self.float8_matmul(x, kernel, training)
        if per_gate:
            x = ops.stack(x[first:last], axis=-2)
        contraction = gates_of(
            len(x.shape), per_gate, first, last, self.float8_gates
        )
        x = self._contract(contraction, x, kernel, training)
        return ops.concatenate(ops.unstack(x, axis=-2), axis=-1)

    def _bias(self) -> tuple[Tensor | None, Tensor | None]:
        """What is added to the products of the inputs and of the state."""
        if self.bias is None:
            return None, None
        return self.convert_input(ops.convert_to_tensor(self.bias)), None


@drop_in
class SimpleRNNCell(Float8Cell, keras.layers.SimpleRNNCell):
    """`keras.layers.SimpleRNNCell` that can follow a float8 policy."""

    float8_gates = 1

    def call(
        self, sequence: Tensor, states: Any, training: bool | None = None
    ) -> tuple[Tensor, Any]:
        """One step; see `Float8Cell.call`."""
        return super().call(sequence, states, training=training)

    def float8_step(
        self, projected: Tensor, states: Any, training: bool | None = None
    ) -> tuple[Tensor, Any]:
        """See `Float8Cell.float8_step`."""
        state = self.convert_input(_first(states))
        inner = self._recurrent(state, training)
        kernel = self.recurrent_kernel
        inner = self._product(kernel, inner, training)
        outputs = ops.add(projected, inner)
        if self.activation is not None:
            outputs = self.activation(outputs)
        return outputs, _like(states, outputs)

    def _drops(self, rate: float) -> bool:
        return rate > 0.0


@drop_in
class GRUCell(Float8Cell, keras.layers.GRUCell):
    """`keras.layers.GRUCell` that can follow a float8 policy."""

    float8_gates = 3

    def float8_step(
        self, projected: Tensor, states: Any, training: bool | None = None
    ) -> tuple[Tensor, Any]:
        """See `Float8Cell.float8_step`."""
        state = self.convert_input(_first(states))
        shares = ops.split(projected, 3, axis=-1)
        make = self._reset_after if self.reset_after else self._reset_before
        update, candidate = make(shares, state, training)
        outputs = update * state + (1 - update) * candidate
        return outputs, _like(states, outputs)

    def _reset_after(
        self, shares: list[Tensor], state: Tensor, training: bool | None
    ) -> tuple[Tensor, Tensor]:
        """The update gate and the candidate, from one product."""
        inner = self._recurrent(state, training)
        kernel = self.recurrent_kernel
        inner = self._product(kernel, inner, training)
        bias = self._bias()[1]
        if bias is not None:
            inner = ops.add(inner, bias)
        z, r, h = ops.split(inner, 3, axis=-1)
        z = self.recurrent_activation(shares[0] + z)
        r = self.recurrent_activation(shares[1] + r)
        return z, self.activation(shares[2] + r * h)

    def _reset_before(
        self, shares: list[Tensor], state: Tensor, training: bool | None
    ) -> tuple[Tensor, Tensor]:
        """Gates where the product of the third one waits for the reset."""
        kernel = self.recurrent_kernel
        inner = self._recurrent(state, training)
        gates = self._product(kernel, inner, training, last=2)
        z, r = ops.split(gates, 2, axis=-1)
        z = self.recurrent_activation(shares[0] + z)
        r = self.recurrent_activation(shares[1] + r)
        inner = r * (inner[2] if isinstance(inner, list) else inner)
        h = self._product(kernel, inner, training, first=2)
        return z, self.activation(shares[2] + h)

    def _bias(self) -> tuple[Tensor | None, Tensor | None]:
        bias, _ = super()._bias()
        if bias is None or not self.reset_after:
            return bias, None
        return bias[0], bias[1]


@drop_in
class LSTMCell(Float8Cell, keras.layers.LSTMCell):
    """`keras.layers.LSTMCell` that can follow a float8 policy."""

    float8_gates = 4
    float8_replaces: tuple[str, ...] = (
        *Float8Cell.float8_replaces,
        *calls.PARTS_OF_LSTM_STEPS,
    )

    def float8_step(
        self, projected: Tensor, states: Any, training: bool | None = None
    ) -> tuple[Tensor, Any]:
        """See `Float8Cell.float8_step`."""
        state, carry = (self.convert_input(x) for x in states)
        inner = self._recurrent(state, training)
        kernel = self.recurrent_kernel
        inner = self._product(kernel, inner, training)
        gates = ops.split(ops.add(projected, inner), 4, axis=-1)
        into, forget, candidate, out = gates
        carry = self.recurrent_activation(forget) * carry
        carry += self.recurrent_activation(into) * self.activation(candidate)
        outputs = self.recurrent_activation(out) * self.activation(carry)
        return outputs, [outputs, carry]


def _masked(x: Tensor, masks: Any) -> Any:
    """What is left of `x`: a tensor, or a list if each gate has its mask."""
    if masks is None:
        return x
    if isinstance(masks, (list, tuple)):
        return [_masked(x, mask) for mask in masks]
    if len(x.shape) > len(masks.shape):
        masks = ops.expand_dims(masks, 1)
    return ops.multiply(x, masks)


def _first(states: Any) -> Tensor:
    return states[0] if keras.tree.is_nested(states) else states


def _like(states: Any, outputs: Tensor) -> Any:
    return [outputs] if keras.tree.is_nested(states) else outputs
