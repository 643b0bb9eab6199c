"""How a folder of Hugging Face says that its kernels are in float8."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_policy_ext import _input_files
from keras_policy_ext.export.safetensors_files import OF_DAMAGE, Slot
from keras_policy_ext.recipes import FrozenKernels
from keras_policy_ext.stored_kernels import BLOCK

Array = np.ndarray[Any, Any]

_DTYPES = ("float32", "bfloat16", "float16")
_SCALES = ("weight_scale", "weight_scale_inv")


@dataclasses.dataclass(frozen=True)
class QuantizedFolder:
    """The config of a model, and how its kernels are stored.

    Attributes:
        config: `config.json`.
        recipe: What its kernels are frozen as.
        dtype: Of its other weights.
    """

    config: dict[str, Any]
    recipe: FrozenKernels
    dtype: str

    @classmethod
    def read(cls, folder: pathlib.Path) -> QuantizedFolder:
        """Read the config; no weight is read.

        Raises:
            FileNotFoundError: If there is no `config.json`.
            ValueError: If it is damaged, or says something else.
        """
        place = folder / "config.json"
        if not place.is_file():
            raise FileNotFoundError(
                "There is no model in Hugging Face's form here. Received: "
                f"{str(folder)!r}, without a config.json. Allowed: a folder "
                "with one. Check the path."
            )
        try:
            config = _input_files.json_in(place.read_bytes(), place)
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
    """The scales of a weight, and of its inputs if they are static.

    Raises:
        ValueError: If they are missing, or no float32.
    """
    module = name.removesuffix("weight")
    found = [slots[module + s] for s in _SCALES if module + s in slots]
    if len(found) != 1 or found[0].dtype not in ("F32", "BF16", "F16"):
        raise ValueError(
            f"A weight in float8 has no scale. Received: {name!r}. Allowed: "
            f"one of {module}weight_scale and {module}weight_scale_inv, in "
            "floating point, beside it. Export the model again."
        )
    scale = found[0].read().astype("float32")
    inputs = slots.get(f"{module}input_scale")
    if inputs is None:
        return scale, None
    return scale, float(inputs.read().astype("float32").reshape(-1)[0])


def _compressed_tensors(quantization: Any) -> FrozenKernels:
    if quantization["quantization_status"] != "compressed":
        raise ValueError("not compressed")
    (group,) = quantization["config_groups"].values()
    weights, inputs = group["weights"], group.get("input_activations")
    _check_numbers(weights)
    if weights.get("dynamic") or group["targets"] != ["Linear"]:
        raise ValueError("other weights")
    if weights["strategy"] == "block":
        _check_block(weights["block_structure"])
    activations = None
    if inputs is not None and not quantization.get("dequantize"):
        _check_numbers(inputs)
        kind = inputs["strategy"], bool(inputs.get("dynamic"))
        activations = {("token", True): "dynamic", ("tensor", False): "static"}[
            kind
        ]
    return FrozenKernels(per=weights["strategy"], activations=activations)


def _fp8(quantization: Any) -> FrozenKernels:
    if quantization.get("weight_block_size") is None:
        return FrozenKernels(per="tensor")
    _check_block(quantization["weight_block_size"])
    return FrozenKernels(per="block")


_RECIPES = {"compressed-tensors": _compressed_tensors, "fp8": _fp8}


def _check_numbers(scheme: Any) -> None:
    if (scheme["num_bits"], scheme["type"]) != (8, "float"):
        raise ValueError("no float8")
    if not scheme.get("symmetric", True):
        raise ValueError("zero points")


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
        "This folder is not of a model whose kernels are in float8. Received: "
        f"{str(place)!r} with {found}. Allowed: the quantization_config of "
        "compressed-tensors in float8 e4m3 (per channel, tensor or block of "
        "128x128; inputs not quantized, by token, or static by tensor), or of "
        "'fp8' (blocks of 128x128, or per tensor). A model of floats is read "
        "by `keras_hub.models.CausalLM.from_preset`."
    )
