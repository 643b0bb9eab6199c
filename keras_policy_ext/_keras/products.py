"""Wrap Keras's operations, to find the products that a layer computes.

A wrapper calls the handlers of `on_operation` blocks and of `watch`, if any.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

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

_FOLLOWED: set[type] = set()
"""The classes of layers whose operations go through the handlers of `watch`."""

_thread = threading.local()
"""`note`: the function of `recording`; `follows`: True in `following()`."""

_T = TypeVar("_T")

Handler = Callable[..., Any]
"""Called as `handler(layer, stock, name, args, kwargs)`; returns the result."""

Operation = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
"""What a handler gets: an operation as Keras has it, and its arguments."""

_watching: dict[str, Handler] = {}
"""The handlers of `watch`, by the name of the operation."""


class _Block(Generic[_T]):
    """A block with its value. A task that was started in it may outlive it."""

    def __init__(self, value: _T) -> None:
        self.value, self.is_open = value, True


class Blocks(Generic[_T]):
    """Blocks with values, for the thread and asyncio task that opens them.

    They may end in any order, and in another thread, as those of generators do.

    Attributes:
        open_count: The number of open blocks of all threads.
    """

    def __init__(self, name: str) -> None:
        """Begin with no open `with` block, in any task.

        `name` is that of the context variable, for debuggers.
        """
        self.open_count = 0
        self._lock = threading.Lock()
        self._of_task: contextvars.ContextVar[tuple[_Block[_T], ...]] = (
            contextvars.ContextVar(name, default=())
        )

    def values(self) -> tuple[_T, ...]:
        """Return the values of this task's blocks; the innermost is last."""
        if not self.open_count:
            return ()
        return tuple(x.value for x in self._of_task.get() if x.is_open)

    @contextlib.contextmanager
    def opened(self, value: _T) -> Iterator[None]:
        """In the block, `value` is one of `values()`."""
        block = _Block(value)
        self._of_task.set((*self._of_task.get(), block))
        with self._lock:
            self.open_count += 1
        try:
            yield
        finally:
            with self._lock:
                self.open_count -= 1
            block.is_open = False
            self._of_task.set(
                tuple(x for x in self._of_task.get() if x.is_open)
            )


_blocks: Blocks[dict[str, Handler]] = Blocks("handlers of operations")
"""The handlers of `on_operation` by the names of operations."""

_handling: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "a handler computes", default=False
)


def is_handling() -> bool:
    """Return True while a handler of a block computes, except what it runs."""
    return _handling.get()


@contextlib.contextmanager
def handling(is_on: bool = True) -> Iterator[None]:
    """In the block, call no handlers of blocks; with False, call them again."""
    token = _handling.set(is_on)
    try:
        yield
    finally:
        _handling.reset(token)


_is_compiling: Callable[[], bool] = bool
"""Returns True while torch.compile traces; always False by default."""


def ask_for_compiling(function: Callable[[], bool]) -> None:
    """Set the function that says whether torch.compile traces now."""
    global _is_compiling
    _is_compiling = function


# Each operation is replaced for all threads while blocks or classes use it.
_LOCK = threading.RLock()
_users: collections.Counter[str] = collections.Counter()
# (module, its former attribute or None, our function) of each replacement.
_replaced: dict[str, list[tuple[Any, Any, Handler]]] = {}
# (Keras's function, ours), kept so that each pair is made only once.
_made: dict[tuple[Any, str], tuple[Handler, Handler]] = {}


def innermost_layer() -> Any:
    """Return the layer whose call or `build` runs now; None outside of one."""
    # Keras opens a name scope for each call, which holds the layer (`caller`
    # in `name_scope_stack`, keras 3.0 to 3.16).
    scopes = _global_state and _global_state.get_global_attribute(_SCOPES)
    callers = (scope.caller for scope in reversed(scopes or ()))
    return next((each for each in callers if each is not None), None)


def watch(handlers: Mapping[tuple[str, ...], Handler]) -> None:
    """Set the handlers of operations, by names, for the whole process.

    A later one for an operation replaces it. A handler is called as
    `handler(layer, stock, name, args, kwargs)`, and its result is that of the
    operation. It is called inside of layers: while products are recorded
    (`recording`), in a block of `following()`, and from `follow` on inside of
    layers of that class.
    """
    for names, handler in handlers.items():
        _watching.update(dict.fromkeys(names, handler))


@contextlib.contextmanager
def on_operation(handlers: Mapping[tuple[str, ...], Handler]) -> Iterator[None]:
    """In the block, call handlers for operations inside of all layers.

    They are as for `watch`, but `stock` goes through the handlers of outer
    blocks. Only operations of this thread and asyncio task count.
    """
    own = {name: x for names, x in handlers.items() for name in names}
    with wrapped(own), _blocks.opened(own):
        yield


@contextlib.contextmanager
def wrapped(names: Iterable[str] = ()) -> Iterator[None]:
    """In the block, the operations of Keras that have handlers call them.

    So do those of `names`. `keras.ops` calls a function of the same name in a
    module of the backend, such as `backend.numpy` (keras 3.0 to 3.15), or in
    `backend.ops`, in modules of these names there and in `backend.random`
    (3.16). These are replaced, so that it makes no difference how a module
    imports the operation. Layers cast by `backend.cast`. `ENTRIES` is a method
    of `keras.Variable`. If Keras has the functions elsewhere, no product is
    seen, and `convert` says that none was recognised.
    """
    wanted = (*_watching, *names)
    _wrap(wanted)
    try:
        yield
    finally:
        _unwrap(wanted)


def modules() -> list[Any]:
    """Return the modules of Keras that have the functions behind operations."""
    home = getattr(_backend, "ops", None)  # Without those of keras.random.
    homes = [each for each in (home, _backend) if each is not None]
    places = [getattr(each, x, None) for each in homes for x in _MODULES]
    present = [each for each in (home, *places) if each is not None]
    # `backend` itself has the `cast` that layers call.
    return present if _backend is None else [*present, _backend]


def not_in_keras(names: Iterable[str]) -> list[str]:
    """Return those names of operations that this Keras does not have.

    It always has `ENTRIES`: that stands for reading entries of a tensor.
    """
    homes = modules()
    return [
        name
        for name in names
        if name != ENTRIES and not any(hasattr(home, name) for home in homes)
    ]


def follow(cls: type) -> None:
    """Call the handlers of `watch` in layers of this class, from now on."""
    with _LOCK:
        if not _FOLLOWED:  # The operations then stay wrapped.
            _wrap(tuple(_watching))
        _FOLLOWED.add(cls)


def _wrap(names: tuple[str, ...]) -> None:
    """Replace operations by functions that call handlers."""
    homes = modules()
    with _LOCK:
        # All functions are made first: an interrupt then replaces none.
        new: dict[str, list[tuple[Any, Any, Handler]]] = {}
        for name in names:
            if name in new:
                continue
            new[name] = []
            for home in [keras.Variable] if name == ENTRIES else homes:
                stock = getattr(home, name, None)
                if stock is None:
                    continue
                if _users[name] and hasattr(stock, _ORIGINAL):
                    continue  # Wrapped already, and not replaced by others.
                # It may be ours, which others put back after their patch.
                stock = getattr(stock, _ORIGINAL, stock)
                wrapped_before, wrapper = _made.get((home, name), (None, stock))
                if wrapped_before is not stock:
                    wrapper = _wrapper_of(stock, name)
                    _made[home, name] = stock, wrapper
                new[name].append((home, vars(home).get(name), wrapper))
        _users.update(names)
        for name, functions in new.items():
            _replaced.setdefault(name, []).extend(functions)
            for home, _, function in functions:
                setattr(home, name, function)


def _unwrap(names: tuple[str, ...]) -> None:
    """Put back the operations that no block and no class needs any more."""
    with _LOCK:
        _users.subtract(names)
        for name in dict.fromkeys(names):
            if _users[name]:
                continue
            for home, own, wrapper in reversed(_replaced.pop(name)):
                if vars(home).get(name) is not wrapper:
                    continue  # Replaced by others since; it goes through ours.
                if own is None:
                    delattr(home, name)
                else:
                    setattr(home, name, own)


def _wrapper_of(stock: Operation, name: str) -> Operation:
    """Return a function that calls the handlers of an operation, if any."""

    @functools.wraps(stock)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        """Run the operation; in a layer, through its handlers."""
        scopes = _global_state.get_global_attribute(_SCOPES)
        layer = scopes[-1].caller if scopes else None
        if scopes and layer is None:  # A name scope of the user.
            layer = innermost_layer()
        if layer is None or layer is _NO_LAYER:
            return stock(*args, **kwargs)
        # First, since a graph of torch.compile would guard the number.
        if not _is_compiling() and _blocks.open_count:
            return _through_blocks(layer, stock, name, args, kwargs)
        if name in _watching and (  # See `watch` for when.
            type(layer) in _FOLLOWED
            or getattr(_thread, "note", None)
            or getattr(_thread, "follows", False)
        ):
            return _watching[name](layer, stock, name, args, kwargs)
        return stock(*args, **kwargs)

    setattr(wrapped, _ORIGINAL, stock)
    return wrapped


_ORIGINAL = "float8_original"
"""The attribute of our functions that has Keras's."""


def _through_blocks(
    layer: keras.Layer, stock: Operation, name: str, args: Args, kwargs: Kwargs
) -> Any:
    """Run an operation through the handlers of `on_operation` blocks."""
    # The handler of `watch` is called last, if it would be without blocks.
    run, of_watch = stock, _watching.get(name)
    is_watched = type(layer) in _FOLLOWED or recorder()
    if of_watch and (is_watched or getattr(_thread, "follows", False)):
        run = _through_handler(of_watch, layer, stock, name)
    of_blocks = [own[name] for own in _blocks.values() if name in own]
    if not of_blocks or is_handling():
        return run(*args, **kwargs)

    def in_the_layer(*args: Any, **kwargs: Any) -> Any:
        """Run the operation as one of the layer."""
        # Undoes the blocks below: what `run` calls is of the layer again.
        with (
            handling(False),
            keras.name_scope(getattr(layer, "name", "layer"), caller=layer),
        ):
            return run(*args, **kwargs)

    through_all: Operation = in_the_layer
    for handler in of_blocks:
        through_all = _through_handler(handler, layer, through_all, name)
    # What a handler computes itself is of no layer, or it would be handled too;
    # nor are layers handled that it calls.
    with handling(), outside_of_layers():
        return through_all(*args, **kwargs)


def _through_handler(
    handler: Handler, layer: keras.Layer, run: Operation, name: str
) -> Operation:
    """Return an operation that calls `handler` in place of `run`."""
    return lambda *args, **kwargs: handler(layer, run, name, args, kwargs)


_NO_LAYER = object()


def outside_of_layers() -> contextlib.AbstractContextManager[Any]:
    """Return a block whose operations are of no layer: no handler sees them."""
    return keras.name_scope("outside", caller=_NO_LAYER)


@contextlib.contextmanager
def recording(note: Callable[[keras.Layer, Any], None]) -> Iterator[None]:
    """In the block, products in this thread are reported to `note`."""
    outer_note = recorder()
    _thread.note = note
    try:
        yield
    finally:
        _thread.note = outer_note


@contextlib.contextmanager
def following() -> Iterator[None]:
    """In the block, handlers of `watch` see all layers of this thread."""
    followed = getattr(_thread, "follows", False)
    _thread.follows = True
    try:
        yield
    finally:
        _thread.follows = followed


def recorder() -> Any:
    """Return the function that notes products now, or None."""
    return getattr(_thread, "note", None)
