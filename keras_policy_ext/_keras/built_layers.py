"""Build layers, and change built ones: trackers, variables and classes."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import keras

from keras_policy_ext import bases
from keras_policy_ext._keras import put_around, variable_values, versions


@contextlib.contextmanager
def unlocked(layer: keras.Layer) -> Iterator[None]:
    """In the block, a built layer can gain or lose variables and sublayers."""
    # `quantize` of Keras's own layers does the same (keras 3.10 to 3.16).
    tracker = tracker_of(layer)
    if tracker is None:
        raise versions.missing("Layer._tracker", "a change of a built layer")
    locked = tracker.locked
    tracker.unlock()
    try:
        yield
    finally:
        if locked:
            tracker.lock()


def tracker_of(thing: Any) -> Any:
    """Return the object with which Keras tracks a layer's variables, or None.

    It is `_tracker` (keras 3.0 to 3.16), or else found by its methods.
    """
    tracker = getattr(thing, "_tracker", None)
    if tracker is not None:
        return tracker
    held = vars(thing).values()
    return next((x for x in held if hasattr(x, "add_to_store")), None)


def swap_class(layer: keras.Layer, cls: type) -> None:
    """Change the class of a built layer, which keeps its attributes."""
    # Keras stores facts about `call` when a layer is made, such as whether it
    # takes `training` (keras 3.0 to 3.15). They are determined again here.
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


def _renew_quantize(layer: keras.Layer) -> None:
    """Make `layer.quantize` call the method of the layer's present class."""
    # Keras gives each layer a function of that name when it is made, which
    # unlocks the layer and calls the method of the class that it had then
    # (keras 3.12 to 3.15). The `quantize_after` of a float8 class checks first,
    # and then calls that function; the stock class gets it back.
    held = vars(layer)
    keras_function = held.pop(_GIVEN_QUANTIZE, None)
    if keras_function is not None:
        held["quantize"] = keras_function
    stock = held.get("quantize")
    if stock is None or not hasattr(type(layer), "quantize_after"):
        return

    @functools.wraps(stock)  # Keras asks for its name.
    def quantize(*args: Any, **kwargs: Any) -> None:
        """Let the layer's class check; then quantize as Keras does."""
        layer.quantize_after(stock, *args, **kwargs)

    held[_GIVEN_QUANTIZE], held["quantize"] = stock, quantize


_GIVEN_QUANTIZE = "_quantize_given_by_keras"


def bookkeeping(thing: Any) -> tuple[list[Any], list[Any]]:
    """Return the objects in which Keras lists a layer's variables and layers.

    Of an optimizer too. Besides its attributes and the containers among them,
    these are Keras's tracker, with a list and a set of ids for each kind of
    part (`_tracker`, keras 3.0 to 3.15); on torch the dictionary of parameters
    (`_torch_params`, the same versions); on TensorFlow the wrappers that it
    puts around lists (`_storage`, TF 2.21). Missing ones are skipped: a failed
    change could then leave traces in them.

    Returns:
        Objects whose attributes store the parts, the argument first; and
        containers that are in no attribute of these.
    """
    objects, containers = [thing], []
    tracker = tracker_of(thing)
    if tracker is not None:
        objects.append(tracker)
        containers += [store for _, store in tracker.config.values()]
        containers += tracker.stored_ids.values()
    held = vars(thing)
    parameters = held.get("_modules", {}).get("_torch_params")
    if parameters is not None:
        objects.append(parameters)
    for each in held.values():
        attributes = getattr(each, "__dict__", None)
        if type(attributes) is dict and "_storage" in attributes:
            objects.append(each)
    return objects, containers


class QuantizedAsLeaf(bases.MixedInto):
    """A layer that `Model.quantize` visits although it contains a sublayer.

    Keras visits the layers that contain no layers, and calls
    `_flatten_layers()` of each to see (keras 3.12 to 3.15; from 3.16 on it
    visits all). If a layer contains only `float8_state`, it returns only
    itself there. Expires with Keras 3.15.
    """

    def _flatten_layers(self, *args: Any, **kwargs: Any) -> Any:
        """Return the layers in this one; none if only its state is in it."""
        parent: Any = super()
        layers = list(parent._flatten_layers(*args, **kwargs))
        state = getattr(self, "float8_state", None)
        is_leaf = len(layers) == 2 and layers[0] is self and layers[1] is state
        return layers[:1] if is_leaf else layers


def skip_in_quantize(layer: keras.Layer) -> None:
    """Make `Model.quantize` skip a layer without a warning."""
    # Keras warns about each layer without a `quantize` (keras 3.12 to 3.15).
    # Later it reports others as quantized, unless they were before (3.16).
    layer.quantize = _do_nothing
    layer._is_quantized = True


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    pass


def track(layer: keras.Layer, variable: keras.Variable) -> None:
    """Add a variable to the list of variables that a layer tracks."""
    # `add_weight` creates its variables itself, and only of one class
    # (`_track_variable`, keras 3.0 to 3.16).
    if not hasattr(layer, "_track_variable"):
        raise versions.missing("Layer._track_variable", "a frozen layer")
    layer._track_variable(variable)


class ToldWhenBuilt:
    """A layer whose `when_built` Keras calls once the layer is built.

    It is called by `_post_build` (keras 3.12 to 3.15), else not at all.
    """

    def when_built(self) -> None:
        """Do nothing; subclasses override this to act once they are built."""

    def _post_build(self) -> None:
        """Build as Keras does, then call `when_built`."""
        parent: Any = super()
        parent._post_build()
        self.when_built()


def around_set_weights(function: Callable[..., None]) -> None:
    """Replace `Layer.set_weights` by `function`, whose first argument it is."""
    # Keras sets weights in turn until one does not fit (keras 3.0 to 3.15).
    put_around(keras.Layer, "set_weights", function)


def replace_variable(
    layer: keras.Layer,
    old: keras.Variable,
    new: keras.Variable,
    tracked: keras.Variable | None = None,
) -> None:
    """Replace the variable `old` in an attribute of an unlocked layer by `new`.

    Keras does not untrack the old value of an attribute. `tracked` is the
    variable that it tracks in place of `old`, if that is another one.

    Raises:
        ValueError: If no attribute is the old variable itself.
    """
    for name, value in vars(layer).items():
        if value is old:
            untrack(layer, old if tracked is None else tracked)
            setattr(layer, name, new)
            variable_values.cancel_initialization(old)
            return
    raise ValueError(
        f"The weight {old.path!r} is in no attribute of its layer. Received: "
        f"{type(layer).__name__} {layer.name!r}. Allowed: `self.kernel = "
        "self.add_weight(...)`, and not a weight in a list or dict. Give it "
        "an attribute of its own, or leave the layer out with `exclude`."
    )


def untrack(layer: keras.Layer, variable: keras.Variable) -> None:
    """Remove a variable from those that an unlocked layer tracks.

    `quantize` of Keras's own layers does the same (`_untrack_variable`, keras
    3.0 to 3.16).
    """
    if not hasattr(layer, "_untrack_variable"):
        what = "Layer._untrack_variable"
        raise versions.missing(what, "the replacement of a weight")
    layer._untrack_variable(variable)


def order_variables(layer: keras.Layer, names: Iterable[str]) -> None:
    """Sort a layer's trainable weights by their position in `names`."""
    # Weights of other names come last. Keras's default loader pairs them with
    # those of a file by their order (`_trainable_variables`, keras 3.0 to
    # 3.16). Expires when it pairs them by name.
    place = {name: number for number, name in enumerate(names)}
    tracked = getattr(layer, "_trainable_variables", None)
    if tracked is None:
        what = "Layer._trainable_variables"
        raise versions.missing(what, "thawing a frozen layer")
    ordered = sorted(tracked, key=lambda v: place.get(v.name, len(place)))
    # Past Keras's class of lists, which tracks what is put into it.
    list.__setitem__(tracked, slice(None), ordered)


def detach(layer: keras.Layer, name: str) -> None:
    """Remove the sublayer in attribute `name` from an unlocked layer."""
    # Deleting the attribute alone would leave it tracked (keras 3.0 to 3.15).
    tracker_of(layer).untrack(getattr(layer, name))
    delattr(layer, name)


def register_parameters(layer: keras.Layer) -> None:
    """Register the variables of a layer as PyTorch parameters."""
    # As Keras's layers on torch do when they are built (`_torch_params` and
    # `_track_variables`, keras 3.0 to 3.16).
    wait = any(getattr(v, "_value", v) is None for v in layer.variables)
    if wait or not hasattr(layer, "_track_variables"):
        return  # Keras tracks them when they have values.
    vars(layer).get("_modules", {}).pop("_torch_params", None)
    layer._track_variables()


def track_again(layers: Iterable[keras.Layer]) -> None:
    """Register the variables of layers again, if they were registered."""
    # Keras registers those of a layer after those of the layers in it. They are
    # registered last again here: copies of a model and checkpoints of
    # optimizers rely on the order of `parameters()` that a loaded model has.
    modules: dict[int, Any] = {}
    for layer in layers:
        children = vars(layer).get("_modules", {}).values()
        tracker = tracker_of(layer)
        config = tracker.config if tracker else {}
        _, tracked = config.get("layers", (None, ()))
        # A Sequential model holds a Functional one that is not among its
        # layers, and its tracker those from when it had fewer layers. They
        # would keep removed variables alive.
        for each in (*tracked, *children, layer):
            # Keras registers the variables of some layers with their parent's.
            if "_torch_params" in vars(each).get("_modules", {}):
                modules.setdefault(id(each), each)
    for each in modules.values():
        register_parameters(each)


class BuiltUnderSavedPath(bases.MixedInto):
    """A mixin that saves a layer's path and builds the layer under it.

    Keras builds the layers of a saved Sequential one by one, outside of the
    model. A rule for `"model/dense"` would not match there.
    """

    def get_build_config(self) -> dict[str, Any] | None:
        """Return the layer's build config, with the layer's path in it."""
        config = super().get_build_config()
        return {**config, "path": self.path} if config else config

    def build_from_config(self, config: dict[str, Any]) -> None:
        """Build the layer inside the name scope of its saved path."""
        path = (config or {}).get("path") or ""
        with scope_of_path(path.rpartition("/")[0]):
            super().build_from_config(config)


def scope_of_path(path: str) -> AbstractContextManager[Any]:
    """Return the name scope of a path; for "" one that changes nothing."""
    parent, _, name = path.rpartition("/")
    if not name:
        return contextlib.nullcontext()
    return keras.name_scope(name, override_parent=parent)
