"""Recurrent layers whose cells are in float8."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras

from keras_policy_ext import _bases, policies
from keras_policy_ext._keras import built_layers, calls, stock_float8
from keras_policy_ext._types import Tensor
from keras_policy_ext.layers import rnn_cells
from keras_policy_ext.layers.drop_in import drop_in
from keras_policy_ext.layers.paths import BuiltUnderSavedPath


class _Float8Recurrent(BuiltUnderSavedPath, _bases.MixedInto):
    """What the layers share: a float8 cell, and a loop of their own around it.

    The inputs of all steps are multiplied at once, before the loop. What
    remains in the loop is the product with the state.
    """

    float8_replaces = ("inner_loop",)

    float8_cell: type

    # Type checkers see the constructor of the stock layer.
    if not TYPE_CHECKING:

        def __init__(self, *args, **kwargs):
            kwargs["dtype"] = policies.get(kwargs.get("dtype"))
            super().__init__(*args, **kwargs)
            # The stock constructor made a stock cell. To make another one
            # would draw other seeds; the `build` that Keras wrapped is right
            # for both.
            policy = policies.get(self.cell.dtype_policy)
            built_layers.swap_class(self.cell, self.float8_cell)
            self.cell.follow_policy(policy)

    @property
    def quantization_mode(self) -> str | None:
        """That of the stock layer; None for float8, which the cell follows."""
        return stock_float8.other_mode(self)

    def call(
        self,
        sequences: Tensor,
        initial_state: Any = None,
        mask: Any = None,
        training: bool | None = None,
    ) -> Any:
        """As the stock layer.

        Args:
            sequences: (batch, steps, features), floating.
            initial_state: None, or a list of states, (batch, units).
            mask: None, or boolean (batch, steps).
            training: Whether amaxes are observed and units are dropped. None:
                nothing is dropped, and amaxes are observed where a gradient
                is taken.

        Returns:
            As the stock layer.
        """
        return super().call(
            sequences, initial_state=initial_state, mask=mask, training=training
        )

    def inner_loop(
        self,
        sequences: Tensor,
        initial_state: Any,
        mask: Any,
        training: bool | None = None,
    ) -> Any:
        """As the stock layer, without fused kernels where the cell is float8.

        Args:
            sequences: As for `call`.
            initial_state: A list of states.
            mask: As for `call`.
            training: As for `call`.

        Returns:
            The last outputs, all outputs, and the last states.

        Raises:
            ValueError: If cuDNN is demanded for a float8 cell.
        """
        cell = self.cell
        if not _in_float8(cell):
            return super().inner_loop(
                sequences, initial_state, mask, training=training
            )
        self._check_cudnn()
        if not keras.tree.is_nested(initial_state):
            initial_state = [initial_state]
        if keras.tree.is_nested(mask):
            mask = mask[0]

        def step(projected: Tensor, states: Any) -> tuple[Tensor, Any]:
            return cell.float8_step(projected, states, training)

        return calls.run_recurrent_loop(
            self,
            step,
            cell.float8_projection(sequences, training),
            initial_state,
            mask,
        )

    def _check_cudnn(self) -> None:
        """Raise if this layer was told to use cuDNN and nothing else."""
        if self.__dict__.get("use_cudnn") is True:
            raise ValueError(
                f"use_cudnn=True is not possible for {self.name!r}: its cell "
                "is in float8, which cuDNN does not have. Received: "
                "use_cudnn=True. Allowed: 'auto' or False. Leave it out, or "
                "take this cell out of float8 with a rule: "
                f"({self.cell.path!r}, None)."
            )


class _CuDNN(_bases.MixedInto):
    """Keeps fused kernels away from a cell in float8, which they are not."""

    @property
    def use_cudnn(self) -> Any:
        """`"auto"`, True or False; False where the cell is in float8.

        `keras.layers.Bidirectional` asks for it too.
        """
        if self.built and _in_float8(self.cell):
            return False
        return self.__dict__.get("use_cudnn", "auto")

    @use_cudnn.setter
    def use_cudnn(self, value: Any) -> None:
        self.__dict__["use_cudnn"] = value


@drop_in
class SimpleRNN(_Float8Recurrent, keras.layers.SimpleRNN):
    """`keras.layers.SimpleRNN` whose cell can follow a float8 policy."""

    float8_cell = rnn_cells.SimpleRNNCell


@drop_in
class GRU(_CuDNN, _Float8Recurrent, keras.layers.GRU):
    """`keras.layers.GRU` whose cell can follow a float8 policy."""

    float8_cell = rnn_cells.GRUCell


@drop_in
class LSTM(_CuDNN, _Float8Recurrent, keras.layers.LSTM):
    """`keras.layers.LSTM` whose cell can follow a float8 policy."""

    float8_cell = rnn_cells.LSTMCell


def _in_float8(cell: Any) -> bool:
    return (
        isinstance(cell, rnn_cells.Float8Cell)
        and cell.float8_policy is not None
    )
