"""Take over layers in Keras's own float8: what the core asks for."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_policy_ext._keras import variable_values
from keras_policy_ext._types import Tensor
from keras_policy_ext.ext.keras_float8 import _keras, files
from keras_policy_ext.files import keras_float8
from keras_policy_ext.files.model_files import PathLike


class KerasFloat8:
    """See `files.keras_float8.TakesOver`."""

    def clear(self, layer: keras.Layer) -> None:
        """Remove the variables that Keras's `quantize("float8")` added."""
        _keras.remove_float8_variables(layer)

    def split(
        self, store: Mapping[str, Any], path: str, checked: bool
    ) -> tuple[Mapping[str, Any], dict[str, np.ndarray]]:
        """Return a layer's own weights in a file, and the entries of a state.

        Raises:
            ValueError: If the state is to be checked, and is damaged.
        """
        weights = files.KerasWeights.of(store)
        if not checked:
            return weights.own, {}
        weights.check(path)
        return weights.own, weights.as_state()

    def rewritten(
        self, path: PathLike, whole: bool
    ) -> AbstractContextManager[PathLike]:
        """Return a block in which a copy exists that this package reads."""
        if whole:
            return files.rewritten_model(path)
        return files.rewritten_weights(path)

    def shown(self, layer: Any, operand: str, kind: str) -> Tensor:
        """Return a scale or history of a float8 layer as Keras's layers do."""
        variable = layer.float8_state.matrices[0]  # It has one kernel.
        layout, rows = variable.rows_layout, variable.rows_of(operand)
        # Without a bank the operand has one row: no axis of matrices then.
        index: Any = rows if variable.matrix_count > 1 else rows.start
        matrix = variable_values.value_without_autocast(variable)
        matrix = ops.stop_gradient(matrix)
        if kind == "amax_history":
            return layout.history(matrix)[index]
        scale = layout.scale(matrix)[index]
        return ops.where(ops.greater(scale, 0.0), scale, 1.0)


keras_float8.register(KerasFloat8())
