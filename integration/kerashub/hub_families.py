"""A table of families of KerasHub, and how a small model is built from it."""

import keras_hub

hub = keras_hub.models

SHARED = {
    "vocabulary_size": "tokens",
    "num_layers": "blocks",
    "hidden_dim": "width",
    "intermediate_dim": "inner",
}
GROUPED = {
    **SHARED,
    "num_query_heads": "heads",
    "num_key_value_heads": "groups",
}
HEADED = {**GROUPED, "head_dim": "head"}
LEARNED = {**SHARED, "num_heads": "heads", "max_sequence_length": "length"}
OF_IMAGES = {
    "num_layers": "blocks",
    "hidden_dim": "width",
    "mlp_dim": "inner",
    "num_heads": "heads",
}

# The class of the backbone, that of the task, the names of the sizes, and what
# else the backbone takes.
FAMILIES = {
    "bert": ("Bert", "MaskedLM", LEARNED, {"dropout": 0.0}),
    "gemma": ("Gemma", "CausalLM", HEADED, {}),
    "gemma3": (
        "Gemma3",
        "CausalLM",
        HEADED,
        {
            "image_size": 16,
            "use_query_key_norm": True,
            "use_post_ffw_norm": True,
            "use_post_attention_norm": True,
            "sliding_window_size": 8,
            "use_sliding_window_attention": True,
        },
    ),
    "gemma4": (
        "Gemma4",
        "CausalLM",
        HEADED,
        {
            "image_size": 16,
            "sliding_window_size": 8,
            "sliding_window_pattern": 2,
        },
    ),
    "gpt2": ("GPT2", "CausalLM", LEARNED, {"dropout": 0.0}),
    "llama": ("Llama", "CausalLM", GROUPED, {}),
    "llama3": ("Llama3", "CausalLM", GROUPED, {}),
    "mistral": ("Mistral", "CausalLM", GROUPED, {"sliding_window": 64}),
    "opt": ("OPT", "CausalLM", LEARNED, {"dropout": 0.0}),
    "phi3": ("Phi3", "CausalLM", GROUPED, {}),
    "qwen": ("Qwen", "CausalLM", GROUPED, {}),
    "qwen3_5": (
        "Qwen3_5",
        "CausalLM",
        GROUPED,
        {
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_conv_kernel_dim": 4,
        },
    ),
    "resnet": (
        "ResNet",
        "ImageClassifier",
        {},
        {
            "input_conv_filters": [64],
            "input_conv_kernel_sizes": [3],
            "stackwise_num_filters": [64],
            "stackwise_num_blocks": [1],
            "stackwise_num_strides": [1],
            "block_type": "basic_block",
        },
    ),
    "vit": ("ViT", "ImageClassifier", OF_IMAGES, {"patch_size": 8}),
}


def backbone(family, sizes, **options):
    """The backbone of a family; options win over the table."""
    name, _, names, more = FAMILIES[family]
    cls = getattr(hub, f"{name}Backbone")
    return cls(**{**sizes.under(**names), **more, "name": family, **options})


def task(family, backbone, **options):
    """The task of a family, without a preprocessor."""
    name, kind, *_ = FAMILIES[family]
    cls = getattr(hub, name + kind)
    return cls(backbone=backbone, preprocessor=None, **options)
