"""Where Keras 3 treats the masks in a graph otherwise than tf_keras did."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from keras_policy_ext.migration.changes import inner_layers
from keras_policy_ext.migration.problems import Config

_RECURRENT = """
    Bidirectional ConvLSTM1D ConvLSTM2D ConvLSTM3D GRU LSTM RNN SimpleRNN
"""
_OTHER_USERS = """
    AdditiveAttention Attention GlobalAveragePooling1D MultiHeadAttention
    TimeDistributed
"""
RECURRENT = frozenset(_RECURRENT.split())
_USERS = RECURRENT.union(_OTHER_USERS.split())


class Masks:
    """The masks in a legacy graph.

    Args:
        layers: Legacy configs of the layers, by name.
        calls: For each layer the names of the layers that each call takes.
    """

    def __init__(
        self, layers: Mapping[str, Config], calls: Mapping[str, list[list[str]]]
    ):
        self._layers = layers
        self._calls = calls

    def origins(self, name: str) -> set[str]:
        """Layers whose masks may come with the outputs of a layer."""
        return {
            found
            for found in self._back(name, masked_only=True)
            if _makes_mask(self._layers[found])
        }

    def notes(self) -> Iterator[str]:
        """List the layers that predict differently in Keras 3."""
        for name, layer in self._layers.items():
            if layer["class_name"] == "Concatenate":
                yield from self._concatenate(name, layer["config"])
            elif layer["class_name"] == "MultiHeadAttention":
                yield from self._attention(name)

    def _concatenate(self, name: str, fields: Config) -> Iterator[str]:
        # compute_mask: `all` over the features in tf_keras, `any` in Keras 3.
        differ = any(
            len({frozenset(self.origins(source)) for source in call}) > 1
            for call in self._calls[name]
        )
        if fields.get("axis") != 1 and differ and self._is_used(name):
            yield (
                f"Keras 3 masks a step after Concatenate {name!r} only where "
                "all of its inputs mask it, tf_keras where one did: the model "
                "predicts otherwise for steps that one input masks. Pass the "
                "mask to the layers after it yourself, in a model that you "
                "build anew."
            )

    def _attention(self, name: str) -> Iterator[str]:
        earlier = [
            found
            for call in self._calls[name]
            for source in call
            for found in self._back(source)
            if self._layers[found]["class_name"] == "MultiHeadAttention"
        ]
        if earlier and self.origins(name):
            yield (
                "Keras 3 lets masked steps into MultiHeadAttention "
                f"{name!r}, which follows another one, and predicts "
                "otherwise for sequences with such steps. Pass the mask to "
                "it yourself, in a model that you build anew."
            )

    def _is_used(self, name: str) -> bool:
        return any(
            (layer["class_name"] in _USERS or _inner(layer))
            and other != name
            and name in self._back(other)
            for other, layer in self._layers.items()
        )

    def _back(self, name: str, masked_only: bool = False) -> set[str]:
        """A layer and all before it, or those that its mask may be of."""
        found: set[str] = set()
        open_ends = [name]
        while open_ends:
            name = open_ends.pop()
            if name in found or (
                masked_only and _ends_mask(self._layers[name])
            ):
                continue
            found.add(name)
            open_ends += [x for call in self._calls[name] for x in call]
        return found


def _inner(layer: Config) -> list[Config]:
    """The layers of a nested model."""
    inner = inner_layers(layer["config"])
    return inner if isinstance(inner, list) else []


def _makes_mask(layer: object) -> bool:
    if not isinstance(layer, Mapping) or "config" not in layer:
        return False
    fields = layer["config"]
    looks_up = isinstance(fields, Mapping) and fields.get("mask_zero")
    if layer.get("class_name") == "Masking" or looks_up:
        return True
    return any(map(_makes_mask, _inner(layer)))


def _ends_mask(layer: Config) -> bool:
    """Return True if the outputs of a layer have no steps left to mask."""
    fields = layer["config"]
    if not isinstance(fields, Mapping):
        return False
    inner = fields.get("layer")
    if layer["class_name"] == "Bidirectional" and isinstance(inner, Mapping):
        fields = inner.get("config") or {}
    if layer["class_name"] in RECURRENT:
        return not fields.get("return_sequences")
    return layer["class_name"].startswith("Global")
