"""How KerasHub's models are written and read as Hugging Face's.

All of it is private there (`keras_hub.src.utils.transformers`, keras_hub 0.27
to 0.33). Its own `export_to_transformers` is public, but it writes floats only,
of frozen models too. Expires with a public map of names.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from typing import Any

import keras

from keras_policy_ext._keras import versions
from keras_policy_ext._keras.symbolic import Symbols

_EXPORTER = "keras_hub.src.utils.transformers.export.hf_exporter"


def is_hub_model(model: object) -> bool:
    """Return True if a model is a backbone or a task of KerasHub."""
    hub = sys.modules.get("keras_hub")
    return hub is not None and isinstance(
        model, (hub.models.Backbone, hub.models.Task)
    )


def is_causal_language_model(model: object) -> bool:
    """True if a task of KerasHub predicts tokens with its backbone alone."""
    hub = sys.modules["keras_hub"]
    return isinstance(model, hub.models.CausalLM)


def families() -> list[str]:
    """The classes of backbones of which KerasHub knows the names."""
    exporter = _exporter()
    return sorted(exporter.MODEL_EXPORTERS.keys() & exporter.MODEL_CONFIGS)


def family(backbone: keras.Layer) -> str | None:
    """The one of `families` that a backbone belongs to, or None."""
    names = [cls.__name__ for cls in type(backbone).__mro__]
    return next((name for name in names if name in families()), None)


def weight_map(backbone: keras.Layer, symbols: Symbols) -> dict[str, Any]:
    """Hugging Face's names, and a symbolic tensor for each."""
    write = _exporter().MODEL_EXPORTERS[family(backbone)]
    stand_in = symbols.stand_in(backbone)
    return dict(write(stand_in, include_lm_head=True))


def config(backbone: keras.Layer, tokenizer: Any = None) -> dict[str, Any]:
    """What `config.json` says of a backbone."""
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
    """Write the files of a tokenizer into a folder."""
    _exporter().export_tokenizer(tokenizer, str(folder))


def write_generation_config(
    backbone: keras.Layer, folder: str | os.PathLike[str]
) -> None:
    """Write `generation_config.json`, where KerasHub has one."""
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
