"""Bytes per element of the inputs that layers save for the backward pass."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Any

import keras

from keras_policy_ext import backends
from keras_policy_ext.policies.of_layers import float8_policy_of
from keras_policy_ext.reports import counted


def itemsize(dtype: Any) -> int:
    """Return the bytes per element of a dtype, as frameworks store it."""
    name = keras.backend.standardize_dtype(dtype)
    if name == "bool":
        return 1
    bits, *_ = "".join(c if c.isdigit() else " " for c in name).split()
    return int(bits) // 8


def of_layer(layer: keras.Layer) -> tuple[int, int] | None:
    """Return the bytes per element of saved inputs: now, and without float8.

    Scales are not counted; those of a tensor or of rows take little. None if
    the layer contracts no kernel in float8, or does not train.
    """
    policy = float8_policy_of(layer)
    if policy is None or not policy.recipe.trains:
        return None
    kernels = layer.float8_contracted
    if not kernels:
        return None
    in_floats = itemsize(layer.compute_dtype)
    quantization = policy.recipe.quantization("inputs", "kernel_grad")
    if quantization is None:
        return in_floats, in_floats
    dtype = backends.current.kept_dtype(kernels[0].value, quantization.format)
    return itemsize(dtype), in_floats


def note(entries: Iterable[Any]) -> list[str]:
    """Return a sentence on the `kept_bytes` of entries of a report, or none."""
    sizes = collections.Counter(
        (entry.kept_bytes, entry.kept_bytes_before)
        for entry in entries
        if entry.kept_bytes is not None
    )
    if not sizes:
        return []
    differ = len(sizes) > 1
    shown = [
        f"{counted(now, 'byte')} per element "
        + ("(as before" if now == before else f"(was {before}")
        + (f"; {counted(layers, 'layer')})" if differ else ")")
        for (now, before), layers in sorted(sizes.items())
    ]
    return [
        f"Saved activations: {', '.join(shown)}. "
        "kpe.memory(model, batch) counts all that a step keeps."
    ]
