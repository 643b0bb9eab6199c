"""An optimizer that scales the loss, and how its scale grows."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_policy_ext import backends, user_code
from keras_policy_ext._keras import optimizer_facts, optimizer_variables
from keras_policy_ext._keras.optimizer_facts import is_overwritten
from keras_policy_ext._types import Tensor
from keras_policy_ext.ext.mixed import (
    inner_optimizers,
    scaler_settings,
    skip_limits,
)
from keras_policy_ext.ext.mixed.float32_views import (
    as_accumulated,
    may_belong,
    with_scaled_states,
)
from keras_policy_ext.ext.mixed.inner_optimizers import read_inner
from keras_policy_ext.ext.mixed.loss_scales import LARGEST


class Growth(NamedTuple):
    """The settings by which a dynamic loss scale grows and shrinks.

    The scale is multiplied after `steps` finite steps, and divided
    after a skipped step. It stays between minimum and maximum.
    """

    steps: int
    multiplier: float
    minimum: float
    maximum: float


class ScaleState(NamedTuple):
    """The loss scale and step counters of a loss scaler, as scalar tensors.

    Attributes:
        scale: Float32, the loss scale.
        good_steps: Integer, finite steps since the scale last moved.
        skipped_steps: Integer, consecutive steps that were skipped.
    """

    scale: Tensor
    good_steps: Tensor
    skipped_steps: Tensor


def scaled(loss: Tensor, scale: Tensor | float) -> Tensor:
    """Return `loss * scale` in at least float32, as float16 could overflow."""
    loss = ops.convert_to_tensor(loss)
    wide = _wide(loss)
    return ops.multiply(ops.cast(loss, wide), ops.cast(scale, wide))


def unscaled(
    gradients: Iterable[Tensor | None], scale: Tensor, left: Iterable[bool]
) -> list[Tensor | None]:
    """Divide gradients by the loss scale, except where `left` is True.

    Args:
        gradients: Floating tensors; None is returned as None.
        scale: Float32 scalar.
        left: For each gradient, whether to leave it unchanged.

    Returns:
        Tensors in float32, or in float64 for float64 gradients.
    """
    # 1 / 2**127 is subnormal and compilers divide by multiplying with it,
    # where JAX and TensorFlow flush it to 0: a large scale goes in two steps.
    one = ops.ones_like(scale)
    part = ops.where(ops.greater(scale, 2.0**64), one * 2.0**-64, one)
    rest = ops.multiply(scale, part)
    return [
        gradient if gradient is None or keep else _divided(gradient, part, rest)
        for gradient, keep in zip(gradients, left, strict=True)
    ]


def all_finite(gradients: Iterable[Tensor | None]) -> Tensor:
    """Return a bool scalar: whether all gradients are finite everywhere."""
    flags = [
        ops.all(ops.isfinite(gradient))
        for gradient in gradients
        if gradient is not None
    ]
    if not flags:
        return ops.convert_to_tensor(True)
    return functools.reduce(ops.logical_and, flags)


def following(
    state: ScaleState, finite: Tensor, growth: Growth | None
) -> ScaleState:
    """Return the state after a step with finite gradients or without."""
    skipped = ops.where(finite, 0, ops.add(state.skipped_steps, 1))
    if growth is None:
        return state._replace(skipped_steps=skipped)
    good = ops.where(finite, ops.add(state.good_steps, 1), 0)
    grows = ops.greater_equal(good, growth.steps)
    grown = ops.minimum(state.scale * growth.multiplier, growth.maximum)
    shrunk = ops.maximum(state.scale / growth.multiplier, growth.minimum)
    kept = ops.where(grows, grown, state.scale)
    return ScaleState(
        scale=ops.where(finite, kept, shrunk),
        good_steps=ops.where(grows, 0, good),
        skipped_steps=skipped,
    )


def _divided(gradient: Tensor, part: Tensor, rest: Tensor) -> Tensor:
    wide = _wide(gradient)
    gradient = ops.cast(gradient, wide)
    part, rest = ops.cast(part, wide), ops.cast(rest, wide)
    return ops.divide(ops.multiply(gradient, part), rest)


def _wide(x: Tensor) -> str:
    dtype = keras.backend.standardize_dtype(x.dtype)
    return "float64" if dtype == "float64" else "float32"


class Unscaling:
    """Records whether the caller or `apply` divides gradients by the scale.

    tf_keras lets the caller unscale gradients by `get_unscaled_gradients`, and
    change them, by clipping for instance, before they are applied. Keras
    applies scaled gradients. A tensor does not show which it is, so the calls
    decide: once the caller has unscaled, `apply` does not, until the loss is
    scaled again or one of the scaled gradients themselves is applied. This
    lasts longer than a step, because the first part of a step may be compiled,
    and its calls are then seen only once.
    """

    def __init__(self) -> None:
        self.states_too = False
        """Whether the caller also unscaled amax observations, because the
        variables of its gradients were unknown."""
        self._scale_used = False
        self._used_in_trace = False
        self._updated: set[int] = set()
        self._warned = False
        self.start_step()

    def start_step(self) -> None:
        """Record that the caller has not unscaled gradients in this step."""
        self._by_caller = False
        self._scaled: list[Tensor | None] = []

    def use_scale(self, traced: bool) -> None:
        """Record that the loss scale was read, and so multiplies the loss.

        Args:
            traced: Whether a compiler traces this call, so that it is not made
                again in each step.
        """
        self._scale_used = True
        if traced:  # It is not read: torch.compile would guard its value.
            self._used_in_trace = True
        else:
            self._updated.clear()

    def check_scaled(
        self, variable: keras.Variable, traced: bool, name: str
    ) -> None:
        """Warn once if the loss was not multiplied by the loss scale.

        Without a compiler, the scale must be used in each step, that is
        between two updates of the same variable. With a compiler, it must be
        used once.

        Args:
            variable: The first variable that is updated.
            traced: Whether a compiler traces this call.
            name: The name of the optimizer.
        """
        if self._by_caller or self._used_in_trace:
            return
        seen = not traced and id(variable) in self._updated
        if not traced:
            self._updated.add(id(variable))
        if self._scale_used and not seen:
            return
        self._warn(
            "The loss is not scaled, but its gradients are divided by the "
            "loss scale: weights hardly change. Received: gradients for "
            f"{name!r}, whose scale_loss was not called for this step. "
            "Allowed: gradients of the scaled loss. Write "
            "`loss = optimizer.scale_loss(loss)` before gradients are taken "
            "(in a train_step: `self.optimizer.scale_loss(loss)`). To train "
            "without loss scaling, compile with auto_scale_loss=False or use "
            "`optimizer.inner_optimizer`."
        )

    def warn_of_constant(self, name: str) -> None:
        """Warn once that the loss scale is a constant in compiled code."""
        self._warn(
            "The loss scale is a constant in this compiled function, and does "
            "not follow when the optimizer changes it. Received: a call of "
            f"scale_loss of {name!r} inside a function that JAX compiles. "
            "Allowed: the scale as an argument of the function. Pass the "
            "values of `optimizer.variables` to the function, and call "
            "scale_loss within `keras.StatelessScope(zip(optimizer.variables, "
            "values))`."
        )

    def _warn(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(message, stacklevel=user_code.stacklevel())

    def by_caller(
        self,
        scaled: list[Tensor | None],
        unscaled: list[Tensor | None],
        states_too: bool,
    ) -> None:
        """Record the gradients before and after the caller unscaled them."""
        self.states_too = states_too
        self._by_caller = True
        pairs = zip(scaled, unscaled, strict=True)
        self._scaled = [a for a, b in pairs if a is not b]

    def is_done(self, gradients: list[Tensor | None]) -> bool:
        """Return True if the caller has already unscaled these gradients."""
        # Only if there are any: torch.compile would guard the ids.
        scaled = {id(x) for x in self._scaled}
        if scaled and any(id(x) in scaled for x in gradients):
            self.start_step()
        # Tensors of a step are not kept until the next.
        self._scaled = []
        return self._by_caller


#: The variables that hold a `ScaleState`, in its order; also their names in
#: a file.
STATE = ("dynamic_scale", "step_counter", "skipped_counter")

#: Own variables of Keras's scaler in a file, where the wrapped optimizer's
#: follow: iteration, learning rate, step counter, scale.
STOCK_STATE = 4


@keras.saving.register_keras_serializable("keras_policy_ext")
class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """An optimizer that scales the loss, and skips a step after an overflow.

    Small gradients are 0 in float16. So the loss is multiplied by a scale
    before gradients are computed, and the gradients are divided by it before
    the wrapped optimizer gets them. A step whose gradients are not all finite
    is skipped: weights, float8 state, slots, accumulators and iterations are
    unchanged.

    Keras's trainers call `scale_loss` and `apply`. In a custom loop, either do
    the same, with scaled gradients,

    ```python
    loss = optimizer.scale_loss(loss)      # before gradients are taken
    optimizer.apply(gradients, variables)  # divides them
    ```

    or unscale as in tf_keras, to change gradients before they are applied:

    ```python
    loss = optimizer.get_scaled_loss(loss)
    gradients = optimizer.get_unscaled_gradients(gradients)
    optimizer.apply_gradients(zip(gradients, variables))
    ```

    Args:
        inner_optimizer: The optimizer to wrap.
        dynamic: Whether the scale adapts: it is multiplied after
            `dynamic_growth_steps` finite steps in a row, and divided after
            each skipped step. False: it is always `initial_scale`.
        initial_scale: The first scale. None: 2**15, or the nearest number
            that minimum and maximum allow. Required with `dynamic=False`.
        dynamic_growth_steps: Integer >= 1; None: 2000. Not with
            `dynamic=False`.
        multiplier: Number > 1.
        minimum_scale: The lower limit of the scale: number >= 2**-126. A
            scale below 1 makes gradients more likely to be 0 than no scale.
        maximum_scale: The upper limit of the scale: number <= 2**127, which is
            the largest power of two in float32. If gradients are 0, or nothing
            is in float16, the scale would otherwise grow to infinity.
        max_skipped_steps: Raise after so many consecutive skipped steps;
            None: never. See `check_skipped_steps`.
        name: Name of the optimizer.

    Attributes:
        inner_optimizer: The wrapped optimizer.
        dynamic, initial_scale, multiplier: The arguments, with defaults
            filled in.
        minimum_scale, maximum_scale, max_skipped_steps: The arguments.
        dynamic_growth_steps: The argument; None for a fixed scale.

    Raises:
        TypeError: If an argument has the wrong type, `inner_optimizer` is no
            optimizer, or it is a loss scaler.
        ValueError: If a value is out of range, a fixed scale has no value,
            or `inner_optimizer` scales the loss itself or is in another
            LossScaleOptimizer.

    Examples:
        >>> optimizer = kpe.mixed_precision.LossScaleOptimizer(
        ...     keras.optimizers.SGD(1.0), initial_scale=8
        ... )
        >>> weight = keras.Variable(0.0)
        >>> scaled = keras.ops.convert_to_tensor(1.0) * optimizer.loss_scale
        >>> optimizer.apply([scaled], [weight])
        >>> float(optimizer.loss_scale), float(weight.numpy())
        (8.0, -1.0)
    """

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        dynamic: bool = True,
        initial_scale: float | None = None,
        dynamic_growth_steps: int | None = None,
        *,
        multiplier: float = 2.0,
        minimum_scale: float = 1.0,
        maximum_scale: float = LARGEST,
        max_skipped_steps: int | None = None,
        name: str | None = None,
    ) -> None:
        inner_optimizers.check_inner(inner_optimizer)
        settings = scaler_settings.checked(
            scaler_settings.ScalerSettings(
                dynamic,
                initial_scale,
                dynamic_growth_steps,
                multiplier,
                minimum_scale,
                maximum_scale,
                max_skipped_steps,
            )
        )
        super().__init__(inner_optimizer, name=name)
        for field, value in settings._asdict().items():
            setattr(self, field, value)
        self._unscaling = Unscaling()
        inner_optimizers.register_wrapper(inner_optimizer, self)

    def build(self, var_list: list[keras.Variable]) -> None:
        """Create the variables of this optimizer and the inner optimizer.

        Args:
            var_list: The trainable variables.
        """
        self.step_counter = self._add_scalar("step_counter", "int", 0)
        self.dynamic_scale = self._add_scalar(
            "dynamic_scale", "float32", self.initial_scale
        )
        self.skipped_counter = self._add_scalar("skipped_counter", "int", 0)
        self.inner_optimizer.build(var_list)
        # Not the build of Keras's scaler, which makes two of these variables.
        super(keras.optimizers.LossScaleOptimizer, self).build(var_list)

    @property
    def loss_scale(self) -> Tensor:
        """The current loss scale, a float32 scalar."""
        scale = self._read("dynamic_scale", self.initial_scale, "float32")
        # Who reads it may multiply the loss by it.
        self._unscaling.use_scale(backends.current.is_traced(scale))
        return scale

    @property
    def dynamic_counter(self) -> Tensor | None:
        """The number of finite steps since the scale changed, or None."""
        if not self.dynamic:
            return None
        return self._read("step_counter", 0, "int32")

    @property
    def skipped_steps(self) -> Tensor:
        """The number of steps skipped in a row, an integer scalar."""
        return self._read("skipped_counter", 0, "int32")

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss multiplied by the current loss scale.

        Args:
            loss: Floating tensor.

        Returns:
            Tensor of the same shape; float32, or float64 if the loss is.
        """
        is_traced, scale = backends.current.is_traced, self._scale()
        traced = is_traced(loss)
        if self.dynamic and traced and not is_traced(scale):
            self._unscaling.warn_of_constant(self.name)
        self._unscaling.start_step()
        self._unscaling.use_scale(traced)
        return scaled(loss, scale)

    def get_scaled_loss(
        self, loss: Tensor | Callable[[], Tensor]
    ) -> Tensor | Callable[[], Tensor]:
        """Return `scale_loss(loss)`; this is the name in tf_keras.

        Args:
            loss: Floating tensor, or a function that returns one.

        Returns:
            The scaled loss, or a function that returns it.
        """
        if callable(loss):
            return lambda: self.scale_loss(loss())
        return self.scale_loss(loss)

    def get_unscaled_gradients(
        self, grads: Iterable[Tensor | None]
    ) -> list[Tensor | None]:
        """Return gradients divided by the current loss scale.

        `apply` then treats its gradients as unscaled, until it gets one of
        `grads` itself or the loss is scaled again.

        Args:
            grads: Gradients of the scaled loss, one for each trainable
                variable; None is returned as None.

        Returns:
            Gradients of the loss, float32 or wider. The amax observations
                of float8 state, which are not scaled, are unchanged.
        """
        grads = list(grads)
        known = self._known()
        variables = known if may_belong(grads, known) else None
        if grads:
            self._check_scaled(grads, known or grads)
        unscaled = self._unscaled(grads, variables)
        self._unscaling.by_caller(grads, unscaled, variables is None)
        return unscaled

    def apply(
        self,
        grads: Iterable[Tensor | None],
        trainable_variables: Iterable[keras.Variable] | None = None,
    ) -> None:
        """Update variables; skip the step if a gradient is not finite.

        Args:
            grads: Gradients of the scaled loss, one for each variable, or
                those of `get_unscaled_gradients`.
            trainable_variables: The variables; None for those that the
                optimizer was built with.

        Raises:
            FloatingPointError: If `max_skipped_steps` consecutive steps were
                skipped. For a compiled step see `check_skipped_steps`.
            ValueError: If there are no variables to build the optimizer with,
                or their number differs from that of the gradients.
        """
        grads = list(grads)
        if not grads:
            return
        variables = inner_optimizers.variables_of(
            self, trainable_variables, len(grads)
        )
        if not self.built:
            with keras.name_scope(self.name, caller=self):
                self.build(variables)
        self._check_scaled(grads, variables)
        framework = backends.current
        finite = framework.on_all_replicas(all_finite(grads))
        framework.run_if(
            finite,
            self.inner_optimizer.apply,
            (self._to_apply(grads, variables), variables),
            self._updated_with(variables),
        )
        self._follow(finite)
        self._end_if_skipping()

    def stateless_apply(
        self,
        optimizer_variables: list[Tensor],
        grads: list[Tensor | None],
        trainable_variables: list[Tensor],
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return new values of variables after a step; not on TensorFlow.

        Args:
            optimizer_variables: Values of `variables`.
            grads: As for `apply`.
            trainable_variables: Values of the trainable variables.

        Returns:
            The new values of the trainable variables and of `variables`.

        Raises:
            ValueError: On TensorFlow, whose optimizers lack this method; if
                the optimizer is not built; or if lengths differ.
        """
        # Keras's scaler has one of its own; the one of all others is `apply`
        # with given values.
        above: Any = super(keras.optimizers.LossScaleOptimizer, self)
        return above.stateless_apply(
            optimizer_variables, grads, trainable_variables
        )

    def check_finite(self, grads: Iterable[Tensor | None]) -> Tensor:
        """Return a bool scalar: whether all gradients are finite."""
        return all_finite(grads)

    def check_skipped_steps(self) -> None:
        """Raise if `max_skipped_steps` steps in a row were skipped.

        `apply` does this itself if it is not compiled. A compiled step cannot
        raise: there, `LossScaleMonitor`, which `LossScaleMixin` adds to `fit`,
        does it after each batch. In a compiled custom loop, call this before
        the first step and then from time to time. Without either, the compiled
        step warns once that nothing checks the limit.

        Raises:
            FloatingPointError: If `max_skipped_steps` steps were skipped.
        """
        skip_limits.mark_checked(self)
        self._end_if_skipping()

    def _end_if_skipping(self) -> None:
        if self.max_skipped_steps is None:
            return
        skipped = backends.current.known_integer(self.skipped_steps)
        if skipped is None:
            skip_limits.warn_unless_checked(self, self.max_skipped_steps)
        elif skipped >= self.max_skipped_steps:
            raise FloatingPointError(
                "Training has stopped: no step is taken, because each has a "
                f"gradient that is not finite. Received: {skipped} skipped "
                f"steps in a row, at a loss scale of "
                f"{float(self.loss_scale):g}. Allowed: fewer than "
                f"max_skipped_steps={self.max_skipped_steps}. Look for NaN "
                "or infinity in the data and the loss; if a float16 layer "
                "overflows, give it dtype='float32'."
            )

    def save_own_variables(
        self, store: MutableMapping[str, np.ndarray]
    ) -> None:
        """Write the loss scale and the counters to a file's store."""
        # The wrapped optimizer has its own group in the file.
        for name in STATE:
            if self.built:
                store[name] = ops.convert_to_numpy(getattr(self, name))

    def load_own_variables(self, store: Mapping[str, np.ndarray]) -> None:
        """Read the loss scale and the counters from a file's store.

        It also reads the files of Keras's `LossScaleOptimizer`, and of an
        optimizer without a scaler: the scale then starts anew. A fixed scale
        is not changed.

        Raises:
            ValueError: If the scale in the file is invalid; nothing is changed.
        """
        keys, inner = len(store.keys()), self.inner_optimizer.variables
        if self.built and set(STATE) <= set(store.keys()):
            self._restore({name: store[name] for name in STATE})
        elif self.built and keys - len(inner) in (0, STOCK_STATE):
            first = keys - len(inner)
            if first:
                self._restore(
                    {"step_counter": store["2"], "dynamic_scale": store["3"]}
                )
            for number, variable in enumerate(inner, first):
                variable.assign(store[str(number)])
        else:
            super().load_own_variables(store)  # which warns

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments as a dict of JSON types."""
        inner = keras.saving.serialize_keras_object(self.inner_optimizer)
        return {
            "name": self.name,
            "inner_optimizer": optimizer_facts.with_public_class(
                inner, self.inner_optimizer
            ),
            **{
                f: getattr(self, f)
                for f in scaler_settings.ScalerSettings._fields
            },
        }

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        custom_objects: Mapping[str, object] | None = None,
    ) -> LossScaleOptimizer:
        """Create the optimizer from a config that `get_config` returned.

        It also reads the config of tf_keras's `LossScaleOptimizer`, if Keras
        can read the optimizer in it.
        """
        config = scaler_settings.of_legacy_config(dict(config))
        inner = read_inner(config.pop("inner_optimizer"), custom_objects)
        return cls(inner, **config)

    def _add_scalar(
        self, name: str, dtype: str, value: float
    ) -> keras.Variable:
        return self.add_variable(
            shape=(),
            dtype=dtype,
            initializer=keras.initializers.Constant(value),
            name=name,
        )

    def _read(self, name: str, initial: float, dtype: str) -> Tensor:
        if not self.built:
            return ops.convert_to_tensor(initial, dtype)
        # A copy: torch writes new values into the tensor of the variable.
        return ops.copy(getattr(self, name).value)

    def _scale(self) -> Tensor:
        if not self.built:
            return self.initial_scale
        return self.dynamic_scale.value

    def _check_scaled(
        self, grads: list[Tensor | None], variables: list[keras.Variable]
    ) -> None:
        """Warn if gradients are divided by a scale that the loss lacks."""
        if not self.dynamic and self.initial_scale == 1.0:
            return
        known = next((g for g in grads if g is not None), None)
        traced = backends.current.is_traced(known)
        self._unscaling.check_scaled(variables[0], traced, self.name)

    def _unscaled(
        self, grads: list[Tensor | None], variables: list[keras.Variable] | None
    ) -> list[Tensor | None]:
        left = [False] * len(grads)
        if variables is not None:
            left = [is_overwritten(v) for v in variables]
        return unscaled(grads, ops.convert_to_tensor(self._scale()), left)

    def _to_apply(
        self, grads: list[Tensor | None], variables: list[keras.Variable]
    ) -> list[Tensor | None]:
        """Return the unscaled gradients, for the inner optimizer."""
        if not self._unscaling.is_done(grads):
            grads = self._unscaled(grads, variables)
        elif self._unscaling.states_too:
            grads = with_scaled_states(grads, variables, self._scale())
        if self.inner_optimizer.gradient_accumulation_steps:
            grads = as_accumulated(grads, variables)
        return grads

    def _updated_with(
        self, variables: list[keras.Variable]
    ) -> list[keras.Variable]:
        """Return all variables that a step may assign, each once."""
        own = self.inner_optimizer.variables
        every = (*variables, *self._known(), *own)
        return list({id(v): v for v in every}.values())

    def _known(self) -> list[keras.Variable]:
        return optimizer_variables.known_to_optimizer(self) or []

    def _restore(self, values: dict[str, Any]) -> None:
        scale = float(np.asarray(values["dynamic_scale"]))
        if not 0.0 < scale <= LARGEST:
            raise ValueError(
                f"The loss scale of {self.name!r} in this file is damaged; "
                f"the optimizer was not changed. Received: {scale!r}. "
                "Allowed: a finite number > 0. Save the model again, or load "
                "it with compile=False."
            )
        scale = min(max(scale, self.minimum_scale), self.maximum_scale)
        values = {**values, "dynamic_scale": np.float32(scale)}
        for name, value in values.items():
            if self.dynamic or name == "skipped_counter":
                getattr(self, name).assign(value)

    def _follow(self, finite: Tensor) -> None:
        variables = [getattr(self, name) for name in STATE]
        growth = None
        if self.dynamic:
            growth = Growth(
                self.dynamic_growth_steps,
                self.multiplier,
                self.minimum_scale,
                self.maximum_scale,
            )
        state = ScaleState(*(ops.convert_to_tensor(v) for v in variables))
        state = following(state, finite, growth)
        for variable, value in zip(variables, state, strict=True):
            variable.assign(ops.cast(value, variable.dtype))
