"""Layers that are built: their trackers, variables and classes."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras

from keras_policy_ext._keras import variable_values, versions
from keras_policy_ext._keras.around import put_around


@contextlib.contextmanager
def unlocked(layer: keras.Layer) -> Iterator[None]:
    """Let a built layer get or lose variables and sub-layers for a while.

    What `quantize` of Keras's own layers does (keras 3.10 to 3.16). Expires
    with a public way to add a sub-layer to a built layer.

    Raises:
        ImportError: If layers of this Keras are locked otherwise.
    """
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
    """Return the tracker of the variables of a layer or an optimizer.

    `_tracker` (keras 3.0 to 3.16); under another name, it is found by what it
    can do. None if there is none.
    """
    tracker = getattr(thing, "_tracker", None)
    if tracker is not None:
        return tracker
    held = vars(thing).values()
    return next((x for x in held if hasattr(x, "add_to_store")), None)


def swap_class(layer: keras.Layer, cls: type) -> None:
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


def _renew_quantize(layer: keras.Layer) -> None:
    """Let `layer.quantize` be that of the class that the layer now has.

    Keras gives each layer a function of that name when it is made, which
    unlocks the layer and goes on to the method that the class had then
    (keras 3.12 to 3.15). A class with a `quantize_after` is asked first, and
    goes on to that function; it is put back with the stock class.
    """
    held = vars(layer)
    given = held.pop(_GIVEN_QUANTIZE, None)
    if given is not None:
        held["quantize"] = given
    stock = held.get("quantize")
    if stock is None or not hasattr(type(layer), "quantize_after"):
        return

    @functools.wraps(stock)  # Keras asks for its name.
    def quantize(*args: Any, **kwargs: Any) -> None:
        layer.quantize_after(stock, *args, **kwargs)

    held[_GIVEN_QUANTIZE], held["quantize"] = stock, quantize


_GIVEN_QUANTIZE = "_quantize_given_by_keras"


def put_class_back(layer: keras.Layer, cls: type) -> None:
    """Undo `swap_class` in a layer whose attributes are put back already."""
    object.__setattr__(layer, "__class__", cls)


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
    tracker = tracker_of(thing)
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
    longer asks, nothing changes: it visits all layers from 3.16 on. Expires
    with Keras 3.15.
    """

    def _flatten_layers(self, *args: Any, **kwargs: Any) -> Any:
        parent: Any = super()
        found = list(parent._flatten_layers(*args, **kwargs))
        state = getattr(self, "float8_state", None)
        leaf = len(found) == 2 and found[0] is self and found[1] is state
        return found[:1] if leaf else found


def skip_in_quantize(layer: keras.Layer) -> None:
    """Let `Model.quantize` pass by a layer without a warning.

    It warns of each layer without a `quantize` (keras 3.12 to 3.15), and
    later reports a layer with one as quantized, unless it was so before
    (3.16). Expires when a layer can say that it has nothing to quantize.
    """
    layer.quantize = _stays
    layer._is_quantized = True


def _stays(*args: Any, **kwargs: Any) -> None:
    """Quantize nothing."""


def track(layer: keras.Layer, variable: keras.Variable) -> None:
    """Let a variable be one of a layer, as `add_weight` does.

    That makes its variables itself, and of no other class (`_track_variable`,
    keras 3.0 to 3.16). Expires with a public way to track a variable that is
    in no attribute yet.

    Raises:
        ImportError: If layers of this Keras track variables otherwise.
    """
    if not hasattr(layer, "_track_variable"):
        raise versions.missing("Layer._track_variable", "a frozen layer")
    layer._track_variable(variable)


class ToldWhenBuilt:
    """A layer with a method that is called once it has its weights.

    Keras calls `_post_build` then (keras 3.12 to 3.15); where it does not,
    nothing is called. Expires with a public hook.
    """

    def when_built(self) -> None:
        """Called once the layer is built."""

    def _post_build(self) -> None:
        parent: Any = super()
        parent._post_build()
        self.when_built()


def around_set_weights(function: Callable[..., None]) -> None:
    """Have a function called in place of `Layer.set_weights`.

    Keras sets one weight after the other until one does not fit (keras 3.0 to
    3.15). Expires when it looks at all of them first.

    Args:
        function: Of the stock method, the layer and the weights.
    """
    put_around(keras.Layer, "set_weights", function)


def replace_variable(
    layer: keras.Layer,
    old: keras.Variable,
    new: keras.Variable,
    tracked: keras.Variable | None = None,
) -> None:
    """Let an attribute of an unlocked layer hold another variable.

    Args:
        layer: The layer.
        old: The variable that the attribute holds.
        new: The one that it is to hold.
        tracked: The variable that Keras tracks for the old one, if it is
            another one.

    Expires when to assign an attribute untracks what it held.

    Raises:
        ImportError: If layers of this Keras let go of variables otherwise.
        ValueError: If the old variable is in no attribute of its own.
    """
    for name, value in vars(layer).items():
        if value is old:
            untrack(layer, old if tracked is None else tracked)
            setattr(layer, name, new)
            variable_values.let_wait_no_longer(old)
            return
    raise ValueError(
        f"The weight {old.path!r} is in no attribute of its layer. Received: "
        f"{type(layer).__name__} {layer.name!r}. Allowed: `self.kernel = "
        "self.add_weight(...)`, and not a weight in a list or dict. Give it "
        "an attribute of its own, or leave the layer out with `exclude`."
    )


def untrack(layer: keras.Layer, variable: keras.Variable) -> None:
    """Let a variable be none of an unlocked layer any more.

    What `quantize` of Keras's own layers does (`_untrack_variable`, keras 3.0
    to 3.16). Expires as `replace_variable` does.

    Raises:
        ImportError: If layers of this Keras let go of variables otherwise.
    """
    if not hasattr(layer, "_untrack_variable"):
        raise versions.missing(
            "Layer._untrack_variable", "the replacement of a weight"
        )
    layer._untrack_variable(variable)


def order_variables(layer: keras.Layer, names: Iterable[str]) -> None:
    """Let a layer have its own weights in the order of their names.

    By that Keras's default loader pairs them with those of a file
    (`_trainable_variables`, keras 3.0 to 3.16). Weights of other names come
    last. Expires when it goes by name.

    Raises:
        ImportError: If layers of this Keras keep their weights elsewhere.
    """
    place = {name: number for number, name in enumerate(names)}
    tracked = getattr(layer, "_trainable_variables", None)
    if tracked is None:
        raise versions.missing(
            "Layer._trainable_variables", "thawing a frozen layer"
        )
    ordered = sorted(tracked, key=lambda v: place.get(v.name, len(place)))
    list.__setitem__(tracked, slice(None), ordered)


def detach(layer: keras.Layer, name: str) -> None:
    """Take a sub-layer out of an unlocked layer, and its attribute.

    Deleting the attribute leaves the sub-layer tracked (keras 3.0 to 3.15).
    """
    tracker_of(layer).untrack(getattr(layer, name))
    delattr(layer, name)


def track_again(layers: Iterable[keras.Layer]) -> None:
    """Let PyTorch see the variables that layers have now.

    Keras's layers on torch register their variables as parameters when they
    are built, after the layers in them (`_torch_params`, keras 3.0 to 3.15);
    nothing to do elsewhere. They are registered last again: copies of a model
    and checkpoints of optimizers go by the order of `parameters()`, and a
    model that was loaded has been built anew. A Sequential model keeps a
    Functional one that is no layer of it, and in its tracker those from when
    it had fewer layers: they would keep what a layer has let go.
    """
    found: dict[int, Any] = {}
    for layer in layers:
        children = vars(layer).get("_modules", {}).values()
        tracker = tracker_of(layer)
        tracked = tracker.config.get("layers") if tracker else None
        earlier = tracked[1] if tracked else ()
        for each in (*earlier, *children, layer):
            if hasattr(each, "_track_variables"):
                found.setdefault(id(each), each)
    for each in found.values():
        if any(getattr(v, "_value", v) is None for v in each.variables):
            continue  # They wait for values, and Keras tracks them then.
        vars(each).get("_modules", {}).pop("_torch_params", None)
        each._track_variables()
