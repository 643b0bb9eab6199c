"""The layers whose training steps are counted, for all ways to compute."""

import warnings

import keras

import keras_policy_ext as kpe
from keras_policy_ext.numerics.scale_sources import source_of

POLICIES = {
    "bfloat16": "mixed_bfloat16",
    "delayed": "float8_from_mixed_bfloat16",
    "current": "float8/current_from_mixed_bfloat16",
    "rowwise": "float8/rowwise_from_mixed_bfloat16",
    "mxfp8": "float8/mxfp8_from_mixed_bfloat16",
    "from one": kpe.Float8DTypePolicy(
        "mixed_bfloat16", recipe=kpe.recipes.DelayedScaling(initial_scale=1.0)
    ),
    "stock": "mixed_bfloat16",  # then quantized by Keras
}
STEPS = {  # the layer, the sizes that make it
    "dense": ("dense", 4096),
    "large dense": ("dense", 8192),
    "relu": ("mlp", "relu"),
    "gelu": ("mlp", "gelu"),
    "swiglu": ("mlp", "swiglu"),
    "gelu recomputed": ("recomputed", "gelu"),
    "swiglu recomputed": ("recomputed", "swiglu"),
    "block": ("block", None),
}


class Layers:
    """Makes the layers of one way to compute.

    Args:
        way: A key of `POLICIES`.
    """

    def __init__(self, way):
        float8 = way not in ("bfloat16", "stock")
        self.room = kpe.layers if float8 else keras.layers
        self.policy = POLICIES[way]
        self.way = way

    def dense(self, units, **kwargs):
        # The numbers do not matter, and zeros are made fast.
        return self.room.Dense(
            units, dtype=self.policy, kernel_initializer="zeros", **kwargs
        )

    def attention(self, heads, size):
        return self.room.MultiHeadAttention(
            heads,
            size,
            dtype=self.policy,
            kernel_initializer="zeros",
            use_bias=False,
        )

    def plain(self, make, *arguments):
        return make(*arguments, dtype="mixed_bfloat16")

    def swiglu(self, x, wide, bias=True):
        """A gate, what it lets through, and back to the width of `x`."""
        gate = self.dense(wide, use_bias=bias)(x)
        up = self.dense(wide, use_bias=bias)(x)
        gate = self.plain(keras.layers.Activation, "silu")(gate)
        product = self.plain(keras.layers.Multiply)([gate, up])
        return self.dense(x.shape[-1], use_bias=bias)(product)

    def finished(self, inputs, outputs):
        model = keras.Model(inputs, outputs)
        if self.way != "stock":
            return model
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for layer in model._flatten_layers(include_self=False):
                if isinstance(
                    layer, (keras.layers.Dense, keras.layers.EinsumDense)
                ):
                    layer.quantize("float8")
        return model


def dense(way, size):
    """One square Dense with a bias; inputs of as many rows."""
    layers = Layers(way)
    x = keras.Input((size,), dtype="bfloat16")
    return layers.finished(x, layers.dense(size)(x)), (size, size)


def mlp(way, activation, depth=12, rows=16384, narrow=1024, wide=4096):
    """Blocks of two Dense layers, or of the three of SwiGLU."""
    layers = Layers(way)
    x = inputs = keras.Input((narrow,), dtype="bfloat16")
    for _ in range(depth):
        if activation == "swiglu":
            x = layers.swiglu(x, wide)
        else:
            x = layers.dense(wide, activation=activation)(x)
            x = layers.dense(narrow)(x)
    return layers.finished(inputs, x), (rows, narrow)


def recomputed(way, activation):
    """The same blocks, which compute activations again for their gradients."""
    with keras.RematScope(mode="activations"):
        return mlp(way, activation)


def block(way, _, batch=2, length=2048, width=4096, heads=32, wide=14336):
    """A block of a language model: attention and SwiGLU, no biases."""
    layers = Layers(way)
    inputs = x = keras.Input((length, width), dtype="bfloat16")
    normalized = layers.plain(keras.layers.LayerNormalization)
    h = normalized(x)
    attended = layers.attention(heads, width // heads)(h, h)
    x = layers.plain(keras.layers.Add)([x, attended])
    h = layers.plain(keras.layers.LayerNormalization)(x)
    x = layers.plain(keras.layers.Add)([x, layers.swiglu(h, wide, bias=False)])
    return layers.finished(inputs, x), (batch, length, width)


def make(step, way):
    """A model and the shape of its inputs.

    Args:
        step: A key of `STEPS`.
        way: A key of `POLICIES`.
    """
    kind, detail = STEPS[step]
    made = {
        "dense": dense,
        "mlp": mlp,
        "recomputed": recomputed,
        "block": block,
    }
    return made[kind](way, detail)


def updated(variable, value, gradient):
    """What a variable becomes in a step of SGD."""
    if not getattr(variable, "overwrite_with_gradient", False):
        return value - 1e-3 * gradient
    if kpe.loops.is_state(variable):
        return source_of(variable.recipe).settle(gradient, value)
    return gradient
