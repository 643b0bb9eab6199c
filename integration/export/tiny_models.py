"""Tiny language models of KerasHub, from config, and data for them.

Sizes differ from each other, so that no axes can be taken for one another.
"""

import functools

import hub_families
import keras
import numpy as np
from hub_families import hub  # noqa: F401  for tests
from model_sizes import Sizes

TOKENS, LENGTH = 96, 12


def _model(name, dtype=None, width=32, inner=40, family=None, **options):
    """The language model of a family; it is called by its name here."""
    family = family or name
    sizes = Sizes(TOKENS, 64, width, inner, heads=4, groups=2, blocks=2)
    backbone = hub_families.backbone(
        family, sizes, dtype=dtype, name=name, **options
    )
    return hub_families.task(family, backbone)


def gemma(dtype=None, width=32, inner=40):
    options = {"num_key_value_heads": 1, "intermediate_dim": 2 * inner}
    return _model("gemma", dtype, width, inner, **options)


def llama(dtype=None, width=32, inner=40, tied=False):
    options = {"family": "llama3", "tie_word_embeddings": tied}
    return _model("llama", dtype, width, inner, **options)


gpt2 = functools.partial(_model, "gpt2")

FAMILIES = {
    "gemma": gemma,
    "llama": llama,
    **{
        name: functools.partial(_model, name)
        for name in ("gemma3", "gemma4", "mistral", "qwen", "qwen3_5", "gpt2")
    },
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
