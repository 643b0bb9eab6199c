"""The models that are measured, under whatever policy is global."""

import dataclasses

import keras
import numpy as np
from keras import ops


@dataclasses.dataclass(frozen=True)
class Llama:
    """A transformer as Llama's blocks are: of Keras's own layers, no rotation.

    Attributes:
        batch: Sequences.
        length: Positions of each.
        width: Of the residual stream.
        wide: Of the gate and what it lets through.
        heads: Of queries.
        groups: Heads of keys and values.
        blocks: How many.
    """

    batch: int
    length: int
    width: int
    wide: int
    heads: int
    groups: int
    blocks: int = 1

    @property
    def shape(self):
        """Of the inputs, and of the outputs."""
        return self.batch, self.length, self.width

    def __str__(self):
        blocks = "1 block" if self.blocks == 1 else f"{self.blocks} blocks"
        return (
            f"{blocks} of {self.width}, {self.wide} in the middle, "
            f"{self.heads} heads in {self.groups} groups, "
            f"{self.batch} × {self.length} tokens"
        )

    def model(self):
        """The built model, from vectors to vectors."""
        inputs = keras.Input(self.shape[1:])
        x = inputs
        for _ in range(self.blocks):
            x = self._block(x)
        return keras.Model(inputs, x)

    def _block(self, x):
        layers = keras.layers
        y = layers.RMSNormalization()(x)
        y = layers.GroupQueryAttention(
            self.width // self.heads, self.heads, self.groups, use_bias=False
        )(y, y, use_causal_mask=True)
        x = layers.Add()([x, y])
        y = layers.RMSNormalization()(x)
        gate = layers.Dense(self.wide, "silu", use_bias=False)(y)
        up = layers.Dense(self.wide, use_bias=False)(y)
        down = layers.Dense(self.width, use_bias=False)
        return layers.Add()([x, down(layers.Multiply()([gate, up]))])


@dataclasses.dataclass(frozen=True)
class MLP:
    """Blocks of two Dense layers, or of the three of SwiGLU, one a layer.

    Attributes:
        rows: Of the inputs.
        width: Of the residual stream.
        wide: Of what is activated.
        blocks: How many.
        activation: `"relu"`, `"gelu"`, `"swiglu"`, or `"swiglu again"`, which
            is computed again for its gradient.
        in_turn: Whether one layer calls all blocks in turn. Keras on PyTorch
            holds the outputs of all layers of a Functional model until its
            forward pass ends.
    """

    rows: int
    width: int
    wide: int
    blocks: int
    activation: str
    in_turn: bool = False

    @property
    def shape(self):
        """Of the inputs, and of the outputs."""
        return self.rows, self.width

    def __str__(self):
        return (
            f"{self.blocks} blocks {self.width}-{self.wide}-{self.width}"
            f"{' called in turn' if self.in_turn else ''}, "
            f"{self.activation}, {self.rows} rows"
        )

    def model(self):
        """The built model, from vectors to vectors."""
        blocks = [
            _Block(self.width, self.wide, self.activation)
            for _ in range(self.blocks)
        ]
        x = inputs = keras.Input((self.width,))
        for layer in [_InTurn(blocks)] if self.in_turn else blocks:
            x = layer(x)
        return keras.Model(inputs, x)


class _InTurn(keras.layers.Layer):
    """Layers, each of which reads what the one before it makes."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, inputs):
        for layer in self.inner:
            inputs = layer(inputs)
        return inputs


class _Block(keras.layers.Layer):
    """A block of `MLP`, of which nothing but the outputs outlives its call."""

    def __init__(self, width, wide, activation):
        super().__init__()
        layers = keras.layers
        gated = activation.startswith("swiglu")
        again = activation == "swiglu again"
        self.up = layers.Dense(wide, None if gated else activation)
        self.down = layers.Dense(width)
        self.gate = self.product = None
        if gated:
            self.gate = layers.Dense(wide, None if again else "silu")
            with keras.RematScope("full" if again else None):
                self.product = _Product("silu" if again else None)

    def call(self, inputs):
        x = self.up(inputs)
        if self.product is not None:
            x = self.product(self.gate(inputs), x)
        return inputs + self.down(x)


class _Product(keras.layers.Layer):
    """What passes a gate, whose activation may be computed here."""

    def __init__(self, activation):
        super().__init__()
        self.activation = keras.activations.get(activation)

    def call(self, gate, other):
        return self.activation(gate) * other


def dense(size):
    """A Dense of a square kernel with a bias, as the layer of a model.

    A layer alone computes in float32 in `stateless_call` of Keras 3.15.
    """
    return keras.Sequential([keras.Input((size,)), keras.layers.Dense(size)])


def normal(shape, dtype="bfloat16", seed=0):
    """Normal random numbers as a tensor."""
    x = np.random.default_rng(seed).standard_normal(shape, dtype="float32")
    return ops.cast(ops.convert_to_tensor(x), dtype)
