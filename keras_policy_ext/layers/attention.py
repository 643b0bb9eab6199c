"""Attention layers: float8 projections, and optionally float8 attention.

The two products of attention are recognised by operation, as in layers of a
class without a float8 form; see `attention_products`.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, TypeVar

import keras

from keras_policy_ext._keras import attention as stock_attention
from keras_policy_ext._keras import calls, products, walking
from keras_policy_ext.files.entries import ATTENTION
from keras_policy_ext.layers.attention_products import Attention
from keras_policy_ext.layers.class_swap import to_float8_class
from keras_policy_ext.layers.drop_in import drop_in, drop_ins, original_of
from keras_policy_ext.layers.mixin import Float8Mixin
from keras_policy_ext.policies import Float8DTypePolicy
from keras_policy_ext.policies.of_layers import held_policy
from keras_policy_ext.seams import SCORES, WEIGHTED_SUM

LayerClass = TypeVar("LayerClass", bound=type)


class _Float8Attention(Float8Mixin):
    """The common base of the attention layers.

    The projections are sublayers that `build` turns into float8. The layer
    itself runs matmuls, and follows float8, only with `attention="float8"`.
    """

    float8_kernels = ()
    float8_replaces = ()

    # On the class, since a stock layer that becomes one of these never ran
    # `__init__` below. Not `attention`: a subclass may have its own.
    _float8_attention: str | None = None

    # Type checkers see the constructor of the stock layer.
    if not TYPE_CHECKING:

        def __init__(self, *args, attention=None, **kwargs):
            """Check `attention`, make the stock layer, look up the policy."""
            if attention not in (None, "float8"):
                raise ValueError(
                    f"Unknown `attention` of {type(self).__name__}. Received: "
                    f"{attention!r}. Allowed: 'float8' (scores and weighted "
                    "sum in float8 under a float8 policy) or None (as in "
                    "Keras). Leave it out for None."
                )
            super().__init__(*args, **kwargs)
            if attention is not None:
                # By position or name: as the stock constructor takes it.
                stock = inspect.signature(super(Float8Mixin, self).__init__)
                if stock.bind(*args, **kwargs).arguments.get("flash_attention"):
                    raise ValueError(
                        f"attention={attention!r} and flash_attention=True "
                        "exclude each other: flash attention computes scores "
                        "and weighted sum in one kernel, not in float8. "
                        f"Received: attention={attention!r} and "
                        "flash_attention=True. Allowed: one of them. Leave the "
                        "other out."
                    )
            self._float8_attention = attention
            self._resolve_float8_policy()

    def build(
        self, query_shape: Any, value_shape: Any, key_shape: Any = None
    ) -> None:
        """Build the projections; swap them to float8 under a float8 policy.

        Other sublayers are rematerialized with this layer, not by themselves.
        """
        super().build(query_shape, value_shape, key_shape)
        self._resolve_float8_policy()  # Path and equations are known now.
        _, *sublayers = walking.layers_within(self)
        policies = map(held_policy, sublayers)
        if not any(isinstance(x, Float8DTypePolicy) for x in policies):
            return
        for layer in sublayers:
            if type(layer) in drop_ins():
                to_float8_class(layer)
            else:  # Such as a softmax.
                calls.rematerialize_with_outer(layer)

    @property
    def float8_policy(self) -> Float8DTypePolicy | None:
        """The float8 policy of the two attention matmuls, or None."""
        # The projections are layers with policies of their own.
        return super().float8_policy if self._float8_attention else None

    def choose_attention(self, attention: str | None) -> None:
        """Set `attention` of a layer that already exists; `convert` calls it.

        Raises:
            ValueError: If it is `"float8"` and the layer was made with
                `flash_attention=True`, or its class computes attention itself.
        """
        flash = stock_attention.has_flash_attention(self)
        if attention is not None and flash:
            raise ValueError(
                "its scores and weighted sum are computed by flash attention, "
                "one kernel that is not float8"
            )
        is_own = stock_attention.has_own_attention(self, _Float8Attention)
        if attention is not None and is_own:
            raise ValueError(
                "its class computes scores and weighted sum itself, in "
                "`_compute_attention`; a layer of your own can multiply them "
                "with float8_activations_einsum and float8_weighted_sum"
            )
        self._float8_attention = attention
        self._resolve_float8_policy()

    def get_config(self) -> dict[str, Any]:
        """Return the stock layer's config, with `attention` if it is set."""
        config = super().get_config()
        # The constructor of a class that a user derived from the stock layer
        # may not take it. `texts_for_file` stores it for all classes.
        original = original_of(type(self))
        takes_it = original is None or original in drop_ins()
        if self._float8_attention is None or not takes_it:
            return config
        return {**config, "attention": self._float8_attention}

    def texts_for_file(self) -> dict[str, str]:
        """Return the strings to save with this layer, `attention` too."""
        mode = self._float8_attention
        attention = {} if mode is None else {ATTENTION: mode}
        return {**super().texts_for_file(), **attention}

    def _resolve_float8_policy(self) -> None:
        """Decide too whether the products of two activations are in float8."""
        super()._resolve_float8_policy()
        controller = self.float8_controller
        controller.attention = None
        is_own = stock_attention.has_own_attention(self, _Float8Attention)
        wanted = self._float8_attention and controller.policy and not is_own
        if wanted and self.weights:  # Only a built layer has equations.
            scores, weighted_sum = stock_attention.products_of(self)
            roles = (scores, SCORES), (weighted_sum, WEIGHTED_SUM)
            controller.attention = Attention(roles=roles, widens_float16=True)
            products.follow(type(self))
        attend = self._attend if wanted else None
        stock_attention.replace_attention(self, attend)

    def _attend(self, *args: Any, **kwargs: Any) -> Any:
        """Compute attention as Keras does, by two products."""
        return stock_attention.attend_by_scores(self, super(), *args, **kwargs)


def _attention_drop_in(cls: LayerClass) -> LayerClass:
    """Register an attention class as `drop_in` does, with `attention`."""
    layer: Any = drop_in(cls)
    *parameters, kwargs = layer.__signature__.parameters.values()
    attention = inspect.Parameter(
        "attention", inspect.Parameter.KEYWORD_ONLY, default=None
    )
    layer.__signature__ = inspect.Signature([*parameters, attention, kwargs])
    return layer


@_attention_drop_in
class MultiHeadAttention(_Float8Attention, keras.layers.MultiHeadAttention):
    """`keras.layers.MultiHeadAttention` that can follow a float8 policy.

    The projections of query, key, value and output are then in float8.

    Args:
        *args: As for `keras.layers.MultiHeadAttention`.
        attention: `"float8"` runs the two attention matmuls in float8 too: the
            scores `query · key`, and the sum of the values weighted by the
            softmax. That holds for the forward pass and both gradients. Under
            `rowwise`, `block` and `mxfp8` no scale is of two queries, keys or
            examples; otherwise each tensor has one scale. Scores and softmax
            stay in the compute dtype (float32 for float16). The fused attention
            kernels of the frameworks are not used. None: as in Keras.
        **kwargs: As for `keras.layers.MultiHeadAttention`.

    Raises:
        ValueError: If `attention` is another value, or is `"float8"` with
            `flash_attention=True`.

    Examples:
        >>> layer = kpe.layers.MultiHeadAttention(
        ...     2, 16, attention="float8", dtype="mixed_float8"
        ... )
        >>> layer.quantization_mode
        'float8'
    """


@_attention_drop_in
class GroupedQueryAttention(_Float8Attention, keras.layers.GroupQueryAttention):
    """`keras.layers.GroupQueryAttention` that can follow a float8 policy.

    It works like `MultiHeadAttention`. Keys and values are repeated for the
    queries of a group before they are quantized.

    Args:
        *args: As for `keras.layers.GroupQueryAttention`.
        attention: As for `MultiHeadAttention`.
        **kwargs: As for `keras.layers.GroupQueryAttention`.

    Raises:
        ValueError: As for `MultiHeadAttention`.
    """
