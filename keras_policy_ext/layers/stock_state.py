"""The state of Keras's own float8 layers: read from files, shown as attributes.

`keras.layers.Dense` and `EinsumDense` under `quantize("float8")` save all
their variables by number: the kernel, the bias if there is one, and then for
each of `recipes.OPERANDS` a scale, float32 (), and an amax history, float32
(length,) (keras 3.4 to 3.15). The scale dequantizes. The history is a ring
with the newest amax at index 0, as in `numerics.observations`. An operand that
Keras never observed has the scale 1 and zeros.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
from keras import ops

from keras_policy_ext._keras import variable_values
from keras_policy_ext.layers.state import amaxes_in
from keras_policy_ext.recipes import OPERANDS

NAMES = tuple(
    f"0.{operand}.{kind}"
    for operand in OPERANDS
    for kind in ("scale", "amax_history")
)
"""The keys in `layers.state` of the numbered entries of Keras's state."""

LENGTH_KEY = "keras_amax_history_length"
"""The entry with the history length of the policy, in a state of Keras's."""


@dataclasses.dataclass(frozen=True)
class StockStore:
    """The file entries of a layer that was saved in Keras's own float8.

    Attributes:
        own: The kernel and the bias, by number.
        state: The state, with the keys of `layers.state` but without a
            version.
    """

    own: dict[str, Any]
    state: dict[str, np.ndarray]


def split(store: Mapping[str, np.ndarray], own: int) -> StockStore | None:
    """Split a layer's file entries into weights and Keras's float8 state.

    Return None if the store has no such state after `own` weights.
    """
    numbers = [str(number) for number in range(own + len(NAMES))]
    if set(store.keys()) != set(numbers):
        return None
    behind = zip(NAMES, numbers[own:], strict=True)
    return StockStore(
        {number: store[number] for number in numbers[:own]},
        {name: np.asarray(store[number]) for name, number in behind},
    )


def checked(state: dict[str, np.ndarray], path: str) -> dict[str, np.ndarray]:
    """Check a file's float8 state; set unobserved operands' scales to 0.

    Raises:
        ValueError: If an entry has another rank, is not floating point, or is
            not finite and >= 0.
    """
    damaged = functools.partial(_damaged, path)
    return observed({key: amaxes_in(state, key, damaged) for key in state})


def observed(entries: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return a copy of the entries; operands never observed get scale 0."""
    entries = dict(entries)
    for operand in OPERANDS:
        scale, history = (
            f"0.{operand}.{kind}" for kind in ("scale", "amax_history")
        )
        if entries[scale] == 1.0 and not entries[history].any():
            entries[scale] = np.zeros((), "float32")
    return entries


class _View:
    """An attribute that shows a scale or history under Keras's name.

    It has no setter. A layer that Keras quantizes to int8 has a variable of
    the same name, which Python finds first.
    """

    def __init__(self, operand: str, kind: str):
        self.row = OPERANDS.index(operand)
        self.kind = kind

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, layer: Any, owner: type | None = None) -> Any:
        if layer is None:
            return self
        matrices = getattr(layer, "float8_state", None)
        matrices = [] if matrices is None else matrices.matrices
        known = bool(matrices) and matrices[0].observes_amaxes
        if layer.float8_policy is None or not known:
            raise AttributeError(
                f"Layer {layer.name!r} has no {self.name!r}: its recipe keeps "
                f"no amaxes. Received: the policy {layer.dtype_policy!r}. "
                "Allowed: a float8 policy with delayed scaling."
            )
        layout = matrices[0].rows_layout
        state = variable_values.value_without_autocast(matrices[0])
        state = ops.stop_gradient(state)
        if self.kind == "amax_history":
            return layout.history(state)[self.row]
        scale = layout.scale(state)[self.row]
        return ops.where(ops.greater(scale, 0.0), scale, 1.0)


class StockAttributes:
    """A mixin that shows scales and histories under Keras's names.

    They are tensors to read. A scale is float32 (), the last one used or 1. An
    amax history is float32 (length,), newest at index 0.
    """

    inputs_scale = _View("inputs", "scale")
    inputs_amax_history = _View("inputs", "amax_history")
    kernel_scale = _View("kernel", "scale")
    kernel_amax_history = _View("kernel", "amax_history")
    outputs_grad_scale = _View("outputs_grad", "scale")
    outputs_grad_amax_history = _View("outputs_grad", "amax_history")


def _damaged(path: str, found: str) -> str:
    return (
        f"The float8 state that Keras wrote for {path!r} in this file is "
        f"damaged; the layer was not changed. Received: {found}. Allowed: for "
        f"each of {', '.join(OPERANDS)} a float scalar and a float vector, "
        "finite and >= 0. Load the file into the model under a plain policy, "
        "which reads only the weights, and then convert the model."
    )
