"""Float32 views of narrow variables, and casts of gradients."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_policy_ext._keras.optimizer_facts import is_overwritten
from keras_policy_ext._types import Tensor
from keras_policy_ext.numerics import ROUNDABLE, stochastic_round


def as_accumulated(
    grads: list[Tensor | None], variables: list[keras.Variable]
) -> list[Tensor | None]:
    """Cast gradients to their variables' dtypes, in which Keras accumulates."""
    return [
        grad if grad is None else ops.cast(grad, variable.dtype)
        for grad, variable in zip(grads, variables, strict=True)
    ]


def may_belong(
    grads: list[Tensor | None], variables: list[keras.Variable]
) -> bool:
    """Return True if gradients and variables agree in number and shapes."""
    return len(grads) == len(variables) and all(
        grad is None or tuple(grad.shape) == tuple(variable.shape)
        for grad, variable in zip(grads, variables, strict=True)
    )


def with_scaled_states(
    grads: list[Tensor | None], variables: list[keras.Variable], scale: Any
) -> list[Tensor | None]:
    """Undo the division of float8 state's gradients by the loss scale."""
    scale = ops.convert_to_tensor(scale)
    return [
        ops.multiply(grad, ops.cast(scale, grad.dtype))
        if grad is not None and is_overwritten(variable)
        else grad
        for grad, variable in zip(grads, variables, strict=True)
    ]


def _operators(operation: Callable[[Tensor, Tensor], Tensor]) -> list[Any]:
    """Return two methods for an operation, such as `__add__` and `__radd__`."""
    return [
        lambda self, other: operation(self.value, other),
        lambda self, other: operation(other, self.value),
    ]


class _Arithmetic:
    """The arithmetic operators of a variable, such as `+` and `*`."""

    value: Tensor

    __add__, __radd__ = _operators(ops.add)
    __sub__, __rsub__ = _operators(ops.subtract)
    __mul__, __rmul__ = _operators(ops.multiply)
    __truediv__, __rtruediv__ = _operators(ops.divide)
    __pow__ = _operators(ops.power)[0]

    def __neg__(self) -> Tensor:
        return ops.negative(self.value)


# On torch an operation takes as tensors only tensors and Keras variables; on
# TensorFlow an optimizer replaces a Keras variable by the tf.Variable in it.
_ON_TORCH = keras.backend.backend() == "torch"
_ON_TENSORFLOW = keras.backend.backend() == "tensorflow"
_Base: Any = keras.Variable if _ON_TORCH else _Arithmetic


def _of_the_variable(name: str) -> property:
    return property(operator.attrgetter(f"_variable.{name}"))


class Float32View(_Base):
    """A float32 variable that reads and writes a bfloat16 or float16 one.

    Assigned values are rounded stochastically into the variable. While the view
    is held, as during one `apply`, it stores the float32 value, and `settle`
    rounds it once. On TensorFlow every assignment is rounded at once: it may be
    in a branch of a graph, and a stored value could not leave the branch. The
    random bits come from the seed generator.
    """

    def __init__(
        self,
        variable: keras.Variable,
        seed_generator: keras.random.SeedGenerator,
    ):
        self._variable = variable
        self._seed_generator = seed_generator
        self._held = False
        self._kept: Tensor | None = None
        if _ON_TORCH:
            # The smallest variable there is: its own value is never read.
            super().__init__(
                "zeros", shape=(), dtype="float32", trainable=False
            )

    @property
    def value(self) -> Tensor:
        """The value in float32: the last one assigned, or the variable's."""
        if self._kept is not None:
            return self._kept
        value = ops.stop_gradient(ops.cast(self._variable.value, "float32"))
        if _ON_TORCH and self._held:
            # Keras's optimizers for torch change this tensor in place.
            self._kept = value
        return value

    def assign(self, value: Tensor) -> Tensor:
        """Round a value into the narrow variable, at once or in `settle`."""
        value = ops.convert_to_tensor(value, dtype="float32")
        if self._held:
            self._kept = value
        else:
            self._round(value)
        return value

    def assign_add(self, value: Tensor) -> Tensor:
        """Add to the float32 value of the view, and assign the sum."""
        return self.assign(ops.add(self.value, value))

    def assign_sub(self, value: Tensor) -> Tensor:
        """Subtract from the float32 value of the view, and assign it."""
        return self.assign(ops.subtract(self.value, value))

    def hold(self) -> None:
        """Keep assigned values as float32 from now on, except on TensorFlow."""
        self._held = not _ON_TENSORFLOW

    def settle(self) -> None:
        """Round the float32 value of the view into the narrow variable."""
        if self._kept is not None:
            self._round(self._kept)

    def release(self) -> None:
        """Stop keeping assigned values, and drop the last one."""
        self._held, self._kept = False, None

    def _round(self, value: Tensor) -> None:
        dtype = keras.backend.standardize_dtype(self._variable.dtype)
        self._variable.assign(
            stochastic_round(value, dtype, self._seed_generator)
        )

    # What optimizers ask of a variable.

    dtype = "float32"
    overwrite_with_gradient = False

    shape = _of_the_variable("shape")
    ndim = _of_the_variable("ndim")
    name = _of_the_variable("name")
    path = _of_the_variable("path")
    constraint = _of_the_variable("constraint")  # applied before rounding

    def __getattr__(self, name: str) -> Any:
        # TensorFlow knows a variable by attributes of the tf.Variable.
        variable = self.__dict__.get("_variable")
        if variable is None:
            raise AttributeError(name)
        if hasattr(variable, name):
            return getattr(variable, name)
        return getattr(variable.value, name)

    def __repr__(self) -> str:
        return f"<{self._variable.path} in float32>"

    def __array__(
        self, dtype: str | None = None, copy: bool | None = None
    ) -> np.ndarray:
        return np.asarray(ops.convert_to_numpy(self.value), dtype)

    def __jax_array__(self) -> Tensor:
        return self.value

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> Tensor:
        return self.value if dtype is None else ops.cast(self.value, dtype)


class Float32Views:
    """The float32 views of an optimizer's bfloat16 and float16 variables."""

    def __init__(self, seed_generator: keras.random.SeedGenerator):
        self._seed_generator = seed_generator
        self._views: dict[int, Float32View] = {}

    def of(self, variables: Iterable[keras.Variable]) -> list[keras.Variable]:
        """Return variables, with float32 views of bfloat16 and float16 ones."""
        return [self._of(variable) for variable in variables]

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """In the block, views keep assigned values; on exit, round them."""
        views = list(self._views.values())
        for view in views:
            view.hold()
        try:
            yield
            for view in views:
                view.settle()
        finally:
            for view in views:
                view.release()

    def _of(self, variable: keras.Variable) -> keras.Variable | Float32View:
        dtype = keras.backend.standardize_dtype(variable.dtype)
        if dtype not in ROUNDABLE or is_overwritten(variable):
            return variable
        key = id(variable)
        if key not in self._views:
            _check_replicas(variable)
            self._views[key] = Float32View(variable, self._seed_generator)
        return self._views[key]


def _check_replicas(variable: keras.Variable) -> None:
    """Raise if a variable has replicas of `tf.distribute`."""
    # TensorFlow updates these through an interface that takes no views.
    if hasattr(variable.value, "distribute_strategy"):
        raise NotImplementedError(
            "StochasticRounding cannot update variables that tf.distribute "
            f"keeps in replicas. Received: {variable.path!r} of dtype "
            f"{variable.dtype}. Allowed: variables made outside a strategy "
            "of several replicas, or float32 ones. Give the layers a dtype "
            "policy with float32 variables, such as 'mixed_bfloat16'."
        )
