"""Write model folders in the form of Hugging Face: configs and tensors."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from keras_policy_ext import formats
from keras_policy_ext._version import __version__
from keras_policy_ext.ext.export import _keras as hub
from keras_policy_ext.ext.export import exported_kernels, safetensors_files
from keras_policy_ext.ext.export._keras.symbolic import Symbols
from keras_policy_ext.ext.export.exported_kernels import ExportedKernel
from keras_policy_ext.ext.export.readers import Reader
from keras_policy_ext.ext.export.report import Written
from keras_policy_ext.ext.export.safetensors_files import (
    CODES,
    DTYPES,
    OneAtATime,
    Tensor,
)
from keras_policy_ext.stored_kernels import (
    E4M3,
    StoredKernel,
    pack,
    tile_of,
)

_ARCHITECTURES = {
    "gemma": "GemmaForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "qwen2": "Qwen2ForCausalLM",
}
"""Architectures of models for which KerasHub names none, or a wrong one."""

_DEFAULTS: dict[str, dict[str, Any]] = {
    # What KerasHub's own reader asks for.
    "qwen2": {"use_sliding_window": False, "sliding_window": None},
}

_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def complete(
    config: dict[str, Any], backbone: Any, dtype: str
) -> dict[str, Any]:
    """Complete the Hugging Face config that KerasHub makes for a backbone.

    Args:
        config: The config that KerasHub makes.
        backbone: The backbone of the config.
        dtype: The dtype of the weights that are not quantized.
    """
    found = {**_DEFAULTS.get(config.get("model_type", ""), {}), **config}
    if found.get("model_type") in ("gemma", "mistral"):
        # Left out, or worked out of other sizes.
        found["rms_norm_eps"] = backbone.layer_norm_epsilon
        found["head_dim"] = backbone.head_dim or found["head_dim"]
    if found.get("model_type") == "gemma4_text":
        # Set, it says that keys are values too; KerasHub always sets it.
        heads = backbone.num_global_key_value_heads
        found["num_global_key_value_heads"] = heads
        found["attention_k_eq_v"] = heads is not None
    found = _part(found, dtype)
    architecture = _ARCHITECTURES.get(found.get("model_type", ""))
    if architecture:
        found["architectures"] = [architecture]
    return found


def _part(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return a config with corrected dtypes and token ids, also inside it."""
    found: dict[str, Any] = {
        key: _part(value, dtype) if key.endswith("_config") else value
        for key, value in config.items()
    }
    size = found.get("vocab_size")
    # GPT-2's token is 50256 even if the vocabulary is smaller.
    for name in _TOKENS:
        if size is not None and (found.get(name) or 0) >= size:
            found[name] = None
    # KerasHub writes the name of a policy.
    return {**found, "torch_dtype": dtype}


Array = np.ndarray[Any, Any]

EMBEDDING = "the reader looks up its rows, or has it for logits"
HEAD_IN_FLOATS = (
    "The reader computes the logits in floats. Here their inputs are quantized "
    "too; leave the embeddings out of `freeze` and `convert` for the same."
)
_NO_LINEAR = "the reader has no Linear for it"
_WEIGHT = ".weight"


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor to write under a Hugging Face name, and how to compute it.

    Attributes:
        name: The Hugging Face name.
        result: A symbolic tensor, computed from the weights of the model.
        variables: The weights that it is computed from.
        kernels: The quantized kernels among the weights: all or none.
        reason: Why it is written in float; empty if it is quantized.
    """

    name: str
    result: Any
    variables: tuple[Any, ...]
    kernels: tuple[ExportedKernel, ...]
    reason: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return tuple(self.result.shape)

    @property
    def module(self) -> str:
        """The tensor's name without the ending ".weight"."""
        return self.name.removesuffix(_WEIGHT)


class Folder:
    """The tensors and configs of a Hugging Face folder, for one model.

    Args:
        backbone: A KerasHub backbone.
        found: Its kernels, by the id of their variables.
        reader: The reader that the folder is for.
    """

    def __init__(
        self,
        backbone: keras.Layer,
        found: dict[int, ExportedKernel],
        reader: Reader,
    ) -> None:
        self._backbone, self._found, self._reader = backbone, found, reader
        self._symbols = Symbols()
        self._owners = exported_kernels.owners(backbone)
        self._dtype = str(backbone.compute_dtype)
        self._code = CODES[self._dtype]
        self.entries = self._entries()

    def write(
        self, folder: pathlib.Path, shard_size: int, tokenizer: Any
    ) -> list[Written]:
        """Write all files of the folder; return a `Written` for each tensor."""
        written: list[Written] = []
        tensors: list[Tensor] = []
        for entry in self.entries:
            made = self._tensors(entry)
            tensors += made
            reader = self._reader
            packs = reader.has_integers or reader.is_nvfp4
            has_codes = packs and not entry.reason
            dtype = reader.scheme.weights if has_codes else None
            written.append(_written(entry, made, dtype))
        safetensors_files.write_shards(folder, tensors, shard_size)
        ignore = self.ignored()
        config = complete(
            hub.config(self._backbone, tokenizer), self._backbone, self._dtype
        )
        config["quantization_config"] = self._reader.config(ignore)
        config["keras_policy_ext_version"] = __version__
        files = {"config.json": config, **self._reader.further_files(ignore)}
        for name, content in files.items():
            text = json.dumps(content, indent=2) + "\n"
            (folder / name).write_text(text, "utf8")
        hub.write_generation_config(self._backbone, folder)
        if tokenizer is not None:
            hub.write_tokenizer(tokenizer, folder)
        return written

    def notes(self) -> tuple[str, ...]:
        """Return notes on what other programs will compute differently."""
        layers = [
            self._owners.get(id(variable))
            for entry in self.entries
            if entry.reason == EMBEDDING
            for variable in entry.variables
        ]
        if any(map(_quantizes_inputs, layers)):
            return (HEAD_IN_FLOATS,)
        return ()

    def ignored(self) -> list[str]:
        """Return the names of modules that the file lists as not quantized."""
        names = {
            entry.module
            for entry in self.entries
            if entry.reason not in ("", EMBEDDING)
            and entry.name.endswith(_WEIGHT)
            and len(entry.shape) == 2
        }
        # The files of a model of text and images name its text modules
        # `model.language_model.…`. Where a reader loads the text alone, they
        # are `model.…`.
        short = {name.replace(".language_model.", ".") for name in names}
        return sorted(names | short | {"lm_head"})

    def _entries(self) -> list[Entry]:
        mapped = hub.weight_map(self._backbone, self._symbols)
        by_result: dict[int, str] = {}
        for name, result in mapped.items():
            # A tied lm_head is the embeddings once more; it is not needed.
            by_result.setdefault(id(result), name)
        return [self._entry(name, mapped[name]) for name in by_result.values()]

    def _entry(self, name: str, result: Any) -> Entry:
        variables = tuple(self._symbols.variables(result))
        reason = self._reason(result, variables)
        kernels = [] if reason else [self._found[id(v)] for v in variables]
        return Entry(name, result, variables, tuple(kernels), reason or "")

    def _reason(
        self, result: Any, variables: Sequence[keras.Variable]
    ) -> str | None:
        """Return why a tensor is written in float; None if in float8."""
        owners = [self._owners.get(id(v)) for v in variables]
        if any(isinstance(layer, keras.layers.Embedding) for layer in owners):
            return EMBEDDING
        if any(id(variable) not in self._found for variable in variables):
            return exported_kernels.NO_KERNEL
        if len(result.shape) != 2:
            return _NO_LINEAR
        for variable in variables:
            kernel = self._found[id(variable)]
            columns, rows = kernel.axes.sizes(tuple(variable.shape))
            reason = kernel.left_out or self._reader.why_float(rows, columns)
            if reason:
                return reason
        return None

    def _tensors(self, entry: Entry) -> list[Tensor]:
        if entry.reason:
            return [
                Tensor(entry.name, self._code, entry.shape, self._float(entry))
            ]
        if self._reader.is_nvfp4:
            return self._nvfp4(entry)
        one = OneAtATime(lambda: self._stored(entry))
        shape = self._scale_shape(entry)
        made = [
            *self._codes(entry, one),
            Tensor(
                f"{entry.module}.{self._reader.scale_name}",
                "F32",
                shape,
                lambda: one.scales().reshape(shape),
            ),
        ]
        if self._reader.scheme.activations == "static":
            value = np.full((1,), entry.kernels[0].input_scale(), "float32")
            name = f"{entry.module}.input_scale"
            made.append(Tensor(name, "F32", (1,), lambda: value))
        return made

    def _codes(self, entry: Entry, one: OneAtATime) -> list[Tensor]:
        """Return the tensors of a kernel's codes."""
        reader = self._reader
        if not reader.packs:
            code = "I8" if reader.has_integers else "F8_E4M3"
            return [
                Tensor(
                    entry.name,
                    code,
                    entry.shape,
                    lambda: one.kernel().codes.view(DTYPES[code]),
                )
            ]
        rows, columns = entry.shape
        return [
            Tensor(
                f"{entry.module}.weight_packed",
                "I32",
                (rows, reader.packed_columns(columns)),
                lambda: reader.packed(one.kernel().codes),
            ),
            Tensor(
                f"{entry.module}.weight_shape",
                "I64",
                (2,),
                lambda: np.array(entry.shape, "int64"),
            ),
        ]

    def _nvfp4(self, entry: Entry) -> list[Tensor]:
        """Return the tensors of a kernel in NVFP4."""
        rows, columns = entry.shape
        places = rows, columns // 2

        def packed() -> Array:
            kernel = self._stored(entry)
            return pack(kernel.codes, kernel.weights).reshape(places)

        def divisor() -> Array:  # Of the scales, where ours is a factor.
            return np.full((1,), 1 / self._outer, "float32")

        def scales() -> Array:
            return self._scales_in_e4m3(entry.name, self._stored(entry))

        name, shape = entry.module, self._scale_shape(entry)
        return [
            Tensor(f"{name}.weight_packed", "U8", places, packed),
            Tensor(f"{name}.weight_scale", "F8_E4M3", shape, scales),
            Tensor(f"{name}.weight_global_scale", "F32", (1,), divisor),
        ]

    @functools.cached_property
    def _outer(self) -> np.float32:
        """The power of two for the scales of all matrices in NVFP4.

        vLLM joins matrices, such as those of queries, keys and values, and
        takes the number of one of them.
        """
        quantized = [entry for entry in self.entries if not entry.reason]
        return max(self._stored(entry).outer_scale for entry in quantized)

    def _scales_in_e4m3(self, name: str, kernel: StoredKernel) -> Array:
        """Return the scales as e4m3fn numbers times `_outer`, or raise."""
        numbers = kernel.scale / self._outer
        # The scale of a group of zeros may be any.
        is_read = np.any(kernel.codes.reshape(*numbers.shape, -1) & 7, axis=2)
        least = formats.get(E4M3).smallest_subnormal
        codes = np.maximum(numbers, least).astype(DTYPES["F8_E4M3"])
        if np.any(is_read & (codes.astype("float32") != numbers)):
            raise ValueError(
                "The scales of this kernel are too small beside those of "
                "others: a folder in NVFP4 has one factor for all. Received: "
                f"{name!r}. Allowed: scales that are exact in e4m3fn, divided "
                "by the largest of all kernels. Leave its layer, or that with "
                "the largest values, out with `exclude`."
            )
        return codes

    def _float(self, entry: Entry) -> Callable[[], Array]:
        def value_of(variable: keras.Variable) -> Array:
            layer = self._owners.get(id(variable))
            return exported_kernels.float_value(layer, variable)

        def make() -> Array:
            value = self._symbols.evaluate(entry.result, value_of)
            return value.astype(DTYPES[self._code])

        return make

    def _stored(self, entry: Entry) -> StoredKernel:
        """Return the quantized kernel for a tensor, which may join several."""
        scheme = self._reader.scheme
        parts = {id(k.variable): k.stored(scheme) for k in entry.kernels}
        codes = np.concatenate([part.matrix for part in parts.values()])
        codes = codes.T if self._reader.transposed else codes
        mapped = self._symbols.evaluate(
            entry.result, lambda variable: parts[id(variable)].codes
        )
        if not np.array_equal(mapped, codes):
            raise ValueError(
                "KerasHub writes this kernel in another order than its layer "
                f"uses it. Received: {entry.name!r}, of "
                f"{[k.path for k in entry.kernels]}. Allowed: a matrix of "
                "outputs by inputs. Leave the layer out with `exclude`, and "
                "report this with the version of KerasHub."
            )
        first = next(iter(parts.values()))
        scale = np.concatenate([self._rows_of(p) for p in parts.values()])
        return dataclasses.replace(first, codes=mapped, scale=scale)

    def _rows_of(self, part: StoredKernel) -> Array:
        """Return the scales of a kernel's matrix, in the file's granularity."""
        scale = part.matrix_scale
        if self._reader.granularity != "channel":
            return scale
        return np.broadcast_to(scale, (part.matrix.shape[0], 1))

    def _scale_shape(self, entry: Entry) -> tuple[int, ...]:
        granularity = self._reader.granularity
        if granularity == "tensor":
            return (1,)
        if tile := tile_of(granularity):
            sizes = zip(entry.shape, tile, strict=True)
            rows, columns = (-(-size // part) for size, part in sizes)
            return rows, columns
        if self._reader.transposed:
            return 1, entry.shape[1]
        return entry.shape[0], 1


def _quantizes_inputs(layer: keras.Layer) -> bool:
    """Return True if an embedding computes logits from quantized inputs."""
    policy = getattr(layer, "float8_policy", None)
    if policy is None or not isinstance(
        layer, keras.layers.ReversibleEmbedding
    ):
        return False
    return policy.recipe.quantization("inputs", "forward") is not None


def _written(
    entry: Entry, made: Sequence[Tensor], dtype: str | None = None
) -> Written:
    return Written(
        entry.name,
        ", ".join(variable.path for variable in entry.variables),
        entry.shape,
        dtype or str(DTYPES[made[0].dtype]),
        entry.reason,
        sum(tensor.nbytes for tensor in made),
    )
