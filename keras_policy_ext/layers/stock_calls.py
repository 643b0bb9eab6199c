"""Help with Keras's `quantize` and rematerialization of float8 layers."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import keras

from keras_policy_ext import backends, contractions
from keras_policy_ext._keras import quantization
from keras_policy_ext._types import Tensor
from keras_policy_ext.layers.operands import is_floating


def refuse_quantize(layer: keras.Layer, mode: str | None) -> None:
    """Raise NotImplementedError if a layer is in float8, or `mode` is."""
    policy = layer.float8_policy
    if policy is not None and not policy.recipe.trains:
        quantization.refuse_quantization(
            f"Layer {layer.name!r} is frozen and was not quantized: its "
            f"kernels are stored in float8. Received: {mode!r}. Allowed: a "
            "layer with float weights. `keras_policy_ext.thaw(model)` "
            "gives it float weights with the rounded values."
        )
    if policy is not None:
        quantization.refuse_quantization(
            f"Layer {layer.name!r} follows the policy "
            f"{policy.full_name!r} and was not quantized: it stays in "
            f"float8. Received: {mode!r}. Allowed: a layer under a plain "
            "policy. Call `keras_policy_ext.revert(model)` first, then "
            "quantize; `keras_policy_ext.convert(model, policy)` changes "
            "how it is scaled."
        )
    if mode == "float8":
        quantization.refuse_quantization(
            f"quantize('float8') does nothing on layer {layer.name!r}: "
            "layers of keras_policy_ext are in float8 by their policy, "
            f"which is {layer.dtype_policy.name!r}. Received: 'float8'. "
            "Allowed: the other modes of Keras. Call "
            "`keras_policy_ext.convert(model)`, or make the layer with "
            "`dtype=keras_policy_ext.Float8DTypePolicy(...)`."
        )


def of_floating_tensors(
    layer_call: Callable[..., Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """Return a layer's call as a function of floating tensors, and these."""
    leaves = keras.tree.flatten((args, kwargs))
    differentiable = [
        keras.ops.is_tensor(leaf) and is_floating(leaf.dtype) for leaf in leaves
    ]
    tensors = list(itertools.compress(leaves, differentiable))
    # What `kernels.prefer` asks for now. The framework may call the layer once
    # more, for gradients, on a thread where it asks for nothing.
    compiling = backends.current.is_compiling()
    kind = None if compiling else contractions.preferred()

    def bound(*tensors: Tensor, **_: Any) -> Tensor:
        """Call the layer with these tensors in their places."""
        # `**_`: Keras passes `training` again, which is among the leaves.
        given = iter(tensors)
        merged = [
            next(given) if is_given else leaf
            for leaf, is_given in zip(leaves, differentiable, strict=True)
        ]
        args_, kwargs_ = keras.tree.pack_sequence_as((args, kwargs), merged)
        unchanged = contextlib.nullcontext()
        with unchanged if kind is None else contractions.prefer(kind):
            return layer_call(*args_, **kwargs_)

    return bound, tensors
