"""Layers in Keras's own float8, which an extension takes over.

Keras's `quantize("float8")` adds scales and amax histories to the weights of a
layer. The core tells such layers, in models and in files. What becomes of them
is up to the extension `keras_float8`, which is imported when the first one is
met.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import keras
import numpy as np

from keras_policy_ext import _extensions
from keras_policy_ext._types import Tensor
from keras_policy_ext.files.entries import GROUP

NAME = "keras_float8"
"""The name of the extension."""

_OWN_COUNTS = 1, 2  # A kernel, maybe a bias.
_STATES = 6  # A scale and a history of each of three operands.


class TakesOver(Protocol):
    """What the extension does. A `store` has the weights of a layer."""

    def clear(self, layer: keras.Layer) -> None:
        """Remove the variables that Keras added to an unlocked layer."""

    def split(
        self, store: Mapping[str, Any], path: str, checked: bool
    ) -> tuple[Mapping[str, Any], dict[str, np.ndarray]]:
        """Return the layer's own weights, and the entries of a state.

        If they are not to be `checked`, there are no entries. A ValueError
        says that they are damaged.
        """

    def rewritten(self, path: Any, whole: bool) -> AbstractContextManager[Any]:
        """Return a block in which a copy of a file exists, and yields its path.

        This package reads the copy: of a model if it is `whole`, of weights
        otherwise.
        """

    def shown(self, layer: Any, operand: str, kind: str) -> Tensor:
        """Return a float8 layer's scale or history as Keras's layers do.

        `kind` is "scale" or "amax_history". The layer has a state with amaxes.
        """


_extension: TakesOver | None = None


def register(extension: TakesOver) -> None:
    """Have `extension` take such layers over from now on."""
    global _extension
    _extension = extension


def extension() -> TakesOver | None:
    """Import and return what takes such layers over; None if it is missing."""
    _extensions.import_for(NAME)
    return _extension


def needed(received: str) -> TakesOver:
    """Return the extension for layers in Keras's own float8; raise without.

    `received` is a noun with its path, for the message.
    """
    found = extension()
    if found is None:
        raise ValueError(
            "Layers in Keras's own float8 are taken over by an extension that "
            f"is not installed, {NAME!r}. Received: {received}, which has such "
            "layers. Allowed without the extension: models and files without "
            "them. Install the whole package."
        )
    return found


def is_store(store: Mapping[str, Any]) -> bool:
    """Return True if a store may have the weights of such a layer.

    Keras saves them by number: the kernel, the bias if there is one, then the
    scales and histories (keras 3.4 to 3.15).
    """
    keys = set(store.keys())
    is_numbered = keys == {str(number) for number in range(len(keys))}
    return is_numbered and len(keys) - _STATES in _OWN_COUNTS


def is_group(group: Any) -> bool:
    """Return True if an HDF5 group has the weights of such a layer."""
    # Other layers have as many weights, but of other shapes or dtypes.
    if not is_store(group) or GROUP in group.parent:
        return False
    items = [group[str(number)] for number in range(len(group))]
    if not all(hasattr(item, "shape") for item in items):
        return False
    states = items[-_STATES:]
    length = states[1].shape
    return (
        items[0].ndim >= 2
        and [item.shape for item in states] == [(), length] * (_STATES // 2)
        and len(length) == 1
        and length[0] > 0
        and all(item.dtype == "float32" for item in states)
    )
