"""Tiny models of KerasHub, from config, and data for them.

Two blocks, width 16: each has the layers of its family and nothing more.
"""

import functools

import hub_families
import keras
import numpy as np
from model_sizes import Sizes, compile_to_train, layers_of, numpy

TOKENS, BATCH, LENGTH, SIDE = 32, 8, 8, 16
SIZES = Sizes(TOKENS, LENGTH, width=16, inner=32, heads=2, groups=1, blocks=2)
OPTIONS = {
    "gemma": {"attention_logit_soft_cap": 50.0, "final_logit_soft_cap": 30.0},
    "vit": {"image_shape": (SIDE, SIDE, 3)},
    "resnet": {"image_shape": (SIDE, SIDE, 3)},
}


def _backbone(name, dtype=None):
    options = OPTIONS.get(name, {})
    return hub_families.backbone(name, SIZES, dtype=dtype, **options)


BACKBONES = {
    name: functools.partial(_backbone, name)
    for name in ("gpt2", "llama", "gemma", "bert", "vit", "resnet")
}
LANGUAGE = ("gpt2", "llama", "gemma")
gpt2, llama = BACKBONES["gpt2"], BACKBONES["llama"]


def task(name, dtype=None):
    """A model that trains: language model, masked one, or classifier."""
    keras.utils.set_random_seed(0)
    options = {"num_classes": 4} if name in ("vit", "resnet") else {}
    return hub_families.task(name, BACKBONES[name](dtype), **options)


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
    return compile_to_train(
        model,
        keras.optimizers.Adam(rate),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[],
        **options,
    )


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
