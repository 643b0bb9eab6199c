"""Facts about layers and models of KerasHub that have no public name."""

from __future__ import annotations

import sys

import keras

from keras_policy_ext._keras import walking

# By the class of a layer of KerasHub (0.32), the attribute with its router.
_ROUTERS = {
    "Gemma4Router": "proj",
    "GptOssTopKRouter": "router_dense",
    "MixtralSparseMoeBlock": "_sparse_feedforward_gate_dense",
    "Qwen3SparseMoeBlock": "_sparse_feedforward_gate_dense",
    "Qwen3_5MoeSparseMoeBlock": "_router_gate",
    "QwenSparseMoeBlock": "_sparse_feedforward_gate_dense",
}


def routers(model: keras.Layer) -> dict[int, str]:
    """Return the class with the experts by the `id` of each of its routers.

    There is no public way to ask a layer for its router. Of a class or an
    attribute that KerasHub has renamed, nothing is found.
    """
    if "keras_hub" not in sys.modules:
        return {}
    by_id = {}
    for layer in walking.layers_within(model):
        for base in type(layer).__mro__:
            library = base.__module__.partition(".")[0]
            if library == "keras_hub" and base.__name__ in _ROUTERS:
                router = getattr(layer, _ROUTERS[base.__name__], None)
                by_id[id(router)] = base.__name__
    return by_id


def count_adapted_layers_again(model: keras.Model) -> None:
    """Update the indices of LoRA layers that a KerasHub backbone stores."""
    # For its adapter files, it stores their indices among all layers with
    # weights (keras_hub 0.32), and a float8 state is one more such layer.
    # Expires when KerasHub stores paths.
    if not writes_map_of_quantized_layers(model):
        return
    if getattr(model, "_lora_enabled_layers", None):
        # In KerasHub's order, which is not that of `layers_within`.
        layers = model._flatten_layers(include_self=False)
        layers = [x for x in layers if x.weights]
        model._lora_enabled_layers = [
            number
            for number, layer in enumerate(layers)
            if getattr(layer, "lora_enabled", False)
        ]


def writes_map_of_quantized_layers(model: keras.Model) -> bool:
    """Return True if a model's config maps each quantized layer to a policy."""
    # KerasHub's backbones do (keras_hub 0.32): once a layer reports a
    # `quantization_mode`, the config has a map of those layers in place of the
    # backbone's policy. It does not list the others, which get the global
    # policy when loaded. A policy that is itself a map is written unchanged.
    # Expires when KerasHub gives that map a default.
    hub = sys.modules.get("keras_hub")
    return hub is not None and isinstance(model, hub.models.Backbone)
