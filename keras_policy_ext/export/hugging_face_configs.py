"""What `config.json` lacks, or has wrong, as KerasHub makes it."""

from __future__ import annotations

from typing import Any

_ARCHITECTURES = {
    "gemma": "GemmaForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "qwen2": "Qwen2ForCausalLM",
}
"""Models for which KerasHub names no architecture, or one that is not there."""

_DEFAULTS: dict[str, dict[str, Any]] = {
    # What KerasHub's own reader asks for.
    "qwen2": {"use_sliding_window": False, "sliding_window": None},
}

_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def complete(
    config: dict[str, Any], backbone: Any, dtype: str
) -> dict[str, Any]:
    """A config with the dtype of the weights, which readers load them in.

    Args:
        config: As KerasHub makes it.
        backbone: What it is of.
        dtype: Of the weights that are not quantized.
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
    """A config, or that of a part of the model.

    KerasHub writes names of policies for dtypes. A token beyond the
    vocabulary is none: GPT-2's is 50256 however small the vocabulary is.
    """
    found: dict[str, Any] = {
        key: _part(value, dtype) if key.endswith("_config") else value
        for key, value in config.items()
    }
    size = found.get("vocab_size")
    for name in _TOKENS:
        if size is not None and (found.get(name) or 0) >= size:
            found[name] = None
    return {**found, "torch_dtype": dtype}
