"""Methods that Keras calls beside `call`: quantize, rematerialize."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import keras

from keras_policy_ext import _bases, backends, contractions
from keras_policy_ext._keras import stock_float8
from keras_policy_ext._types import Tensor
from keras_policy_ext.layers.drop_in import drop_ins
from keras_policy_ext.layers.operands import is_floating_tensor


class StockCalls(_bases.MixedInto):
    """The part of `Float8Mixin` about those methods."""

    def quantize(
        self,
        mode: str | None = None,
        type_check: bool = True,
        config: Any = None,
    ) -> None:
        """As the stock layer, under a policy that is not float8.

        `Model.quantize` warns with the text of the error, and goes on.

        Args:
            mode: As for the stock layer, but not `"float8"`.
            type_check: As for the stock layer: whether to refuse subclasses.
            config: As for the stock layer.

        Raises:
            NotImplementedError: If the layer follows float8 or is to, or the
                stock layer has no quantization.
        """
        layer: Any = self
        # Keras 3.12 has no `config`.
        kwargs = {} if config is None else {"config": config}
        if not isinstance(layer, StockCalls):
            # Keras goes on calling this of a layer that was reverted since.
            type(layer).quantize(layer, mode, type_check=type_check, **kwargs)
            return
        self.quantize_after(super().quantize, mode, type_check, **kwargs)

    def quantize_after(
        self,
        stock: Callable[..., None],
        mode: str | None = None,
        type_check: bool = True,
        **kwargs: Any,
    ) -> None:
        """`quantize`, which goes on to a given function of the stock layer."""
        policy = self.float8_policy
        if policy is not None and not policy.recipe.trains:
            stock_float8.refuse_quantization(
                f"Layer {self.name!r} is frozen and was not quantized: its "
                f"kernels are stored in float8. Received: {mode!r}. Allowed: a "
                "layer with float weights. `keras_policy_ext.thaw(model)` "
                "gives it float weights with the rounded values."
            )
        if policy is not None:
            stock_float8.refuse_quantization(
                f"Layer {self.name!r} follows the policy "
                f"{policy.full_name!r} and was not quantized: it stays in "
                f"float8. Received: {mode!r}. Allowed: a layer under a plain "
                "policy. Call `keras_policy_ext.revert(model)` first, then "
                "quantize; `keras_policy_ext.convert(model, policy)` changes "
                "how it is scaled."
            )
        if mode == "float8":
            stock_float8.refuse_quantization(
                f"quantize('float8') does nothing on layer {self.name!r}: "
                "layers of keras_policy_ext are in float8 by their policy, "
                f"which is {self.dtype_policy.name!r}. Received: 'float8'. "
                "Allowed: the other modes of Keras. Call "
                "`keras_policy_ext.convert(model)`, or make the layer with "
                "`dtype=keras_policy_ext.Float8DTypePolicy(...)`."
            )
        type_check = type_check and type(self) not in drop_ins().values()
        stock(mode, type_check=type_check, **kwargs)

    def quantized_call(self, *args: Any, **kwargs: Any) -> Tensor:
        """Call the layer: Keras calls this where it has a quantization mode."""
        if self._float8_policy is None and stock_float8.is_quantized(self):
            return super().quantized_call(*args, **kwargs)
        return self.call(*args, **kwargs)

    def rematerialized_call(
        self, layer_call: Callable[..., Tensor], *args: Any, **kwargs: Any
    ) -> Callable[..., Tensor]:
        """Rematerialize a function of the floating tensors; the rest is bound.

        Keras would rematerialize a function of all arguments: JAX then traces
        `training`, and TensorFlow refuses keyword arguments in a graph and
        has no gradient for a tensor that is not an argument.
        """
        leaves = keras.tree.flatten((args, kwargs))
        differentiable = [is_floating_tensor(leaf) for leaf in leaves]
        tensors = list(itertools.compress(leaves, differentiable))
        compiling = backends.current().is_compiling()
        kind = None if compiling else contractions.preferred()

        def bound(*tensors: Tensor, **_: Any) -> Tensor:
            # Keras hands on `training` besides, which is among the leaves.
            given = iter(tensors)
            merged = [
                next(given) if is_given else leaf
                for leaf, is_given in zip(leaves, differentiable, strict=True)
            ]
            args_, kwargs_ = keras.tree.pack_sequence_as((args, kwargs), merged)
            # The second time it may be called on a thread of the framework.
            chosen = contextlib.nullcontext()
            with chosen if kind is None else contractions.prefer(kind):
                return layer_call(*args_, **kwargs_)

        again = super().rematerialized_call(bound, *args, **kwargs)
        return lambda *args, **kwargs: again(*tensors)

    def quantized_build(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: `add_weight` makes the state of a float8 layer."""
        if self.quantization_mode != "float8":
            super().quantized_build(*args, **kwargs)
