"""What a file says of a float8 layer: one reader, by the schema of `entries`.

Each entry is checked when it is asked for: a layer that needs no scales accepts
damaged ones. The functions `..._for_file` are the inverse.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import ml_dtypes
import numpy as np

from keras_policy_ext import formats
from keras_policy_ext.files import entries, input_files
from keras_policy_ext.files.entries import FROZEN, STATE, Group
from keras_policy_ext.policies import Float8DTypePolicy
from keras_policy_ext.policies.float8 import of_file
from keras_policy_ext.recipes import FrozenKernels
from keras_policy_ext.stored_kernels import (
    E4M3,
    Axes,
    StoredKernel,
    are_codes,
    rounded_scales,
    scale_dtype,
    scale_shape,
    unpack,
)


class SavedState(Group):
    """The group of a float8 state in a file."""

    @classmethod
    def of(cls, store: Mapping[str, Any], path: str) -> SavedState:
        """Read all entries of a group; none if the file has no group."""
        keys, read = sorted(store.keys()), input_files.array_in
        arrays = {key: read(path, store[key]) for key in keys}
        return cls(schema=STATE, path=path, store=arrays)

    def policy(self, source: keras.DTypePolicy) -> Float8DTypePolicy | None:
        """Return the policy that the layer was saved under, or None.

        A file may have the recipe only, to which `source` is added.

        Raises:
            ValueError: If the entry is damaged, or names no float8 policy.
        """
        if recipe := self.text(entries.RECIPE):
            return Float8DTypePolicy(source, recipe=recipe)
        name, cause = self.text(entries.POLICY), ""
        if not name:
            return None
        try:
            policy = of_file(name)
            if isinstance(policy, Float8DTypePolicy):
                return policy  # Any other policy is refused below.
        except (TypeError, ValueError) as error:
            cause = f" Cause: {error}"
        allowed = "full names of float8 policies, as in `policy.full_name`"
        raise ValueError(self._unknown("a policy", name, allowed) + cause)

    @property
    def attention(self) -> str:
        """The argument `attention` of an attention layer; "" if missing."""
        mode = self.text(entries.ATTENTION)
        if mode not in ("", "float8"):
            text = self._unknown("an attention mode", mode, "float8")
            raise ValueError(text)
        return mode

    def text(self, key: str) -> str:
        """Return a string that the file has about the layer; "" if missing."""
        if key not in self.store:
            return ""
        self.check_own_version()
        text = self.read(key)
        try:
            return text.tobytes().decode()
        except UnicodeDecodeError as error:
            fault = f"{key!r} is {text.dtype} and no UTF-8"
            raise self.damaged(fault) from error

    def check_own_version(self) -> None:
        """Raise ValueError if a newer version of this package wrote it."""
        self.check_version(int(self.read(entries.VERSION)))

    def _unknown(self, what: str, value: str, allowed: str) -> str:
        """Return the message for a value that this version does not know."""
        layer = self.path.removesuffix(f"/{entries.GROUP}")
        return (
            f"Layer {layer!r} was saved under {what} that this version of "
            f"keras_policy_ext does not know. Received: {value!r}. Allowed: "
            f"{allowed}. Update keras_policy_ext, or load the weights without "
            "float8, as Keras does: `keras.saving.load_model` or "
            "`model.load_weights`."
        )


def state_for_file(
    texts: Mapping[str, str], memory: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return the entries of a layer's state: strings, and what it remembers."""
    arrays: dict[str, np.ndarray] = {}
    if texts or memory:
        arrays[entries.VERSION] = np.array(STATE.version, "int32")
    for key, text in texts.items():
        arrays[key] = np.frombuffer(text.encode(), "uint8")
    return {**arrays, **memory}


def is_float8_layer(group: Any) -> bool:
    """Return True if an HDF5 group is the state of a layer that contracts."""
    # A layer contracts if `convert` gave it its policy (GIVEN), if its state
    # has a first kernel ("0."), or if it has weights. The state of a composite
    # such as attention has none of these; where the composite is frozen, its
    # group of weights holds a header alone.
    is_state = group.name.endswith(f"/{entries.GROUP}/vars")
    if not is_state or entries.VERSION not in group:
        return False
    if entries.GIVEN in group or any(key.startswith("0.") for key in group):
        return True
    layer = group.parent.parent
    return "vars" in layer and bool(set(layer["vars"]) - {entries.HEADER})


def is_frozen(store: Mapping[str, Any]) -> bool:
    """Return True if a group has the weights of a frozen layer."""
    return entries.HEADER in store


@dataclasses.dataclass(frozen=True)
class FrozenWeights(Group):
    """The group of a frozen layer's weights in a file."""

    recipe: FrozenKernels  # How kernels are stored.
    names: list[str]  # The names of the weights, in order.
    # The summed axes of each kernel, by name.
    summed: Mapping[str, tuple[int, ...]]
    lora: Mapping[str, Any] | None  # Rank and alpha of LoRA; None without.
    # The shapes of kernels, by name, if their codes are packed.
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, store: Mapping[str, Any], path: str) -> FrozenWeights:
        """Read the header of a group; raise ValueError if it cannot be read."""
        group = Group(schema=FROZEN, path=path, store=store)
        header = _header_of(group)
        group.check_version(header["version"])
        try:
            header.setdefault("shapes", {})  # Of codes that are not packed.
            for field, is_valid in entries.HEADER_FIELDS.items():
                if field not in header or not is_valid(header[field], header):
                    raise ValueError(f"{field!r} is {header.get(field)!r}")
            fields = ("weights", "per", "activations")
            # Older files have scales in float32 alone.
            in_format = {"scale_format": header.get("scale_format", "float32")}
            how = {key: header[key] for key in fields}
            recipe = FrozenKernels(**how, **in_format)
        except (ValueError, KeyError, TypeError) as error:
            raise group.damaged(f"in {entries.HEADER!r}: {error}") from error
        summed, shapes = (
            {key: tuple(sizes) for key, sizes in header[field].items()}
            for field in ("summed", "shapes")
        )
        names, lora = header["names"], header["lora"]
        return cls(FROZEN, path, store, recipe, names, summed, lora, shapes)

    def array(self, name: str) -> np.ndarray:
        """Return a weight that is no kernel; bfloat16 becomes float32."""
        item = self.item(name)
        # HDF5 has no bfloat16: Keras stores two bytes, and an attribute.
        if getattr(item, "attrs", {}).get("dtype") == "bfloat16":
            array = np.array(item, "V2").view(ml_dtypes.bfloat16)
            return array.astype("float32")
        return np.asarray(item)

    def kernel(self, name: str) -> StoredKernel:
        """Return the codes and scales of a kernel; ValueError for damage."""
        recipe, summed = self.recipe, self.summed[name]
        codes = self._codes(name)
        free = tuple(axis for axis in range(codes.ndim) if axis not in summed)
        if len(summed) + len(free) != codes.ndim:
            fault = f"{name!r} has {codes.ndim} axes, and sums over {summed}"
            raise self.damaged(fault)
        axes = Axes(summed, free)
        scale = self._scale(name)
        if scale.shape != scale_shape(codes.shape, axes, recipe.per):
            raise self.damaged(f"the scale of {name!r} is {scale.shape}")
        stored = StoredKernel(
            codes=codes,
            scale=scale,
            weights=recipe.weights,
            granularity=recipe.per,
            axes=axes,
            scale_format=recipe.scale_format,
        )
        if not are_codes(codes, recipe.weights):
            has_nan = formats.get(recipe.weights).nan_codes
            fault = "of NaN" if has_nan else "out of range"
            raise self.damaged(f"{name!r} has codes {fault}")
        return stored

    def _scale(self, name: str) -> np.ndarray:
        """Return the scales of a kernel, float32."""
        if self.recipe.scale_format == "float32":
            return self.read(entries.CODES_SCALE, name=name)
        codes = self.read(entries.CODES_OF_SCALE, name=name)
        dtype = scale_dtype(self.recipe.scale_format)
        if codes.dtype.itemsize == dtype.itemsize:
            scale = np.asarray(codes.view(dtype).astype("float32"))
            if self.recipe.scale_format == E4M3:
                scale = scale * self.read(entries.OUTER_SCALE, name=name)
            if np.all(np.isfinite(scale) & (scale > 0)):
                again = rounded_scales(scale, self.recipe.scale_format)
                if np.array_equal(again, scale):
                    return scale
        raise self.damaged(
            f"the scale of {name!r} is {codes.dtype}, not in {dtype.name}"
        )

    def _codes(self, name: str) -> np.ndarray:
        """Return the codes of a kernel in its shape, one a byte."""
        codes, weights = (
            self.read(entries.CODES, name=name),
            self.recipe.weights,
        )
        count = formats.get(weights).numbers_per_byte
        if count == 1:
            return codes
        shape = self.shapes.get(name)
        if shape is None:
            raise self.damaged(
                f"{entries.HEADER!r} lacks the shape of {name!r}"
            )
        if codes.shape != (-(-math.prod(shape) // count),):
            raise self.damaged(
                f"{name!r} has {codes.shape} bytes for the shape {shape}"
            )
        return unpack(codes, shape, weights)


def _header_of(group: Group) -> dict[str, Any]:
    """Parse the header of a group; the version in it is an integer."""
    text = group.read(entries.HEADER).tobytes()
    try:
        header = input_files.json_in(text, group.path)
        if type(header["version"]) is int and header["version"] >= 1:
            return dict(header)
        fault = f"'version' is {header['version']!r}"
    except (ValueError, KeyError, TypeError) as error:
        fault = str(error)
    raise group.damaged(f"{entries.HEADER!r} cannot be read: {fault}")


def dequantize(group: Any) -> None:
    """Rewrite a frozen layer's HDF5 group with float weights, LoRA merged in.

    Kernels get the values that `thaw` gives them. Nothing happens if a group is
    that of another layer.
    """
    if not is_frozen(group):
        return
    frozen = FrozenWeights.of(group, group.name)
    kernels: list[Any] = []
    others: list[Any] = []
    adapters: list[Any] = []
    for name in frozen.names:
        if name in frozen.summed:  # The header has axes of kernels alone.
            kernels.append(frozen.kernel(name).dequantized())
        else:
            into = adapters if name.startswith("lora_") else others
            into.append(frozen.array(name))
    if frozen.lora:  # It adapts the first kernel, or the embeddings.
        a, b = adapters
        scale = frozen.lora["alpha"] / frozen.lora["rank"]
        kernels[0] = kernels[0] + scale * (a @ b)
    for key in list(group):
        del group[key]
    # As Keras saves a layer: weights by number, the kernels first.
    for number, value in enumerate([*kernels, *others]):
        group[str(number)] = value


def header_for_file(
    recipe: FrozenKernels,
    names: Sequence[str],
    summed: Mapping[str, Sequence[int]],
    lora: Mapping[str, Any] | None,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> np.ndarray:
    """Return the header of a frozen layer, JSON in bytes, for a file.

    `names` are those of all weights; `summed` has, by kernel, the axes that a
    matmul sums over; `lora` the rank and alpha of adapters, or None.
    `shapes` has the shapes of kernels if their codes are packed.
    """
    header = {
        "version": FROZEN.version,
        "weights": recipe.weights,
        "per": recipe.per,
        "activations": recipe.activations,
        "names": names,
        "summed": summed,
        "lora": lora,
        **({} if shapes is None else {"shapes": shapes}),
    }
    if recipe.scale_format != "float32":
        header["scale_format"] = recipe.scale_format
    return np.frombuffer(json.dumps(header).encode(), "uint8")
