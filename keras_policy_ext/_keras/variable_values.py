"""Variables: their values, when these can be read, and in which dtype."""

from typing import Any

import keras

from keras_policy_ext._keras import calls, versions
from keras_policy_ext._types import Tensor

try:
    from keras.src.backend.common import global_state as _global_state
except ImportError:  # Keras has moved it: the public API has to do.
    _global_state = None


def value_without_autocast(variable: keras.Variable | Tensor) -> Tensor:
    """The tensor in a variable, in the variable's own dtype.

    Inside a mixed-precision layer Keras hands out a copy in the compute
    dtype; float8 is quantized from the variable itself. Tensors are returned
    as they are. There is no public way (keras 3.0 to 3.16).

    Raises:
        ImportError: Inside such a layer, if this Keras keeps its autocast
            scope elsewhere.
    """
    if not isinstance(variable, keras.Variable):
        return variable
    try:
        scope = calls.autocast_scope(None)
    except ImportError:
        value = variable.value
        dtype = getattr(variable, "_dtype", variable.dtype)
        if keras.backend.standardize_dtype(value.dtype) == dtype:
            return value
        raise
    with scope:
        # On TensorFlow ops.convert_to_tensor would return the Keras variable,
        # to be read, and autocast, after this scope.
        return variable.value


def autocasts(variable: keras.Variable) -> bool:
    """True if a variable says that it is cast where it is read in a scope.

    `autocast=` is an argument of `keras.Variable` and cannot be read back
    publicly (`_autocast`, keras 3.0 to 3.15). Where it is gone, True, which
    is Keras's default.
    """
    return bool(getattr(variable, "_autocast", True))


def set_autocasts(variable: keras.Variable, value: bool) -> None:
    """Change what `autocasts` returns, after the variable was made.

    Where Keras keeps it elsewhere, nothing: the variable stays as it was
    made.
    """
    if hasattr(variable, "_autocast"):
        variable._autocast = value


def has_value(variable: keras.Variable) -> bool:
    """Return True if a variable can be read now.

    The JAX trainer empties the variables while it trains, or leaves buffers
    in them which the training step has deleted (`train_on_batch`; both seen
    in keras 3.3 to 3.15), and assigns the results before it reads them again.
    """
    value = getattr(variable, "_value", variable)
    if value is not None and not _is_deleted(value):
        return True
    scope = _stateless_scope()
    return bool(scope) and scope.get_current_value(variable) is not None


def is_stateless() -> bool:
    """Return whether assignments here do not reach the variables.

    From the same place as `has_value` looks at; where that is gone, False.
    """
    return bool(_stateless_scope())


def _stateless_scope() -> Any:
    return _global_state and _global_state.get_global_attribute(
        "stateless_scope"
    )


def let_wait_no_longer(variable: keras.Variable) -> None:
    """Never give a value to a variable that was made without one.

    In a scope without state Keras keeps a list of those, to give them memory
    at its end (`uninitialized_variables`, keras 3.0 to 3.15). Where that is
    gone, the value is made and dropped. Expires when the list is of weak
    references.
    """
    waiting = _global_state and _global_state.get_global_attribute(
        "uninitialized_variables"
    )
    if waiting and getattr(variable, "_value", variable) is None:
        waiting[:] = [each for each in waiting if each is not variable]


def _is_deleted(value: Tensor) -> bool:
    """True if JAX has donated this array, or a part of it, to a computation.

    On several devices the array passes for a whole one if NumPy has a view
    of its first buffer, which then stays; to read it ends the process
    (jaxlib 0.10).
    """
    is_deleted = getattr(value, "is_deleted", None)
    try:
        if not callable(is_deleted) or is_deleted():
            return callable(is_deleted)
        shards = getattr(value, "addressable_shards", ())
        return any(shard.data.is_deleted() for shard in shards)
    except TypeError:  # a tracer knows no buffers
        return False


class TellsItsValue:
    """A variable whose `value_made` gets the tensor that holds it.

    Keras makes that tensor in `_initialize`, in the constructor or, where a
    scope without state is open, later (keras 3.0 to 3.16). Where it does so
    elsewhere, the constructor tells of it. Expires with a public hook.
    """

    value: Any
    _has_told = False
    _value: Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        parent: Any = super()
        parent.__init__(*args, **kwargs)
        made: Any = self
        if not self._has_told and has_value(made):
            self._tell()

    def value_made(self, value: Tensor) -> None:
        """Called once with the tensor."""

    def _initialize(self, value: Tensor) -> None:
        parent: Any = super()
        parent._initialize(value)
        self._tell()

    def _tell(self) -> None:
        self._has_told = True
        # Under another name it is what the variable hands out.
        value = self.value if "_value" not in vars(self) else self._value
        self.value_made(value)


def read_from(variable: keras.Variable, holder: Any, key: str) -> None:
    """Let a variable read its tensor from a mapping, each time it is read.

    Keras keeps the tensor itself (`_value`, keras 3.12 to 3.15), and not the
    place where others may replace it. Expires when it reads the parameters
    of its module.
    """
    cls = type(variable)
    value = property(lambda self: holder[key])
    variable.__class__ = type(cls.__name__, (cls,), {"_value": value})


class ComputedVariable:
    """A variable whose numbers are computed of what another one holds.

    It has the name, path and shape of that one, no memory, and a dtype of its
    own. Put it before `keras.Variable`, whose constructor would make a tensor;
    what that keeps in attributes is asked of the other one (`_name`, `_path`,
    `_shape` and others; `_dtype`, `_autocast` are its own; keras 3.0 to 3.15).
    Where they have other names, the properties of Keras raise. Expires with
    variables that have no value of their own.

    Args:
        held: The other variable.
        dtype: Of the numbers, outside of an autocast scope.
    """

    def __init__(self, held: keras.Variable, dtype: str):
        self.held = held
        self._dtype = dtype
        self._autocast = True

    def __getattr__(self, name: str) -> Any:
        if name == "held" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.held, name)

    @property
    def trainable(self) -> bool:
        """Return whether the other variable is trainable."""
        return bool(self.held.trainable)

    @trainable.setter
    def trainable(self, value: bool) -> None:
        self.held.trainable = value

    def __repr__(self) -> str:
        made: Any = self
        shape = tuple(self.held.shape)
        return f"<Variable path={made.path}, shape={shape}, dtype={made.dtype}>"


def stored_kernel(layer: keras.Layer) -> keras.Variable:
    """The kernel variable of Dense, EinsumDense or a convolution.

    Public `layer.kernel` merges LoRA's adapters into a new tensor
    (`_kernel`, keras 3.0 to 3.16).

    Raises:
        ImportError: If this Keras keeps the kernel of a layer with adapters
            elsewhere.
    """
    return _stored(layer, "kernel")


def stored_embeddings(layer: keras.Layer) -> keras.Variable:
    """The embeddings variable of Embedding and ReversibleEmbedding.

    Public `layer.embeddings` merges LoRA's adapters into a new tensor
    (`_embeddings`, keras 3.0 to 3.16).

    Raises:
        ImportError: As for `stored_kernel`.
    """
    return _stored(layer, "embeddings")


def _stored(layer: keras.Layer, name: str) -> keras.Variable:
    if hasattr(layer, f"_{name}"):
        return getattr(layer, f"_{name}")
    if getattr(layer, "lora_enabled", False):
        what = f"{type(layer).__name__}._{name}"
        raise versions.missing(what, "a float8 layer with LoRA")
    return getattr(layer, name)
