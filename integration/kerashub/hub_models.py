"""Tiny models of KerasHub, from config, and data for them.

Two blocks, width 16: each has the layers of its family and nothing more.
"""

import keras
import keras_hub
import numpy as np

from keras_policy_ext._keras import walking
from keras_policy_ext.layers.state import Float8State

TOKENS, BATCH, LENGTH, SIDE = 32, 8, 8, 16

hub = keras_hub.models


def gpt2(dtype=None):
    return hub.GPT2Backbone(
        vocabulary_size=TOKENS,
        num_layers=2,
        num_heads=2,
        hidden_dim=16,
        intermediate_dim=32,
        dropout=0.0,
        max_sequence_length=LENGTH,
        dtype=dtype,
        name="gpt2",
    )


def llama(dtype=None):
    return hub.LlamaBackbone(
        vocabulary_size=TOKENS,
        num_layers=2,
        num_query_heads=2,
        num_key_value_heads=1,
        hidden_dim=16,
        intermediate_dim=32,
        dtype=dtype,
        name="llama",
    )


def gemma(dtype=None):
    return hub.GemmaBackbone(
        vocabulary_size=TOKENS,
        num_layers=2,
        num_query_heads=2,
        num_key_value_heads=1,
        hidden_dim=16,
        intermediate_dim=32,
        head_dim=8,
        attention_logit_soft_cap=50.0,
        final_logit_soft_cap=30.0,
        dtype=dtype,
        name="gemma",
    )


def bert(dtype=None):
    return hub.BertBackbone(
        vocabulary_size=TOKENS,
        num_layers=2,
        num_heads=2,
        hidden_dim=16,
        intermediate_dim=32,
        dropout=0.0,
        max_sequence_length=LENGTH,
        dtype=dtype,
        name="bert",
    )


def vit(dtype=None):
    return hub.ViTBackbone(
        image_shape=(SIDE, SIDE, 3),
        patch_size=8,
        num_layers=2,
        num_heads=2,
        hidden_dim=16,
        mlp_dim=32,
        dtype=dtype,
        name="vit",
    )


def resnet(dtype=None):
    return hub.ResNetBackbone(
        input_conv_filters=[64],
        input_conv_kernel_sizes=[3],
        stackwise_num_filters=[64],
        stackwise_num_blocks=[1],
        stackwise_num_strides=[1],
        block_type="basic_block",
        image_shape=(SIDE, SIDE, 3),
        dtype=dtype,
        name="resnet",
    )


BACKBONES = {f.__name__: f for f in (gpt2, llama, gemma, bert, vit, resnet)}
LANGUAGE = ("gpt2", "llama", "gemma")


def task(name, dtype=None):
    """A model that trains: language model, masked one, or classifier."""
    keras.utils.set_random_seed(0)
    backbone = BACKBONES[name](dtype)
    if name in LANGUAGE:
        classes = hub.GPT2CausalLM, hub.LlamaCausalLM, hub.GemmaCausalLM
        cls = dict(zip(LANGUAGE, classes, strict=True))[name]
        return cls(backbone=backbone, preprocessor=None)
    if name == "bert":
        return hub.BertMaskedLM(backbone=backbone, preprocessor=None)
    options = {"preprocessor": None, "num_classes": 4}
    if name == "vit":
        return hub.ViTImageClassifier(backbone=backbone, **options)
    return hub.ResNetImageClassifier(backbone=backbone, **options)


def data(name):
    """A batch of inputs, and targets that can be learned."""
    rng = np.random.default_rng(0)
    if name in ("vit", "resnet"):
        x = rng.normal(size=(BATCH, SIDE, SIDE, 3)).astype("float32")
        return x, np.arange(BATCH, dtype="int32") % 4
    # The next token is the one after this one.
    tokens = (np.arange(LENGTH) + rng.integers(0, TOKENS, (BATCH, 1))) % TOKENS
    inputs = {
        "token_ids": tokens.astype("int32"),
        "padding_mask": np.ones((BATCH, LENGTH), "int32"),
    }
    if name != "bert":
        return inputs, (tokens + 1) % TOKENS
    positions = np.tile(np.array([1, 4, 6], "int32"), (BATCH, 1))
    targets = np.take_along_axis(tokens, positions, axis=1)
    inputs["segment_ids"] = np.zeros((BATCH, LENGTH), "int32")
    inputs["mask_positions"] = positions
    return inputs, targets


def randomize(model):
    """Weights that are the same on each backend, and none of them constant."""
    rng = np.random.default_rng(1)
    for variable in model.trainable_variables:
        value, random = numpy(variable), rng.normal(size=variable.shape)
        several = len(variable.shape) > 1
        variable.assign(random * value.std() if several else value + random / 9)


def compiled(model, rate=0.01):
    """Ready to train, with a loss for logits."""
    options = {"sampler": "greedy"} if hasattr(model, "generate") else {}
    # XLA takes longer than it saves, but JAX knows no other compiler.
    model.compile(
        keras.optimizers.Adam(rate),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[],
        jit_compile=keras.backend.backend() == "jax",
        **options,
    )
    return model


def train(model, inputs, targets, steps):
    """The loss of each step."""
    batch = inputs, targets
    return [
        float(np.ravel(model.train_on_batch(*batch))[0]) for _ in range(steps)
    ]


def prompt(inputs, length=3):
    """Rows of which the first tokens are given."""
    mask = np.zeros_like(inputs["padding_mask"])
    mask[:, :length] = 1
    return {"token_ids": inputs["token_ids"] * mask, "padding_mask": mask}


def numpy(x):
    return keras.ops.convert_to_numpy(keras.ops.cast(x, "float32"))


def layers_of(model):
    """All layers, without the states of float8 layers."""
    return [
        layer
        for layer in walking.layers_within(model)
        if not isinstance(layer, Float8State)
    ]


def followed(model):
    """The float8 policy of each layer that has one."""
    policies = {
        layer.path: getattr(layer, "float8_policy", None)
        for layer in layers_of(model)
    }
    return {p: policy.full_name for p, policy in policies.items() if policy}


def dtypes(model):
    """What each layer computes and keeps its variables in."""
    return [(x.compute_dtype, x.variable_dtype) for x in layers_of(model)]


def arrays(model, state=True):
    """The weights by path; those of the state only on request."""
    return {
        v.path: numpy(v)
        for v in model.weights
        if state or "float8_state" not in v.path
    }


def assert_same_arrays(got, expected):
    """Same paths, and the same bits."""
    assert got.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(got[path], value, err_msg=path)


def ran_in_float8(layer):
    """Whether a product of this layer was computed, or traced, in float8."""
    return getattr(layer, "kernel_choice", None) is not None
