"""What Keras's recurrent layers consist of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from keras_policy_ext._types import Tensor

PARTS_OF_LSTM_STEPS = (
    "_compute_carry_and_output",
    "_compute_carry_and_output_fused",
)
"""Methods that `LSTMCell.call` consists of (keras 3.0 to 3.15).

A subclass that overrides one computes something else, and has no float8 form.
If they are missing, no subclass overrides them. Expires when they are public.
"""


class _WithCell:
    """A substitute for an RNN layer that has another cell."""

    def __init__(
        self,
        layer: keras.layers.RNN,
        cell: Callable[..., object],
        unroll: bool,
    ):
        self._layer = layer
        self.cell = cell
        self.unroll = unroll

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def run_recurrent_loop(
    layer: keras.layers.RNN,
    step: Callable[..., object],
    inputs: Tensor,
    initial_state: list[Tensor],
    mask: Tensor | None,
    unroll: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Run the loop of an RNN layer over time, with `step` as the cell.

    There is no public loop over time steps with masks, and that of `RNN` calls
    `self.cell`. So it is called with a substitute for the layer (keras 3.0 to
    3.15). If it needs more than attributes in a later Keras, it raises, and so
    do float8 RNN layers. Expires with a public `ops.rnn`.

    Args:
        layer: An RNN layer.
        step: Maps (inputs of a step, states) to (outputs, new states).
        inputs: (batch, steps, ...).
        initial_state: A list of states.
        mask: None, or boolean (batch, steps).
        unroll: Whether the loop is one of Python.

    Returns:
        The last outputs, all outputs, and the last states.
    """
    return keras.layers.RNN.inner_loop(
        _WithCell(layer, step, unroll), inputs, initial_state, mask
    )
