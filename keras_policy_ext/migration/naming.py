"""Names of layers, and what else of a graph Keras gives names to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import keras

_FAR = 10_000
"""More operations than Keras names while it builds a model."""


def of_layers(config: object) -> Iterator[str]:
    """The names of all layers of the models in a Keras 3 config."""
    if isinstance(config, Mapping):
        layers = config.get("layers")
        for layer in layers if isinstance(layers, list) else ():
            if isinstance(layer, Mapping):
                fields = layer.get("config")
                inner = fields if isinstance(fields, Mapping) else {}
                name = layer.get("name", inner.get("name"))
                if isinstance(name, str):
                    yield name
        config = list(config.values())
    if isinstance(config, list):
        for value in config:
            yield from of_layers(value)


def reserve(names: Iterable[str]) -> None:
    """Let Keras not give these names by itself from now on.

    A mask is computed by operations, which Keras names by their class with a
    count and puts into the graph of a functional model. That of a layer
    `Concatenate` is a `Concatenate` too, and gets the name that the layer
    has in the file: a graph takes no name twice (keras 3.12 to 3.15).
    """
    taken: dict[str, set[int]] = {}
    for name in names:
        taken.setdefault(name, set()).add(0)
        counted = re.fullmatch(r"(.+)_([1-9]\d{0,8})", name, re.ASCII)
        if counted:
            taken.setdefault(counted[1], set()).add(int(counted[2]))
    for prefix, counts in taken.items():
        following = keras.backend.get_uid(prefix)
        # A count that is far off is not reached, and would cost its steps.
        last = max((n for n in counts if n < following + _FAR), default=0)
        while following <= last:
            following = keras.backend.get_uid(prefix)
