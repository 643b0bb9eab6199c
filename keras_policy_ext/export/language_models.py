"""Which models can be written as, and read from, Hugging Face's folders."""

from __future__ import annotations

from typing import Any

import keras

from keras_policy_ext._keras import keras_hub_export as hub

_TEXT = {"vision_encoder": None, "audio_encoder": None}

_SOFT_CAPS = {"attention_logit_soft_cap": None, "final_logit_soft_cap": None}

# What a model of a family has to be, by the attributes of its backbone
# (keras_hub 0.32, transformers 5.23). Of Gemma's keys and values the map has
# those of the first head.
_FIXED: dict[str, dict[str, Any]] = {
    "GemmaBackbone": {
        "num_key_value_heads": 1,
        "query_head_dim_normalize": True,
        "use_post_attention_norm": False,
        "use_post_ffw_norm": False,
        "use_sliding_window_attention": False,
        **_SOFT_CAPS,
    },
    "Gemma3Backbone": {
        "is_embedding_model": False,
        "use_post_attention_norm": True,
        "use_post_ffw_norm": True,
        "use_query_key_norm": True,
        **_SOFT_CAPS,
    },
    "QwenBackbone": {"use_sliding_window_attention": False},
}


def parts(model: Any, format: str) -> tuple[keras.Layer, Any]:
    """The backbone of a language model, and the tokenizer if it has one.

    Raises:
        TypeError: If it is no model of KerasHub, or another task.
        ValueError: If KerasHub cannot write it, or would write it wrong.
    """
    if not hub.is_hub_model(model):
        raise _not_one(model, format, type(model).__name__)
    backbone = getattr(model, "backbone", model)
    if backbone is not model and not hub.is_causal_language_model(model):
        raise _not_one(
            model, format, f"{type(model).__name__}, whose head has no place"
        )
    family = hub.family(backbone)
    if family is None:
        raise _not_one(model, format, type(backbone).__name__)
    _check_can_be_written(backbone, family, format)
    preprocessor = getattr(model, "preprocessor", None)
    return backbone, getattr(preprocessor, "tokenizer", None)


def _check_can_be_written(backbone: Any, family: str, format: str) -> None:
    """Raise where Hugging Face's model would be another one."""
    for name, value in {**_TEXT, **_FIXED.get(family, {})}.items():
        has = getattr(backbone, name, value)
        if has != value:
            raise ValueError(
                f"A {family} like this one cannot be written as {format!r}: "
                "Hugging Face's model, or KerasHub's map of names, is of one "
                f"kind only. Received: {name}={has!r}. Allowed: {value!r}. "
                "Write it as format='safetensors'."
            )
    types = getattr(backbone, "layer_types", None)
    if family == "Gemma4Backbone" and types and types[-1] != "full_attention":
        raise ValueError(
            "The last layer of this model does not attend to all tokens, as "
            "that of Hugging Face's Gemma4 does. Received: "
            f"layer_types={types}. Allowed: 'full_attention' at the end. "
            "Write it as format='safetensors'."
        )


def _not_one(model: Any, format: str, received: str) -> Exception:
    known = (
        ", ".join(hub.families())
        if hub.is_hub_model(model)
        else ("those of KerasHub")
    )
    return TypeError(
        f"This model cannot be written as {format!r}. Received: {received}. "
        f"Allowed: a causal language model, or the backbone of one: {known}. "
        "Write it as format='safetensors', which takes any model, or 'onnx', "
        "which takes Functional and Sequential ones."
    )
