"""Turn built layers into their float8 classes (forms) and back, in place.

A layer keeps its identity, its variables and its place in the model. Only its
class changes, and a layer with kernels gets a float8 state.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras

from keras_policy_ext import policies
from keras_policy_ext._keras import built_layers, global_policy, quantization
from keras_policy_ext.files import keras_float8
from keras_policy_ext.layers import stored_weights
from keras_policy_ext.layers.by_operation import (
    ByOperation,
    foreign_kernels,
    form_by_operation,
)
from keras_policy_ext.layers.controller import Float8Controller
from keras_policy_ext.layers.drop_in import form_of, original_of
from keras_policy_ext.layers.mixin import Float8Mixin
from keras_policy_ext.layers.stored_weights import Frozen
from keras_policy_ext.layers.transaction import unchanged_on_error
from keras_policy_ext.policies.of_layers import source_policy_of

# The attributes that float8 classes give a layer, besides `float8_state`.
_ATTRIBUTES_OF_FORMS = ("_float8_attention", "float8_controller")


def to_float8_class(
    layer: keras.Layer,
    policy: Any = None,
    frozen: Iterable[Frozen] | None = None,
) -> None:
    """Change a built layer to its float8 class and a float8 policy, in place.

    If Keras has quantized it to float8, Keras's scales and histories are
    removed, since those of a layer that is used twice are sums. Its amaxes
    start anew. A layer that followed another policy keeps its amaxes.

    Args:
        layer: A built layer whose class has a float8 form, or is one.
        policy: The float8 policy to follow; None for the layer's own policy.
        frozen: The stored kernels for a policy with the recipe
            `FrozenKernels`; None for zeros, to be loaded later.

    Raises:
        ValueError: If the layer is not built, or there is no such form.
        TypeError: If its class may compute something else.
    """
    policy = policies.get(layer.dtype_policy if policy is None else policy)
    form = type(layer) if isinstance(layer, Float8Mixin) else _form(layer)
    if not layer.built:
        raise ValueError(
            f"Layer {layer.name!r} has no weights yet. Received: a layer "
            "that is not built. Allowed: a built one. Build it, or call it "
            "on data, first."
        )
    with unchanged_on_error([layer]):
        with built_layers.unlocked(layer):
            if form is not type(layer):
                if quantization.is_in_float8(layer):
                    keras_float8.needed(f"layer {layer.path!r}").clear(layer)
                if issubclass(form, Float8Mixin):
                    Float8Controller.join(layer)
                built_layers.swap_class(layer, form)
            if isinstance(layer, ByOperation):
                _contract_foreign_kernels(layer, policy)
            if isinstance(layer, Float8Mixin):
                layer.float8_controller.replace_policy(policy)
                stored_weights.store_all(layer, frozen)
            else:  # A form without kernels, such as LSTM: its cell has them.
                global_policy.replace_layer_policy(layer, policy)
        built_layers.track_again([layer])


def to_stock_class(layer: keras.Layer) -> None:
    """Change a float8 layer to its stock class, without float8, in place.

    A class without a stock original, such as a user's own class with the
    mixin, is kept. A layer without float8 is unchanged. Weights are the same
    to the bit. Stored kernels become dequantized float kernels.
    """
    original = original_of(type(layer))
    plain = source_policy_of(layer)
    with unchanged_on_error([layer]):
        with built_layers.unlocked(layer):
            if isinstance(layer, Float8Mixin):
                if layer.is_frozen:
                    stored_weights.thaw_kernels(layer)
                layer.float8_controller.replace_policy(plain)
                if original is not None:
                    built_layers.detach(layer, "float8_state")
            if original is not None:
                built_layers.swap_class(layer, original)
                for name in _ATTRIBUTES_OF_FORMS:
                    vars(layer).pop(name, None)
            global_policy.replace_layer_policy(layer, plain)
        built_layers.track_again([layer])


def _contract_foreign_kernels(layer: ByOperation, policy: Any) -> None:
    """Make a layer contract weights of other layers, which then stop.

    Such a weight, read by a layer that does not own it, is called foreign.
    """
    recipe = getattr(policy, "recipe", None)
    # To freeze a layer concerns its own weights alone.
    trains = recipe is not None and recipe.trains
    foreign = foreign_kernels(layer) if trains else []
    for owner, kernel in foreign:
        controller = getattr(owner, "float8_controller", None)
        if controller is not None and controller.has_kernel(kernel):
            # A kernel has one state, which the layer that multiplies holds.
            to_stock_class(owner)
    layer.float8_controller.foreign = tuple(kernel for _, kernel in foreign)


def _form(layer: keras.Layer) -> type:
    """Return the float8 class of a layer; raise if there is none."""
    form = form_of(type(layer)) or form_by_operation(layer)
    if form is None:
        raise ValueError(
            f"This layer has no float8 form. Received: {type(layer).__name__} "
            f"{layer.name!r}. Allowed: the layers of keras_policy_ext.layers, "
            "their subclasses, and layers that derive from Float8Mixin. Keep "
            "the policy of this layer, or derive its class from Float8Mixin."
        )
    return form
