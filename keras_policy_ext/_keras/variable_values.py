"""Values of variables: read, assigned and averaged."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from keras_policy_ext._keras import calls, versions
from keras_policy_ext._keras.around import put_around
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


class Companion:
    """Base of an object that is notified when its variable changes.

    There is no public hook (keras 3.0 to 3.15). Expires with one.
    """

    left_out = False
    """Whether an optimizer was built for the variable, and none for this."""

    _optimizers: Any = None

    def handed_to(self, optimizer: keras.Optimizer) -> None:
        """Called when an optimizer is built for this."""
        self._optimizers = self._optimizers or weakref.WeakSet()
        self._optimizers.add(optimizer)
        self.left_out = False

    def assigned_beside(self) -> None:
        """Called after each assignment that is not `untold`."""

    def stepped_beside(self) -> None:
        """Called when an optimizer has changed the variable and not this."""

    def memory(self) -> Callable[[], None]:
        """Remember what this holds now; return what puts it back.

        To be called once the values of both variables are back.
        """
        raise NotImplementedError


_COMPANIONS: weakref.WeakValueDictionary[int, Any] = (
    weakref.WeakValueDictionary()
)
"""By the id of the variable, which its companion keeps alive."""

_thread = threading.local()


def watch(variable: keras.Variable, companion: Companion) -> None:
    """Tell a companion from now on when this variable is assigned.

    Args:
        variable: A variable that the companion holds.
        companion: Told of it, as long as it lives.
    """
    _COMPANIONS[id(variable)] = companion


def is_untold() -> bool:
    """Return whether this thread is in a block of `untold`."""
    return getattr(_thread, "blocks", 0) > 0


@contextlib.contextmanager
def untold() -> Iterator[None]:
    """A block whose assignments are told to nobody.

    As in a step of an optimizer, which assigns companions too, or while a
    file is read that has both.
    """
    _thread.blocks = getattr(_thread, "blocks", 0) + 1
    try:
        yield
    finally:
        _thread.blocks -= 1


def tell_companions() -> None:
    """Have assignments to variables, and steps of optimizers, be told.

    Public methods are put into others: `Variable.assign`, and of optimizers
    `build`, `apply` and `finalize_variable_values`, which on TensorFlow write
    into the tensors behind the variables. The variables that an optimizer was
    built with are in `_trainable_variables` (keras 3.0 to 3.15); where these
    are gone, `apply` has to be given them.
    """
    put_around(keras.Variable, "assign", _assign)
    put_around(keras.optimizers.Optimizer, "build", _build)
    put_around(keras.optimizers.Optimizer, "apply", _apply)
    name = "finalize_variable_values"
    put_around(keras.optimizers.Optimizer, name, _finalize)


def _assign(
    stock: Callable[..., Any], variable: keras.Variable, value: Any
) -> Any:
    assigned = stock(variable, value)
    companion = _COMPANIONS.get(id(variable))
    if companion is not None and not is_untold():
        companion.assigned_beside()
    return assigned


def _build(
    stock: Callable[..., Any],
    optimizer: keras.Optimizer,
    variables: Sequence[keras.Variable],
) -> Any:
    built = stock(optimizer, variables)
    for variable in variables:
        if isinstance(variable, Companion):
            variable.handed_to(optimizer)
    for companion in _companions_of(variables):
        companion.left_out = not companion._optimizers
    return built


def _apply(
    stock: Callable[..., Any],
    optimizer: keras.Optimizer,
    grads: Any,
    trainable_variables: Any = None,
) -> Any:
    variables = trainable_variables
    if variables is None:
        variables = getattr(optimizer, "_trainable_variables", ())
    else:
        trainable_variables = variables = list(variables)
    with untold():
        applied = stock(optimizer, grads, trainable_variables)
        for companion in _companions_of(variables):
            if companion.left_out:
                companion.stepped_beside()
    return applied


def _finalize(
    stock: Callable[..., Any],
    optimizer: keras.Optimizer,
    var_list: Sequence[Any],
) -> Any:
    with untold():
        stock(optimizer, var_list)
    if getattr(optimizer, "use_ema", True):
        for companion in _companions_of(var_list):
            companion.stepped_beside()


def _companions_of(variables: Sequence[keras.Variable]) -> list[Any]:
    found = (_COMPANIONS.get(id(variable)) for variable in variables)
    return [companion for companion in found if companion is not None]


class _AverageStandIn(keras.Variable):
    """Stands where an optimizer keeps the moving average of a variable.

    It ignores what is assigned. It holds zeros, which leave the variable as it
    is when Keras assigns them. On TensorFlow Keras writes into the
    tensors behind the variables: there it holds what the variable holds, so
    that to overwrite the one with the other, or to swap the two, changes
    nothing.
    """

    def __init__(self, variable: keras.Variable):
        self._copies = keras.backend.backend() == "tensorflow"

        def initial(shape: Sequence[int], dtype: str | None = None) -> Tensor:
            if self._copies:
                return keras.ops.copy(variable.value)
            return keras.ops.zeros(shape, dtype)

        # As Keras makes slots: on JAX a LayoutMap may match the name.
        layout = getattr(variable, "_layout", None)
        super().__init__(
            initial,
            shape=variable.shape,
            dtype=variable.dtype,
            trainable=False,
            autocast=False,
            aggregation="only_first_replica",
            name=f"{variable.name}_average",
            **({} if layout is None else {"layout": layout}),
        )

    def assign(self, value: Tensor) -> None:
        """Ignore the assigned value."""

    def follow(self, variable: keras.Variable) -> None:
        """Hold what the variable holds now, where that is due."""
        if self._copies:
            super().assign(variable.value)


class NotAveraged:
    """A variable that moving averages leave as it is.

    For a variable that is overwritten with its gradient, optimizers with
    `use_ema` keep None as the average and then fail on it: on TensorFlow at
    the end of `fit`, on TensorFlow and JAX with `ema_overwrite_frequency`, on
    all three with the callback `SwapEMAWeights` (keras 3.12 to 3.15). See
    `leave_out_of_averages`. Zeros, assigned to such a variable, must leave it
    as it is.
    """

    _stand_in: _AverageStandIn | None = None

    def stand_in(self) -> keras.Variable:
        """Return the stand-in that optimizers get for an average."""
        if self._stand_in is None:
            self._stand_in = _AverageStandIn(self)
        return self._stand_in

    def is_stand_in(self, value: Any) -> bool:
        """True if a value is what this variable gave out for its average."""
        return value is not None and value is self._stand_in

    def assign(self, value: Tensor) -> Tensor:
        """Assign, and let the stand-in follow."""
        parent: Any = super()
        assigned = parent.assign(value)
        if self._stand_in is not None:
            self._stand_in.follow(self)
        return assigned


def fill_averages(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]
) -> None:
    """Put the stand-ins of variables where a built optimizer has None."""
    averages = getattr(optimizer, "_model_variables_moving_average", None) or []
    for index, average in enumerate(averages):
        variable = variables[index]
        if average is None and isinstance(variable, NotAveraged):
            averages[index] = variable.stand_in()


def leave_out_of_averages() -> None:
    """Have all optimizers treat variables as `NotAveraged` says.

    Nothing public tells a variable which optimizer it is given to. So the
    public method `Optimizer.build`, which is given the variables, is put into
    another one that fills the list of averages when it has made it
    (`_model_variables_moving_average`, keras 3.12 to 3.15). Where that list is
    gone, optimizers fail as Keras's do. Expires when Keras skips None
    everywhere.
    """

    def build(
        stock: Callable[..., None],
        optimizer: keras.optimizers.Optimizer,
        variables: Sequence[keras.Variable],
    ) -> None:
        stock(optimizer, variables)
        fill_averages(optimizer, list(variables))

    put_around(keras.optimizers.Optimizer, "build", build)
