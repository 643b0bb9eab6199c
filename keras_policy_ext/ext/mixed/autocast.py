"""Autocasting that a layer can control: `AutocastMixin`, `autocast_scope`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Self

import keras
from keras import ops

from keras_policy_ext import policies, scopes
from keras_policy_ext._keras import calls
from keras_policy_ext._keras.walking import tracked_variables
from keras_policy_ext._types import Tensor
from keras_policy_ext.bases import MixedInto, check_before
from keras_policy_ext.ext.mixed import _keras
from keras_policy_ext.policies import FLOATS

__all__ = ["AutocastMixin"]


WAYS = ("all", "first")

#: The order of tf_keras's `add_weight`.
_LEGACY = (
    "name",
    "shape",
    "dtype",
    "initializer",
    "regularizer",
    "trainable",
    "constraint",
)

_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CastArguments:
    """The arguments of a layer's `call` that are cast to the compute dtype.

    Attributes:
        positional: Names of the positional parameters.
        rest: Name of the parameter for all further positional arguments.
        only_first: Whether only the first argument is cast.
        excluded: Names of parameters that are not cast.
    """

    positional: tuple[str, ...]
    rest: str
    only_first: bool
    excluded: frozenset[str]

    @classmethod
    def of(cls, call: Callable[..., object], way: str, exclude: object) -> Self:
        """Return which arguments of `call` the layer's settings cast.

        Raises:
            ValueError: If `way` is not in `WAYS`, or `call` has no parameter
                with a name in `exclude`.
            TypeError: If `exclude` is neither a string nor a list of strings.
        """
        if way not in WAYS:
            raise ValueError(
                "`autocast_args` is neither 'all' nor 'first'. Received: "
                f"{way!r}. Allowed: 'all' (every argument is cast, as in "
                "Keras) or 'first' (only the first one, as in tf_keras). "
                "Choose one."
            )
        parameters = inspect.signature(call).parameters.values()
        return cls(
            positional=tuple(
                p.name for p in parameters if p.kind in _POSITIONAL
            ),
            rest=next(
                (p.name for p in parameters if p.kind == p.VAR_POSITIONAL), ""
            ),
            only_first=way == "first",
            excluded=_excluded(exclude, list(parameters)),
        )

    def at(self, position: int) -> bool:
        """Return True if the argument at this position is cast."""
        known = position < len(self.positional)
        name = self.positional[position] if known else self.rest
        if self.only_first and position > 0:
            return False
        return name not in self.excluded

    def named(self, name: str) -> bool:
        """Return True if the keyword argument of this name is cast."""
        if self.only_first and name not in self.positional[:1]:
            return False
        return name not in self.excluded


def exclusion(exclude: object) -> tuple[str, ...]:
    """Convert the value of `autocast_exclude` to a tuple of names.

    Raises:
        TypeError: If it is not a name or a collection of names.
    """
    names = [exclude] if isinstance(exclude, str) else exclude
    if isinstance(names, Iterable):
        names = tuple(names)
        if all(isinstance(name, str) for name in names):
            return names
    raise TypeError(
        "`autocast_exclude` is not a name or a tuple of names. Received: "
        f"{exclude!r}. Allowed: a name or a tuple of names of parameters of "
        "`call`. Pass for instance autocast_exclude=('mask_logits',)."
    )


def _excluded(
    exclude: object, parameters: list[inspect.Parameter]
) -> frozenset[str]:
    names = exclusion(exclude)
    allowed = [p.name for p in parameters if p.kind != p.VAR_KEYWORD]
    unknown = sorted(set(names) - set(allowed))
    if unknown and len(allowed) == len(parameters):
        raise ValueError(
            "`autocast_exclude` names arguments that `call` does not have. "
            f"Received: {unknown}. Allowed: {allowed}. Correct the name."
        )
    return frozenset(names)


def read_add_weight(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Convert tf_keras's arguments of `add_weight` to those of Keras.

    In tf_keras the name is the first argument: `add_weight("kernel", (3, 4))`.
    Its `experimental_autocast` is Keras's `autocast`.

    Raises:
        TypeError: If an argument is given twice, or there are too many.
    """
    kwargs = dict(kwargs)
    if "experimental_autocast" in kwargs:
        _once("autocast", kwargs, "as `experimental_autocast` and by name")
        kwargs["autocast"] = kwargs.pop("experimental_autocast")
    if not _is_legacy(args):
        return args, kwargs
    if len(args) > len(_LEGACY):
        raise TypeError(
            f"add_weight got too many arguments. Received: {args!r}. "
            f"Allowed: {', '.join(_LEGACY)}. Pass others by name."
        )
    for name, value in zip(_LEGACY, args, strict=False):
        _once(name, kwargs, "by position and by name")
        if value is not None:
            kwargs[name] = value
    return (), kwargs


def _is_legacy(args: tuple[Any, ...]) -> bool:
    """Return True if `add_weight` got tf_keras's arguments: a name first."""
    first, second = (*args, None, None)[:2]
    unnamed = first is None and isinstance(second, (tuple, list))
    return isinstance(first, str) or unnamed


def _once(name: str, kwargs: dict[str, Any], how: str) -> None:
    if name in kwargs:
        raise TypeError(
            f"add_weight got {name!r} twice, {how}. Received: "
            f"{name}={kwargs[name]!r} as the second one. Allowed: one value. "
            "Pass it once."
        )


_SCOPES = scopes.Scopes(
    "autocast_scope", _keras.stored_autocast_scope, _keras.store_autocast_scope
)


def autocast_scope(dtype: object) -> AbstractContextManager[None]:
    """In the block, read autocast variables in this dtype.

    It affects variables read in the block itself: a layer's call enters the
    scope of its own compute dtype. The scope belongs to the thread and all its
    asyncio tasks, so await only tasks that are started inside the block.
    Scopes nest. The previous scope is restored afterwards, also after an
    exception.

    Args:
        dtype: The floating dtype in which autocast variables are read; None
            turns autocasting off.

    Returns:
        A context manager that can be entered once.

    Raises:
        ValueError: If the dtype is not floating.
        RuntimeError: On entry, if another asyncio task of this thread is
            inside a scope; on exit, if a scope that was entered later is still
            open.

    Examples:
        >>> class Counting(kpe.layers.AutocastMixin, keras.layers.Layer):
        ...     def build(self, shape):
        ...         self.count = self.add_weight(shape=(), initializer="zeros")
        ...
        ...     def call(self, x):
        ...         with kpe.autocast_scope(None):
        ...             self.seen = keras.ops.add(self.count, 1.0)
        ...         return x
        >>> layer = Counting(dtype="mixed_bfloat16")
        >>> outputs = layer(np.ones((2, 3)))
        >>> keras.backend.standardize_dtype(layer.seen.dtype)
        'float32'
    """
    name = None
    if dtype is not None:
        try:
            name = keras.backend.standardize_dtype(dtype)
        except (TypeError, ValueError):
            name = ""
    if name is not None and name not in FLOATS:
        raise ValueError(
            f"{dtype!r} is not a floating dtype; variables are autocast to "
            f"floating dtypes only. Received: {dtype!r}. Allowed: "
            f"{', '.join(FLOATS)}, or None to switch autocasting off. Use "
            "`ops.cast` for other dtypes."
        )
    return _SCOPES.opened(calls.autocast_scope(name))


class AutocastVariable(keras.Variable):
    """A variable to which values are always written in its variable dtype.

    Inside a mixed layer Keras adds in the compute dtype before it assigns. On
    torch it assigns to the cast copy that it returned.

    Attributes:
        owner: The layer that created the variable.
        asked: Whether the variable was created with `autocast=True`.
    """

    owner: Any
    asked: bool

    def assign(self, value: Tensor) -> Tensor:
        """Assign a value, cast to the variable's own dtype."""
        with calls.autocast_scope(None):
            return super().assign(value)

    def assign_add(self, value: Tensor) -> Tensor:
        """Add a value in the variable's own dtype."""
        with calls.autocast_scope(None):
            return super().assign_add(value)

    def assign_sub(self, value: Tensor) -> Tensor:
        """Subtract a value in the variable's own dtype."""
        with calls.autocast_scope(None):
            return super().assign_sub(value)

    def follow(self, mixed: bool) -> None:
        """Autocast from now on if that was requested and `mixed` is True."""
        _keras.set_autocasts(self, self.asked and mixed)


def own(variable: keras.Variable, layer: keras.Layer, mixed: bool) -> None:
    """Turn a layer's variable into an `AutocastVariable` of the layer.

    It changes the class of the object. `Layer.add_weight` creates the
    variable, with Keras's name scope and tracking, and does not let the caller
    choose a class. A variable of another class, such as the state of a float8
    kernel, is unchanged.
    """
    if type(variable) is not keras.Variable:
        return
    variable.__class__ = AutocastVariable
    variable.owner = layer
    variable.asked = _keras.autocasts(variable)
    variable.follow(mixed)


def assigned_variables(value: object) -> list[keras.Variable]:
    """Return the variables in an attribute's value, also in lists and dicts."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [v for each in value for v in assigned_variables(each)]
    return [value] if isinstance(value, keras.Variable) else []


def is_autocast_variable(variable: object) -> bool:
    """Return True if reading a variable in a mixed layer's call casts it.

    Args:
        variable: Anything.

    Returns:
        True for a floating `keras.Variable` that autocasts. A variable of an
        `AutocastMixin` layer autocasts while its layer is mixed, unless it was
        created with `autocast=False`. A variable of a stock layer autocasts in
        any mixed layer that reads it. False for any other object.
    """
    if not isinstance(variable, keras.Variable):
        return False
    with calls.autocast_scope(None):
        dtype = variable.dtype
    return _keras.autocasts(variable) and dtype in FLOATS


class AutocastMixin(_keras.OwnArgumentConversion, MixedInto):
    """A mixin for layers that choose which arguments and variables are cast.

    ```python
    class MyLayer(kpe.layers.AutocastMixin, keras.layers.Layer):
        autocast_exclude = ("mask_logits",)

        def call(self, inputs, mask_logits):
            ...
    ```

    Put it before the Keras class. In addition to its attributes:

    - A floating argument is never cast to an integer dtype.
    - Variables of the layer are cast in a call only if this layer is mixed
      (its compute and variable dtypes differ), not if another layer is.
      Values written to them keep the variable dtype.
    - Regularizers compute in the variable dtype, wherever `losses` is read,
      and so does the activity regularizer.
    - `stateless_call`, which trains and predicts on JAX, casts as
      `__call__` does.
    - `add_weight` takes `experimental_autocast=` for `autocast=`, and the
      order of tf_keras: name, shape, dtype, initializer.

    Args:
        *args, **kwargs: As for the layer.
        autocast_args, autocast_exclude, strict: Override the class attributes
            for this layer.

    Attributes:
        autocast_args: `"all"`: floating tensors in every argument are cast
            to the compute dtype, as in Keras; `"first"`: in the first one
            only, as in tf_keras.
        autocast_exclude: Names of parameters of `call` that are not cast.
        strict: Whether a floating output in another dtype than the compute
            dtype raises `ValueError`.

    Raises:
        ValueError: If `autocast_args` is another value, or `call` has no
            parameter with an excluded name.
        TypeError: If `autocast_exclude` contains anything but names. Raised by
            the `class` statement if the Keras class comes first.
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
            given["autocast_exclude"] = exclusion(autocast_exclude)
        given = {k: v for k, v in given.items() if v is not None}
        # Not through `__setattr__`: Keras would wrap the tuple to track it.
        self.__dict__.update(given, _autocast_config=given)
        self.__dict__["_cast_arguments"] = CastArguments.of(
            self.call, self.autocast_args, self.autocast_exclude
        )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_before(cls, AutocastMixin, keras.Layer, "keras.Layer")
        inherited = getattr(super(), "get_config", None)
        marked = _keras.is_default(inherited)
        if cls.get_config is AutocastMixin.get_config and not marked:
            cls.get_config = _unmarked_get_config(cls)  # type: ignore[method-assign]

    # `wraps` takes over the mark by which Keras knows its own `get_config`:
    # a layer that does not write one gets its config from the arguments of
    # its constructor.
    @functools.wraps(keras.layers.Layer.get_config, assigned=())
    def get_config(self) -> dict[str, Any]:
        """Return the layer's config, with the autocast arguments given."""
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
        """Add a weight, by the arguments of Keras or of tf_keras.

        Args:
            *args: The arguments of Keras (shape, initializer, dtype) or, if
                the first is a name, of tf_keras (name, shape, dtype,
                initializer, regularizer, trainable, constraint).
            **kwargs: As for `keras.layers.Layer.add_weight`;
                `experimental_autocast` is `autocast`.

        Returns:
            The variable.

        Raises:
            TypeError: If an argument is given twice.
        """
        args, kwargs = read_add_weight(args, kwargs)
        variable = super().add_weight(*args, **kwargs)
        own(variable, self, self._is_mixed())
        return variable

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "built":
            self._own_variables()
            return
        for variable in assigned_variables(value):
            if self._has_made(variable):
                own(variable, self, self._is_mixed())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer; cast the arguments that the layer's settings say."""
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
        """Call the layer with given values of its variables, like `__call__`.

        Keras's `stateless_call` runs `call` directly, so that no argument and
        no variable of the layer itself is cast.

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
            ValueError: If the layer is not built, or the numbers of values and
                variables differ.
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
        """Return the output spec, in the dtypes that `__call__` gives."""
        args, kwargs = self._convert(args, kwargs, symbolic=True)
        with self._call_scope():
            return super().compute_output_spec(*args, **kwargs)

    def rematerialized_call(
        self, layer_call: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Callable[..., Any]:
        """Return a rematerialized call that casts as the first call does."""

        @functools.wraps(layer_call)
        def call(*args: Any, **kwargs: Any) -> Any:
            # The backward pass recomputes it, outside of the call's scope.
            with self._call_scope():
                return layer_call(*args, **kwargs)

        return super().rematerialized_call(call, *args, **kwargs)

    @property
    def losses(self) -> list[Tensor]:
        """The layer's losses, computed in the variable dtype."""
        with calls.autocast_scope(None):
            return super().losses

    @property
    def activity_regularizer(self) -> Any:
        """The regularizer of the layer's outputs; None if there is none."""
        regularizer = self.__dict__.get("_activity_regularizer")
        if regularizer is None or not self.__dict__.get("_calls", 0):
            return regularizer
        # Cast first: in float16 a sum of squares overflows at 65504.
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
        """Return True if this layer, and no other, created a variable."""
        if "_cast_arguments" not in self.__dict__:
            return False  # Keras's own constructor is at work.
        # The variable of another layer has the path of that layer.
        return variable.path in (variable.name, f"{self.path}/{variable.name}")

    def _own_variables(self) -> None:
        """Make all variables of this layer `AutocastVariable`s of the layer."""
        if "_cast_arguments" not in self.__dict__:
            return  # Keras's own constructor is at work.
        # Some are in no attribute, or in a list that was filled later. Keras
        # tracks no new ones once the layer is built: calls need no check.
        for variable in tracked_variables(self):
            if self._has_made(variable):
                own(variable, self, self._is_mixed())
        # A metric writes what it reads. On torch what is assigned to a cast
        # variable is lost, and float16 has not every integer above 2048.
        for metric in _keras.tracked_metrics(self):
            for variable in metric.variables:
                _keras.set_autocasts(variable, False)

    def _follow_policy(self) -> None:
        """Update the variables' autocasting after a change of policy."""
        mixed = self._is_mixed()
        if self.__dict__.get("_was_mixed") == mixed:
            return
        self._own_variables()  # A constructor may say that it is built.
        self.__dict__["_was_mixed"] = mixed
        for variable in self.variables:
            if getattr(variable, "owner", None) is self:
                variable.follow(mixed)

    def _call_scope(self) -> AbstractContextManager[object]:
        """Return the autocast scope that Keras enters around `call`."""
        dtype = self.compute_dtype
        if not self.autocast or not keras.backend.is_float_dtype(dtype):
            return calls.autocast_scope(None)
        if self._is_mixed() or _keras.stored_autocast_scope():
            return calls.autocast_scope(dtype)
        return contextlib.nullcontext()

    def _convert(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], symbolic: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Convert arguments to tensors; cast floats by the layer's settings."""
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

        def convert(x: Tensor) -> Any:
            # Before Keras has made a node of the layer, each cast would be a
            # node of its own.
            if isinstance(x, keras.KerasTensor) and not symbolic:
                return x
            new = policy.convert_input(x, cast, dtype)
            return _keras.keep_mask(x, new)

        if keras.tree.is_nested(argument):
            return keras.tree.map_structure(convert, argument)
        return convert(argument)

    def _check_outputs(self, outputs: Tensor) -> None:
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
    """Return a `get_config` method that calls the parent class's method."""

    def get_config(self: Any) -> dict[str, Any]:
        return super(cls, self).get_config()

    return get_config


def _regularize(regularizer: Any, x: Tensor, *, dtype: str) -> Tensor:
    """Call a regularizer on a tensor cast to `dtype`, if it is floating."""
    return regularizer(x if _floating_dtype(x) is None else ops.cast(x, dtype))


def _floating_dtype(x: Tensor) -> str | None:
    """Return the name of a floating tensor's dtype, or None."""
    # Shapes are being inferred: on torch Keras then returns variables in their
    # own dtype, as meta tensors.
    if isinstance(x, keras.KerasTensor) or getattr(x, "is_meta", False):
        return None
    if not hasattr(x, "dtype"):
        return None
    dtype = str(keras.backend.standardize_dtype(x.dtype))
    return dtype if keras.backend.is_float_dtype(dtype) else None
