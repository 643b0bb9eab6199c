"""How KerasHub reads models in Hugging Face's form.

All of it is private there (`keras_hub.src.utils.transformers`, keras_hub 0.32):
`from_preset` is public, but it reads weights with a library that knows no
float8, into variables of floats. Expires when a loader can be passed to it.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import keras

from keras_policy_ext._keras import versions

_LOADER = "keras_hub.src.utils.transformers.preset_loader"


class Converter:
    """What KerasHub knows of one kind of model.

    Args:
        folder: Of the model.
        config: What its `config.json` says.

    Raises:
        ImportError: If KerasHub is not installed, or another one.
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
        """A backbone of this kind, with new weights."""
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
        """Have each weight ported with `loader.port_weight`.

        Args:
            backbone: One of these backbones, or a stand-in.
            loader: With what converters use of KerasHub's `SafetensorLoader`:
                `port_weight`, `get_tensor` and `safetensor_config`.
        """
        self._loader.converter.convert_weights(backbone, loader, self._config)


def language_model_of(backbone: keras.Model) -> keras.Model:
    """The task that predicts tokens with a backbone; else the backbone."""
    hub = importlib.import_module("keras_hub")
    name = type(backbone).__name__.removesuffix("Backbone") + "CausalLM"
    task = getattr(hub.models, name, None)
    if task is None:
        return backbone
    return task(backbone=backbone, preprocessor=None)
