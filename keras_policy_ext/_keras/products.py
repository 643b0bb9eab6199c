"""See the products that a layer's `call` computes by Keras's operations."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_policy_ext._keras.around import put_around

try:
    from keras.src import backend as _backend
    from keras.src.backend.common import global_state as _global_state
except ImportError:  # Keras has moved them: see `watch`.
    _backend = _global_state = None

PRODUCTS = ("matmul", "einsum", "dot", "tensordot")
"""The operations that multiply two operands, as `keras.ops` names them."""

MOVES = (
    "transpose",
    "reshape",
    "swapaxes",
    "moveaxis",
    "expand_dims",
    "squeeze",
    "take",
)
"""The operations that move the elements of a tensor and change none."""

CASTS = ("cast", "convert_to_tensor")

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

CHOICES = {
    "numpy": ("argmax", "argmin", "argsort", "sort"),
    "math": ("top_k",),
}
"""The operations that choose among entries, by module of the backend."""

_thread = threading.local()

Handler = Callable[..., Any]


def innermost_layer() -> Any:
    """Return the layer whose call or `build` runs now; None outside of one.

    Keras opens a name scope for each call, which holds the layer (`caller` in
    `name_scope_stack`, keras 3.0 to 3.16). If it is missing, None. Expires
    with a public way to ask for the layer of a call.
    """
    if _global_state is None:
        return None
    scopes = _global_state.get_global_attribute("name_scope_stack")
    return getattr(scopes[-1], "caller", None) if scopes else None


def watch(product: Handler, move: Handler, branch: Handler) -> None:
    """Make Keras's operations call `product` and `move` inside of a layer.

    `keras.ops` calls a function of the same name in `backend.numpy` or
    `backend.core` (keras 3.0 to 3.16). These are wrapped, so that it makes no
    difference how a module imports the operation. If Keras has the functions
    elsewhere, no product is seen, and `convert` says that such a layer has no
    float8 form. Expires with a public hook.

    Args:
        product: Called as `product(layer, stock, name, args, kwargs)` for each
            of `PRODUCTS`; its result is that of the operation.
        move: The same for each of `MOVES` and `CASTS`.
        branch: The same for each of `BRANCHES` and `CHOICES`.
    """
    if _backend is None:
        return
    for names, module, handler in (
        (PRODUCTS, _backend.numpy, product),
        (MOVES, _backend.numpy, move),
        (CASTS, _backend.core, move),
        (BRANCHES, _backend.core, branch),
        (CHOICES["numpy"], _backend.numpy, branch),
        (CHOICES["math"], _backend.math, branch),
    ):
        for name in names:
            put_around(module, name, _told(handler, name))


def _told(handler: Handler, name: str) -> Callable[..., Any]:
    """Return a function for `put_around` that calls `handler`."""

    def told(stock: Any, *args: Any, **kwargs: Any) -> Any:
        layer = innermost_layer()
        if layer is None:
            return stock(*args, **kwargs)
        return handler(layer, stock, name, args, kwargs)

    told.__qualname__ = f"_told.{handler.__name__}.{name}"
    return told


@contextlib.contextmanager
def recording(note: Callable[[keras.Layer, Any], None]) -> Iterator[None]:
    """In the block, `recorder()` is `note` in this thread."""
    before = recorder()
    _thread.note = note
    try:
        yield
    finally:
        _thread.note = before


def recorder() -> Any:
    """Return the function that notes products now, or None."""
    return getattr(_thread, "note", None)
