"""Frozen layers as Keras's own layers in int8 and int4.

Files of such a model load without this package. Keras quantizes each layer, and
then gets the codes and scales that `freeze` has stored.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_policy_ext._keras import walking
from keras_policy_ext.conversion import candidates
from keras_policy_ext.conversion.candidates import path_of
from keras_policy_ext.conversion.freezing import register_writer
from keras_policy_ext.layers.class_swap import to_stock_class
from keras_policy_ext.layers.drop_in import form_of, original_of
from keras_policy_ext.layers.stored_weights import stored_in
from keras_policy_ext.policies.of_layers import float8_policy_of
from keras_policy_ext.recipes import FrozenKernels
from keras_policy_ext.stored_kernels import StoredKernel

CLASSES = (
    keras.layers.Dense,
    keras.layers.EinsumDense,
    keras.layers.Embedding,
)
"""The classes that Keras quantizes, and whose weights are known here."""


def check(layers: Iterable[tuple[Any, FrozenKernels]]) -> None:
    """Raise if Keras has no form for a layer that is to be frozen by a recipe.

    Raises:
        ValueError: If it has none; nothing has changed.
    """
    for layer, recipe in layers:
        fault = _fault(layer, recipe)
        if fault:
            raise ValueError(
                f"Keras has no quantized form for layer {path_of(layer)!r}: "
                f"{fault}. Received: to='keras' with weights="
                f"{recipe.weights!r}, granularity={recipe.per!r} and "
                f"activations={recipe.activations!r}. Allowed: Dense, "
                "EinsumDense and Embedding, with weights='int8' per channel, "
                "or weights='int4' per channel or group, and with inputs that "
                "are not quantized, or 'dynamic' per channel. Leave the layer "
                "out with `exclude`, or freeze without `to`."
            )


def _fault(layer: Any, recipe: FrozenKernels) -> str | None:
    """Return why Keras cannot hold a layer, or None."""
    cls: Any = original_of(type(layer)) or type(layer)
    if cls not in CLASSES:
        return f"its class is {cls.__name__}"
    if "config" not in inspect.signature(cls.quantize).parameters:
        return f"Keras {keras.__version__} always rounds its inputs"
    if recipe.weights not in ("int8", "int4"):
        return f"its kernel is in {recipe.weights}"
    in_groups = recipe.per.startswith("group")
    if recipe.per != "channel" and not (in_groups and recipe.weights == "int4"):
        return f"its scales are per {recipe.per}"
    if in_groups and recipe.activations is not None:
        return "beside groups inputs are not quantized"
    if getattr(layer, "lora_enabled", False):
        return "it has LoRA adapters"
    if cls is keras.layers.EinsumDense:
        form: Any = form_of(cls)
        axes = form.float8_axes(layer, layer.kernel)
        order = axes.summed + axes.free
        if order != tuple(range(len(order))):
            return f"its equation {layer.equation!r} moves axes of the kernel"
    return None


def convert(model: keras.Layer, layers: Iterable[Any]) -> None:
    """Make Keras's own quantized layers of frozen layers, in place.

    They have passed `check`.
    """
    for layer in layers:
        _convert(layer)
    for composite in candidates.survey(model).composites:
        inner = walking.layers_within(composite)[1:]
        if not any(map(float8_policy_of, inner)):
            to_stock_class(composite)


def _convert(layer: Any) -> None:
    """Make one frozen layer a quantized layer of Keras."""
    (variable,) = stored_in(layer)
    stored, recipe = variable.stored, layer.float8_policy.recipe
    name = variable.name
    to_stock_class(layer)
    layer.quantize(recipe.weights, config=_config(recipe))
    by_name = {each.name: each for each in layer.weights}
    for suffix, value in values_of(stored).items():
        into = by_name[name + suffix]
        into.assign(np.reshape(value, into.shape))


def _config(recipe: FrozenKernels) -> Any:
    """Return the configuration with which Keras quantizes a layer."""
    rounds = recipe.activations is not None
    inputs = keras.quantizers.AbsMaxQuantizer(axis=-1) if rounds else None
    if recipe.weights == "int8":
        return keras.quantizers.Int8QuantizationConfig(
            activation_quantizer=inputs
        )
    size = (
        int(recipe.per.removeprefix("group")) if "group" in recipe.per else -1
    )
    return keras.quantizers.Int4QuantizationConfig(
        activation_quantizer=inputs, block_size=size
    )


def values_of(stored: StoredKernel) -> dict[str, Any]:
    """Return what Keras's layer holds of a kernel, by the end of the name.

    Scales per channel are factors that quantize, the reciprocals of ours.
    """
    codes = stored.codes.view("int8")
    if stored.weights == "int4":
        columns, rows = stored.axes.sizes(codes.shape)
        is_table = stored.axes.summed == (1,) and codes.ndim == 2
        shape = (rows, columns) if is_table else (columns, rows)
        packed, *_ = keras.quantizers.pack_int4(
            ops.convert_to_tensor(codes.reshape(shape)), axis=-1
        )
        codes = ops.convert_to_numpy(packed)
    if stored.granularity == "channel":
        return {"": codes, "_scale": np.float32(1) / stored.scale}
    in_rows = stored.axes.summed == (1,) and stored.codes.ndim == 2
    scale = stored.scale if in_rows else stored.scale.T
    return {
        "": codes,
        "_scale": scale,
        "_zero": np.zeros(scale.shape, "int8"),
    }


class _KerasLayers:
    """Makes Keras's int8 and int4 layers of frozen ones: `to="keras"`."""

    check = staticmethod(check)
    convert = staticmethod(convert)


register_writer("keras", _KerasLayers())
