"""Scales and histories of float8 layers under the names that Keras gives."""

from __future__ import annotations

from typing import Any

from keras_policy_ext import bases
from keras_policy_ext.files.keras_float8 import NAME, extension


class _Shown:
    """An attribute that shows a scale or history under Keras's name.

    It has no setter. A layer that Keras quantizes to int8 has a variable of
    the same name, which Python finds first.
    """

    def __init__(self, operand: str, kind: str):
        self._operand, self._kind = operand, kind

    def __get__(self, layer: Any, owner: type | None = None) -> Any:
        """Return the scale or history; AttributeError without one."""
        if layer is None:  # As for a property that is read from the class.
            return self
        state = getattr(layer, "float8_state", None)
        variables = [] if state is None else state.matrices
        has_amaxes = bool(variables) and variables[0].observes_amaxes
        name = f"{self._operand}_{self._kind}"
        if layer.float8_policy is None or not has_amaxes:
            raise AttributeError(
                f"Layer {layer.name!r} has no {name!r}: its "
                "recipe keeps no amaxes. Received: the policy "
                f"{layer.dtype_policy!r}. Allowed: a float8 policy with "
                "delayed scaling."
            )
        keras_float8 = extension()
        if keras_float8 is None:
            raise AttributeError(
                f"Layer {layer.name!r} has no {name!r} without "
                f"the extension {NAME!r}. Install the whole package."
            )
        return keras_float8.shown(layer, self._operand, self._kind)


class KerasNames(bases.MixedInto):
    """A mixin that shows scales and histories under Keras's names.

    They are tensors to read. A scale is float32 (), the last one used or 1. An
    amax history is float32 (length,), newest at index 0. A bank of matrices has
    one more axis in front, of its matrices.
    """

    inputs_scale = _Shown("inputs", "scale")
    inputs_amax_history = _Shown("inputs", "amax_history")
    kernel_scale = _Shown("kernel", "scale")
    kernel_amax_history = _Shown("kernel", "amax_history")
    outputs_grad_scale = _Shown("outputs_grad", "scale")
    outputs_grad_amax_history = _Shown("outputs_grad", "amax_history")
