"""Use KerasHub: its presets, its importer and its exporter."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from typing import Any

import keras

from keras_policy_ext._keras import versions, walking
from keras_policy_ext._keras.symbolic import Symbols

_EXPORTER = "keras_hub.src.utils.transformers.export.hf_exporter"


def is_hub_model(model: object) -> bool:
    """Return True if a model is a backbone or a task of KerasHub."""
    hub = sys.modules.get("keras_hub")
    return hub is not None and isinstance(
        model, (hub.models.Backbone, hub.models.Task)
    )


def is_causal_language_model(model: object) -> bool:
    """Return True if a task of KerasHub is a causal language model."""
    hub = sys.modules["keras_hub"]
    return isinstance(model, hub.models.CausalLM)


# By the class of a layer of KerasHub (0.32), the attribute with its router.
_ROUTERS = {
    "Gemma4Router": "proj",
    "GptOssTopKRouter": "router_dense",
    "MixtralSparseMoeBlock": "_sparse_feedforward_gate_dense",
    "Qwen3SparseMoeBlock": "_sparse_feedforward_gate_dense",
    "Qwen3_5MoeSparseMoeBlock": "_router_gate",
    "QwenSparseMoeBlock": "_sparse_feedforward_gate_dense",
}


def routers(model: keras.Layer) -> dict[int, str]:
    """Return the class with the experts by the `id` of each of its routers.

    There is no public way to ask a layer for its router. Of a class or an
    attribute that KerasHub has renamed, nothing is found.
    """
    if "keras_hub" not in sys.modules:
        return {}
    by_id = {}
    for layer in walking.layers_within(model):
        for base in type(layer).__mro__:
            library = base.__module__.partition(".")[0]
            if library == "keras_hub" and base.__name__ in _ROUTERS:
                router = getattr(layer, _ROUTERS[base.__name__], None)
                by_id[id(router)] = base.__name__
    return by_id


def families() -> list[str]:
    """Return the names of the backbone classes that KerasHub can export."""
    exporter = _exporter()
    return sorted(exporter.MODEL_EXPORTERS.keys() & exporter.MODEL_CONFIGS)


def family(backbone: keras.Layer) -> str | None:
    """Return the name in `families` of a backbone's class or base, or None."""
    names = [cls.__name__ for cls in type(backbone).__mro__]
    return next((name for name in names if name in families()), None)


def weight_map(backbone: keras.Layer, symbols: Symbols) -> dict[str, Any]:
    """Return, by Hugging Face weight name, the symbolic tensor to export."""
    write = _exporter().MODEL_EXPORTERS[family(backbone)]
    stand_in = symbols.stand_in(backbone)
    return dict(write(stand_in, include_lm_head=True))


def config(backbone: keras.Layer, tokenizer: Any = None) -> dict[str, Any]:
    """Return the `config.json` of Hugging Face for a backbone, as a dict."""
    write = _exporter().MODEL_CONFIGS[family(backbone)]
    has_head = "include_lm_head" in inspect.signature(write).parameters
    written = write(backbone, **({"include_lm_head": True} if has_head else {}))
    fields = dict(written.to_dict() if hasattr(written, "to_dict") else written)
    for key, name in (("bos", "start_token"), ("eos", "end_token")):
        token = getattr(tokenizer, name, None)
        if token is not None:
            fields[f"{key}_token_id"] = tokenizer.token_to_id(token)
    return fields


def write_tokenizer(tokenizer: Any, folder: str | os.PathLike[str]) -> None:
    """Write the Hugging Face files of a tokenizer into a folder."""
    _exporter().export_tokenizer(tokenizer, str(folder))


def write_generation_config(
    backbone: keras.Layer, folder: str | os.PathLike[str]
) -> None:
    """Write `generation_config.json`, if KerasHub supports that."""
    write = getattr(_exporter(), "export_generation_config", None)
    if write is not None:
        write(backbone, str(folder))


def _exporter() -> Any:
    try:
        return importlib.import_module(_EXPORTER)
    except ImportError as error:
        raise ImportError(
            "This KerasHub has no export to Hugging Face's form that this "
            f"package knows: {error}. Install {versions.to_install(error)}."
        ) from error


_LOADER = "keras_hub.src.utils.transformers.preset_loader"


class Converter:
    """The KerasHub converter that reads one Hugging Face model.

    Args:
        folder: The folder of the model.
        config: The content of its `config.json`.

    Raises:
        ImportError: If KerasHub is missing, or lacks what is needed.
        ValueError: If KerasHub does not know the kind of model.
    """

    def __init__(
        self, folder: str | os.PathLike[str], config: dict[str, Any]
    ) -> None:
        try:
            module = importlib.import_module(_LOADER)
        except ImportError as error:
            raise ImportError(
                f"Models of Hugging Face are read by KerasHub: {error}. "
                f"Install {versions.to_install(error)}."
            ) from error
        self._config = config
        self._loader = module.TransformersPresetLoader(str(folder), config)

    def make_backbone(self, dtype: str) -> keras.Model:
        """Return a new backbone for the model; no weights are loaded."""
        more: dict[str, Any] = {}
        if self._config.get("n_inner"):
            # GPT-2's, which KerasHub takes to be four times the width.
            more["intermediate_dim"] = self._config["n_inner"]
        if self._config["model_type"] in ("gemma", "llama"):
            # KerasHub has its own default instead.
            epsilon = self._config.get("rms_norm_eps", 1e-6)
            more["layer_norm_epsilon"] = epsilon
        cls = self._loader.check_backbone_class()
        return self._loader.load_backbone(cls, False, dtype=dtype, **more)

    def port(self, backbone: Any, loader: Any) -> None:
        """Call `loader.port_weight` for each weight of a backbone.

        A symbolic substitute will do. The loader has the attributes of
        KerasHub's `SafetensorLoader` that converters use: `port_weight`,
        `get_tensor` and `safetensor_config`.
        """
        self._loader.converter.convert_weights(backbone, loader, self._config)


def language_model_of(backbone: keras.Model) -> keras.Model:
    """Return a `CausalLM` around a backbone, or the backbone without one."""
    hub = importlib.import_module("keras_hub")
    name = type(backbone).__name__.removesuffix("Backbone") + "CausalLM"
    task = getattr(hub.models, name, None)
    if task is None:
        return backbone
    return task(backbone=backbone, preprocessor=None)


def count_adapted_layers_again(model: keras.Model) -> None:
    """Update the indices of LoRA layers that a KerasHub backbone stores."""
    # For its adapter files, it stores their indices among all layers with
    # weights (keras_hub 0.32), and a float8 state is one more such layer.
    # Expires when KerasHub stores paths.
    if not writes_map_of_quantized_layers(model):
        return
    if getattr(model, "_lora_enabled_layers", None):
        # In KerasHub's order, which is not that of `layers_within`.
        layers = model._flatten_layers(include_self=False)
        layers = [x for x in layers if x.weights]
        model._lora_enabled_layers = [
            number
            for number, layer in enumerate(layers)
            if getattr(layer, "lora_enabled", False)
        ]


def writes_map_of_quantized_layers(model: keras.Model) -> bool:
    """Return True if a model's config maps each quantized layer to a policy."""
    # KerasHub's backbones do (keras_hub 0.32): once a layer reports a
    # `quantization_mode`, the config has a map of those layers in place of the
    # backbone's policy. It does not list the others, which get the global
    # policy when loaded. A policy that is itself a map is written unchanged.
    # Expires when KerasHub gives that map a default.
    hub = sys.modules.get("keras_hub")
    return hub is not None and isinstance(model, hub.models.Backbone)
