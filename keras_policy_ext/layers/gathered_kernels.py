"""Which kernels `fully_shard` of PyTorch can gather as float8."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import keras

from keras_policy_ext.layers.stored_weights import StoredVariable
from keras_policy_ext.numerics.scale_sources import source_of
from keras_policy_ext.recipes import Quantization, matmuls_of


class GatheredKernel(NamedTuple):
    """A kernel that can be gathered as float8.

    Attributes:
        variable: The kernel.
        quantization: How the recipe quantizes it; with one scale.
        source: The source of scales of the recipe.
        state: The state variable of the kernel; None for none.
    """

    variable: keras.Variable
    quantization: Quantization
    source: Any
    state: Any


def found_in(layers: Iterable[keras.Layer]) -> list[GatheredKernel]:
    """Return the kernels that only one float8 matmul reads, in one form.

    These are trainable kernels of `Dense` and `EinsumDense`, if the recipe
    gives each kernel one scale, and rounds to the nearest value.

    Args:
        layers: All layers of a model.
    """
    kernels: list[tuple[Any, keras.Variable]] = [
        (layer, kernel)
        for layer in layers
        if hasattr(layer, "float8_controller") and layer.float8_policy
        for kernel in layer.float8_controller.contracted
    ]
    uses = Counter(id(kernel) for _, kernel in kernels)
    found = []
    for layer, kernel in kernels:
        is_dense = isinstance(
            layer, (keras.layers.Dense, keras.layers.EinsumDense)
        )
        is_weight = not isinstance(kernel, StoredVariable) and kernel.trainable
        if not (is_dense and is_weight) or uses[id(kernel)] > 1:
            continue
        recipe = layer.float8_policy.recipe
        asked = {recipe.quantization("kernel", m) for m in matmuls_of("kernel")}
        one = asked.pop()
        is_bank = layer.float8_bank_axis(layer, kernel) is not None
        if asked or one is None or not one.keeps_axes or is_bank:
            continue
        state = layer.float8_state.of(kernel)
        found.append(GatheredKernel(kernel, one, source_of(recipe), state))
    return found
