"""What the programs that load Hugging Face folders accept, by format.

Taken from the sources of transformers 5.23 and compressed-tensors 0.20, and
tested with both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from keras_policy_ext import formats
from keras_policy_ext.ext.export import exported_kernels
from keras_policy_ext.ext.export.exported_kernels import Scheme
from keras_policy_ext.stored_kernels import BLOCK, E4M3, tile_of

COMPRESSED_TENSORS, FP8, MODELOPT = "compressed-tensors", "fp8", "modelopt"

CONV1D = frozenset({"GPT2Backbone"})
"""Families whose matrices are `Conv1D` of transformers, not `Linear`, and
transposed."""

USUAL = {
    COMPRESSED_TENSORS: exported_kernels.USUAL,
    FP8: Scheme(
        weights="float8_e4m3fn", granularity="block", activations="dynamic"
    ),
    MODELOPT: Scheme(
        weights="float8_e4m3fn", granularity="tensor", activations="static"
    ),
}
"""The defaults of each format, if no kernel is frozen."""


@dataclasses.dataclass(frozen=True)
class Reader:
    """The programs that load one export format, and what they accept.

    Attributes:
        format: The name of the format.
        family: The class of the backbone in KerasHub.
        scheme: How kernels are stored.
    """

    format: str
    family: str
    scheme: Scheme

    @property
    def transposed(self) -> bool:
        """True if the programs expect matrices of shape (in, out)."""
        return self.family in CONV1D

    @property
    def granularity(self) -> str:
        """The granularity of the scales, one of `GRANULARITIES`."""
        return "channel" if self.transposed else self.scheme.granularity

    @property
    def has_integers(self) -> bool:
        """True if codes are integers."""
        return self.scheme.weights in _BITS

    @property
    def packs(self) -> bool:
        """True if codes are integers, packed into int32.

        Where inputs are quantized too, each is one int8 (`int-quantized`).
        """
        return self.has_integers and self.scheme.activations is None

    @property
    def is_nvfp4(self) -> bool:
        """True if two codes of e2m1fn are in a byte (`nvfp4-pack-quantized`).

        16 of them have a scale in e4m3fn, divided by one number of the folder.
        """
        return self.scheme.weights == "float4_e2m1fn"

    @property
    def scale_name(self) -> str:
        """The last part of the name of a module's scales in the file."""
        return "weight_scale_inv" if self.format == FP8 else "weight_scale"

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for users about how programs will load the export."""
        if self.format == FP8:
            return (
                "fp8 has no form without quantized inputs: on a GPU the "
                "reader quantizes them in groups of 128, on a CPU never.",
            )
        if self.transposed:
            return (
                "The matrices of this model are no Linear of transformers. "
                "It dequantizes them while it loads; vLLM does not read them.",
            )
        return ()

    def check(self) -> None:
        """Raise if programs that load this format do not support the scheme."""
        scheme = self.scheme
        if self.transposed:
            self._check_transposed()
        weights = _weights_of(self)
        if scheme.weights not in weights:
            listed = ", ".join(map(repr, weights))
            raise _refused(self, f"weights={scheme.weights!r}", listed)
        allowed = _GRANULARITIES[self.format]
        if self.has_integers or self.is_nvfp4:
            allowed = _OF_INTEGERS if self.has_integers else ("group16",)
        if self.transposed:
            allowed = tuple(g for g in allowed if g != "block")
        if scheme.granularity not in allowed:
            listed = ", ".join(map(repr, allowed))
            raise _refused(self, f"granularity={scheme.granularity!r}", listed)
        self._check_inputs()

    def check_scales(self, formats: Iterable[str]) -> None:
        """Raise if programs do not read scales that are in these formats."""
        wrong = sorted(set(formats) - {E4M3}) if self.is_nvfp4 else []
        if wrong:
            raise _refused(self, f"scale_format={wrong[0]!r}", repr(E4M3))

    def _check_transposed(self) -> None:
        inputs = self.scheme.activations
        if self.format != COMPRESSED_TENSORS:
            raise _refused(
                self,
                f"a {self.family}, whose matrices are Conv1D, which the "
                "reader takes for numbers that are not quantized",
                "format='compressed-tensors', or format='safetensors'",
            )
        if inputs is not None:
            raise _refused(
                self,
                f"activations={inputs!r} for a {self.family}, whose matrices "
                "are Conv1D, the inputs of which are not quantized",
                "activations=None",
            )

    def _check_inputs(self) -> None:
        inputs = self.scheme.activations
        if self.is_nvfp4 and inputs is not None:
            given = f"activations={inputs!r} beside {self.scheme.weights}"
            raise _refused(self, given, "activations=None")
        if self.has_integers and inputs == "static":
            raise _refused(
                self,
                f"activations='static' beside {self.scheme.weights}",
                "'dynamic' or None",
            )
        if self.format == FP8 and inputs == "static":
            raise _refused(self, "activations='static'", "'dynamic' or None")
        if self.format == MODELOPT and inputs != "static":
            raise _refused(
                self,
                f"activations={inputs!r}",
                "'static', with granularity='tensor'; "
                "`kpe.freeze(model, granularity='tensor', "
                "activations='static')` makes such a model",
            )

    def why_float(self, rows: int, columns: int) -> str | None:
        """Return why a matrix of these sizes stays in float, or None."""
        if self.has_integers or self.is_nvfp4:
            return self._why_not_grouped(columns)
        if self.format != FP8 or self.scheme.granularity != "block":
            return None
        wrong = [s for s in (rows, columns) if s > BLOCK and s % BLOCK]
        if not wrong:
            return None
        return f"the reader would misread blocks of {wrong[0]} numbers"

    def _why_not_grouped(self, columns: int) -> str | None:
        """Return why a matrix with so many inputs stays in float, or None."""
        _, group = tile_of(self.granularity) or (1, 1)
        if columns % group == 0:
            return None
        return f"the reader wants whole groups of {group} of its {columns}"

    def packed(self, codes: Any) -> Any:
        """Return a matrix of codes as int32, the first in the lowest bits.

        `unpacked` is the inverse. Source: `pack_to_int32` of compressed-tensors
        0.20.
        """
        bits = _BITS[self.scheme.weights]
        count, offset = 32 // bits, 1 << (bits - 1)
        numbers = codes.view("int8").astype("int64") + offset
        numbers = np.pad(numbers, [(0, 0), (0, -numbers.shape[1] % count)])
        rows = numbers.reshape(len(numbers), -1, count)
        words = (rows << (bits * np.arange(count))).sum(axis=2)
        return words.astype("uint32").view("int32")

    def packed_columns(self, columns: int) -> int:
        """Return how many int32 the codes of so many inputs take."""
        return -(-columns // (32 // _BITS[self.scheme.weights]))

    def config(self, ignore: Sequence[str]) -> dict[str, Any]:
        """Return the entry `quantization_config` for `config.json`."""
        if self.format == FP8:
            return self._fp8(list(ignore))
        return self._compressed_tensors(list(ignore))

    def _fp8(self, ignore: list[str]) -> dict[str, Any]:
        block = self.scheme.granularity == "block"
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK] if block else None,
            "modules_to_not_convert": ignore,
            "ignored_layers": ignore,
        }

    def _compressed_tensors(self, ignore: list[str]) -> dict[str, Any]:
        kind = "int" if self.has_integers else "float"
        number = {"num_bits": 8, "type": kind, "symmetric": True}
        weights = {**number, "strategy": self.granularity, "dynamic": False}
        weights["num_bits"] = formats.get(self.scheme.weights).bits
        if self.granularity == "block":
            weights["block_structure"] = [BLOCK, BLOCK]
        elif tile := tile_of(self.granularity):
            strategy = "tensor_group" if self.is_nvfp4 else "group"
            weights.update(strategy=strategy, group_size=tile[1])
        inputs = {
            None: None,
            "dynamic": {**number, "strategy": "token", "dynamic": True},
            "static": {**number, "strategy": "tensor", "dynamic": False},
        }[self.scheme.activations]
        form = "pack-quantized" if self.packs else f"{kind}-quantized"
        found: dict[str, Any] = {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized" if self.is_nvfp4 else form,
            "quantization_status": "compressed",
            "ignore": ignore,
            "kv_cache_scheme": None,
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": weights,
                    "input_activations": inputs,
                }
            },
        }
        return {**found, "dequantize": True} if self.transposed else found

    def further_files(self, ignore: Sequence[str]) -> dict[str, Any]:
        """Return the content of other JSON files to write, by file name."""
        if self.format != MODELOPT:
            return {}
        quantization = {
            "quant_algo": "FP8",
            "kv_cache_quant_algo": None,
            "exclude_modules": list(ignore),
        }
        return {
            "hf_quant_config.json": {
                "producer": {"name": "modelopt"},
                "quantization": quantization,
            }
        }


_BITS = {"int8": 8, "int4": 4}
"""The formats of integers that readers of compressed-tensors have."""

_OF_INTEGERS = ("channel", "group32", "group64", "group128")
"""What has a scale beside integers."""


def unpacked(words: Any, columns: int, bits: int) -> Any:
    """Return the matrix of int8 of which `Reader.packed` has made int32."""
    count, offset = 32 // bits, 1 << (bits - 1)
    shifts = np.arange(count, dtype="uint32") * np.uint32(bits)
    numbers = words.view("uint32")[:, :, None] >> shifts
    numbers = (numbers & np.uint32((1 << bits) - 1)).astype("int16") - offset
    return numbers.astype("int8").reshape(len(words), -1)[:, :columns]


def _weights_of(reader: Reader) -> tuple[str, ...]:
    """Return the formats of kernels that programs for a format read."""
    if reader.format == COMPRESSED_TENSORS and not reader.transposed:
        return "float8_e4m3fn", *_BITS, "float4_e2m1fn"
    return ("float8_e4m3fn",)


_GRANULARITIES = {
    COMPRESSED_TENSORS: ("channel", "tensor", "block"),
    FP8: ("block", "tensor"),
    MODELOPT: ("tensor",),
}


def _refused(reader: Reader, received: str, allowed: str) -> ValueError:
    return ValueError(
        f"format={reader.format!r} does not support this model. Received: "
        f"{received}. Allowed: {allowed}. Pass an allowed value, or another "
        "`format`. If the model is frozen with other arguments, call "
        "`keras_policy_ext.thaw`, and freeze the model again with allowed "
        "arguments."
    )
