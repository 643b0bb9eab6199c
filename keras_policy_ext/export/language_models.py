"""Which models can be written as, and read from, Hugging Face's folders."""

from __future__ import annotations

from typing import Any

import keras

from keras_policy_ext._keras import keras_hub_export as hub


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
    """Raise where Hugging Face's model is another one."""
    for name in ("vision_encoder", "audio_encoder"):
        if getattr(backbone, name, None) is not None:
            raise ValueError(
                f"Only models of text are written as {format!r}. Received: a "
                f"{family} with a {name}. Allowed: one without. Write it as "
                "format='safetensors'."
            )
    heads = getattr(backbone, "num_key_value_heads", 1)
    if family == "GemmaBackbone" and heads > 1:
        raise ValueError(
            "KerasHub writes the first key and value head of a Gemma only. "
            f"Received: num_key_value_heads={heads}. Allowed: 1. Write it as "
            "format='safetensors'."
        )
    types = getattr(backbone, "layer_types", None)
    if family == "Gemma4Backbone" and types and types[-1] != "full_attention":
        raise ValueError(
            "The last layer of Hugging Face's Gemma4 attends to all tokens. "
            f"Received: layer_types={types}. Allowed: 'full_attention' at the "
            "end. Write it as format='safetensors'."
        )
    for name in ("use_post_ffw_norm", "use_post_attention_norm"):
        if family == "Gemma3Backbone" and not getattr(backbone, name, True):
            raise ValueError(
                "Hugging Face's Gemma3 normalizes after attention and after "
                f"the feed-forward layers. Received: {name}=False. Allowed: "
                "True. Write it as format='safetensors'."
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
        "Write it as format='safetensors' or 'onnx', which take any model."
    )
