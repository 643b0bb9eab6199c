"""A small decoder-only transformer of Keras layers."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from keras_policy_ext import layers, policies
from keras_policy_ext._types import Tensor
from keras_policy_ext.diagnostics.demo.settings import Size

register = keras.saving.register_keras_serializable("keras_policy_ext.demo")


@register
class PositionEmbedding(keras.layers.Layer):
    """Adds a learned vector for each position."""

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Make one vector for each position of `(batch, time, width)`."""
        self.embeddings = self.add_weight(
            shape=input_shape[1:], initializer="uniform", name="embeddings"
        )

    def call(self, inputs: Tensor) -> Tensor:
        """`inputs + embeddings`, both (batch, time, width)."""
        return inputs + ops.convert_to_tensor(self.embeddings)


@register
class CausalAttention(keras.layers.Layer):
    """Softmax attention to the positions so far; it has no weights."""

    def call(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend; all are (batch, time, heads, width)."""
        return ops.nn.dot_product_attention(query, key, value, is_causal=True)

    def compute_output_shape(self, query_shape: Any, *_: Any) -> Any:
        """The shape of the query."""
        return query_shape


def decoder(tokens: int, size: Size, policy: object) -> keras.Model:
    """Build the model: characters in, logits of the next ones out.

    The layers that multiply with a matrix come from this package and follow
    a float8 policy; all others take the source policy from it.

    Returns:
        A model from (batch, context) int32 to (batch, context, tokens)
        float32.
    """
    with policies.policy_scope(policy):
        inputs = keras.Input((size.context,), dtype="int32", name="characters")
        x = layers.Embedding(tokens, size.width, name="embedding")(inputs)
        x = PositionEmbedding(name="position")(x)
        for number in range(size.blocks):
            x = _attend(x, size, f"block_{number}")
            x = _feed_forward(x, size, f"block_{number}")
        x = layers.LayerNormalization(name="norm")(x)
        logits = layers.Dense(tokens, name="logits")(x)
        outputs = layers.Activation("linear", dtype="float32")(logits)
    return keras.Model(inputs, outputs, name="decoder")


def _attend(x: Tensor, size: Size, block: str) -> Tensor:
    head = size.width // size.heads
    normed = layers.LayerNormalization(name=f"{block}_attention_norm")(x)
    projected = [
        layers.EinsumDense(
            "btd,dhk->bthk", (None, size.heads, head), name=f"{block}_{role}"
        )(normed)
        for role in ("query", "key", "value")
    ]
    attended = CausalAttention(name=f"{block}_attention")(*projected)
    outputs = layers.EinsumDense(
        "bthk,hkd->btd", (None, size.width), name=f"{block}_attention_outputs"
    )(attended)
    return layers.Add(name=f"{block}_attention_add")([x, outputs])


def _feed_forward(x: Tensor, size: Size, block: str) -> Tensor:
    normed = layers.LayerNormalization(name=f"{block}_feed_forward_norm")(x)
    hidden = layers.Dense(size.hidden, "gelu", name=f"{block}_feed_forward_up")(
        normed
    )
    outputs = layers.Dense(size.width, name=f"{block}_feed_forward_down")(
        hidden
    )
    return layers.Add(name=f"{block}_feed_forward_add")([x, outputs])
