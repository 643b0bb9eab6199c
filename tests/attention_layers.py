"""Attention layers and their two products."""

from keras import ops

import keras_policy_ext as kpe
from saving_models import matrices
from steps import normal, numpy

SCORES = "aecd,abcd->acbe"  # keys and queries, as in MultiHeadAttention
WEIGHTED_SUM = "acbe,aecd->abcd"

FLOAT32_TOLERANCE = 1e-6
"""Relative RMS of a float32 result against one accumulated in float64."""

PRODUCTS_ONLY = [(".*/(query|key|value|attention_output)", None)]


def policy(source="float32", recipe="4", rules=()):
    return kpe.Float8DTypePolicy(source, recipe=recipe, rules=rules)


def half(x):
    """`x` rounded to bfloat16, in float32."""
    return numpy(ops.cast(ops.cast(x, "bfloat16"), "float32"))


def float32(x):
    return numpy(ops.cast(x, "float32"))


def mha(dtype=None, **kwargs):
    return kpe.layers.MultiHeadAttention(3, 4, dtype=dtype, **kwargs)


def gqa(dtype=None, **kwargs):
    return kpe.layers.GroupedQueryAttention(4, 6, 3, dtype=dtype, **kwargs)


LAYERS = {"mha": mha, "gqa": gqa}


def float_weights(layer):
    """All weights but the states."""
    states = {id(v) for v in matrices(layer)}
    return [v for v in layer.weights if id(v) not in states]


X, Y, Z = normal(2, 5, 8), normal(2, 6, 8, seed=1), normal(2, 6, 8, seed=2)
