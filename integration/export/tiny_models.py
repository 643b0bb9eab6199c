"""Tiny language models of KerasHub, from config, and data for them.

Sizes differ from each other, so that no axes can be taken for one another.
"""

import keras
import keras_hub
import numpy as np

hub = keras_hub.models

TOKENS, LENGTH = 96, 12


def gemma(dtype=None, width=32, inner=40):
    backbone = hub.GemmaBackbone(
        vocabulary_size=TOKENS,
        num_layers=2,
        num_query_heads=4,
        num_key_value_heads=1,
        hidden_dim=width,
        intermediate_dim=2 * inner,
        head_dim=width // 4,
        dtype=dtype,
        name="gemma",
    )
    return hub.GemmaCausalLM(backbone=backbone, preprocessor=None)


def gemma3(dtype=None, width=32, inner=40):
    backbone = hub.Gemma3Backbone(
        vocabulary_size=TOKENS,
        image_size=16,
        num_layers=2,
        num_query_heads=4,
        num_key_value_heads=2,
        hidden_dim=width,
        intermediate_dim=inner,
        head_dim=width // 4,
        use_query_key_norm=True,
        use_post_ffw_norm=True,
        use_post_attention_norm=True,
        sliding_window_size=8,
        use_sliding_window_attention=True,
        dtype=dtype,
        name="gemma3",
    )
    return hub.Gemma3CausalLM(backbone=backbone, preprocessor=None)


def gemma4(dtype=None, width=32, inner=40):
    backbone = hub.Gemma4Backbone(
        vocabulary_size=TOKENS,
        image_size=16,
        num_layers=2,
        num_query_heads=4,
        num_key_value_heads=2,
        sliding_window_size=8,
        sliding_window_pattern=2,
        hidden_dim=width,
        intermediate_dim=inner,
        head_dim=width // 4,
        dtype=dtype,
        name="gemma4",
    )
    return hub.Gemma4CausalLM(backbone=backbone, preprocessor=None)


def llama(dtype=None, width=32, inner=40, tied=False):
    backbone = hub.Llama3Backbone(
        vocabulary_size=TOKENS,
        num_layers=2,
        num_query_heads=4,
        num_key_value_heads=2,
        hidden_dim=width,
        intermediate_dim=inner,
        tie_word_embeddings=tied,
        dtype=dtype,
        name="llama",
    )
    return hub.Llama3CausalLM(backbone=backbone, preprocessor=None)


def mistral(dtype=None, width=32, inner=40):
    backbone = hub.MistralBackbone(
        vocabulary_size=TOKENS,
        num_layers=2,
        num_query_heads=4,
        num_key_value_heads=2,
        hidden_dim=width,
        intermediate_dim=inner,
        sliding_window=64,
        dtype=dtype,
        name="mistral",
    )
    return hub.MistralCausalLM(backbone=backbone, preprocessor=None)


def qwen(dtype=None, width=32, inner=40):
    backbone = hub.QwenBackbone(
        vocabulary_size=TOKENS,
        num_layers=2,
        num_query_heads=4,
        num_key_value_heads=2,
        hidden_dim=width,
        intermediate_dim=inner,
        dtype=dtype,
        name="qwen",
    )
    return hub.QwenCausalLM(backbone=backbone, preprocessor=None)


def qwen3_5(dtype=None, width=32, inner=40):
    backbone = hub.Qwen3_5Backbone(
        vocabulary_size=TOKENS,
        num_layers=2,
        num_query_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        hidden_dim=width,
        intermediate_dim=inner,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_conv_kernel_dim=4,
        dtype=dtype,
        name="qwen3_5",
    )
    return hub.Qwen3_5CausalLM(backbone=backbone, preprocessor=None)


def gpt2(dtype=None, width=32, inner=40):
    backbone = hub.GPT2Backbone(
        vocabulary_size=TOKENS,
        num_layers=2,
        num_heads=4,
        hidden_dim=width,
        intermediate_dim=inner,
        dropout=0.0,
        max_sequence_length=64,
        dtype=dtype,
        name="gpt2",
    )
    return hub.GPT2CausalLM(backbone=backbone, preprocessor=None)


FAMILIES = {
    f.__name__: f
    for f in (gemma, gemma3, gemma4, llama, mistral, qwen, qwen3_5, gpt2)
}


def randomized(model, seed=1):
    """The model with weights of which none is constant."""
    rng = np.random.default_rng(seed)
    for variable in model.trainable_variables:
        value = keras.ops.convert_to_numpy(variable)
        noise = rng.normal(size=value.shape)
        several = len(value.shape) > 1
        variable.assign(noise / 5 if several else value + noise / 9)
    return model


def tokens(count=8, length=LENGTH, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(3, TOKENS, (count, length)).astype("int32")


def successors(count, length, seed):
    """Rows in which each token tells the next one."""
    rng = np.random.default_rng(seed)
    first = rng.integers(0, TOKENS - 3, (count, 1))
    return (3 + (first + 5 * np.arange(length)) % (TOKENS - 3)).astype("int32")


def inputs(model, ids):
    """What a backbone takes, for tokens."""
    made = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    if "position_ids" in model.backbone.input:
        places = np.arange(ids.shape[1], dtype="int32")
        made["position_ids"] = np.broadcast_to(places, ids.shape)
    return made


def logits(model, ids):
    """Those of a task of KerasHub, float32."""
    made = model(inputs(model, ids), training=False)
    return keras.ops.convert_to_numpy(keras.ops.cast(made, "float32"))
