"""The weights of a frozen layer as others read them in a call: in floats.

Some layers multiply with `layer.kernel` of another one, as KerasHub's Gemma4
does, and would take the codes for numbers. Outside of calls `kernel` is the
variable with the codes: what saves and loads reads every attribute, and would
widen every kernel.
"""

from __future__ import annotations

from typing import Any

from keras import ops

from keras_policy_ext import _bases, kernels
from keras_policy_ext._keras import calls, variable_values
from keras_policy_ext.layers.stored_variable import StoredVariable

Tensor = Any


class KernelInFloats(_bases.MixedInto):
    """A layer whose `kernel` is in floats in a call though it is frozen."""

    @property
    def kernel(self) -> Any:
        """The kernel; of a frozen layer in a call a tensor, merged."""
        layer: Any = self
        if not (layer.built and layer.is_frozen):
            return super().kernel
        return _dequantized(
            layer, variable_values.stored_kernel(layer), "kernel"
        )


class EmbeddingsInFloats(_bases.MixedInto):
    """A layer whose `embeddings` are in floats in a call though frozen."""

    @property
    def embeddings(self) -> Any:
        """The embeddings; see `KernelInFloats.kernel`."""
        layer: Any = self
        if not (layer.built and layer.is_frozen):
            return super().embeddings
        return _dequantized(
            layer, variable_values.stored_embeddings(layer), "embeddings"
        )


def in_floats(name: str) -> property:
    """A weight that stock Keras keeps in an attribute of this name.

    It stays in `vars(layer)` under that name, where the stock class finds it
    when the layer becomes one of Keras's again. The float8 layer itself asks
    `stored_weight` for it.
    """

    def get(layer: Any) -> Any:
        """See `KernelInFloats.kernel`."""
        variable = stored_weight(layer, name)
        if not isinstance(variable, StoredVariable):
            return variable
        return _dequantized(layer, variable, name)

    def put(layer: Any, value: Any) -> None:
        layer.__dict__[name] = value

    return property(get, put)


def stored_weight(layer: Any, name: str) -> Any:
    """The variable of a weight that is `in_floats`.

    Raises:
        AttributeError: If the layer is not built.
    """
    if name not in layer.__dict__:
        raise AttributeError(f"{type(layer).__name__!r} has no {name!r} yet")
    return layer.__dict__[name]


def _dequantized(layer: Any, variable: Any, kind: str) -> Tensor:
    """A frozen weight in the compute dtype, as floats are in a call."""
    if not calls.is_in_a_call():
        return variable
    codes, scale, *_ = variable.constants
    dtype = layer.compute_dtype
    value = kernels.dequantized(
        variable.recipe, variable.axes, codes, scale, dtype
    )
    if not getattr(layer, "lora_enabled", False):
        return value
    a, b = (
        ops.cast(getattr(layer, f"lora_{kind}_{factor}"), dtype)
        for factor in "ab"
    )
    share = layer.lora_alpha / layer.lora_rank
    return ops.add(value, ops.multiply(ops.matmul(a, b), share))
