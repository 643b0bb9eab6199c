"""Attributes that show a float8 state under the names of Keras's own float8."""

from __future__ import annotations

from typing import Any

from keras import ops

from keras_policy_ext._keras import variable_values


class _View:
    """An attribute that shows a scale or history under Keras's name.

    It has no setter. A layer that Keras quantizes to int8 has a variable of
    the same name, which Python finds first.
    """

    def __init__(self, operand: str, kind: str):
        self.operand = operand
        self.kind = kind

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, layer: Any, owner: type | None = None) -> Any:
        if layer is None:
            return self
        matrices = getattr(layer, "float8_state", None)
        matrices = [] if matrices is None else matrices.matrices
        has_amaxes = bool(matrices) and matrices[0].observes_amaxes
        if layer.float8_policy is None or not has_amaxes:
            raise AttributeError(
                f"Layer {layer.name!r} has no {self.name!r}: its recipe keeps "
                f"no amaxes. Received: the policy {layer.dtype_policy!r}. "
                "Allowed: a float8 policy with delayed scaling."
            )
        layout, rows = (
            matrices[0].rows_layout,
            matrices[0].rows_of(self.operand),
        )
        at: Any = rows if matrices[0].matrices > 1 else rows.start
        state = variable_values.value_without_autocast(matrices[0])
        state = ops.stop_gradient(state)
        if self.kind == "amax_history":
            return layout.history(state)[at]
        scale = layout.scale(state)[at]
        return ops.where(ops.greater(scale, 0.0), scale, 1.0)


class StockAttributes:
    """A mixin that shows scales and histories under Keras's names.

    They are tensors to read. A scale is float32 (), the last one used or 1. An
    amax history is float32 (length,), newest at index 0. A bank of matrices has
    one more axis in front, of its matrices.
    """

    inputs_scale = _View("inputs", "scale")
    inputs_amax_history = _View("inputs", "amax_history")
    kernel_scale = _View("kernel", "scale")
    kernel_amax_history = _View("kernel", "amax_history")
    outputs_grad_scale = _View("outputs_grad", "scale")
    outputs_grad_amax_history = _View("outputs_grad", "amax_history")
