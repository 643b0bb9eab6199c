"""The paths of layers, which rules, files and PyTorch use."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import keras

from keras_policy_ext import _bases


class BuiltUnderSavedPath(_bases.MixedInto):
    """A mixin that saves a layer's path and builds the layer under it.

    Keras builds the layers of a saved Sequential one by one, outside of the
    model. A rule for `"model/dense"` would not match there.
    """

    def get_build_config(self) -> dict[str, Any] | None:
        """Return the layer's build config, with the layer's path in it."""
        config = super().get_build_config()
        return {**config, "path": self.path} if config else config

    def build_from_config(self, config: dict[str, Any]) -> None:
        """Build the layer inside the name scope of its saved path."""
        path = (config or {}).get("path") or ""
        with scope_of_path(path.rpartition("/")[0]):
            super().build_from_config(config)


def scope_of_path(path: str) -> AbstractContextManager[Any]:
    """Return the name scope of a path; for "" one that changes nothing."""
    parent, _, name = path.rpartition("/")
    if not name:
        return contextlib.nullcontext()
    return keras.name_scope(name, override_parent=parent)
