"""Read and replace the values of variables."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import keras

from keras_policy_ext._keras import calls, versions
from keras_policy_ext._types import Tensor

try:
    from keras.src.backend.common import global_state as _global_state
except ImportError:  # Keras has moved it: the public API has to do.
    _global_state = None


def value_without_autocast(variable: Any) -> Tensor:
    """Return a variable's tensor in its stored dtype, or an array's tensor."""
    # Inside a mixed-precision layer Keras returns a copy in the compute dtype,
    # but float8 is quantized from the variable itself (keras 3.0 to 3.16).
    if not isinstance(variable, keras.Variable):
        tensor = keras.ops.is_tensor(variable)
        return variable if tensor else keras.ops.convert_to_tensor(variable)
    try:
        scope = calls.autocast_scope(None)
    except ImportError:  # Without the scope, a value in its own dtype will do.
        value = variable.value
        dtype = getattr(variable, "_dtype", variable.dtype)
        if keras.backend.standardize_dtype(value.dtype) == dtype:
            return value
        raise
    with scope:
        # On TensorFlow ops.convert_to_tensor would return the Keras variable,
        # to be read, and autocast, after this scope.
        return variable.value


def has_value(variable: keras.Variable) -> bool:
    """Return True if a variable can be read now."""
    # The JAX trainer empties the variables while it trains, or leaves buffers
    # in them which the training step has deleted (`train_on_batch`; both seen
    # in keras 3.3 to 3.15), and assigns the results before it reads them.
    value = getattr(variable, "_value", variable)
    if value is not None and not _is_deleted(value):
        return True
    scope = _stateless_scope()
    return bool(scope) and scope.get_current_value(variable) is not None


def is_stateless() -> bool:
    """Return True if `assign` does not change variables in this scope."""
    return bool(_stateless_scope())


def _stateless_scope() -> Any:
    """Return the `StatelessScope` that is entered now, or None."""
    return _global_state and _global_state.get_global_attribute(
        "stateless_scope"
    )


def cancel_initialization(variable: keras.Variable) -> None:
    """Cancel the deferred initialization of a variable that is replaced."""
    # In a stateless scope Keras lists the variables without a value, to
    # allocate them at its end (`uninitialized_variables`, keras 3.0 to 3.15).
    # Otherwise it would keep this one alive, and make a value for it. Expires
    # when the list has weak references.
    waiting = _global_state and _global_state.get_global_attribute(
        "uninitialized_variables"
    )
    if waiting and getattr(variable, "_value", variable) is None:
        waiting[:] = [each for each in waiting if each is not variable]


def _is_deleted(value: Tensor) -> bool:
    """Return True if JAX has deleted (donated) an array or a shard of it."""
    # On several devices, the array looks complete if NumPy has a view of its
    # first buffer. To read it would abort the process (jaxlib 0.10).
    is_deleted = getattr(value, "is_deleted", None)
    if not callable(is_deleted):  # An array of another framework.
        return False
    try:
        if is_deleted():
            return True
        shards = getattr(value, "addressable_shards", ())
        return any(shard.data.is_deleted() for shard in shards)
    except TypeError:  # A tracer knows no buffers.
        return False


def read_from(variable: keras.Variable, holder: Any, key: str) -> None:
    """Make a variable read its tensor from `holder[key]` on each access."""
    # Keras stores the tensor itself (`_value`, keras 3.12 to 3.15), and not
    # the place where others may replace it.
    cls = type(variable)
    value = property(lambda self: holder[key])
    variable.__class__ = type(cls.__name__, (cls,), {"_value": value})
    # Its first tensor, of a whole weight, is not needed any more.
    vars(variable).pop("_value", None)


def replace(variable: keras.Variable, value: Tensor) -> None:
    """Make a variable hold another tensor, which `assign` would copy."""
    # It is in `_value` (keras 3.12 to 3.15).
    variable._value = value


class ComputedVariable:
    """A variable whose value is computed from another variable, `held`.

    It has the name, path and shape of the other one, no memory, and a dtype of
    its own outside of an autocast scope. List it before `keras.Variable` among
    the bases, because the constructor of that class would create a tensor.
    Attributes of that class are read from the other variable (`_name`,
    `_path`, `_shape` and others), except `_dtype` and `_autocast` (keras 3.0
    to 3.15). If they have other names, the properties of Keras raise.
    """

    def __init__(self, held: keras.Variable, dtype: str):
        """Read all but the value from `held`; autocast to other dtypes."""
        self.held = held
        self._dtype = dtype
        # A layer's call reads the value in the compute dtype, as a kernel's.
        self._autocast = True

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the other variable."""
        if name == "held" or name.startswith("__"):  # Not set yet, in a copy.
            raise AttributeError(name)
        return getattr(self.held, name)

    @property
    def trainable(self) -> bool:
        """True if the other variable, `held`, is trainable."""
        return bool(self.held.trainable)

    @trainable.setter
    def trainable(self, value: bool) -> None:
        self.held.trainable = value

    def __repr__(self) -> str:
        """Return path, shape and dtype, as a variable of Keras does."""
        this: Any = self
        shape = tuple(self.held.shape)
        return f"<Variable path={this.path}, shape={shape}, dtype={this.dtype}>"


def stored_kernel(layer: keras.Layer) -> keras.Variable:
    """Return the kernel variable of Dense, EinsumDense or a convolution."""
    # With LoRA `layer.kernel` is a new tensor (`_kernel`, keras 3.0 to 3.16).
    return _variable_behind(layer, "kernel")


def stored_embeddings(layer: keras.Layer) -> keras.Variable:
    """Return the embeddings variable of Embedding or ReversibleEmbedding."""
    # Public `layer.embeddings` merges LoRA's adapters into a new tensor
    # (`_embeddings`, keras 3.0 to 3.16).
    return _variable_behind(layer, "embeddings")


def _variable_behind(layer: keras.Layer, name: str) -> keras.Variable:
    """Return the variable behind the attribute `name` of a layer."""
    variable = getattr(layer, f"_{name}", None)
    if variable is not None:
        return variable
    if getattr(layer, "lora_enabled", False):
        what = f"{type(layer).__name__}._{name}"
        raise versions.missing(what, "a float8 layer with LoRA")
    return getattr(layer, name)


_thread = threading.local()
"""`blocks`: how many of `without_notifying` are entered."""


def is_without_notifying() -> bool:
    """Return True if this thread is in a block of `without_notifying`."""
    return getattr(_thread, "blocks", 0) > 0


@contextlib.contextmanager
def without_notifying() -> Iterator[None]:
    """In the block, no state is told that its kernel was assigned."""
    # For steps of an optimizer, and for files: they have states too.
    _thread.blocks = getattr(_thread, "blocks", 0) + 1
    try:
        yield
    finally:
        _thread.blocks -= 1
