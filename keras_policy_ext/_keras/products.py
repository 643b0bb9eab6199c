"""Wrap Keras's operations, to find the products that a layer computes."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras

try:
    from keras.src import backend as _backend
    from keras.src.backend.common import global_state as _global_state
except ImportError:  # Keras has moved them: see `watch`.
    _backend = _global_state = None

PRODUCTS = ("matmul", "einsum", "dot", "tensordot")
"""The operations that multiply two operands, as `keras.ops` names them."""

CONVOLUTION = "conv"
"""The operation that convolves inputs with a kernel."""

MOVES = (
    "transpose",
    "reshape",
    "swapaxes",
    "moveaxis",
    "expand_dims",
    "squeeze",
    "take",
    "split",
)
"""The operations that move the elements of a tensor and change none."""

ENTRIES = "__getitem__"
"""The method of a variable that takes entries of it, such as a slice."""

CASTS = ("cast", "convert_to_tensor")

PASSES = ("dropout", "where")
"""Operations whose result is made of one operand, with some entries set."""

SOFTMAX = "softmax"

ATTENTION = "dot_product_attention"
"""The operation that multiplies queries, keys and values."""

BRANCHES = (
    "associative_scan",
    "cond",
    "fori_loop",
    "map",
    "scan",
    "switch",
    "vectorized_map",
    "while_loop",
)
"""The operations that run functions of the caller, perhaps in another trace."""

ALL_RUN = ("associative_scan", "map", "scan", "vectorized_map")
"""Those of `BRANCHES` that run their function in each trace."""

CHOICES = ("argmax", "argmin", "argsort", "sort", "top_k")
"""The operations that choose among entries."""

_MODULES = ("core", "math", "nn", "numpy", "random")

_SCOPES = "name_scope_stack"

_MARK = "_keras_policy_ext_products"

_FOLLOWED: set[type] = set()

_thread = threading.local()

Handler = Callable[..., Any]


def innermost_layer() -> Any:
    """Return the layer whose call or `build` runs now; None outside of one.

    Keras opens a name scope for each call, which holds the layer (`caller` in
    `name_scope_stack`, keras 3.0 to 3.16). If it is missing, None. Expires
    with a public way to ask for the layer of a call.
    """
    scopes = _global_state and _global_state.get_global_attribute(_SCOPES)
    callers = (scope.caller for scope in reversed(scopes or ()))
    return next((each for each in callers if each is not None), None)


def watch(handlers: Mapping[tuple[str, ...], Handler]) -> None:
    """Make operations of Keras call a handler of their own inside of a layer.

    `keras.ops` calls a function of the same name in a module of the backend,
    such as `backend.numpy` (keras 3.0 to 3.15), or in `backend.ops`, in
    modules of these names there and in `backend.random` (3.16). These are
    wrapped, so that it makes no difference how a module imports the
    operation. Layers cast by `backend.cast`. `ENTRIES` is a method of
    `keras.Variable`. If Keras has the functions
    elsewhere, no product is seen, and `convert` says that none was recognised.
    Expires with a public hook.

    Args:
        handlers: The handler for operations of these names. It is called as
            `handler(layer, stock, name, args, kwargs)`, and its result is that
            of the operation. It is called while products are recorded, for
            layers of classes that are followed (`follow`), and inside of
            `following()`.
    """
    homes = modules()
    for names, handler in handlers.items():
        for name in names:
            for module in homes:
                _wrap(module, name, handler)
            if name == "cast":
                _wrap(_backend, name, handler)
            if name == ENTRIES:
                _wrap(keras.Variable, name, handler)


def modules() -> list[Any]:
    """Return the modules of Keras that have the functions behind operations."""
    home = getattr(_backend, "ops", None)  # Without those of keras.random.
    homes = [each for each in (home, _backend) if each is not None]
    places = [getattr(each, x, None) for each in homes for x in _MODULES]
    return [each for each in (home, *places) if each is not None]


def follow(cls: type) -> None:
    """Call the functions given to `watch` inside of layers of this class."""
    _FOLLOWED.add(cls)


def _wrap(module: Any, name: str, handler: Handler) -> None:
    """Replace `module.name` once by a function that calls `handler`.

    All operations of the process pass through it, so it is one function.
    """
    stock = getattr(module, name, None)
    if stock is None or hasattr(stock, _MARK):
        return

    @functools.wraps(stock)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        scopes = _global_state.get_global_attribute(_SCOPES)
        layer = scopes[-1].caller if scopes else None
        if scopes and layer is None:  # A name scope of the user.
            layer = innermost_layer()
        if layer is not None and (
            type(layer) in _FOLLOWED
            or getattr(_thread, "note", None)
            or getattr(_thread, "follows", False)
        ):
            return handler(layer, stock, name, args, kwargs)
        return stock(*args, **kwargs)

    vars(wrapped)[_MARK] = True
    setattr(module, name, wrapped)


@contextlib.contextmanager
def recording(note: Callable[[keras.Layer, Any], None]) -> Iterator[None]:
    """In the block, `recorder()` is `note` in this thread."""
    before = recorder()
    _thread.note = note
    try:
        yield
    finally:
        _thread.note = before


@contextlib.contextmanager
def following() -> Iterator[None]:
    """In the block, call handlers inside of all layers, in this thread."""
    before = getattr(_thread, "follows", False)
    _thread.follows = True
    try:
        yield
    finally:
        _thread.follows = before


def recorder() -> Any:
    """Return the function that notes products now, or None."""
    return getattr(_thread, "note", None)
