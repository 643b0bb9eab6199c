"""The one place that touches what Keras's public API does not offer.

Each function says what it is for, which Keras versions it was seen to work
on, and when it can go. Internals are feature-detected: where they are gone,
the public API does as much as it can.
"""

import collections
import contextlib
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras

try:
    from keras.src.backend.common import global_state as _global_state
except ImportError:  # Keras has moved it: the public API has to do.
    _global_state = None

try:
    from keras.src.utils import tracking as _tracking
except ImportError:  # Keras has moved it: see `_replace_list`.
    _tracking = None

try:
    from keras.src.backend import AutocastScope as _AutocastScope
except ImportError:  # Keras has moved it: see `autocast_scope`.
    _AutocastScope = None

try:
    from keras.src.backend.common import masking as _masking
except ImportError:  # Keras has moved it: see `keep_mask`.
    _masking = None


# --------------------------------------------------------------------------
# The global dtype policy (used by policies/)
# --------------------------------------------------------------------------


def stored_global_policy() -> Any:
    """The global policy as Keras stores it; None while there is none.

    Public `keras.config.dtype_policy()` stores the floatx policy on its first
    read, after which `set_floatx` is ignored (keras 3.8 to 3.15); reading
    must not have that effect. Where Keras has moved the store, the public
    function is used. Expires when `set_dtype_policy(None)` resets in Keras.
    """
    if _global_state is None:
        return keras.config.dtype_policy()
    return _global_state.get_global_attribute("dtype_policy", None)


def store_global_policy(policy: Any) -> None:
    """Store a global policy; None empties the store.

    `keras.config.set_dtype_policy(None)` raises (keras 3.8 to 3.15). Where
    Keras has moved the store, None stores the policy of today's floatx.
    """
    if _global_state is not None:
        _global_state.set_global_attribute("dtype_policy", policy)
    elif policy is None:
        keras.config.set_dtype_policy(keras.config.floatx())
    else:
        keras.config.set_dtype_policy(policy)


def layer_whose_policy_is_set(policy_map: Any) -> Any:
    """The layer whose `dtype_policy` setter is now writing into a policy map.

    To be called by `__setitem__` or `__delitem__` of the map. Keras's setter
    (layers/layer.py, keras 3.8 to 3.15) doesn't replace a map that a built
    layer holds but writes `map[layer.path] = policy` into it, although many
    layers hold the same object; the call names the path and not the layer,
    so the layer is taken from the setter's frame. None when the writer is
    anything else. Expires when Keras's setter copies the map.
    """
    frame = sys._getframe(2) if hasattr(sys, "_getframe") else None
    if frame is None or frame.f_code.co_name != "dtype_policy":
        return None
    layer = frame.f_locals.get("self")
    if not isinstance(layer, keras.Layer):
        return None
    held = getattr(layer, "_dtype_policy", None)
    return layer if held is policy_map else None


def replace_layer_policy(layer: Any, policy: Any) -> None:
    """Let one layer hold another policy, as Keras's setter does without map.

    Public `layer.dtype_policy = …` is the caller here and would recurse.
    """
    layer._dtype_policy = policy


# --------------------------------------------------------------------------
# Calls and variables (used by layers/)
# --------------------------------------------------------------------------


def training_of_call() -> bool | None:
    """The `training` argument of the layer call that is under way, or None.

    For layers whose `call` has no such argument; Keras keeps it in the call
    context (keras 3.0 to 3.15) and offers no public way to read it. Where the
    context is gone, None: amaxes are then observed where a gradient is taken.
    """
    if _global_state is None:
        return None
    context = _global_state.get_global_attribute("current_call_ctx")
    if context is None:
        return None
    if hasattr(context, "get_value"):  # keras >= 3.11
        return context.get_value("training")
    return getattr(context, "training", None)


def autocast_scope(dtype: str | None) -> Any:
    """Keras's context manager under which variables are read in a dtype.

    Inside, variables that autocast are handed out in `dtype`; None: in their
    own. Layers enter it around their `call`; there is no public name for it
    (keras 3.0 to 3.15). Expires when there is one.

    Raises:
        ImportError: If this Keras keeps it elsewhere.
    """
    if _AutocastScope is None:
        raise ImportError(
            f"Keras {keras.__version__} has moved AutocastScope, without "
            "which variables cannot be read in their own dtype. Install a "
            "version of keras_policy_ext that names this Keras as supported."
        )
    return _AutocastScope(dtype)


def value_without_autocast(variable: Any) -> Any:
    """The tensor in a variable, in the variable's own dtype.

    Inside a mixed-precision layer Keras hands out a copy in the compute
    dtype; float8 is quantized from the variable itself. Tensors are returned
    as they are. There is no public way (keras 3.0 to 3.15).

    Raises:
        ImportError: If this Keras keeps its autocast scope elsewhere.
    """
    if not isinstance(variable, keras.Variable):
        return variable
    with autocast_scope(None):
        # On TensorFlow ops.convert_to_tensor would return the Keras variable,
        # to be read, and autocast, after this scope.
        return variable.value


def rematerialize_with_outer(layer: Any) -> None:
    """Let a layer be rematerialized with the one that it is in, not again.

    Where all of the outer layer is, to do it again inside saves nothing, and
    on TensorFlow a stock layer that is called with keyword arguments, such as
    a softmax with its mask, cannot be (keras 3.8 to 3.15). Expires when Keras
    rematerializes functions with keyword arguments there.
    """
    mode = getattr(layer, "_remat_mode", None)
    if getattr(mode, "mode", None) == "full":
        layer._remat_mode = None


def stored_kernel(layer: Any) -> Any:
    """The kernel variable of Dense, EinsumDense or a convolution.

    Public `layer.kernel` merges LoRA's adapters into a new tensor
    (keras 3.0 to 3.15).
    """
    return layer._kernel if hasattr(layer, "_kernel") else layer.kernel


def stored_embeddings(layer: Any) -> Any:
    """The embeddings variable of Embedding and ReversibleEmbedding.

    Public `layer.embeddings` merges LoRA's adapters into a new tensor
    (keras 3.0 to 3.15).
    """
    if hasattr(layer, "_embeddings"):
        return layer._embeddings
    return layer.embeddings


class _WithCell:
    """An RNN layer as its own `inner_loop` sees it, but for the cell."""

    def __init__(self, layer: Any, cell: Any):
        self._layer = layer
        self.cell = cell

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def run_recurrent_loop(
    layer: Any, step: Any, inputs: Any, initial_state: Any, mask: Any
) -> Any:
    """`keras.layers.RNN.inner_loop` of a layer around another step.

    There is no public loop over time steps with masks, and the one of `RNN`
    calls `self.cell`; so it is called with a stand-in for the layer
    (keras 3.0 to 3.15). Where it comes to need more than attributes, it
    raises, and float8 RNN layers with it. Expires with a public `ops.rnn`.

    Args:
        layer: An RNN layer.
        step: Of (inputs of a step, states) to (outputs, new states).
        inputs: (batch, steps, ...).
        initial_state: A list of states.
        mask: None, or boolean (batch, steps).

    Returns:
        The last outputs, all outputs, and the last states.
    """
    return keras.layers.RNN.inner_loop(
        _WithCell(layer, step), inputs, initial_state, mask
    )


def has_value(variable: Any) -> bool:
    """Whether a variable can be read now.

    The JAX trainer empties the variables while it trains, or leaves buffers
    in them which the training step has deleted (`train_on_batch`; both seen
    in keras 3.3 to 3.15), and assigns the results before it reads them again.
    """
    value = getattr(variable, "_value", variable)
    if value is not None and not _is_deleted(value):
        return True
    scope = _global_state and _global_state.get_global_attribute(
        "stateless_scope"
    )
    return bool(scope) and scope.get_current_value(variable) is not None


def _is_deleted(value: Any) -> bool:
    """Whether JAX has donated this array, or a part of it, to a computation.

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
    """A variable that is told of the tensor which comes to hold it.

    Keras makes that tensor in `_initialize`, in the constructor or, where a
    scope without state is open, later (keras 3.0 to 3.15). Where it does so
    elsewhere, nobody is told. Expires with a public hook.
    """

    def value_made(self, value: Any) -> None:
        """Called once with the tensor."""

    def _initialize(self, value: Any) -> None:
        parent: Any = super()
        parent._initialize(value)
        self.value_made(vars(self).get("_value"))


class _OwnAverage(keras.Variable):
    """Stands where an optimizer keeps the moving average of a variable.

    Reads as the variable itself and ignores what is assigned, so that to
    overwrite the variable with its average, or to swap the two, changes
    nothing. Has nothing of its own: all else is that of the variable.
    """

    def __init__(self, variable: Any):
        self._variable = variable

    @property
    def value(self) -> Any:
        return self._variable.value

    def assign(self, value: Any) -> None:
        """Leave the variable as it is."""

    def __getattr__(self, name: str) -> Any:
        if "_variable" not in vars(self):  # while it is being copied
            raise AttributeError(name)
        return getattr(self._variable, name)


class _EqualAverage(keras.Variable):
    """The same for TensorFlow, where it is a number of its own.

    There `SwapEMAWeights` adds and subtracts the two in place, which swaps
    them only if they are two.
    """

    def __init__(self, variable: Any):
        super().__init__(
            lambda shape, dtype=None: keras.ops.copy(variable.value),
            shape=tuple(map(int, variable.shape)),
            dtype=variable.dtype,
            trainable=False,
            autocast=False,
            aggregation="only_first_replica",
            name=f"{variable.name}_average",
        )

    def assign(self, value: Any) -> None:
        """Stay what `follow` made of it."""

    def follow(self, variable: Any) -> None:
        """Become what the variable is now."""
        super().assign(variable.value)


def spare_from_averaging(variable: Any) -> None:
    """Keep an optimizer with `use_ema` from failing on a state variable.

    To be called where the optimizer asks a variable whether it is overwritten
    with its gradient. For such a variable the optimizer keeps None as the
    average and then fails: on TensorFlow at the end of `fit`, on TensorFlow
    and JAX with `ema_overwrite_frequency`, on all three with the callback
    `SwapEMAWeights` (keras 3.12 to 3.15). The optimizer is taken from the
    frame of the question, since Keras tells a variable nothing about its
    optimizer. Expires when Keras skips None everywhere.
    """
    frame = sys._getframe(2) if hasattr(sys, "_getframe") else None
    optimizer = frame.f_locals.get("self") if frame is not None else None
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return
    if not getattr(optimizer, "use_ema", False):
        return
    # Asked first while the optimizer makes its own variables, as is due.
    if "_average" not in vars(variable):
        tensorflow = keras.backend.backend() == "tensorflow"
        make = _EqualAverage if tensorflow else _OwnAverage
        variable._average = make(variable)
    averages = getattr(optimizer, "_model_variables_moving_average", None)
    find = getattr(optimizer, "_get_variable_index", None)
    if not averages or find is None:
        return
    index = find(variable)
    if averages[index] is None:
        averages[index] = variable._average


def keep_average_equal(variable: Any) -> None:
    """Have what `spare_from_averaging` made follow an assigned variable."""
    average = vars(variable).get("_average")
    if isinstance(average, _EqualAverage):
        average.follow(variable)


class _UncountedDimension(int):
    """An int, but a product with it is 0."""

    name = "int32"  # Keras up to 3.12 takes the type of a size for a dtype.

    def __mul__(self, other: Any) -> int:
        return 0

    __rmul__ = __mul__

    # Keras keeps sizes in memory by shape: those of a weight are others.
    def __hash__(self) -> int:
        return hash((_UncountedDimension, int(self)))


def uncounted(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The `Variable.shape` of a variable that is no parameter.

    `count_params` and `summary` of a model take all that is in its weights
    for parameters, and the product of `Variable.shape` for their number
    (keras 3.0 to 3.15). This tuple is equal to `shape`, entry by entry, and
    has the product 0. What makes an array from it, or asks for the index of
    an entry, gets plain ints. Were parameters counted otherwise, the totals
    would include the state. Expires when a variable can say what it is.
    """
    return tuple(_UncountedDimension(size) for size in shape)


# --------------------------------------------------------------------------
# Autocasting (used by layers/autocast.py)
# --------------------------------------------------------------------------


def in_autocast_scope() -> bool:
    """Whether this thread is inside some `autocast_scope`.

    Read off Keras's thread-local state, which has no public form (keras 3.0
    to 3.15). Where that is gone, False: a layer that is not mixed then leaves
    the scope that it is called in as it is.
    """
    if _global_state is None:
        return False
    return _global_state.get_global_attribute("autocast_scope") is not None


def autocasts(variable: Any) -> bool:
    """Whether a variable says that it is cast where it is read in a scope.

    `autocast=` is an argument of `keras.Variable` and cannot be read back
    publicly (`_autocast`, keras 3.0 to 3.15). Where it is gone, True, which
    is Keras's default.
    """
    return bool(getattr(variable, "_autocast", True))


def set_autocasts(variable: Any, value: bool) -> None:
    """Change what `autocasts` returns, after the variable was made.

    Where Keras keeps it elsewhere, nothing: the variable stays as it was
    made.
    """
    if hasattr(variable, "_autocast"):
        variable._autocast = value


def is_default(method: Any) -> bool:
    """Whether a method is marked as one that Keras's base classes have.

    `_is_default`, keras 3.0 to 3.15. A marked `get_config` is answered by
    the arguments of the constructor. Where the mark is gone, False.
    """
    return bool(getattr(method, "_is_default", False))


def tracked_variables(layer: Any) -> list[Any]:
    """The variables that a layer has outside of the layers in it.

    However they came into its attributes, lists and dicts. `variables` has
    those of the inner layers too (`_trainable_variables` and
    `_non_trainable_variables`, keras 3.0 to 3.15); where these are gone,
    nothing: variables then count from their assignment to an attribute on.
    """
    kept = ("_trainable_variables", "_non_trainable_variables")
    return [v for name in kept for v in getattr(layer, name, ())]


def tracked_metrics(layer: Any) -> list[Any]:
    """The metrics that a layer has outside of the layers in it.

    `metrics` of a model is often a property of its author, which may read
    what the constructor has not set yet (`_metrics`, keras 3.0 to 3.15).
    Where it is gone, nothing: metrics are then updated as in Keras.
    """
    return list(getattr(layer, "_metrics", ()))


class OwnArgumentConversion:
    """A layer that converts the arguments of its call itself.

    Keras's `__call__` casts every floating argument unless the layer says
    `_convert_input_args = False`, as Keras's preprocessing layers do (keras
    3.0 to 3.15); per argument there is nothing to say. Whatever a layer
    says, Keras is told no here, and `converts_arguments` keeps the answer.
    Where Keras no longer asks, it casts all arguments once more. Expires
    when a layer can say which arguments are cast.
    """

    @property
    def converts_arguments(self) -> bool:
        """Whether arguments are to be converted at all."""
        return bool(self.__dict__.get("_converts_arguments", True))

    @property
    def _convert_input_args(self) -> int:
        # Not False: TensorFlow skips the setter for the object that is there.
        return 0

    @_convert_input_args.setter
    def _convert_input_args(self, value: bool) -> None:
        self.__dict__["_converts_arguments"] = bool(value)


def keep_mask(old: Any, new: Any) -> Any:
    """Give a tensor the Keras mask of the one that it was cast from.

    As Keras does when it casts arguments. Masks are attributes of tensors
    without public access (`masking`, keras 3.4 to 3.15); where the module is
    gone, the mask is lost, unless it is given as `mask=`.

    Returns:
        `new`.
    """
    if _masking is not None and new is not old:
        mask = _masking.get_keras_mask(old)
        if mask is not None:
            _masking.set_keras_mask(new, mask)
    return new


# --------------------------------------------------------------------------
# Layers that exist already (used by layers/adoption.py and conversion/)
# --------------------------------------------------------------------------


def layers_within(layer: Any) -> list[Any]:
    """A layer and all layers in it, each once, in order, outer ones first.

    `model.layers` has one level only. `_flatten_layers` was seen in keras
    3.0 to 3.15, and is asked for one level at a time, since it turns the
    order of the deeper ones around; where it is gone, the attributes are
    followed through `layer.layers`. Expires with a public way to walk a
    model.
    """
    found: dict[int, Any] = {}
    waiting = [layer]
    while waiting:
        each = waiting.pop()
        if id(each) not in found:
            found[id(each)] = each
            waiting.extend(reversed(layers_directly_in(each)))
    return list(found.values())


def layers_directly_in(layer: Any) -> list[Any]:
    """The layers of one level below a layer; see `layers_within`."""
    if hasattr(layer, "_flatten_layers"):
        return list(layer._flatten_layers(include_self=False, recursive=False))
    return list(getattr(layer, "layers", ()))


def attributes(layer: Any) -> dict[str, Any]:
    """The attributes of a layer by name, its layers among them.

    On torch a layer is a module, which keeps the modules in it apart
    (`named_children`, public there; keras 3.0 to 3.15).
    """
    children = getattr(layer, "named_children", dict)
    return {**vars(layer), **dict(children())}


def uses_in_graph(model: Any) -> dict[int, int]:
    """How often a Functional model calls each of its layers, by their ids.

    From `_nodes_by_depth` (keras 3.0 to 3.15), since `model.layers` and
    `model.operations` have each layer once. Empty for other models; where
    the attribute is gone, every layer counts as called once. Expires with a
    public way to read the graph.
    """
    levels = getattr(model, "_nodes_by_depth", None) or {}
    nodes = itertools.chain.from_iterable(levels.values())
    return collections.Counter(id(node.operation) for node in nodes)


def own_weights(layer: Any) -> list[Any]:
    """The weights of a layer that are not those of a layer in it.

    `layer.weights` has both (keras 3.0 to 3.15).
    """
    inner = layers_within(layer)[1:]
    others = {id(weight) for each in inner for weight in each.weights}
    return [weight for weight in layer.weights if id(weight) not in others]


@contextlib.contextmanager
def unlocked(layer: Any) -> Iterator[None]:
    """Let a built layer get or lose variables and sub-layers for a while.

    What `quantize` of Keras's own layers does (keras 3.10 to 3.15). Expires
    with a public way to add a sub-layer to a built layer.
    """
    locked = layer._tracker.locked
    layer._tracker.unlock()
    try:
        yield
    finally:
        if locked:
            layer._tracker.lock()


def swap_class(layer: Any, cls: type) -> None:
    """Give a built layer another class, one of the same attributes.

    Keras keeps what it found out about `call` when the layer was made, such
    as whether it takes `training` (keras 3.0 to 3.15): found out again here.
    """
    object.__setattr__(layer, "__class__", cls)
    signature = inspect.signature(layer.call)
    names = list(signature.parameters)
    renewed = {
        "_call_signature": signature,
        "call_signature_parameters": names,
        "_call_has_training_arg": "training" in names,
        "_call_has_mask_arg": "mask" in names,
        "_call_has_context_arg": {
            name: name in names
            for name in getattr(layer, "_call_context_args", ())
        },
    }
    for name, value in renewed.items():
        if hasattr(layer, name):
            object.__setattr__(layer, name, value)
    _renew_quantize(layer)


def _renew_quantize(layer: Any) -> None:
    """Let `layer.quantize` go on to the class that the layer now has.

    Keras gives each layer a function of that name when it is made, which
    checks the mode, unlocks the layer, and goes on to the method that the
    class had then (keras 3.12 to 3.15). The method is put into that function;
    where Keras does it otherwise, the layer stays as it is.
    """
    function = vars(layer).get("quantize")
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    if function is not None and "original_quantize_method" in names:
        cell = function.__closure__[names.index("original_quantize_method")]
        cell.cell_contents = type(layer).quantize.__get__(layer)


def put_class_back(layer: Any, cls: type) -> None:
    """Undo `swap_class` in a layer whose attributes are put back already."""
    object.__setattr__(layer, "__class__", cls)
    _renew_quantize(layer)


def bookkeeping(thing: Any) -> tuple[list[Any], list[Any]]:
    """Where Keras and a framework keep what a layer or optimizer has.

    Beside the attributes themselves and the containers among them, that is
    Keras's tracker, with a list and a set of ids for each kind of thing
    (`_tracker`, keras 3.0 to 3.15); on torch the dictionary of parameters
    (`_torch_params`, the same); on TensorFlow the wrappers that it puts
    around lists (`_storage`, TF 2.21). What is gone is left out: a failed
    change would then leave traces in it. Expires when Keras can add and
    remove variables and layers in a transaction.

    Returns:
        Objects, the thing first, whose attributes say it; and containers that
        are in no attribute of these.
    """
    objects, containers = [thing], []
    tracker = getattr(thing, "_tracker", None)
    if tracker is not None:
        objects.append(tracker)
        containers += [store for _, store in tracker.config.values()]
        containers += tracker.stored_ids.values()
    held = vars(thing)
    parameters = held.get("_modules", {}).get("_torch_params")
    if parameters is not None:
        objects.append(parameters)
    wrappers = [x for x in held.values() if "_storage" in _attributes(x)]
    return objects + wrappers, containers


def _attributes(thing: Any) -> dict[str, Any]:
    found = getattr(thing, "__dict__", None)
    return found if type(found) is dict else {}


class QuantizedAsLeaf:
    """A layer that `Model.quantize` visits though it has a state in it.

    Keras visits the layers that have none in them, and asks each for
    `_flatten_layers()` to see (keras 3.12 to 3.15). To that question a layer
    with nothing but `float8_state` in it names itself alone. Where Keras no
    longer asks, nothing changes. Expires when Keras visits all layers.
    """

    def _flatten_layers(self, *args: Any, **kwargs: Any) -> Any:
        parent: Any = super()
        found = list(parent._flatten_layers(*args, **kwargs))
        state = getattr(self, "float8_state", None)
        leaf = len(found) == 2 and found[0] is self and found[1] is state
        return found[:1] if leaf else found


def skip_in_quantize(layer: Any) -> None:
    """Let `Model.quantize` pass by a layer without a warning.

    It warns of each layer without a `quantize` (keras 3.12 to 3.15).
    """
    layer.quantize = _stays


def _stays(*args: Any, **kwargs: Any) -> None:
    """Quantize nothing."""


def detach(layer: Any, name: str) -> None:
    """Take a sub-layer out of an unlocked layer, and its attribute.

    Deleting the attribute leaves the sub-layer tracked (keras 3.0 to 3.15).
    """
    layer._tracker.untrack(getattr(layer, name))
    delattr(layer, name)


def stock_float8(layer: Any) -> dict[str, Any]:
    """What Keras's `quantize("float8")` has put into a layer, by attribute.

    Scales and amax histories of three operands, as trainable weights of the
    layer itself (keras 3.5 to 3.15).

    Returns:
        Variables by name; none if this is no such layer.
    """
    if layer.quantization_mode != "float8":
        return {}
    names = [
        f"{operand}_{kind}"
        for operand in ("inputs", "kernel", "outputs_grad")
        for kind in ("scale", "amax_history")
    ]
    found = {name: getattr(layer, name, None) for name in names}
    # A float8 layer of this package has these names too, but no variables.
    own = all(isinstance(v, keras.Variable) for v in found.values())
    return found if own else {}


def remove_stock_float8(layer: Any) -> None:
    """Take that out of an unlocked layer, if it is there.

    Deleting the attributes would collect garbage once for each (3.15).
    """
    for name, variable in stock_float8(layer).items():
        layer._untrack_variable(variable)
        vars(layer).pop(name)
        layer._is_quantized = False


@contextlib.contextmanager
def shown(layer: Any, name: str, value: Any) -> Iterator[None]:
    """Let those who look at a layer's attributes see another value for one.

    Keras's loader follows the attributes that `dir` lists, and asks for each
    with `getattr` (keras 3.0 to 3.15). What is put into the instance here is
    found before what Keras or PyTorch keeps under this name elsewhere, and is
    not tracked, so that a built layer need not be unlocked. Where the loader
    takes its objects from the tracker, nothing is read. Expires with a public
    way to know where in a file a layer is.
    """
    attributes = layer.__dict__
    hidden = {name: attributes[name]} if name in attributes else {}
    attributes[name] = value
    try:
        yield
    finally:
        del attributes[name]
        attributes.update(hidden)


_PUT_AROUND = "_keras_policy_ext"
"""In a function of this package that goes on to one of Keras."""


def after_loading(tell: Callable[[Any, Any], None]) -> None:
    """Have each model that Keras's loader returns shown to a function.

    `keras.saving.load_model` gives `.keras` files and folders to one function
    of the module `saving_lib` (keras 3.0 to 3.15), which is put into another
    one here; there is no public way to see a file that was loaded. What is
    loaded stays as it is. Where that function is gone, nothing is told. Expires
    when Keras warns of groups in a file that no layer has read.

    Args:
        tell: Of the model and the path that it was loaded from.
    """
    try:
        from keras.src.saving import saving_lib
    except ImportError:
        return
    load = getattr(saving_lib, "load_model", None)
    if load is None or _PUT_AROUND in vars(load):
        return

    @functools.wraps(load)
    def load_model(filepath: Any, *args: Any, **kwargs: Any) -> Any:
        model = load(filepath, *args, **kwargs)
        tell(model, filepath)
        return model

    vars(load_model)[_PUT_AROUND] = True
    saving_lib.load_model = load_model


def before_export(check: Callable[[Any, str], None]) -> None:
    """Have a function asked before `Model.export` writes anything.

    All formats but that of PyTorch are made of the same traced call, so that
    a layer cannot tell for which it is traced; there is no public way to be
    asked. So the public method is put into another one (keras 3.12 to 3.15).
    Expires when a layer can say in which formats it can be written.

    Args:
        check: Of the model and the name of the format; raises to refuse.
    """
    export = keras.Model.export
    if _PUT_AROUND in vars(export):
        return

    signature = inspect.signature(export)

    @functools.wraps(export)
    def checked(*args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(TypeError):  # Keras says what is wrong.
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            format = given.arguments.get("format")
            check(given.arguments["self"], str(format))
        return export(*args, **kwargs)

    vars(checked)[_PUT_AROUND] = True
    keras.Model.export = checked


def track_again(layers: Iterable[Any]) -> None:
    """Let PyTorch see the variables that layers have now.

    Keras's layers on torch register their variables as parameters when they
    are built, after the layers in them (`_torch_params`, keras 3.0 to 3.15);
    nothing to do elsewhere. They are registered last again: copies of a model
    and checkpoints of optimizers go by the order of `parameters()`, and a
    model that was loaded has been built anew. A Sequential model keeps a
    Functional one that is no layer of it.
    """
    found: dict[int, Any] = {}
    for layer in layers:
        children = vars(layer).get("_modules", {}).values()
        for each in (*children, layer):
            if hasattr(each, "_track_variables"):
                found.setdefault(id(each), each)
    for each in found.values():
        vars(each).get("_modules", {}).pop("_torch_params", None)
        each._track_variables()


def serialize_as(cls: type, original: type) -> None:
    """Let files name a class as they name another.

    For a class made while the program runs: a file must name the one that a
    program which loads it can import. Keras has the names in a table
    (keras 3.0 to 3.15); where that is gone, the class is found by its module
    and name, which are those of the original.
    """
    try:
        from keras.src.saving import object_registration
    except ImportError:
        return
    names = getattr(object_registration, "GLOBAL_CUSTOM_NAMES", None)
    if isinstance(names, dict) and original in names:
        names[cls] = names[original]


# --------------------------------------------------------------------------
# Compiled models (used by conversion/ and mixed_precision/)
# --------------------------------------------------------------------------


class OwnReturnedLogs:
    """A model that says which logs `train_on_batch` returns as a list.

    Keras lists whatever `train_step` logs (`_flatten_metrics_in_order`,
    keras 3.0 to 3.15). Where it no longer asks, all logs are returned.
    """

    def returned_logs(self, logs: dict[str, Any]) -> dict[str, Any]:
        """The logs to return; all, unless a subclass leaves some out."""
        return logs

    def _flatten_metrics_in_order(self, logs: dict[str, Any]) -> Any:
        above: Any = super()
        return above._flatten_metrics_in_order(self.returned_logs(logs))


def known_to_optimizer(optimizer: Any) -> list[Any] | None:
    """The model variables that an optimizer was built with, None if not.

    `_trainable_variables`, keras 3.0 to 3.15; where it is gone, None, and
    the optimizer has to be compiled anew.
    """
    if not getattr(optimizer, "built", False):
        return None
    variables = getattr(optimizer, "_trainable_variables", None)
    return None if variables is None else list(variables)


def optimizers_within(optimizer: Any) -> list[Any]:
    """An optimizer and the ones that it wraps, outermost first."""
    found = []
    while isinstance(optimizer, keras.optimizers.Optimizer):
        found.append(optimizer)
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return found


def retarget_optimizer(optimizer: Any, variables: list[Any]) -> None:
    """Let a built optimizer know another list of variables.

    Slots are moved and none is copied or made: only variables that are
    overwritten with their gradient, which have no slots, may be new. An
    optimizer keeps, for each model variable in order, one entry in each of
    its lists of slots (keras 3.0 to 3.15), and variables for the
    accumulation of gradients. Expires with a public way to add a variable.
    """
    before = {id(v): i for i, v in enumerate(optimizer._trainable_variables)}
    places = [before.get(id(v)) for v in variables]
    slots = [
        name
        for name, value in vars(optimizer).items()
        if name not in ("_variables", "_accumulated_gradients")
        and _are_slots(value, before)
    ]
    _retarget_accumulators(optimizer, variables, places)
    for name in slots:
        old = getattr(optimizer, name)
        moved = [None if i is None else old[i] for i in places]
        _replace_list(optimizer, name, moved)
    _replace_list(optimizer, "_trainable_variables", list(variables))
    optimizer._trainable_variables_indices = {
        optimizer._var_key(v): i for i, v in enumerate(variables)
    }


def _are_slots(candidate: Any, before: dict[int, int]) -> bool:
    """Whether this is a list with a slot, or None, for each variable."""
    if not isinstance(candidate, list) or len(candidate) != len(before):
        return False
    return all(
        slot is None
        or isinstance(slot, _OwnAverage)
        or (isinstance(slot, keras.Variable) and id(slot) not in before)
        for slot in candidate
    )


def _retarget_accumulators(
    optimizer: Any, variables: list[Any], places: list[int | None]
) -> None:
    """Accumulators for new variables, in the order in which `build` has them.

    Files keep the variables of an optimizer by their number.
    """
    if not optimizer.gradient_accumulation_steps:
        return
    old = list(optimizer._accumulated_gradients)
    ids = [id(v) for v in optimizer._variables]
    start = min((ids.index(id(v)) for v in old), default=len(ids))
    new = [
        optimizer.add_variable_from_reference(v, name="gradient_accumulator")
        if i is None
        else old[i]
        for v, i in zip(variables, places, strict=True)
    ]
    moved = {id(v) for v in (*old, *new)}
    rest = [v for v in optimizer._variables if id(v) not in moved]
    ordered = rest[:start] + new + rest[start:]
    _replace_list(optimizer, "_variables", ordered)
    tracked = optimizer._tracker.config
    tracked["variables"] = (tracked["variables"][0], optimizer._variables)
    _replace_list(optimizer, "_accumulated_gradients", new)


def _replace_list(owner: Any, name: str, values: list[Any]) -> None:
    """Fill a list attribute of an optimizer anew, without tracking it.

    As stock `build` does. TensorFlow's checkpoints refuse a list of theirs
    whose elements were replaced, and take another list.
    """
    if _tracking is None:
        getattr(owner, name)[:] = values
        return
    with _tracking.DotNotTrackScope():
        setattr(owner, name, values)


def forget_compiled_functions(model: Any) -> None:
    """Let a model trace its training, test and prediction steps anew.

    As `compile` does, which would also ask for the loss and the metrics
    again (keras 3.0 to 3.15). KerasHub's models that generate keep one step
    more, which `compile` sets to None too (keras_hub 0.32). A `fit` that is
    under way, and has called back, makes no training step by itself.
    """
    trains = getattr(model, "train_function", None) is not None
    names = ["train_function", "test_function", "predict_function"]
    if hasattr(model, "make_generate_function"):
        names.append("generate_function")
    for name in names:
        if hasattr(model, name):
            setattr(model, name, None)
    if trains:
        model.make_train_function()


def count_adapted_layers_again(model: Any) -> None:
    """Let a KerasHub backbone find its LoRA layers where they now are.

    It remembers them by their number among all layers with weights, for its
    files of adapters (keras_hub 0.32); a float8 state is one more of those.
    Nothing happens where LoRA was not enabled, or that list is gone. Expires
    when KerasHub goes by path.
    """
    if not writes_map_of_quantized_layers(model):
        return
    if getattr(model, "_lora_enabled_layers", None):
        # In KerasHub's order, which is not that of `layers_within`.
        layers = model._flatten_layers(include_self=False)
        layers = [x for x in layers if x.weights]
        model._lora_enabled_layers = [
            number
            for number, layer in enumerate(layers)
            if getattr(layer, "lora_enabled", False)
        ]


def writes_map_of_quantized_layers(model: Any) -> bool:
    """Whether a model's config names a policy for each quantized layer.

    KerasHub's backbones do (keras_hub 0.32): once a layer reports a
    `quantization_mode`, the config has a map of those layers in place of the
    backbone's policy, and no word about the others, which come back in the
    global policy. A policy that is itself a map is written as it is. Expires
    when KerasHub gives that map a default.
    """
    hub = sys.modules.get("keras_hub")
    return hub is not None and isinstance(model, hub.models.Backbone)


def follow_weight_decay_exclusions(
    optimizer: Any, pairs: Iterable[tuple[Any, Any]]
) -> None:
    """Exclude from weight decay what stands in for an excluded variable.

    `exclude_from_weight_decay(var_list=…)` is kept as the keys of variables,
    which a stand-in does not have on JAX and torch; there is no way to ask
    (keras 3.12 to 3.15). Where Keras keeps it otherwise, nothing happens:
    exclude through the wrapper, or by `var_names`. Expires with a public way
    to read the exclusions.

    Args:
        optimizer: A Keras optimizer.
        pairs: Variables and what stands in for each.
    """
    excluded = getattr(optimizer, "_exclude_from_weight_decay", None)
    key = getattr(optimizer, "_var_key", None)
    if not isinstance(excluded, set) or key is None:
        return
    for variable, stand_in in pairs:
        if key(variable) in excluded:
            excluded.add(key(stand_in))


# --------------------------------------------------------------------------
# Operations in the graph of a model (used by migration/)
# --------------------------------------------------------------------------


def operation_class(
    function: Any,
    operands: int = 1,
    takes_list: bool = False,
    **options: Any,
) -> Any:
    """The class that Keras puts into a graph for a function of `keras.ops`.

    `keras.ops` exports the functions alone, and a saved graph names the
    classes (keras 3.0 to 3.15). The class is taken from the history of a
    symbolic result.

    Args:
        function: Such as `keras.ops.add`.
        operands: How many tensors it takes; they get the shape (3, 3).
        takes_list: Whether it takes them as a list.
        **options: Other arguments that it cannot be called without.

    Raises:
        ImportError: If symbolic tensors of this Keras have no history.
    """
    # A square shape: a matrix product takes it too.
    tensors = [keras.KerasTensor((3, 3)) for _ in range(operands)]
    result = function(tensors) if takes_list else function(*tensors, **options)
    history = getattr(result, "_keras_history", None)
    if history is None:
        raise ImportError(
            f"Keras {keras.__version__} keeps no history in symbolic tensors, "
            "which the migration of TensorFlow operations needs. Install a "
            "version of keras_policy_ext that names this Keras as supported."
        )
    return type(history.operation)


def amend_compile_config(model: Any, changes: dict[str, Any]) -> None:
    """Let a compiled model be saved as compiled with other arguments.

    `get_compile_config` returns what `compile` was given, except for
    `auto_scale_loss` (`_compile_config`, keras 3.0 to 3.15): a model that
    was compiled with False would be wrapped when it is loaded. Where it is
    gone, nothing: files then say what Keras says. Expires when Keras saves
    the argument, and public classes on torch.
    """
    kept = getattr(model, "_compile_config", None)
    arguments = getattr(kept, "config", None)
    if isinstance(arguments, dict):
        arguments.update(changes)
