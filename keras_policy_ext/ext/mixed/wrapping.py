"""Wrap optimizers and models so that the loss is scaled."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras

from keras_policy_ext import policies
from keras_policy_ext._keras import optimizer_facts, optimizer_variables
from keras_policy_ext._keras.walking import layers_within
from keras_policy_ext.bases import MixedInto, check_before
from keras_policy_ext.ext.mixed import _keras, inner_optimizers, scaler_settings
from keras_policy_ext.ext.mixed.loss_scale_monitor import (
    LossScaleMonitor,
    log_values,
    without_log_values,
)
from keras_policy_ext.ext.mixed.loss_scales import (
    AUTO,
    DynamicLossScale,
    LossScale,
    LossScaleDTypePolicy,
)
from keras_policy_ext.ext.mixed.optimizer import LossScaleOptimizer
from keras_policy_ext.policies import is_stock_map, of_path

NAME = "loss_scale_optimizer"


def wrap_optimizer(
    optimizer: object, policy: object = None
) -> keras.optimizers.Optimizer:
    """Return an optimizer, in a loss scaler if the policy needs loss scaling.

    Args:
        optimizer: An optimizer, or anything `keras.optimizers.get` takes.
        policy: Anything `kpe.get` takes; None for the global policy. A
            `LossScaleDTypePolicy` gives the loss scale. Under any other policy
            with layers in float16, such as a float8 policy from
            `"mixed_float16"` or a map, it is dynamic.

    Returns:
        A `LossScaleOptimizer`. The optimizer itself, if the policy needs no
        scaling or the optimizer already scales the loss: it is a loss scaler,
        or has a `loss_scale_factor`. For an optimizer that is already wrapped,
        its wrapper.

    Raises:
        ValueError: If the policy is invalid, or the optimizer is wrapped
            with another loss scale.
    """
    return _wrapped(optimizer, loss_scale_of(policies.get(policy)))


def loss_scale_of(policy: keras.DTypePolicy) -> LossScale | None:
    """Return the loss scale that a policy requests or needs, or None."""
    requested = _the_one(_requested(policy), "The policies in this map")
    if requested != AUTO:
        return requested
    return DynamicLossScale() if _has_float16(policy) else None


def loss_scale_of_model(model: keras.Model) -> LossScale | None:
    """Return the loss scale that a model's layers request, or None.

    If the policy of the model gives a loss scale, that is used; else the one
    that its layers agree on. Otherwise it is dynamic if any layer computes in
    float16, or may do so once it is built. Layers that do not exist yet are
    not considered.

    Raises:
        ValueError: If the layers disagree.
    """
    layers = [
        layer
        for layer in layers_within(model)
        if not isinstance(layer, keras.layers.InputLayer)
    ]
    own = _the_one(_requested(of_path(model.dtype_policy, model.path)))
    if own != AUTO:
        return own
    said = set().union(*map(_requested_by, layers))
    scale = _the_one(said, "The layers of this model")
    if scale != AUTO:
        return scale
    if any(_computes_in_float16(layer) for layer in layers):
        return DynamicLossScale()
    return None


def compile(
    model: keras.Model,
    optimizer: object = "rmsprop",
    *args: Any,
    auto_scale_loss: bool = True,
    **kwargs: Any,
) -> None:
    """Compile a model, with loss scaling if a layer computes in float16.

    Use it for models whose class is not yours; for your own see
    `LossScaleMixin`. A saved file then has the optimizer as it is: wrapped,
    and on torch with its public class. Loaded under any global policy, it has
    the same class, scale, counters, iterations and slots.

    Args:
        model: A Keras model.
        optimizer: As for `keras.Model.compile`. One that already
            scales the loss is unchanged.
        *args: As for `keras.Model.compile`.
        auto_scale_loss: Whether to wrap the optimizer as `wrap_optimizer`
            does. False: never.
        **kwargs: As for `keras.Model.compile`.

    Raises:
        ValueError: If layers request different loss scales.

    Examples:
        >>> layer = keras.layers.Dense(1, dtype="mixed_float16")
        >>> model = keras.Sequential([keras.Input((3,)), layer])
        >>> kpe.mixed_precision.compile(model, "adam", "mse")
        >>> type(model.optimizer).__name__
        'LossScaleOptimizer'
    """
    compile_by(model.compile, model, optimizer, args, auto_scale_loss, kwargs)


def compile_by(
    method: Callable[..., object],
    model: keras.Model,
    optimizer: object,
    args: tuple[object, ...],
    auto_scale_loss: bool,
    kwargs: dict[str, Any],
) -> None:
    """Call Keras's `compile` with an optimizer that is already wrapped."""
    optimizer = keras.optimizers.get(optimizer)
    name, takes = "auto_scale_loss", inspect.signature(method)
    given = takes.bind(optimizer, *args, **kwargs)
    # Keras does not wrap: that would erase a fixed `loss_scale_factor`.
    if name in takes.parameters:
        auto_scale_loss = auto_scale_loss and given.arguments.get(name, True)
        given.arguments[name] = False
    elif any(p.kind is p.VAR_KEYWORD for p in takes.parameters.values()):
        kwargs = {**kwargs, name: False}
        given = takes.bind(optimizer, *args, **kwargs)
    if auto_scale_loss:
        optimizer = _wrapped(optimizer, loss_scale_of_model(model))
    method(optimizer, *given.args[1:], **given.kwargs)
    remember_compiled(model)


def remember_compiled(model: keras.Model) -> None:
    """Set the `compile` arguments that the model's file will hold."""
    changes: dict[str, Any] = {"auto_scale_loss": False}
    optimizer = model.optimizer
    inner = optimizer_variables.optimizers_within(optimizer)
    if any(map(optimizer_facts.public_class, inner)):
        config = keras.saving.serialize_keras_object(optimizer)
        changes["optimizer"] = optimizer_facts.with_public_class(
            config, optimizer
        )
    _keras.amend_compile_config(model, changes)


def _wrapped(
    optimizer: object, loss_scale: LossScale | None
) -> keras.optimizers.Optimizer:
    found = keras.optimizers.get(optimizer)
    if found is None or loss_scale is None or _scales_itself(found):
        return found
    wanted = scaler_settings.of_loss_scale(loss_scale)
    wrapper = inner_optimizers.wrapper_of(found)
    if not isinstance(wrapper, LossScaleOptimizer):
        return LossScaleOptimizer(found, name=NAME, **wanted)
    differs = {
        key: value
        for key, value in wanted.items()
        if getattr(wrapper, key) != value
    }
    if differs:
        raise ValueError(
            "The optimizer is wrapped already, with another loss scale. "
            f"Received: {found.name!r} for {loss_scale!r}; its wrapper "
            f"differs in {', '.join(differs)}. Allowed: an optimizer without "
            "wrapper, or a LossScaleOptimizer, which is used as it is. Make "
            "a new optimizer, or pass the wrapper."
        )
    return wrapper


def _scales_itself(optimizer: keras.optimizers.Optimizer) -> bool:
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return True
    return getattr(optimizer, "loss_scale_factor", None) is not None


def _requested(policy: keras.DTypePolicy) -> set[Any]:
    """Return the loss scales in a policy or in a `DTypePolicyMap`."""
    if isinstance(policy, LossScaleDTypePolicy):
        return {policy.requested_loss_scale} - {AUTO}
    if not is_stock_map(policy):
        return set()
    return set().union(
        _requested(policy.default_policy),
        *(_requested(policy[key]) for key in policy),
    )


def _requested_by(layer: keras.Layer) -> set[Any]:
    """Return the loss scales that the policy of a layer requests."""
    if not layer.built:  # It has no path yet, by which a map is read.
        return _requested(layer.dtype_policy)
    return _requested(of_path(layer.dtype_policy, layer.path))


def _the_one(scales: set[Any], those_who_ask: str = "") -> Any:
    """Return the one loss scale in a set, or AUTO; raise if it has several."""
    if len(scales) > 1:
        named = ", ".join(sorted(map(repr, scales)))
        raise ValueError(
            f"{those_who_ask} ask for different loss scales, and there is one "
            f"loss. Received: {named}. Allowed: one of them. Give the model "
            "itself the LossScaleDTypePolicy that counts, or compile it with "
            "a LossScaleOptimizer of your own."
        )
    return next(iter(scales), AUTO)


def _computes_in_float16(layer: keras.Layer) -> bool:
    if layer.built:
        return bool(layer.compute_dtype == "float16")
    # By path, which a layer gets when it is built, a map may say float16
    # where its default does not. A scaler that proves to be of no use
    # changes no number: it multiplies and divides by a power of two.
    return _has_float16(layer.dtype_policy)


def _has_float16(policy: keras.DTypePolicy) -> bool:
    if policy.compute_dtype == "float16":
        return True
    if not isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        return False
    return any(_has_float16(policy[key]) for key in policy)


class LossScaleMixin(_keras.OwnReturnedLogs, MixedInto):
    """A mixin for models whose `compile` scales the loss for float16.

    ```python
    class MyModel(kpe.mixed_precision.LossScaleMixin, keras.Model):
        ...
    ```

    Put it before the Keras class. `compile` wraps the optimizer if any layer
    computes in float16, as `wrap_optimizer` does, with the loss scale of a
    `LossScaleDTypePolicy` if there is one. An optimizer that scales the loss
    itself is unchanged, and with `auto_scale_loss=False` so is any other.

    With a `LossScaleOptimizer`, the logs of `fit` have `loss_scale` and
    `skipped_steps`: the scale after the last step, and the number of
    consecutive skipped steps up to it. A custom `train_step` has them too if
    it calls this one. If `max_skipped_steps` of the optimizer is reached,
    `fit` ends with an error.

    Raises:
        TypeError: By the `class` statement, if the Keras class comes first.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_before(cls, LossScaleMixin, keras.Model, "keras.Model")

    def compile(
        self,
        optimizer: object = "rmsprop",
        *args: Any,
        auto_scale_loss: bool = True,
        **kwargs: Any,
    ) -> None:
        """Compile the model, in a loss scaler if a layer is in float16.

        Args:
            optimizer: As for `keras.Model.compile`.
            *args: As for `keras.Model.compile`.
            auto_scale_loss: Whether to wrap the optimizer where needed.
            **kwargs: As for `keras.Model.compile`.

        Raises:
            ValueError: If layers request different loss scales.
        """
        compile_by(
            super().compile, self, optimizer, args, auto_scale_loss, kwargs
        )

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compile the model by the config in a file, also of plain Keras.

        If a subclass overrides `compile`, the method of Keras is used instead,
        which only warns that the model is not compiled.
        """
        if type(self).compile is not LossScaleMixin.compile:
            super().compile_from_config(config)
            return
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.optimizer is not None and self.built:
            self.optimizer.build(self.trainable_variables)

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> keras.callbacks.History:
        """Train as `keras.Model.fit`; raise after too many skipped steps.

        Raises:
            FloatingPointError: If `max_skipped_steps` consecutive steps of
                the `LossScaleOptimizer` were skipped.
        """
        optimizer = getattr(self, "optimizer", None)
        if getattr(optimizer, "max_skipped_steps", None) is not None:
            callbacks = _with_monitor(callbacks, self)
        return super().fit(
            x, y, batch_size, epochs, verbose, callbacks, *args, **kwargs
        )

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run `keras.Model.train_step`, and add the loss scale to the logs."""
        result = super().train_step(*args, **kwargs)
        if not isinstance(self.optimizer, LossScaleOptimizer):
            return result
        if keras.backend.backend() != "jax":
            return {**result, **log_values(self.optimizer)}
        logs, state = result
        mapping = list(zip(self.optimizer.variables, state[2], strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            return {**logs, **log_values(self.optimizer)}, state

    def returned_logs(self, logs: dict[str, Any]) -> dict[str, Any]:
        """Return the logs without the loss scale, for `train_on_batch`."""
        return without_log_values(logs)


def _with_monitor(callbacks: Any, model: keras.Model) -> Any:
    monitor = LossScaleMonitor()
    if isinstance(callbacks, keras.callbacks.CallbackList):
        # Around the user's list, which would have one more after each fit.
        return keras.callbacks.CallbackList(
            [callbacks, monitor], model=model, **(callbacks.params or {})
        )
    if callbacks is None:
        return [monitor]
    if isinstance(callbacks, keras.callbacks.Callback):
        return [callbacks, monitor]
    return [*callbacks, monitor]
