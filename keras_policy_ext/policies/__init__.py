"""Dtype policies: in which dtypes and formats a layer computes.

`Float8DTypePolicy` is a map in Keras's sense (`DTypePolicyMap`): float8 for
the layers that support it, the plain source policy for all others. Stock
layers read the source policy from it; layers of this package call `for_path`.
Instances are immutable. `LossScaleDTypePolicy` defines how the loss of a model
is scaled. It is a map too, since Keras saves a map with all fields.

The global policy is Keras's own and belongs to one thread; a new thread starts
with the floatx policy. `carry_policy` carries it to other threads.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import keras

from keras_policy_ext import _extensions, policy_names
from keras_policy_ext._keras import first_use, global_policy
from keras_policy_ext.policies import _global, plain
from keras_policy_ext.policies._global import dtype_policy
from keras_policy_ext.policies._source_map import SourceMap, is_stock_map
from keras_policy_ext.policies.float8 import Float8DTypePolicy, as_float8, get
from keras_policy_ext.policies.of_layers import of_path
from keras_policy_ext.policies.plain import (
    FLOATS,
    actual_dtype,
    floating,
    is_plain,
)
from keras_policy_ext.policy_names import is_full_name

__all__ = [
    "FLOATS",
    "Float8DTypePolicy",
    "LossScaleDTypePolicy",
    "SourceMap",
    "actual_dtype",
    "as_float8",
    "carry_policy",
    "deserialize",
    "dtype_policy",
    "floating",
    "get",
    "is_full_name",
    "is_plain",
    "is_stock_map",
    "names_in_keras",
    "of_path",
    "policy_scope",
    "serialize",
    "set_dtype_policy",
    "set_layer_policy",
]

_F = TypeVar("_F", bound=Callable[..., Any])


def serialize(policy: object) -> dict[str, Any]:
    """Return the config dict of a policy, or of anything that `get` accepts."""
    return keras.dtype_policies.serialize(get(policy))


def deserialize(config: Mapping[str, Any]) -> keras.DTypePolicy:
    """Build a policy from a config dict of `serialize` or of tf_keras.

    Raises:
        TypeError: If the config is not a dict.
        ValueError: If it does not describe a policy.
    """
    if not isinstance(config, Mapping):
        raise TypeError(
            f"Cannot deserialize a policy. Received: {config!r} (of type "
            f"{type(config).__name__}). Allowed: the dict of `serialize`. "
            "Use `get` for names and dtypes."
        )
    return get(config)


def set_dtype_policy(policy: object) -> None:
    """Set the global dtype policy of this thread.

    Args:
        policy: Anything `get` takes that computes in floating point. None
            returns to the floatx, and follows later calls of `set_floatx`.

    Raises:
        ValueError: If it does not describe a floating-point policy. The global
            policy is unchanged then.
        RuntimeError: If another asyncio task of this thread is inside a
            `policy_scope`, whose end would undo the change.

    Warns:
        UserWarning: If it asks for float64 and JAX has none (see `get`).

    Examples:
        >>> kpe.set_dtype_policy("mixed_float8")
        >>> kpe.layers.Dense(8).quantization_mode
        'float8'
        >>> kpe.set_dtype_policy(None)  # as before
    """
    state = _state_of(policy)
    _global.SCOPES.check()
    _global.restore(state)


def _state_of(policy: object) -> _global.State:
    """Return the state of a thread under a policy; None follows the floatx."""
    first_use.begin()  # A file then tells the policies of its models.
    if policy is None:
        floatx = keras.config.floatx()
        plain.warn_of_missing_float64(keras.DTypePolicy(floatx))
        return None, floatx
    return floating(get(policy), "The global policy"), None


def set_layer_policy(layer: keras.Layer, policy: object) -> None:
    """Set the dtype policy of a layer, also after the layer was built.

    Keras does not replace a map that a built layer holds, but writes into it.
    The policies of this package are maps that many layers share, and refuse
    that. Layers of this package do not need this function.

    Args:
        layer: A Keras layer.
        policy: Anything `get` takes.

    Raises:
        ValueError: If it does not describe a policy.
    """
    policy = get(policy)
    held = layer.dtype_policy
    try:
        layer.dtype_policy = policy
    except TypeError:
        if not isinstance(held, SourceMap):
            raise
        global_policy.replace_layer_policy(layer, held.source_policy)
        layer.dtype_policy = policy


@contextlib.contextmanager
def policy_scope(policy: object) -> Iterator[keras.DTypePolicy]:
    """In the block, set the global dtype policy of this thread.

    Scopes nest. At the end, also after an exception, the very object that was
    set before is restored. Keras has one policy for all asyncio tasks of a
    thread, so await only tasks that are started inside the block.

    Args:
        policy: See `set_dtype_policy`.

    Yields:
        The policy that is set.

    Raises:
        ValueError: See `set_dtype_policy`.
        RuntimeError: On entry, if another asyncio task of this thread is
            inside a scope; at the end, if a scope that was entered later is
            still open.

    Examples:
        >>> with kpe.policy_scope("mixed_bfloat16"):
        ...     layer = keras.layers.Dense(8)
        >>> layer.compute_dtype
        'bfloat16'
    """
    with _global.SCOPES.opened(_state_of(policy)):
        yield dtype_policy()


def carry_policy(function: _F) -> _F:
    """Wrap a function so that it runs under the current global policy.

    Keras's global policy belongs to one thread. The wrapped function runs
    under the policy of the thread that called `carry_policy`. The thread that
    runs it gets its own policy back afterwards.

    Raises:
        TypeError: If it is a coroutine function, which runs after its call.

    Examples:
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> def compute_dtype():
        ...     return keras.layers.Dense(8).compute_dtype
        >>> pool = ThreadPoolExecutor(1)
        >>> with kpe.policy_scope("mixed_bfloat16"):
        ...     pool.submit(kpe.carry_policy(compute_dtype)).result()
        'bfloat16'
    """
    if inspect.iscoroutinefunction(function):
        raise TypeError(
            "A coroutine runs after the call of its function, and has no "
            f"policy of its own. Received: {function!r}. Allowed: functions "
            "that are not async. Wrap the functions that it calls to make "
            "layers."
        )
    carried = _global.snapshot()

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        """Call the function under the policy that was carried."""
        own = _global.snapshot()  # Of the thread that runs the function.
        _global.restore(carried)
        try:
            return function(*args, **kwargs)
        finally:
            _global.restore(own)

    return run  # type: ignore[return-value]


def __getattr__(name: str) -> Any:
    """Import a name of an extension; raise if that is not installed."""
    if name in __all__:
        return _extensions.get(f"policies.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


_names_are_read = True


def names_in_keras(read: bool) -> None:
    """Set whether Keras accepts names of float8 policies, in all threads.

    Keras accepts them once this package is imported.
    `keras.layers.Dense(8, dtype="mixed_float8")` and
    `keras.config.set_dtype_policy("float8/current_from_float32")` then work as
    with the policy object. `"float8_from_<source>"` still means Keras's own
    float8 there. Under such a name, or in a model file with such a policy,
    layers without float8 compute as the source policy says.

    Args:
        read: False for Keras's behavior without this package; True to accept
            the names again.
    """
    global _names_are_read
    _names_are_read = bool(read)


def are_names_read() -> bool:
    """Return True if Keras accepts names of float8 policies now."""
    return _names_are_read


def _policy_of_name(name: str) -> keras.DTypePolicy | None:
    """Return the policy of a name of this package; None for any other name."""
    if not policy_names.is_ours(name):
        if policy_names.is_full_name(name):
            _extensions.import_for("keras_float8_policy")
        return None
    if _names_are_read:
        return get(name)
    raise ValueError(
        f"{name!r} is a policy name of keras_policy_ext, and Keras does not "
        "read such names now. Allowed: a policy of Keras, or the policy "
        f"object: dtype=keras_policy_ext.get({name!r}). To let Keras read the "
        "names, call keras_policy_ext.policies.names_in_keras(True)."
    )


global_policy.read_names(_policy_of_name)
