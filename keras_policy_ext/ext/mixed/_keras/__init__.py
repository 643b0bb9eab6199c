"""Contacts of `mixed` with Keras: scopes of autocasting, optimizers, masks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras

from keras_policy_ext._keras import versions
from keras_policy_ext._types import Tensor

try:
    from keras.src.backend.common import global_state as _global_state
except ImportError:  # Keras has moved it: the public API has to do.
    _global_state = None

try:
    from keras.src.backend.common import masking as _masking
except ImportError:  # Keras has moved it: see `keep_mask`.
    _masking = None


def stored_autocast_scope() -> object:
    """Return Keras's autocast scope that is active in this thread, or None.

    It is read from Keras's thread-local state, which is not public (keras 3.0
    to 3.15). If that is missing, None: a layer that is not mixed then leaves
    the scope of its caller unchanged.
    """
    if _global_state is None:
        return None
    return _global_state.get_global_attribute("autocast_scope")


def store_autocast_scope(scope: object) -> None:
    """Set Keras's autocast scope of this thread; None for no scope.

    Raises:
        ImportError: If this Keras stores it elsewhere.
    """
    if _global_state is None:
        raise versions.missing(
            "keras.src.backend.common.global_state", "an autocast scope"
        )
    _global_state.set_global_attribute("autocast_scope", scope)


class OwnArgumentConversion:
    """A layer that casts its call arguments itself, instead of Keras.

    Keras's `__call__` casts every floating argument unless the layer sets
    `_convert_input_args = False`, as Keras's preprocessing layers do (keras
    3.0 to 3.15). It cannot be set per argument. Here Keras always reads False,
    and `converts_arguments` has the value that the layer set. If Keras no
    longer reads it, all arguments are cast a second time. Expires when a layer
    can say which arguments are cast.
    """

    @property
    def converts_arguments(self) -> bool:
        """True if the layer may cast its call arguments."""
        return bool(self.__dict__.get("_converts_arguments", True))

    @property
    def _convert_input_args(self) -> int:
        # Not False: TensorFlow skips the setter for the object that is there.
        return 0

    @_convert_input_args.setter
    def _convert_input_args(self, value: bool) -> None:
        self.__dict__["_converts_arguments"] = bool(value)


def autocasts(variable: keras.Variable) -> bool:
    """Return True if reads in an autocast scope cast this variable.

    `autocast=` is an argument of `keras.Variable` and cannot be read back
    publicly (`_autocast`, keras 3.0 to 3.15). If it is missing, True, which is
    Keras's default.
    """
    return bool(getattr(variable, "_autocast", True))


def set_autocasts(variable: keras.Variable, value: bool) -> None:
    """Set whether reads in an autocast scope cast this variable.

    If Keras stores it elsewhere, nothing changes.
    """
    if hasattr(variable, "_autocast"):
        variable._autocast = value


class OwnReturnedLogs:
    """A model that chooses which logs `train_on_batch` returns as a list.

    Keras lists all logs of `train_step` (`_flatten_metrics_in_order`, keras 3.0
    to 3.15). If it no longer calls this, all logs are returned.
    """

    def returned_logs(self, logs: dict[str, Any]) -> dict[str, Any]:
        """Return the logs to list; subclasses may leave some out."""
        return logs

    def _flatten_metrics_in_order(self, logs: dict[str, Any]) -> Any:
        above: Any = super()
        return above._flatten_metrics_in_order(self.returned_logs(logs))


def tracked_metrics(layer: keras.Layer) -> list[keras.metrics.Metric]:
    """Return the metrics of a layer, without those of inner layers.

    `metrics` of a custom model is often a property that may read attributes
    which the constructor has not set yet (`_metrics`, keras 3.0 to 3.15). If it
    is missing, the list is empty: metrics are then updated as in Keras.
    """
    return list(getattr(layer, "_metrics", ()))


def is_default(method: object) -> bool:
    """Return True if a method is Keras's default, such as `Layer.get_config`.

    Keras marks it with `_is_default` (keras 3.0 to 3.15). A marked `get_config`
    returns the arguments of the constructor. If the mark is missing, False.
    """
    return bool(getattr(method, "_is_default", False))


def amend_compile_config(model: keras.Model, changes: dict[str, Any]) -> None:
    """Change the `compile` arguments that a model's file will hold.

    `get_compile_config` returns what `compile` was given, except for
    `auto_scale_loss` (`_compile_config`, keras 3.0 to 3.15): a model that was
    compiled with False would get a loss scaler when it is loaded. If the
    attribute is missing, nothing changes, and files have what Keras saves.
    Expires when Keras saves the argument, and public classes on torch.
    """
    kept = getattr(model, "_compile_config", None)
    arguments = getattr(kept, "config", None)
    if isinstance(arguments, dict):
        arguments.update(changes)


def follow_weight_decay_exclusions(
    optimizer: keras.optimizers.Optimizer,
    pairs: Iterable[tuple[keras.Variable, object]],
) -> None:
    """Exclude each variable's substitute from weight decay as well.

    `exclude_from_weight_decay(var_list=…)` stores the keys of variables, and on
    JAX and torch a substitute has another key. There is no public way to read
    them (keras 3.12 to 3.15). If Keras stores them otherwise, nothing happens:
    exclude through the wrapper, or by `var_names`. Expires with a public way to
    read the exclusions.

    Args:
        optimizer: The optimizer.
        pairs: Variables, each with its substitute.
    """
    excluded = getattr(optimizer, "_exclude_from_weight_decay", None)
    key = getattr(optimizer, "_var_key", None)
    if not isinstance(excluded, set) or key is None:
        return
    for variable, stand_in in pairs:
        if key(variable) in excluded:
            excluded.add(key(stand_in))


def excludes_weights(optimizer: keras.optimizers.Optimizer) -> bool:
    """Return True if an optimizer excludes weights from weight decay.

    On PyTorch Keras fails if all weights of a step are excluded (keras 3.15).
    There is no public way to ask (`_exclude_from_weight_decay` and
    `_exclude_from_weight_decay_pattern`, keras 3.0 to 3.16).
    """
    return bool(
        getattr(optimizer, "_exclude_from_weight_decay", None)
        or getattr(optimizer, "_exclude_from_weight_decay_pattern", None)
    )


def keep_mask(old: Tensor, new: Tensor) -> Tensor:
    """Copy the Keras mask of tensor `old` to tensor `new`; return `new`.

    Keras does so when it casts arguments. Masks are attributes of tensors
    without public access (`masking`, keras 3.4 to 3.16). If the module is
    missing, the mask is lost, with one warning.
    """
    if _masking is None and new is not old:
        versions.warn_of_missing(
            "keras.src.backend.common.masking",
            "A mask is lost where a layer with AutocastMixin casts its "
            "argument. Call the layer with `mask=`.",
        )
    elif new is not old:
        mask = _masking.get_keras_mask(old)
        if mask is not None:
            _masking.set_keras_mask(new, mask)
    return new
