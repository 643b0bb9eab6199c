"""KerasHub's importer and its exporter."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from typing import Any

import keras

from keras_policy_ext._keras import versions
from keras_policy_ext.ext.export._keras.symbolic import Symbols

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
    found = dict(written.to_dict() if hasattr(written, "to_dict") else written)
    for key, name in (("bos", "start_token"), ("eos", "end_token")):
        token = getattr(tokenizer, name, None)
        if token is not None:
            found[f"{key}_token_id"] = tokenizer.token_to_id(token)
    return found


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

        Args:
            backbone: A backbone of this kind, or its symbolic substitute.
            loader: Has the attributes of KerasHub's `SafetensorLoader` that
                converters use: `port_weight`, `get_tensor` and
                `safetensor_config`.
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
