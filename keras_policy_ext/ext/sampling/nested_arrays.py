"""Nested arrays, such as the inputs of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras


def map_arrays(function: Callable[[Any], Any], nested: Any) -> Any:
    """Apply a function to each array of nested ones; None stays None.

    A model may have an optional input.
    """
    return keras.tree.map_structure(
        lambda x: None if x is None else function(x), nested
    )
