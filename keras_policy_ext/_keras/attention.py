"""Attention of Keras's layers, with other functions for the two matmuls."""

from collections.abc import Callable

import keras
from keras import ops

from keras_policy_ext._keras import versions
from keras_policy_ext._types import Tensor


def has_flash_attention(layer: keras.Layer) -> bool:
    """Return True if a layer was made with `flash_attention=True`.

    Its config does not have this argument (`_flash_attention`, keras 3.7 to
    3.15). If the attribute is missing, False: scores are then not computed by
    flash attention.
    """
    return bool(getattr(layer, "_flash_attention", False))


def has_own_attention(layer: keras.Layer, mixin: type) -> bool:
    """Return True if a subclass of `mixin` overrides the attention of Keras."""
    cls, name = type(layer), "_compute_attention"
    stock = getattr(super(mixin, cls), name, None)
    return getattr(cls, name, None) is not stock


def replace_attention(
    layer: keras.Layer, mixin: type, attend: Callable[..., object] | None
) -> None:
    """Make `layer` compute attention by `attend`; None restores Keras's.

    A subclass of `mixin` that overrides attention keeps its own. The function
    is set on the instance and not on the class: Keras compares the method of
    the class (`_compute_attention`, keras 3.12 to 3.15) to see whether
    attention is overridden, and if so, does not use the causal kernels of the
    frameworks. Expires with a public method to override.

    Raises:
        ImportError: If Keras has no such method any more.
    """
    name = "_compute_attention"
    vars(layer).pop(name, None)
    replaced = attend is not None and not has_own_attention(layer, mixin)
    if replaced:
        _check(layer)
        vars(layer)[name] = attend
    # A layer inside, which would cast float32 scores to float16 (`_softmax`,
    # keras 3.0 to 3.15).
    softmax = getattr(layer, "_softmax", None)
    if softmax is not None:
        softmax.autocast = not replaced


def _check(layer: keras.Layer) -> None:
    """Raise if a layer lacks an attribute that `attend` needs."""
    needed = ["_compute_attention", "_compute_causal_mask", "_masked_softmax"]
    if layer.built:
        needed += ["_dot_product_equation", "_combine_equation"]
    for name in needed:
        if not hasattr(layer, name):
            what = f"{type(layer).__name__}.{name}"
            raise versions.missing(what, 'attention="float8"')


def attend(
    layer: keras.Layer,
    scored: Callable[..., Tensor],
    contracted: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    training: bool | None = None,
    return_attention_scores: bool = False,
    use_causal_mask: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute attention as Keras's layer does, with the two matmuls passed in.

    Masks, softmax, dropout and the equations are those of the stock layer,
    which has them under private names only (keras 3.12 to 3.15). Expires with
    public names.

    Args:
        layer: An attention layer.
        scored: Computes the scores from an equation, query and key.
        contracted: Computes the weighted sum from an equation, weights and
            value.
        query: (batch, <queries>, heads, size), projected.
        key: (batch, <keys>, heads, size), projected.
        value: (batch, <keys>, heads, value size), projected.
        attention_mask: Boolean, (batch, <queries>, <keys>).
        training: Whether dropout is applied to the probabilities.
        return_attention_scores: Ignored; the scores are always returned.
        use_causal_mask: Whether to add the causal mask here.

    Returns:
        (batch, <queries>, heads, value size), and the probabilities
        before dropout, (batch, heads, <queries>, <keys>).
    """
    if use_causal_mask:
        causal = layer._compute_causal_mask(query, value)
        attention_mask = (
            causal
            if attention_mask is None
            else ops.logical_and(ops.cast(attention_mask, "bool"), causal)
        )
    scores = scored(layer._dot_product_equation, query, key)
    scores = layer._masked_softmax(scores, attention_mask)
    weights = scores
    if layer.dropout > 0.0:
        weights = layer._dropout_layer(scores, training=training)
    if scores.dtype != query.dtype:
        scores = ops.cast(scores, query.dtype)
    return contracted(layer._combine_equation, weights, value), scores
