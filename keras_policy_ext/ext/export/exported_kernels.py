"""Find and quantize the kernels of a model that is exported."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_policy_ext import stored_kernels
from keras_policy_ext._keras import variable_values
from keras_policy_ext._keras.walking import layers_within, tracked_variables
from keras_policy_ext.conversion.freezing import (
    deciding,
    freezable,
    frozen_layers,
)
from keras_policy_ext.conversion.requested import Selection
from keras_policy_ext.conversion.traced_model import TracedModel
from keras_policy_ext.layers.stored_weights import (
    StoredVariable,
    in_place_of_codes,
    kernels_to_store,
    stored_in,
)
from keras_policy_ext.policies.of_layers import float8_policy_of
from keras_policy_ext.reports import counted
from keras_policy_ext.stored_kernels import Axes, StoredKernel

Array = np.ndarray[Any, Any]

NO_KERNEL = "it is not the weight of a matrix multiplication"
"""The reason for a weight in float that is no kernel."""

NOT_FROZEN = "it is not frozen, and others are"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheme:
    """The quantization of kernels and inputs in an export.

    Attributes:
        weights: The format of the codes.
        granularity: What has a scale, one of `stored_kernels.GRANULARITIES`.
        activations: None, `"dynamic"` or `"static"`.
    """

    weights: str
    granularity: str
    activations: str | None

    @property
    def is_nvfp4(self) -> bool:
        """True if the codes are e2m1fn, and 16 of them have a scale."""
        return (self.weights, self.granularity) == ("float4_e2m1fn", "group16")


USUAL = Scheme(weights="float8_e4m3fn", granularity="channel", activations=None)
"""The default if nothing is frozen and no argument is given."""


@dataclasses.dataclass(frozen=True)
class ExportedKernel:
    """A kernel of the model to be exported, and how it is to be written.

    Attributes:
        layer: The layer that it is in.
        variable: The weight, without LoRA adapters.
        axes: The summed and the kept axes of the kernel.
        left_out: Why it is written in float; None if it is quantized.
    """

    layer: keras.Layer
    variable: Any
    axes: Axes
    left_out: str | None

    @property
    def path(self) -> str:
        """The path of the kernel in the model."""
        return str(self.variable.path)

    @property
    def frozen(self) -> bool:
        """True if the kernel is frozen, so that the float8 bytes exist."""
        return is_frozen(self.variable)

    @property
    def adapted(self) -> bool:
        """True if the kernel has LoRA adapters, which the export merges."""
        return _adapters(self.layer, self.variable) is not None

    def float_value(self) -> Array:
        """Return the kernel in float32, with LoRA adapters merged in."""
        return float_value(self.layer, self.variable)

    def stored(self, scheme: Scheme) -> StoredKernel:
        """Return the kernel in float8; a frozen one keeps its bytes."""
        if self.frozen and not self.adapted:
            return self.variable.stored
        # With adapters, a frozen one is quantized again in the same format.
        kept = self.variable if self.frozen else scheme
        return stored_kernels.quantize(
            self.float_value(),
            self.axes,
            kept.granularity,
            kept.weights,
            scale_format=self.scale_format(scheme),
        )

    def scale_format(self, scheme: Scheme) -> str:
        """Return the format of the scales; by the scheme unless frozen."""
        if self.frozen:
            return str(self.variable.recipe.scale_format)
        return stored_kernels.E4M3 if scheme.is_nvfp4 else "float32"

    @property
    def is_looked_up(self) -> bool:
        """True if the kernel is a frozen embedding that is never multiplied."""
        form: Any = type(self.layer)
        return self.frozen and not form.is_float8_kernel(
            self.layer, self.variable
        )

    def input_scale(self) -> float | None:
        """Return the static scale of the kernel's inputs; None without one."""
        scale = getattr(self.variable, "inputs_scale", None)
        if scale is None or self.is_looked_up:
            return None
        return float(ops.convert_to_numpy(scale))


def of_model(
    model: keras.Layer, include: object, exclude: object
) -> dict[int, ExportedKernel]:
    """Return the kernels of a model to export, by the `id` of the variable."""
    traced = TracedModel(model)
    candidates, _ = freezable(traced)
    selection = Selection.read(include, exclude, None, None)
    frozen = frozen_layers(model)
    decide: dict[int, str] = {}
    # If some are frozen, the others stay in floats; else those of layers that
    # decide do, such as routers of experts.
    if not frozen:
        decide = deciding(selection, candidates, traced)
    reasons = selection.reasons(candidates, decide)
    if frozen:
        for number, candidate in enumerate(candidates):
            if not stored_in(candidate.layer):
                reasons.setdefault(number, NOT_FROZEN)
    found = {}
    for number, candidate in enumerate(candidates):
        layer: Any = candidate.layer
        form: Any = candidate.form
        for variable in stored_in(layer) or kernels_to_store(layer, form):
            axes = form.float8_axes(layer, variable)
            found[id(variable)] = ExportedKernel(
                layer, variable, axes, reasons.get(number)
            )
    return found


def scheme_of(
    kernels: Iterable[ExportedKernel],
    weights: str | None,
    granularity: str | None,
    activations: str | None,
    usual: Scheme,
) -> Scheme:
    """Return the scheme from the arguments, or from the frozen kernels.

    Raises:
        ValueError: If frozen kernels differ from the arguments or from each
            other.
    """
    kernels = [k for k in kernels if k.left_out is None]
    frozen = [k for k in kernels if k.frozen]
    _check_trained(kernels)
    if granularity == "group":
        granularity = "group32"
    known = activations in (None, "dynamic", "static", "auto")
    if not known:
        raise ValueError(
            "`activations` is not a way to quantize inputs. Received: "
            f"activations={activations!r}. Allowed: 'auto', None, 'dynamic', "
            "'static'. Pass one of them."
        )
    asked = {"weights": weights, "granularity": granularity}
    found: dict[str, Any] = {}
    for name, value in asked.items():
        has = {getattr(kernel.variable, name) for kernel in frozen}
        _check_alike(name, has if value is None else has | {value})
        found[name] = value or next(iter(has), getattr(usual, name))
    if activations == "auto":
        has = {kernel.variable.recipe.activations for kernel in frozen}
        _check_alike("activations", has)
        activations = next(iter(has), usual.activations)
    scheme = Scheme(activations=activations, **found)
    _check_names(scheme)
    return scheme


def _check_trained(kernels: Iterable[ExportedKernel]) -> None:
    """Raise if a kernel is trained for a grid, and not frozen on it yet."""
    for kernel in kernels:
        policy = float8_policy_of(kernel.layer)
        if not kernel.frozen and policy is not None and policy.recipe.grid:
            raise ValueError(
                f"{kernel.path!r} is trained for a grid of numbers, and not "
                f"stored on it. Received: a layer under {policy.full_name!r}. "
                "Allowed: frozen layers. Call `keras_policy_ext.freeze(model)` "
                "first."
            )


def _check_names(scheme: Scheme) -> None:
    """Raise if the format or the granularity of a scheme is unknown."""
    empty = np.zeros((1, 1), "float32")
    axes = Axes((0,), (1,))
    stored_kernels.quantize(empty, axes, scheme.granularity, scheme.weights)


def _check_alike(name: str, values: set[Any]) -> None:
    if len(values) > 1:
        listed = ", ".join(sorted(map(repr, values)))
        raise ValueError(
            f"Kernels that are frozen with one `{name}` cannot be written with "
            f"another. Received: {name} of {listed}. Allowed: the same "
            f"`{name}` for all quantized kernels. Freeze the whole model with "
            f"one `{name}`, do not pass another to `export`, or leave layers "
            "out with `exclude`."
        )


def is_frozen(variable: keras.Variable) -> bool:
    """Return True if a variable is a frozen kernel, stored in float8."""
    return isinstance(variable, StoredVariable)


def float_value(layer: keras.Layer, variable: keras.Variable) -> Array:
    """Return a weight in floats, LoRA adapters merged in; integers stay so."""
    if is_frozen(variable):
        value: Array = variable.stored.dequantized()
    else:
        value = host_value(variable)
    adapters = None if layer is None else _adapters(layer, variable)
    if adapters is None:
        return value
    a, b, scale = adapters
    merged: Array = np.matmul(a, b)
    merged *= np.float32(scale)
    merged += value
    return merged


def host_value(variable: keras.Variable) -> Array:
    """Return a weight as a NumPy array; bfloat16 and float16 become float32."""
    value = variable_values.value_without_autocast(variable)
    if keras.backend.standardize_dtype(variable.dtype) in (
        "bfloat16",
        "float16",
    ):
        value = ops.cast(value, "float32")
    return np.asarray(ops.convert_to_numpy(value))


def _adapters(
    layer: keras.Layer, variable: keras.Variable
) -> tuple[Array, Array, float] | None:
    """Return a weight's LoRA factors and scale (a, b, scale), or None."""
    made: Any = layer
    if not getattr(layer, "lora_enabled", False):
        return None
    for kind, stored in (
        ("kernel", variable_values.stored_kernel),
        ("embeddings", variable_values.stored_embeddings),
    ):
        factors = [getattr(made, f"lora_{kind}_{x}", None) for x in "ab"]
        if all(f is not None for f in factors) and stored(layer) is variable:
            a, b = (host_value(factor) for factor in factors)
            return a, b, float(made.lora_alpha / made.lora_rank)
    return None


def adapters_within(model: keras.Layer) -> set[int]:
    """Return the `id` of each LoRA factor in a model."""
    return {
        id(variable)
        for layer in layers_within(model)
        if getattr(layer, "lora_enabled", False)
        for variable in tracked_variables(layer)
        if variable.name.startswith("lora_")
    }


def merged_notes(
    model: keras.Layer, include: object, exclude: object
) -> tuple[str, ...]:
    """Return sentences on how many LoRA adapters the export has merged."""
    adapted = [
        layer
        for layer in layers_within(model)
        if getattr(layer, "lora_enabled", False)
    ]
    if not adapted:
        return ()
    found = of_model(model, include, exclude).values()
    kernels = [k for k in found if k.adapted and k.left_out is None]
    again = sum(kernel.frozen for kernel in kernels)
    counts = [
        (again, "it was rounded again", "these were rounded again"),
        (len(kernels) - again, "the sum is rounded", "the sums are rounded"),
        (
            len(adapted) - len(kernels),
            "the sum is in floats",
            "the sums are in floats",
        ),
    ]
    return tuple(
        f"Adapters merged into {counted(number, 'kernel')}; "
        f"{one if number == 1 else several}."
        for number, one, several in counts
        if number
    )


def owners(model: keras.Layer) -> dict[int, keras.Layer]:
    """Return the layer that holds each weight, by the `id` of the weight."""
    return {
        id(variable): layer
        for layer in reversed(layers_within(model))
        for variable in in_place_of_codes(layer, tracked_variables(layer))
    }
