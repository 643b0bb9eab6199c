"""Folders of Hugging Face into models of KerasHub, frozen."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from keras_policy_ext._keras import keras_hub_import, variable_values
from keras_policy_ext._keras.symbolic import Symbols
from keras_policy_ext._keras.while_building import (
    after_each_build,
    without_values,
)
from keras_policy_ext.conversion import candidates, composites
from keras_policy_ext.export import kernels, quantized_folders, shards
from keras_policy_ext.export.quantized_folders import QuantizedFolder
from keras_policy_ext.export.safetensors_files import Slot
from keras_policy_ext.layers import stored_weights
from keras_policy_ext.layers.class_swap import freeze_layer, thaw_layer
from keras_policy_ext.layers.drop_in import form_of
from keras_policy_ext.layers.stored_variable import StoredVariable
from keras_policy_ext.policies import Float8DTypePolicy
from keras_policy_ext.policies.of_layers import source_policy_of
from keras_policy_ext.recipes import FrozenKernels
from keras_policy_ext.stored_kernels import (
    Axes,
    StoredKernel,
    as_matrix,
    of_matrix,
    scale_shape,
)

Array = np.ndarray[Any, Any]
Hook = Callable[[Array, list[int]], Array]


def load(path: str | os.PathLike[str], dtype: str | None) -> keras.Model:
    """Do what `load_quantized` is asked for."""
    place = pathlib.Path(path)
    folder = QuantizedFolder.read(place)
    slots = shards.read(place)
    converter = keras_hub_import.Converter(place, folder.config)

    def freeze(layer: keras.Layer) -> None:
        _freeze_empty(layer, folder.recipe)

    with after_each_build(freeze), without_values(_is_to_be_frozen):
        backbone = converter.make_backbone(dtype or folder.dtype)
    loader = _Loader(backbone, slots)
    converter.port(loader.stand_in, loader)
    for layer in candidates.survey(backbone).composites:
        composites.enter_float8_with_children(layer)
    composites.declare_policies(backbone)
    return keras_hub_import.language_model_of(backbone)


def _form(layer: keras.Layer) -> Any:
    """What a stock layer is frozen as; None if it is not.

    Not embeddings, which folders have in floats.
    """
    if isinstance(layer, keras.layers.Embedding):
        return None
    try:
        form = form_of(type(layer))
    except TypeError:  # It computes in its own way, and stays in floats.
        return None
    return None if type(layer) is form else form


def _is_to_be_frozen(layer: keras.Layer, name: str | None) -> bool:
    """Whether a weight that a layer adds is frozen once it is built."""
    return name in (getattr(_form(layer), "float8_kernels", None) or ())


def _freeze_empty(layer: keras.Layer, recipe: FrozenKernels) -> None:
    """Freeze a layer that was just built, with kernels of zeros."""
    form = _form(layer)
    found = [] if form is None else stored_weights.kernels_to_store(layer, form)
    if found:
        source = source_policy_of(layer).name
        policy = Float8DTypePolicy(source, recipe=recipe)
        empty = (
            (
                kernel,
                _empty(kernel, form.float8_axes(layer, kernel), recipe),
                None,
            )
            for kernel in found
        )
        freeze_layer(layer, policy, empty)


def _empty(kernel: Any, axes: Axes, recipe: FrozenKernels) -> StoredKernel:
    shape = tuple(kernel.shape)
    return StoredKernel(
        codes=np.zeros(shape, "uint8"),
        scale=np.ones(scale_shape(shape, axes, recipe.per), "float32"),
        weights=recipe.weights,
        granularity=recipe.per,
        axes=axes,
    )


class _Loader:
    """What KerasHub's converters ask for tensors, and give variables to.

    Args:
        backbone: The model that they are for.
        slots: The tensors of the folder.
    """

    safetensor_config = None
    """No list of tensors to count against those that are ported."""

    def __init__(
        self, backbone: keras.Model, slots: Mapping[str, Slot]
    ) -> None:
        self._slots = slots
        self._symbols = Symbols()
        self._owners = kernels.owners(backbone)
        self.stand_in = self._symbols.stand_in(backbone)

    def get_tensor(self, name: str) -> Array:
        """A tensor as it is in its file."""
        return self._slots[self._name(name)].read()

    def port_weight(
        self, keras_variable: Any, hf_weight_key: str, hook_fn: Any = None
    ) -> None:
        """Put a tensor into a variable.

        Args:
            keras_variable: A symbol of it.
            hf_weight_key: The name of the tensor, or the end of it.
            hook_fn: Makes the shape of the variable of that of the tensor.
        """
        (variable,) = self._symbols.variables(keras_variable)
        name = self._name(hf_weight_key)
        hook: Hook = hook_fn or (lambda value, shape: value)
        if self._slots[name].dtype == "F8_E4M3":
            self._port_codes(variable, name, hook)
            return
        if isinstance(variable, StoredVariable):
            variable = self._thawed(variable)
        self._assign(variable, self._slots[name].read(), hook, name)

    def _name(self, wanted: str) -> str:
        """The name in the files, which may have more in front."""
        if wanted in self._slots:
            return wanted
        ends = [n for n in self._slots if n.endswith(f".{wanted}")]
        if not ends:
            raise ValueError(
                "This folder lacks a weight of the model. Received: no "
                f"tensor {wanted!r}. Allowed: all that config.json tells of. "
                "Copy the folder again, or export it again."
            )
        return min(ends, key=len)

    def _thawed(self, variable: StoredVariable) -> keras.Variable:
        """The float kernel of a layer that the folder has in floats."""
        layer = self._owners[id(variable)]
        thaw_layer(layer)
        return variable_values.stored_kernel(layer)

    def _port_codes(self, variable: Any, name: str, hook: Hook) -> None:
        codes = self._slots[name].read()
        scale, inputs_scale = quantized_folders.scales(self._slots, name)
        if not isinstance(variable, StoredVariable):
            value = codes.astype("float32") * _spread(scale, codes.shape)
            self._assign(variable, value, hook, name)
            return
        shape = tuple(variable.shape)
        bits = codes.view("uint8")
        hooked = self._hooked(bits, hook, list(shape), name)
        stored = StoredKernel(
            codes=hooked,
            scale=_scale_of(variable, bits, hooked, scale, hook),
            weights=variable.weights,
            granularity=variable.granularity,
            axes=variable.axes,
        )
        variable.take(stored, inputs_scale)

    def _assign(
        self, variable: Any, value: Array, hook: Hook, name: str
    ) -> None:
        value = (
            value.astype("float32") if value.dtype.kind not in "biu" else value
        )
        variable.assign(self._hooked(value, hook, list(variable.shape), name))

    def _hooked(
        self, value: Array, hook: Hook, shape: list[int], name: str
    ) -> Array:
        try:
            made = np.asarray(hook(value.view(_Kept), shape), order="C")
        except (IndexError, ValueError) as error:
            raise _misshapen(name, value.shape, shape) from error
        if list(made.shape) != shape:
            raise _misshapen(name, value.shape, shape)
        return made


class _Kept(np.ndarray[Any, Any]):
    """An array that stays as it is.

    KerasHub's converter for Mistral casts each tensor to float16.
    """

    def astype(self, *args: Any, **kwargs: Any) -> Any:
        """The array itself."""
        return self


def _scale_of(
    variable: StoredVariable,
    bits: Array,
    hooked: Array,
    scale: Array,
    hook: Hook,
) -> Array:
    """The scales in the shape of those of the kernel.

    Where the tensor is the matrix of the kernel they are in the same order;
    else, as in GPT-2, each number is given its scale, and they follow the
    numbers.

    Raises:
        ValueError: If they do not fit the kernel.
    """
    shape, axes = tuple(variable.shape), variable.axes
    wanted = scale_shape(shape, axes, variable.granularity)
    columns, rows = axes.sizes(shape)
    same = bits.shape == (rows, columns) and np.array_equal(
        hooked, of_matrix(bits, shape, axes)
    )
    if variable.granularity == "block":
        if same and scale.shape == wanted:
            return scale
    elif scale.size == 1:
        tensor = np.full((1,) * len(shape), scale.reshape(()), "float32")
        return np.broadcast_to(tensor, wanted)
    elif same and scale.shape == (rows, 1):
        return of_matrix(scale, wanted, axes)
    elif not same:
        spread = np.asarray(hook(_spread(scale, bits.shape), list(shape)))
        matrix = as_matrix(spread, axes)
        if np.all(matrix == matrix[:, :1]):
            return of_matrix(matrix[:, :1], wanted, axes)
    raise ValueError(
        "The scales of a kernel do not fit it. Received: scales of shape "
        f"{scale.shape} for a tensor {bits.shape}, per "
        f"{variable.granularity}. Allowed: {wanted} for the kernel {shape}. "
        "Export the model again."
    )


def _spread(scale: Array, shape: tuple[int, ...]) -> Array:
    """The scale of each number of a tensor; blocks have one for 128x128."""
    try:
        return np.broadcast_to(scale, shape)
    except ValueError:
        rows, columns = (np.arange(size) // 128 for size in shape)
        return np.asarray(scale[rows[:, None], columns[None, :]])


def _misshapen(
    name: str, received: tuple[int, ...], allowed: list[int]
) -> ValueError:
    return ValueError(
        f"A tensor does not fit the model. Received: {name!r} of shape "
        f"{received}. Allowed: what makes a weight of shape {allowed}. The "
        "config.json of the folder is of another model; copy both again."
    )
