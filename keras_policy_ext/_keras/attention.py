"""Private names of the attention layers of Keras."""

from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_policy_ext._keras import versions

_ATTEND = "_compute_attention"
_FLASH, _FLASH_BEFORE = "_flash_attention", "float8_flash_attention_before"


def has_flash_attention(layer: keras.Layer) -> bool:
    """Return True if a layer was made with `flash_attention=True`."""
    # The config of a layer does not have this argument (`_flash_attention`,
    # keras 3.7 to 3.15). Without the attribute, no flash attention is used.
    return bool(getattr(layer, "_flash_attention", False))


def has_own_attention(layer: keras.Layer, mixin: type) -> bool:
    """Return True if a subclass of `mixin` overrides the attention of Keras."""
    stock = getattr(super(mixin, type(layer)), _ATTEND, None)
    return getattr(type(layer), _ATTEND, None) is not stock


def products_of(layer: keras.Layer) -> tuple[str, str]:
    """Return the equations of scores and weighted sum of a built layer."""
    # Keras 3.12 to 3.16 has them under these names.
    names = "_dot_product_equation", "_combine_equation"
    for name in (_ATTEND, *names):
        if not hasattr(layer, name):
            what = f"{type(layer).__name__}.{name}"
            raise versions.missing(what, 'attention="float8"')
    scores, weighted_sum = (getattr(layer, name) for name in names)
    return scores, weighted_sum


def replace_attention(
    layer: keras.Layer, attend: Callable[..., Any] | None
) -> None:
    """Make a layer compute attention by `attend`; None restores Keras's."""
    # It is set on the instance. Keras compares the method of the class
    # (`_compute_attention`, keras 3.12 to 3.16): if that is overridden, layers
    # without `attend` lose the causal kernels of the frameworks.
    own = vars(layer)
    own.pop(_ATTEND, None)
    if attend is not None:
        own[_ATTEND] = attend
        # With flash attention Keras returns no scores. Layers made with it get
        # no `attend`; others may have it by `enable_flash_attention` of Keras.
        own.setdefault(_FLASH_BEFORE, own.get(_FLASH))
        own[_FLASH] = False
    elif _FLASH_BEFORE in own:
        own[_FLASH] = own.pop(_FLASH_BEFORE)
    # The layer `_softmax` would cast scores to float16 (keras 3.0 to 3.16).
    softmax = getattr(layer, "_softmax", None)
    if softmax is not None:
        softmax.autocast = attend is None


def attend_by_scores(
    layer: keras.Layer,
    stock: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any = None,
    training: bool | None = None,
    return_attention_scores: bool = True,
    **options: bool,
) -> tuple[Any, Any]:
    """Call Keras's attention on the path that computes scores.

    There both matmuls are calls of `ops.einsum`, which can run in float8. Keras
    takes it where it returns the scores, and otherwise may call
    `ops.dot_product_attention`. `MultiHeadAttention` reads from an argument
    whether to return them, `GroupQueryAttention` from an attribute
    (`_return_attention_scores`, keras 3.12 to 3.16). `stock` is `super()` in
    the layer, and what follows are the arguments of Keras's method;
    `return_attention_scores` is without effect.

    Returns:
        The weighted sum and the probabilities.
    """
    if hasattr(layer, "_return_attention_scores"):
        vars(layer)["_return_attention_scores"] = True
    else:
        options["return_attention_scores"] = True
    operands = query, key, value, attention_mask, training
    with keras.name_scope(layer.name, caller=layer):
        weighted_sum, weights = getattr(stock, _ATTEND)(*operands, **options)
    # The softmax gave float32 where the layer computes in float16.
    return weighted_sum, ops.cast(weights, query.dtype)
