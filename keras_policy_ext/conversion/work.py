"""The work of each layer of a model: its kernels, its multiplications.

The core knows the entries of kernels, by the names and shapes of weights. An
extension counts multiplications, by a class that it registers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import keras

from keras_policy_ext import _extensions
from keras_policy_ext._keras import walking
from keras_policy_ext.layers.drop_in import drop_in_of
from keras_policy_ext.layers.mixin import Float8Mixin
from keras_policy_ext.policies.of_layers import (
    is_frozen,
    multiplies_in_float8,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """The kernel entries of one layer, and the multiplications with them.

    Attributes:
        parameters: Entries of the kernels that it multiplies with; of its own
            weights if it has no kernel.
        multiplications: Multiplications, each with its addition, in the
            products of one sample with them; 0 without a kernel. None if they
            are not counted: the extension `count` is not installed.
        plain_multiplications: How many of these are not in float8 though the
            layer is, such as those of a depthwise kernel. Where they are not
            counted, None if none is in float8, else 0.
        sizes_known: Whether all sizes of the inputs were known; one that is
            not counts as 1.
        plain_parameters: How many of `parameters` stay in floats though the
            layer is in float8; without counts, those that `freeze` left.
    """

    parameters: int = 0
    multiplications: int | None = 0
    plain_multiplications: int | None = 0
    sizes_known: bool = True
    plain_parameters: int = 0


class ModelWork:
    """The `Work` of the layers of a model, without multiplications.

    Args:
        model: A built model.
    """

    def __init__(self, model: keras.Layer) -> None:
        self.model = model

    def hold_for(self, converted: Iterable[keras.Layer]) -> bool:
        """Return True if the counts hold once these layers are in float8."""
        return True  # Nothing is counted here.

    @property
    def multiplying(self) -> Sequence[keras.Layer]:
        """The layers whose calls multiply with a kernel, as far as counted."""
        return ()

    def of(self, layer: keras.Layer) -> Work:
        """Return the `Work` of a layer: its parameters and multiplications."""
        own, stored = walking.own_weights(layer), stored_kernels(layer)
        kernels = _kernels(layer, own)
        if not kernels:
            return Work(parameters=scalars(stored or own))
        entries, frozen = scalars(kernels), is_frozen(layer)
        in_floats = frozen and not multiplies_in_float8(layer)
        return Work(
            parameters=entries,
            multiplications=None,
            plain_multiplications=None if in_floats else 0,
            plain_parameters=entries - scalars(stored) if frozen else 0,
        )

    def of_parts(
        self, layer: keras.Layer, in_floats: list[keras.Variable]
    ) -> tuple[Work, list[Work]]:
        """Split the `Work` of a frozen layer whose kernels are partly stored.

        Args:
            layer: A frozen layer, in the model when it was counted.
            in_floats: The kernels that `freeze` left in floats.

        Returns:
            That of its stored part, and that of each kernel in floats.
        """
        whole = self.of(layer)
        parts = [
            Work(
                parameters=scalars([kernel]),
                multiplications=None,
                sizes_known=whole.sizes_known,
            )
            for kernel in in_floats
        ]
        size = whole.parameters - whole.plain_parameters
        stored = dataclasses.replace(whole, parameters=size, plain_parameters=0)
        return stored, parts


_Counter = TypeVar("_Counter", bound=type[ModelWork])
_counter: type[ModelWork] = ModelWork


def register_counter(counter: _Counter) -> _Counter:
    """Have a class count the multiplications of models from now on."""
    global _counter
    _counter = counter
    return counter


def work_of(model: keras.Layer) -> ModelWork:
    """Return the work of the layers of a model, counted if a class counts."""
    # Not at the import of `conversion`: the counter imports parts of it.
    _extensions.import_for("counter")
    return _counter(model)


def scalars(variables: Iterable[keras.Variable]) -> int:
    """Return the total number of elements of these variables."""
    return sum(math.prod(v.shape) for v in variables)


def stored_kernels(layer: Any) -> list[keras.Variable]:
    """Return the kernels of a layer that are stored in float8."""
    return layer.float8_contracted if is_frozen(layer) else []


# Classes of Keras, without layers in them, that run code of their subclass or
# of what they are given; the last one multiplies only if an argument says so.
RUN_OTHER_CODE = frozenset(
    (
        *("Layer", "Model", "Functional", "Sequential", "Wrapper", "Lambda"),
        *("TorchModuleWrapper", "JaxLayer", "FlaxLayer", "TFSMLayer"),
        "ReversibleEmbedding",
    )
)


def keras_class(layer: keras.Layer) -> type[keras.Layer]:
    """Return the nearest class in a layer's MRO that Keras defines."""
    return next(
        base
        for base in type(layer).__mro__
        if base.__module__.partition(".")[0] == "keras"
    )


def runs_stock_call(layer: keras.Layer) -> bool:
    """Return True if a layer's `call` is Keras's, or the float8 form's."""
    owner = next(base for base in type(layer).__mro__ if "call" in vars(base))
    package = owner.__module__.partition(".")[0]
    return package in ("keras", "keras_policy_ext")


DEPTHWISE = "depthwise_kernel"
"""A kernel that is multiplied in the source policy in float8 layers too."""

# In names of weights that are looked up or added, and not multiplied with.
_NO_KERNEL = ("bias", "embed", "pos_", "position", "table", "token")

# In names of weights that are multiplied with, though they do not train: most
# that do not are caches, indices and statistics.
_FIXED_KERNEL = ("kernel", "filter", "matrix")


def _kernels(
    layer: keras.Layer, own: list[keras.Variable]
) -> list[keras.Variable]:
    """Return the weights with which the call of a layer multiplies."""
    depthwise = [v for v in own if v.name == DEPTHWISE]
    if isinstance(layer, Float8Mixin) and layer.float8_contracted:
        contracted = layer.float8_contracted
        return [v for v in contracted if not _looks_up(layer, v)] + depthwise
    # By the stock class, also where a subclass computes something else.
    form = drop_in_of(type(layer))
    if form is not None and issubclass(form, Float8Mixin):
        return [v for v in own if form.is_float8_kernel(layer, v)] + depthwise
    if keras_class(layer).__name__ in RUN_OTHER_CODE:
        return [v for v in own if _looks_like_kernel(layer, v)]
    return [v for v in own if v.name.endswith("kernel")]


def _looks_up(layer: keras.Layer, kernel: keras.Variable) -> bool:
    """Return True if a frozen layer only looks up rows of this kernel."""
    stored = layer.is_stored_kernel(layer, kernel)
    return stored and not layer.is_float8_kernel(layer, kernel)


def _looks_like_kernel(layer: keras.Layer, variable: keras.Variable) -> bool:
    """Guess from shape, dtype and name whether a layer multiplies with it."""
    axes = [size for size in variable.shape if size > 1]
    if len(axes) < 2 or not keras.backend.is_float_dtype(variable.dtype):
        return False
    if layer.trainable and not variable.trainable:
        return any(word in variable.name for word in _FIXED_KERNEL)
    return not any(word in variable.name for word in _NO_KERNEL)
