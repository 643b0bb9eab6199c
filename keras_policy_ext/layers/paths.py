"""The paths of layers and weights, which rules, files and PyTorch go by."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import keras

from keras_policy_ext import _bases


class BuiltUnderSavedPath(_bases.MixedInto):
    """Keeps the path of a layer in its build config.

    Keras builds the layers of a saved Sequential one by one, outside of it,
    where a rule for `"model/dense"` would not match.
    """

    def get_build_config(self) -> dict[str, Any] | None:
        """`Layer.get_build_config`, and the path of this layer."""
        config = super().get_build_config()
        return {**config, "path": self.path} if config else config

    def build_from_config(self, config: dict[str, Any]) -> None:
        """`Layer.build_from_config`, under the path that was saved."""
        path = (config or {}).get("path") or ""
        with scope_of_path(path.rpartition("/")[0]):
            super().build_from_config(config)


def scope_of_path(path: str) -> AbstractContextManager[Any]:
    """The name scope of a path, whichever is open; that one for no path."""
    parent, _, name = path.rpartition("/")
    if not name:
        return contextlib.nullcontext()
    return keras.name_scope(name, override_parent=parent)
