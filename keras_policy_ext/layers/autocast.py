"""Autocasting that a layer decides on: `AutocastMixin`."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import keras
from keras import ops

from keras_policy_ext import _bases, policies
from keras_policy_ext._keras import (
    calls,
    saving_hooks,
    variable_values,
    walking,
)
from keras_policy_ext._types import Tensor
from keras_policy_ext.layers import autocast_arguments, autocast_variables

__all__ = ["AutocastMixin"]


class AutocastMixin(calls.OwnArgumentConversion, _bases.MixedInto):
    """Decides what a layer casts: arguments, variables, outputs.

    ```python
    class MyLayer(kpe.layers.AutocastMixin, keras.layers.Layer):
        autocast_exclude = ("mask_logits",)

        def call(self, inputs, mask_logits):
            ...
    ```

    Put it before the Keras class. Beside what the attributes say:

    - A floating argument is never cast to an integer dtype.
    - Variables of the layer are cast in a call while the layer is mixed
      (its compute and variable dtypes differ), and never because another
      layer is. What is written to them keeps their dtype.
    - Regularizers see the variable dtype, wherever `losses` is read, and so
      does the activity regularizer.
    - `stateless_call`, which trains and predicts on JAX, casts as
      `__call__` does.
    - `add_weight` takes `experimental_autocast=` for `autocast=`, and the
      order of tf_keras: name, shape, dtype, initializer.

    Args:
        *args, **kwargs: As for the layer.
        autocast_args, autocast_exclude, strict: Instead of the attributes of
            the class, for this layer.

    Attributes:
        autocast_args: `"all"`: floating tensors in every argument are cast
            to the compute dtype, as in Keras; `"first"`: in the first one
            only, as in tf_keras.
        autocast_exclude: Names of parameters of `call` that are not cast.
        strict: Whether a floating output in another dtype than the compute
            dtype raises `ValueError`.

    Raises:
        ValueError: If `autocast_args` is neither, or `call` has no parameter
            of an excluded name.
        TypeError: If `autocast_exclude` holds anything but names; by the
            `class` statement, if the Keras class comes first.
    """

    autocast_args: str = "all"
    autocast_exclude: tuple[str, ...] = ()
    strict: bool = False

    def __init__(
        self,
        *args: Any,
        autocast_args: str | None = None,
        autocast_exclude: object = None,
        strict: bool | None = None,
        **kwargs: Any,
    ):
        if kwargs.get("dtype") is not None:
            kwargs["dtype"] = policies.get(kwargs["dtype"])
        super().__init__(*args, **kwargs)
        given: dict[str, Any] = {
            "autocast_args": autocast_args,
            "strict": strict,
        }
        if autocast_exclude is not None:
            names = autocast_arguments.exclusion(autocast_exclude)
            given["autocast_exclude"] = names
        given = {k: v for k, v in given.items() if v is not None}
        # Not through `__setattr__`: Keras would wrap the tuple to track it.
        self.__dict__.update(given, _autocast_config=given)
        self.__dict__["_cast_arguments"] = autocast_arguments.CastArguments.of(
            self.call, self.autocast_args, self.autocast_exclude
        )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _bases.check_before(cls, AutocastMixin, keras.Layer, "keras.Layer")
        inherited = getattr(super(), "get_config", None)
        marked = saving_hooks.is_default(inherited)
        if cls.get_config is AutocastMixin.get_config and not marked:
            cls.get_config = _unmarked_get_config(cls)  # type: ignore[method-assign]

    # `wraps` takes over the mark by which Keras knows its own `get_config`:
    # a layer that does not write one gets its config from the arguments of
    # its constructor.
    @functools.wraps(keras.layers.Layer.get_config, assigned=())
    def get_config(self) -> dict[str, Any]:
        """`Layer.get_config`, with what the constructor was told to cast."""
        config = dict(super().get_config())
        for name in ("autocast_args", "autocast_exclude", "strict"):
            value = self.__dict__["_autocast_config"].get(name)
            config.pop(name, None)  # Keras notes defaults, too.
            if value is not None:
                config[name] = (
                    list(value) if isinstance(value, tuple) else value
                )
        return config

    def add_weight(self, *args: Any, **kwargs: Any) -> keras.Variable:
        """`Layer.add_weight`; tf_keras's arguments are understood too.

        Args:
            *args: Those of Keras (shape, initializer, dtype) or, if the first
                is a name, of tf_keras (name, shape, dtype, initializer,
                regularizer, trainable, constraint).
            **kwargs: As for `keras.layers.Layer.add_weight`;
                `experimental_autocast` is `autocast`.

        Returns:
            The variable.

        Raises:
            TypeError: If an argument is given twice.
        """
        args, kwargs = autocast_arguments.read_add_weight(args, kwargs)
        variable = super().add_weight(*args, **kwargs)
        autocast_variables.own(variable, self, self._is_mixed())
        return variable

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "built":
            self._own_variables()
            return
        for variable in autocast_variables.assigned_variables(value):
            if self._has_made(variable):
                autocast_variables.own(variable, self, self._is_mixed())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`Layer.__call__`, with the arguments cast as the layer says."""
        if "_cast_arguments" not in self.__dict__:
            return super().__call__(*args, **kwargs)  # Keras says what lacks.
        self._follow_policy()
        args, kwargs = self._convert(args, kwargs, symbolic=False)
        with self._regularized_in_variable_dtype():
            outputs = super().__call__(*args, **kwargs)
        self._check_outputs(outputs)
        return outputs

    def stateless_call(
        self,
        trainable_variables: list[Tensor],
        non_trainable_variables: list[Tensor],
        *args: Any,
        return_losses: bool = False,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """`Layer.stateless_call`, by way of `__call__`.

        Keras's goes to `call` directly: no argument and no variable of the
        layer itself is then cast.

        Args:
            trainable_variables: Values of `self.trainable_variables`.
            non_trainable_variables: Values of `self.non_trainable_variables`.
            *args: Arguments of the call.
            return_losses: Whether to return the losses of the call.
            **kwargs: Arguments of the call.

        Returns:
            `(outputs, non_trainable_variables)` or `(outputs,
            non_trainable_variables, losses)`.

        Raises:
            ValueError: If the layer is not built, or the values are not as
                many as the variables.
        """
        states = (trainable_variables, non_trainable_variables)
        variables = (self.trainable_variables, self.non_trainable_variables)
        if not self.built or [*map(len, states)] != [*map(len, variables)]:
            # Keras says what is wrong.
            return super().stateless_call(*states, *args, **kwargs)
        pairs = zip(
            itertools.chain(*variables), itertools.chain(*states), strict=True
        )
        with calls.autocast_scope(None):
            # Under another scope it would cast the values.
            stateless = keras.StatelessScope(
                state_mapping=list(pairs), collect_losses=return_losses
            )
        with stateless:
            outputs = self(*args, **kwargs)
            losses = self.losses if return_losses else []
        state = [stateless.get_current_value(v) for v in variables[1]]
        return (outputs, state, losses) if return_losses else (outputs, state)

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        """`Layer.compute_output_spec`, in the dtypes of `__call__`."""
        args, kwargs = self._convert(args, kwargs, symbolic=True)
        with self._call_scope():
            return super().compute_output_spec(*args, **kwargs)

    def rematerialized_call(
        self, layer_call: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Callable[..., Any]:
        """Keras's, so that what is done again is done in the same dtypes.

        It is done in the backward pass, when the call's scope is left.
        """

        @functools.wraps(layer_call)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._call_scope():
                return layer_call(*args, **kwargs)

        return super().rematerialized_call(call, *args, **kwargs)

    @property
    def losses(self) -> list[Tensor]:
        """`Layer.losses`, of variables in their own dtype."""
        with calls.autocast_scope(None):
            return super().losses

    @property
    def activity_regularizer(self) -> Any:
        """The regularizer of the outputs, None if there is none.

        During a call it is one that casts to the variable dtype first: in
        float16 a sum of squares overflows at 65504.
        """
        regularizer = self.__dict__.get("_activity_regularizer")
        if regularizer is None or not self.__dict__.get("_calls", 0):
            return regularizer
        return functools.partial(
            _regularize, regularizer, dtype=self.variable_dtype
        )

    @activity_regularizer.setter
    def activity_regularizer(self, regularizer: Any) -> None:
        self.__dict__["_activity_regularizer"] = regularizer

    @contextlib.contextmanager
    def _regularized_in_variable_dtype(self) -> Iterator[None]:
        self.__dict__["_calls"] = self.__dict__.get("_calls", 0) + 1
        try:
            yield
        finally:
            self.__dict__["_calls"] -= 1

    def _is_mixed(self) -> bool:
        return bool(self.autocast and self.compute_dtype != self.variable_dtype)

    def _has_made(self, variable: keras.Variable) -> bool:
        """True if a variable that is assigned to an attribute is no other's.

        A variable that another layer made has the path of that layer.
        """
        if "_cast_arguments" not in self.__dict__:
            return False  # Keras's own constructor is at work.
        return variable.path in (variable.name, f"{self.path}/{variable.name}")

    def _own_variables(self) -> None:
        """Own what came in otherwise than by an assignment.

        A list that was assigned may be filled afterwards. Keras marks the
        layer as built and then takes no variable any more, so that there is
        nothing to look for in each call.
        """
        if "_cast_arguments" not in self.__dict__:
            return  # Keras's own constructor is at work.
        for variable in walking.tracked_variables(self):
            if self._has_made(variable):
                autocast_variables.own(variable, self, self._is_mixed())
        # A metric writes what it reads. On torch what is assigned to a cast
        # variable is lost, and float16 has not every integer above 2048.
        for metric in walking.tracked_metrics(self):
            for variable in metric.variables:
                variable_values.set_autocasts(variable, False)

    def _follow_policy(self) -> None:
        """Let the variables follow a policy that has changed."""
        mixed = self._is_mixed()
        if self.__dict__.get("_was_mixed") == mixed:
            return
        self._own_variables()  # A constructor may say that it is built.
        self.__dict__["_was_mixed"] = mixed
        for variable in self.variables:
            if getattr(variable, "owner", None) is self:
                variable.follow(mixed)

    def _call_scope(self) -> AbstractContextManager[object]:
        """The scope that Keras's `__call__` enters around `call`."""
        dtype = self.compute_dtype
        if not self.autocast or not keras.backend.is_float_dtype(dtype):
            return calls.autocast_scope(None)
        if self._is_mixed() or calls.stored_autocast_scope():
            return calls.autocast_scope(dtype)
        return contextlib.nullcontext()

    def _convert(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], symbolic: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Make tensors of arrays, and cast floats as the layer says.

        Symbolic tensors too, if Keras has made a node of them: before, each
        cast would be a node of its own.
        """
        if not self.converts_arguments:
            return args, kwargs
        which = self.__dict__["_cast_arguments"]
        new = tuple(
            self._converted(argument, which.at(position), symbolic)
            for position, argument in enumerate(args)
        )
        return new, {
            name: self._converted(argument, which.named(name), symbolic)
            for name, argument in kwargs.items()
        }

    def _converted(self, argument: Any, cast: bool, symbolic: bool) -> Any:
        dtype, policy = self.input_dtype, self.dtype_policy
        # An integer dtype would lose the fraction of a float.
        keeps = keras.backend.is_float_dtype(dtype) or "complex" in dtype
        cast = cast and self.autocast and keeps

        def convert(x: Any) -> Any:
            if isinstance(x, keras.KerasTensor) and not symbolic:
                return x
            new = policy.convert_input(x, cast, dtype)
            return calls.keep_mask(x, new)

        if keras.tree.is_nested(argument):
            return keras.tree.map_structure(convert, argument)
        return convert(argument)

    def _check_outputs(self, outputs: Any) -> None:
        dtype = self.compute_dtype
        if not self.strict or not keras.backend.is_float_dtype(dtype):
            return
        expected = policies.actual_dtype(dtype)
        for path, output in keras.tree.flatten_with_path(outputs):
            got = _floating_dtype(output)
            if got not in (None, expected):
                which = "".join(f"[{part!r}]" for part in path)
                raise ValueError(
                    f"Layer {self.name!r} ({type(self).__name__}) is strict, "
                    f"and its output{which} is not in the compute dtype. "
                    f"Received: {got}. Allowed: {expected} (policy "
                    f"{self.dtype_policy.name!r}) and dtypes that are not "
                    "floating. Make new tensors in `call` with "
                    "dtype=self.compute_dtype, as in "
                    "keras.random.normal(shape, dtype=self.compute_dtype), or "
                    "cast the output; or set strict=False if the dtype is "
                    "intended."
                )


def _unmarked_get_config(cls: Any) -> Any:
    """The mixin's `get_config`, for a layer whose Keras class has its own."""

    def get_config(self: Any) -> dict[str, Any]:
        return super(cls, self).get_config()

    return get_config


def _regularize(regularizer: Any, x: Tensor, *, dtype: str) -> Tensor:
    """A regularizer of a floating tensor, computed in a dtype."""
    return regularizer(x if _floating_dtype(x) is None else ops.cast(x, dtype))


def _floating_dtype(x: Any) -> str | None:
    """The dtype of a floating tensor, None of anything else.

    Also of a symbolic one, and of torch's without data: while shapes are
    inferred on torch, Keras hands out variables in their own dtype.
    """
    if isinstance(x, keras.KerasTensor) or getattr(x, "is_meta", False):
        return None
    if not hasattr(x, "dtype"):
        return None
    dtype = str(keras.backend.standardize_dtype(x.dtype))
    return dtype if keras.backend.is_float_dtype(dtype) else None
