"""Checks of a float8 layer's operands, and the seam for rounding them."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import keras

from keras_policy_ext import _extensions, backends
from keras_policy_ext._types import Tensor
from keras_policy_ext.contractions import Contraction, Einsum, equations
from keras_policy_ext.stored_kernels import Axes, Grid

Shape = tuple[Any, ...]
"""A shape; an unknown size is None, or symbolic."""


class Rounding(Protocol):
    """Rounds operands that train for a grid.

    An extension registers one by `register_rounding`.
    """

    def __call__(
        self,
        grid: Grid,
        contraction: Contraction,
        inputs: Tensor,
        kernel: Tensor,
        axes: Axes,
        state: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor]:
        """Return inputs and kernel, rounded, in the dtypes that they have.

        They have gradients. `axes` are those of the kernel, which has the order
        of its variable. `state` is that of the kernel, if it has one.
        """


_roundings: list[Rounding] = []


def register_rounding(rounding: Rounding) -> None:
    """Register what rounds operands under recipes that have a grid."""
    _roundings.append(rounding)


def on_grid(*given: Any) -> tuple[Tensor, Tensor]:
    """Return the operands of a contraction on a grid; see `Rounding`."""
    if not _roundings:
        _extensions.import_for("rounding")
    return _roundings[0](*given)


class MovedKernel(NamedTuple):
    """A kernel whose elements are moved before a contraction reads it."""

    shape: Shape  # The shape that the contraction reads.
    # Moves the tensor of the kernel; differentiable.
    move: Callable[[Tensor], Tensor]


Value = TypeVar("Value")
Function = TypeVar("Function", bound=Callable[..., Any])


def cached(function: Function) -> Function:
    """Return a function with a cache, which torch.compile leaves out."""
    known = functools.lru_cache(maxsize=4096)(function)  # It would warn.

    def call(*args: Any) -> Any:
        return (function if backends.current.is_compiling() else known)(*args)

    return functools.wraps(function)(call)  # type: ignore[return-value]


class TensorNotes(Generic[Value]):
    """A store of one value for each tensor, for as long as the tensor exists.

    A tensor is found by identity: tensors of some frameworks have no hash.
    """

    def __init__(self) -> None:
        """Begin without values."""
        self._values: dict[int, tuple[weakref.ref[Any], Value]] = {}
        # The values of calls that torch.compile traces. It would end a graph
        # where a dict changes (torch 2.13).
        self._traced: list[tuple[Any, Value]] = []

    def get(self, x: object) -> Value | None:
        """Return the value stored for a tensor, or None."""
        if backends.current.is_compiling():
            found = [value for each, value in self._traced if each is x]
            return found[-1] if found else None
        entry = self._values.get(id(x))
        return None if entry is None or entry[0]() is not x else entry[1]

    def set(self, x: object, value: Value) -> None:
        """Store a value for a tensor."""
        if backends.current.is_compiling():
            self._traced.append((x, value))
            return
        values, key = self._values, id(x)

        def forget(reference: Any) -> None:
            """Forget the value of a tensor that was deleted."""
            # Unless another tensor has this id by now.
            if key in values and values[key][0] is reference:
                del values[key]

        values[key] = weakref.ref(x, forget), value

    @contextlib.contextmanager
    def of_call(self) -> Iterator[None]:
        """Forget the values of a trace at the end of the block, a call."""
        known = len(self._traced)
        try:
            yield
        finally:
            del self._traced[known:]


def no_operands(inputs: Tensor, kernel: keras.Variable) -> str:
    """Return an error message: the operands are no tensor and weight."""
    return (
        "The operands are not a tensor and a weight of this layer. Received: "
        f"inputs {inputs!r}, kernel {kernel!r}. Allowed: a tensor or array, "
        "and a weight which the layer made with `add_weight`. Make the weight "
        "in `build` or `__init__`."
    )


def is_floating(dtype: object) -> bool:
    """Return True if a dtype is floating."""
    return "float" in keras.backend.standardize_dtype(dtype)


def contraction_of(equation: str, first: Shape, second: Shape) -> Einsum:
    """Return the `Einsum` of an equation for operands of these shapes.

    `...` is allowed; a size that is not known is None.

    Raises:
        ValueError: If the equation is malformed or does not fit the operands.
    """
    explicit = equations.explicit(equation, len(first), len(second))
    # Checked here, since an einsum would broadcast a size of 1.
    terms = equations.split(explicit)
    sizes = dict(zip(terms.first, first, strict=True))
    for axis, size in zip(terms.second, second, strict=True):
        other = sizes.get(axis, size)
        if None not in (size, other) and size != other:
            raise ValueError(
                f"The operands of {explicit!r} differ in axis {axis!r}. "
                f"Received: shapes {tuple(first)} and {tuple(second)}. "
                "Allowed: equal sizes. Transpose or repeat the inputs first."
            )
    return Einsum(explicit)


known_contraction_of = functools.lru_cache(maxsize=4096)(contraction_of)


def contraction_of_tensors(
    equation: str, first: Tensor, second: Tensor
) -> Einsum:
    """Return the `Einsum` of an equation, for two operands.

    ValueError says that the equation does not fit them.
    """
    # torch.compile leaves caches out, and sizes that it traces have no hash.
    has_hash = isinstance(equation, str)  # The check refuses all else.
    is_cached = has_hash and not backends.current.is_compiling()
    make = known_contraction_of if is_cached else contraction_of
    return make(equation, tuple(first.shape), tuple(second.shape))
