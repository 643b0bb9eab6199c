"""Load a quantized Hugging Face folder into a KerasHub model."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from keras_policy_ext import formats
from keras_policy_ext._keras import calls
from keras_policy_ext._keras.walking import own_weights
from keras_policy_ext.conversion.candidates import survey
from keras_policy_ext.conversion.freezing import form_to_freeze, frozen_layers
from keras_policy_ext.conversion.in_place import (
    declare_policies,
    enter_float8_with_children,
)
from keras_policy_ext.ext.export import _keras as hub
from keras_policy_ext.ext.export import readers, safetensors_files
from keras_policy_ext.ext.export._keras.symbolic import Symbols
from keras_policy_ext.ext.export.safetensors_files import OF_DAMAGE, Slot
from keras_policy_ext.files import input_files
from keras_policy_ext.layers.class_swap import to_float8_class, to_stock_class
from keras_policy_ext.layers.stored_weights import (
    StoredVariable,
    kernels_to_store,
    stored_in,
)
from keras_policy_ext.policies import Float8DTypePolicy
from keras_policy_ext.policies.of_layers import source_policy_of
from keras_policy_ext.recipes import FrozenKernels
from keras_policy_ext.stored_kernels import (
    BLOCK,
    E4M3,
    StoredKernel,
    as_matrix,
    of_matrix,
    rounded_scales,
    scale_shape,
    spread_blocks,
    tile_of,
    unpack,
)

Array = np.ndarray[Any, Any]

_DTYPES = ("float32", "bfloat16", "float16")
_SCALES = ("weight_scale", "weight_scale_inv")
_OUTER = "weight_global_scale"
"""The name of the number that divides the scales of NVFP4."""


@dataclasses.dataclass(frozen=True)
class QuantizedFolder:
    """The quantization that `config.json` of a Hugging Face folder states.

    Attributes:
        config: The content of `config.json`.
        recipe: The recipe that its kernels are frozen with.
        dtype: The dtype of its other weights.
    """

    config: dict[str, Any]
    recipe: FrozenKernels
    dtype: str

    @classmethod
    def read(cls, folder: pathlib.Path) -> QuantizedFolder:
        """Read `config.json` in a folder; no weight is read.

        Raises:
            FileNotFoundError: If there is no `config.json`.
            ValueError: If it is damaged, or has another quantization.
        """
        place = folder / "config.json"
        if not place.is_file():
            raise FileNotFoundError(
                "There is no model in Hugging Face's form here. Received: "
                f"{str(folder)!r}, without a config.json. Allowed: a folder "
                "with one. Check the path."
            )
        try:
            config = input_files.json_in(place.read_bytes(), place)
            quantization = config["quantization_config"]
            method = quantization["quant_method"]
        except KeyError as error:
            raise _wrong(place, f"no {error.args[0]!r}") from error
        except OF_DAMAGE as error:
            raise _wrong(place, f"no config ({error})") from error
        try:
            recipe = _RECIPES[method](quantization)
        except OF_DAMAGE as error:
            raise _wrong(place, f"{quantization}") from error
        return cls(config, recipe, _dtype(config))


def scales(slots: Mapping[str, Slot], name: str) -> tuple[Array, float | None]:
    """Return (scales of a weight, static scale of its inputs or None).

    Raises:
        ValueError: If they are missing, or are not floats.
    """
    module = name.removesuffix("weight")
    found = [slots[module + s] for s in _SCALES if module + s in slots]
    outer = slots.get(module + _OUTER)
    narrow = () if outer is None else ("F8_E4M3",)
    allowed = ("F32", "BF16", "F16", *narrow)
    if len(found) != 1 or found[0].dtype not in allowed:
        raise ValueError(
            f"A weight in float8 has no scale. Received: {name!r}. Allowed: "
            f"one of {module}weight_scale and {module}weight_scale_inv, in "
            "floating point, beside it. Export the model again."
        )
    scale = found[0].read().astype("float32")
    if outer is not None:
        scale = scale / outer.read().astype("float32").reshape(())
    inputs = slots.get(f"{module}input_scale")
    if inputs is None:
        return scale, None
    return scale, float(inputs.read().astype("float32").reshape(-1)[0])


def _compressed_tensors(quantization: Any) -> FrozenKernels:
    if quantization["quantization_status"] != "compressed":
        raise ValueError("not compressed")
    (group,) = quantization["config_groups"].values()
    weights, inputs = group["weights"], group.get("input_activations")
    stored_as = _numbers(weights)
    per, form = weights["strategy"], "float32"
    if per == "group" or (per == "tensor_group" and stored_as == _NVFP4):
        form = E4M3 if per == "tensor_group" else form
        per = f"group{weights['group_size']}"
    if weights.get("dynamic") or group["targets"] != ["Linear"]:
        raise ValueError("other weights")
    if weights["strategy"] == "block":
        _check_block(weights["block_structure"])
    activations = None
    if inputs is not None and not quantization.get("dequantize"):
        if _numbers(inputs) != _INPUTS[weights["type"]]:
            raise ValueError("other inputs")
        kind = inputs["strategy"], bool(inputs.get("dynamic"))
        activations = {("token", True): "dynamic", ("tensor", False): "static"}[
            kind
        ]
    if stored_as == _NVFP4 and form != E4M3:
        raise ValueError("other groups")
    return FrozenKernels(
        weights=stored_as, per=per, activations=activations, scale_format=form
    )


def _fp8(quantization: Any) -> FrozenKernels:
    if quantization.get("weight_block_size") is None:
        return FrozenKernels(per="tensor")
    _check_block(quantization["weight_block_size"])
    return FrozenKernels(per="block")


_RECIPES = {"compressed-tensors": _compressed_tensors, "fp8": _fp8}


_NUMBERS = {
    ("float", 8): "float8_e4m3fn",
    ("int", 8): "int8",
    ("int", 4): "int4",
    ("float", 4): "float4_e2m1fn",
}

_NVFP4 = _NUMBERS["float", 4]

_INPUTS = {"float": "float8_e4m3fn", "int": "int8"}
"""The format of inputs beside weights of a type."""


def _numbers(scheme: Any) -> str:
    """Return the format of the numbers that a scheme describes, or raise."""
    if not scheme.get("symmetric", True):
        raise ValueError("zero points")
    return _NUMBERS[scheme["type"], scheme["num_bits"]]


def _check_block(sizes: Any) -> None:
    if list(sizes) != [BLOCK, BLOCK]:
        raise ValueError("other blocks")


def _dtype(config: Any) -> str:
    text = config.get("text_config") or config
    for found in (config, text):
        dtype = found.get("torch_dtype") or found.get("dtype")
        if dtype in _DTYPES:
            return str(dtype)
    return "float32"


def _wrong(place: pathlib.Path, found: str) -> ValueError:
    return ValueError(
        "The model in this folder has no kernels that can be read. "
        f"Received: {str(place)!r} with {found}. Allowed: the "
        "quantization_config of compressed-tensors in float8 e4m3 (per "
        "channel, tensor or block of 128x128; inputs not quantized, by token, "
        "or static by tensor) or in int8 and int4 (per channel or group of "
        "32, 64 or 128; inputs not quantized, or by token in int8) or in "
        "NVFP4 with inputs that are not quantized, or of 'fp8' (blocks of "
        "128x128, or per tensor). To read a model in floats, call "
        "`keras_hub.models.CausalLM.from_preset`."
    )


Hook = Callable[[Array, list[int]], Array]


def load(path: str | os.PathLike[str], dtype: str | None) -> keras.Model:
    """Load a quantized Hugging Face folder as a model; see `load_quantized`."""
    place = pathlib.Path(path)
    folder = QuantizedFolder.read(place)
    slots = unpacked(safetensors_files.read_folder(place), folder.recipe)
    folder = dataclasses.replace(folder, recipe=_held(folder.recipe, slots))
    converter = hub.Converter(place, folder.config)

    def freeze(layer: keras.Layer) -> None:
        form = _form(layer)
        if form and kernels_to_store(layer, form):
            source = source_policy_of(layer).name
            policy = Float8DTypePolicy(source, recipe=folder.recipe)
            to_float8_class(layer, policy)

    numbers = sum(math.prod(slot.shape) for slot in slots.values())
    with (
        input_files.within_memory_of(place, numbers),
        calls.after_each_build(freeze, _is_to_be_frozen),
    ):
        backbone = converter.make_backbone(dtype or folder.dtype)
    codes = "I8" if folder.recipe.has_integers else "F8_E4M3"
    codes = _CODES if folder.recipe.weights == _NVFP4 else codes
    asked = _Asked(backbone, slots, codes)
    converter.port(asked.stand_in, asked)
    asked.check_all()
    thawed = _thawed(backbone, asked)
    for port in asked.ports:
        variable = thawed.get(id(port.variable), port.variable)
        _fill(variable, port, slots, tile_of(folder.recipe.per))
    return hub.language_model_of(backbone)


@dataclasses.dataclass(frozen=True)
class _PackedSlot(Slot):
    """A matrix of int8, several in an int32 of a file."""

    bits: int

    def read(self) -> Array:
        """Return the matrix; only this one is in memory."""
        rows, columns = self.shape
        words = rows, -(-columns // (32 // self.bits))
        packed = Slot(self.path, "I32", words, self.start).read()
        return np.asarray(readers.unpacked(packed, columns, self.bits))


_CODES = "U8"
"""The dtype of tensors with two codes of e2m1fn in a byte."""


class _PackedFloats(Slot):
    """A matrix of e2m1fn, two in a byte of a file."""

    def read(self) -> Array:
        """Return the matrix; only this one is in memory."""
        size = math.prod(self.shape) // 2
        packed = Slot(self.path, _CODES, (size,), self.start).read()
        codes = unpack(packed, self.shape, _NVFP4)
        return codes.view(formats.get(_NVFP4).dtype)


def _held(recipe: FrozenKernels, slots: Mapping[str, Slot]) -> FrozenKernels:
    """Return a recipe whose format of scales has those of a folder.

    Other programs write scales of NVFP4 that are not e4m3fn numbers times a
    power of two. The format is float32 then.
    """
    for name in slots:
        if name.endswith("." + _OUTER):
            scale, _ = scales(slots, name.removesuffix(_OUTER) + "weight")
            if not np.array_equal(rounded_scales(scale, E4M3), scale):
                return dataclasses.replace(recipe, scale_format="float32")
    return recipe


_PACKED, _SHAPE = "weight_packed", "weight_shape"


def unpacked(
    slots: Mapping[str, Slot], recipe: FrozenKernels
) -> Mapping[str, Slot]:
    """Return tensors, with those of packed codes as matrices of int8.

    Raises:
        ValueError: If a packed tensor does not fit its shape.
    """
    found = dict(slots)
    for name in [each for each in slots if each.endswith("." + _PACKED)]:
        module, packed = name.removesuffix(_PACKED), found.pop(name)
        if recipe.weights == _NVFP4:
            found[module + "weight"] = _floats(name, packed)
            continue
        of_shape = found.pop(module + _SHAPE, None)
        shape = () if of_shape is None else tuple(of_shape.read().tolist())
        bits = formats.get(recipe.weights).bits
        is_matrix = len(shape) == 2 and recipe.has_integers
        words = is_matrix and (shape[0], -(-shape[1] // (32 // bits)))
        if packed.dtype != "I32" or packed.shape != words:
            raise ValueError(
                "A packed weight does not fit its shape. Received: "
                f"{name!r}, {packed.dtype} of shape {packed.shape}, and "
                f"{_SHAPE} {shape}. Allowed: I32, with the numbers of each row "
                "of a matrix. Copy the folder again, or export it again."
            )
        found[module + "weight"] = _PackedSlot(
            packed.path, "I8", shape, packed.start, bits
        )
    return found


def _floats(name: str, packed: Slot) -> Slot:
    """Return a packed tensor as the matrix of its e2m1fn numbers, or raise."""
    if packed.dtype != _CODES or len(packed.shape) != 2:
        raise ValueError(
            "A packed weight of NVFP4 is no matrix of bytes. Received: "
            f"{name!r}, {packed.dtype} of shape {packed.shape}. Allowed: U8, "
            "with the numbers of each row of a matrix. Copy the folder again, "
            "or export it again."
        )
    rows, columns = packed.shape
    return _PackedFloats(packed.path, _CODES, (rows, 2 * columns), packed.start)


def _form(layer: keras.Layer) -> Any:
    """Return the class that `freeze` would give a layer, or None."""
    if isinstance(layer, keras.layers.Embedding):
        return None  # Folders have them in floats.
    return form_to_freeze(layer)


def _is_to_be_frozen(layer: keras.Layer, name: str | None) -> bool:
    """Return True if a weight that a layer is adding will be frozen."""
    return name in (getattr(_form(layer), "float8_kernels", None) or ())


def _thawed(backbone: keras.Model, asked: _Asked) -> dict[int, Any]:
    """Thaw layers with kernels in floats; return new kernels by old ids."""
    wide = {id(port.variable) for port in asked.ports if not port.has_codes}
    found: dict[int, Any] = {}
    for layer in frozen_layers(backbone):
        before = {v.name: id(v) for v in stored_in(layer)}
        if wide.isdisjoint(before.values()):
            continue
        to_stock_class(layer)
        own = {v.name: v for v in own_weights(layer)}
        found.update({place: own[name] for name, place in before.items()})
    for layer in survey(backbone).composites:
        enter_float8_with_children(layer)
    declare_policies(backbone)
    return found


@dataclasses.dataclass(frozen=True)
class _Port:
    """A tensor of the folder, and the variable that it is loaded into.

    Attributes:
        variable: The variable of the new model.
        name: The name of the tensor.
        hook: Converts the tensor to the shape of the variable.
        has_codes: Whether the tensor has codes, in float8 or of integers.
    """

    variable: keras.Variable
    name: str
    hook: Hook
    has_codes: bool


class _Asked:
    """Records which tensor KerasHub's converter assigns to which variable.

    Args:
        backbone: The model that the tensors are for.
        slots: The tensors of the folder.
        codes: The dtype of those that are codes.
    """

    safetensor_config = None
    """None, so that KerasHub does not compare ported tensors with a list."""

    def __init__(
        self, backbone: keras.Model, slots: Mapping[str, Slot], codes: str
    ) -> None:
        self._slots, self._codes = slots, codes
        self._symbols = Symbols()
        self.stand_in = self._symbols.stand_in(backbone)
        self.ports: list[_Port] = []

    def get_tensor(self, name: str) -> Array:
        """Read a tensor of the folder, for KerasHub's converter."""
        return self._slots[self._name(name)].read()

    def port_weight(
        self, keras_variable: Any, hf_weight_key: str, hook_fn: Any = None
    ) -> None:
        """Record that a tensor is the value of a variable; no value is read.

        Args:
            keras_variable: The symbolic tensor of the variable.
            hf_weight_key: The name of the tensor, or the end of it.
            hook_fn: Converts the tensor to the shape of the variable.
        """
        (variable,) = self._symbols.variables(keras_variable)
        name = self._name(hf_weight_key)
        hook: Hook = hook_fn or (lambda value, shape: value)
        has_codes = self._slots[name].dtype == self._codes
        self.ports.append(_Port(variable, name, hook, has_codes))

    def check_all(self) -> None:
        """Raise if a kernel of the folder belongs to no variable."""
        ported = {port.name for port in self.ports}
        left = [
            name
            for name, slot in self._slots.items()
            if slot.dtype == self._codes
            and name not in ported
            # Layers that predict several tokens, which KerasHub has not.
            and not name.startswith("mtp.")
        ]
        if left:
            raise ValueError(
                "The model that KerasHub makes from this folder lacks some of "
                f"its kernels. Received: {len(left)} kernels without a place "
                f"in the model, such as {left[0]!r}. Allowed: a folder whose "
                "whole architecture KerasHub supports. Read it with "
                "transformers."
            )

    def _name(self, wanted: str) -> str:
        """Return the full name of a tensor, which may have a prefix."""
        if wanted in self._slots:
            return wanted
        ends = [n for n in self._slots if n.endswith(f".{wanted}")]
        if not ends:
            raise ValueError(
                "This folder lacks a weight of the model. Received: no "
                f"tensor {wanted!r}. Allowed: a folder with every tensor of "
                "the model that config.json describes. Copy the folder "
                "again, or export it again."
            )
        return min(ends, key=len)


def _fill(
    variable: keras.Variable,
    port: _Port,
    slots: Mapping[str, Slot],
    tile: tuple[int, int] | None,
) -> None:
    """Assign a tensor of the folder, as values or codes, to a variable.

    `tile` is what has a scale, or None for a row or all.
    """
    value = slots[port.name].read()
    shape = list(variable.shape)
    if not port.has_codes:
        if value.dtype.kind not in "biu":
            value = value.astype("float32")
        variable.assign(_hooked(value, port, shape))
        return
    scale, inputs_scale = scales(slots, port.name)
    if not isinstance(variable, StoredVariable):
        value = value.astype("float32") * _spread(scale, value.shape, tile)
        variable.assign(_hooked(value, port, shape))
        return
    bits = value.view("uint8")
    codes = _hooked(bits, port, shape)
    stored = StoredKernel(
        codes=codes,
        scale=_scale_of(variable, bits, codes, scale, port.hook),
        weights=variable.weights,
        granularity=variable.granularity,
        axes=variable.axes,
        scale_format=variable.recipe.scale_format,
    )
    variable.take(stored, inputs_scale)


def _hooked(value: Array, port: _Port, shape: list[int]) -> Array:
    """Convert a tensor to its variable's shape, by KerasHub's function."""
    try:
        made = np.asarray(port.hook(value.view(_Kept), shape), order="C")
    except (IndexError, ValueError) as error:
        raise _misshapen(port.name, value.shape, shape) from error
    if list(made.shape) != shape:
        raise _misshapen(port.name, value.shape, shape)
    return made


class _Kept(np.ndarray[Any, Any]):
    """An array whose `astype` returns the array itself."""

    # KerasHub's converter for Mistral casts each tensor to float16.

    def astype(self, *args: Any, **kwargs: Any) -> Any:
        """Return the array itself, whatever dtype is requested."""
        return self


def _scale_of(
    variable: StoredVariable,
    bits: Array,
    hooked: Array,
    scale: Array,
    hook: Hook,
) -> Array:
    """Convert scales of a file to the shape of the kernel's, or raise."""
    shape, axes = tuple(variable.shape), variable.axes
    wanted = scale_shape(shape, axes, variable.granularity)
    columns, rows = axes.sizes(shape)
    same = bits.shape == (rows, columns) and np.array_equal(
        hooked, of_matrix(bits, shape, axes)
    )
    if tile_of(variable.granularity) is not None:
        if same and scale.shape == wanted:
            return scale
    elif scale.size == 1:
        tensor = np.full((1,) * len(shape), scale.reshape(()), "float32")
        return np.broadcast_to(tensor, wanted)
    elif same and scale.shape == (rows, 1):
        return of_matrix(scale, wanted, axes)
    elif not same:
        # As in GPT-2: give each element its scale, and reorder these likewise.
        spread = np.asarray(hook(_spread(scale, bits.shape), list(shape)))
        matrix = as_matrix(spread, axes)
        if np.all(matrix == matrix[:, :1]):
            return of_matrix(matrix[:, :1], wanted, axes)
    raise ValueError(
        "The scales of a kernel have the wrong shape. Received: scales of "
        f"shape {scale.shape} for a tensor {bits.shape}, per "
        f"{variable.granularity}. Allowed: {wanted} for the kernel {shape}. "
        "Export the model again."
    )


def _spread(
    scale: Array, shape: tuple[int, ...], tile: tuple[int, int] | None = None
) -> Array:
    """Return the scale of each element: that of its row, or of its tile."""
    if tile is not None:
        return spread_blocks(scale, shape, tile)
    return np.broadcast_to(scale, shape)


def _misshapen(
    name: str, received: tuple[int, ...], allowed: list[int]
) -> ValueError:
    return ValueError(
        f"A tensor does not fit the model. Received: {name!r} of shape "
        f"{received}. Allowed: a tensor for a weight of shape {allowed}. The "
        "config.json of this folder belongs to another model; copy the whole "
        "folder again."
    )
