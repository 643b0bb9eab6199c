"""Kernels of a layer that are stored: made, taken in place, given back."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_policy_ext._keras import built_layers, variable_values, walking
from keras_policy_ext.layers.operands import is_floating
from keras_policy_ext.layers.paths import scope_of_path
from keras_policy_ext.layers.stored_variable import (
    StoredCodes,
    StoredVariable,
    add_stored,
    read_as_numbers,
)
from keras_policy_ext.recipes import FrozenKernels
from keras_policy_ext.stored_kernels import Axes, StoredKernel

Frozen = tuple[Any, StoredKernel | Axes, Any]
"""A kernel, what it becomes or its axes for zeros, the scale of its inputs."""


class Weight(NamedTuple):
    """What a weight is going to be."""

    name: str | None
    shape: tuple[int, ...]
    dtype: str


def made(
    layer: Any, stored: bool | None, *args: Any, **kwargs: Any
) -> StoredCodes | None:
    """`add_weight` of a layer that is frozen, for a kernel.

    Args:
        layer: The layer.
        stored: Whether this weight is stored; None: as its class says.
        *args: As for `keras.layers.Layer.add_weight`.
        **kwargs: Likewise.

    Returns:
        Its codes, until the layer is built; None if it is not stored.
    """
    asked = inspect.signature(keras.layers.Layer.add_weight).bind(
        layer, *args, **kwargs
    )
    shape = (*args, kwargs.get("shape"))[0]
    name = kwargs.get("name")
    dtype = keras.backend.standardize_dtype(
        asked.arguments.get("dtype") or layer.variable_dtype
    )
    if stored is False or not is_floating(dtype):
        return None
    if shape is None:
        return None
    weight: Any = Weight(name, tuple(shape), dtype)
    if not (stored or layer.is_stored_kernel(layer, weight)):
        return None
    axes = layer.float8_axes(layer, weight)
    recipe = layer.float8_policy.recipe
    variable = add_stored(layer, name, weight.shape, recipe, axes)
    layer._float8_kernel_paths += (variable.path,)
    codes = variable.codes
    codes.read = variable
    built_layers.track(layer, codes)
    return codes


def check_policy(layer: Any, policy: keras.DTypePolicy) -> None:
    """Raise if kernels that are made would have to change for a policy.

    Args:
        layer: A layer.
        policy: What it is to follow, without rules.

    Raises:
        ValueError: If so.
    """
    asked = getattr(policy, "recipe", None)
    stores = asked is not None and not asked.trains
    if not (layer._float8_kernel_paths and (stores or layer.is_frozen)):
        return
    if layer.is_frozen and asked == layer.float8_policy.recipe:
        return
    raise ValueError(
        f"The policy of layer {layer.name!r} cannot be set: it would store "
        "the kernels in another way than they are. Received: "
        f"{getattr(policy, 'full_name', policy.name)!r}, where the layer has "
        f"{layer.dtype_policy!r}. Allowed: a recipe of the same kind. "
        "`keras_policy_ext.freeze(model)` stores kernels in float8, and "
        "`keras_policy_ext.thaw(model)` gives them back in floating point."
    )


def kernels_to_store(layer: Any, form: Any) -> list[keras.Variable]:
    """The weights of a layer that are stored when it is frozen.

    Args:
        layer: A built layer.
        form: Its float8 form.
    """
    own = walking.own_weights(layer)
    if layer.__class__ is form and form.float8_kernels is None:
        return list(layer.float8_contracted)
    return [
        each
        for each in own
        if is_floating(each.dtype) and form.is_stored_kernel(layer, each)
    ]


def stored_in(layer: Any) -> list[StoredVariable]:
    """The stored kernels of a layer."""
    own = walking.own_weights(layer)
    return [each for each in own if isinstance(each, StoredVariable)]


def store_all(layer: Any, kernels: Iterable[Frozen] | None) -> None:
    """Store the float kernels of an unlocked layer, if it is frozen.

    Args:
        layer: The layer.
        kernels: What they become; None for zeros.
    """
    if not layer.is_frozen:
        return
    if kernels is None:
        kernels = [
            (kernel, layer.float8_axes(layer, kernel), None)
            for kernel in kernels_to_store(layer, type(layer))
        ]
    kernels = list(kernels)
    if kernels:
        own = walking.own_weights(layer)
        layer._float8_weight_names = tuple(each.name for each in own)
    for kernel, stored, scale in kernels:
        store(layer, kernel, stored, scale)
    paths = tuple(each.path for each in stored_in(layer))
    layer._float8_kernel_paths = paths


def store(
    layer: Any,
    kernel: keras.Variable,
    stored: StoredKernel | Axes,
    scale: Any,
) -> StoredVariable:
    """Put a stored kernel in the place of a float one.

    Args:
        layer: An unlocked layer that follows `FrozenKernels`.
        kernel: One of its weights.
        stored: What it was rounded to; only which axes are summed for zeros.
        scale: That of its inputs, where it is known before.
    """
    recipe: FrozenKernels = layer.float8_policy.recipe
    variable = add_stored(
        layer,
        kernel.name,
        tuple(kernel.shape),
        recipe,
        stored if isinstance(stored, Axes) else stored.axes,
        None if isinstance(stored, Axes) else stored,
        scale,
    )
    variable.codes.read = variable
    built_layers.replace_variable(layer, kernel, variable.codes)
    read_as_numbers(layer)
    return variable


def widen_all(layer: Any) -> None:
    """Put float kernels in the places of all stored ones of a layer.

    Its weights have the order again in which a stock layer has them.
    """
    for variable in stored_in(layer):
        widen(layer, variable)
    built_layers.order_variables(layer, layer._float8_weight_names)


def widen(layer: Any, variable: StoredVariable) -> keras.Variable:
    """Put a float kernel in the place of a stored one, dequantized.

    Args:
        layer: An unlocked layer.
        variable: One of its stored kernels.
    """
    with scope_of_path(layer.path or layer.name):
        kernel = keras.Variable(
            variable.stored.dequantized(),
            dtype=layer.variable_dtype,
            name=variable.name,
            trainable=not getattr(layer, "lora_enabled", False),
        )
    built_layers.replace_variable(layer, variable, kernel, variable.codes)
    # Tracked as trainable before, so that `layer.trainable = True` reaches it.
    kernel.trainable = kernel.trainable and layer.trainable
    return kernel


def float_value(kernel: keras.Variable) -> np.ndarray:
    """A float kernel on the host, float32."""
    value = variable_values.value_without_autocast(kernel)
    return np.asarray(ops.convert_to_numpy(ops.cast(value, "float32")))
