"""Find the layers of a model that can be converted, and why others cannot."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from keras_policy_ext._keras import quantization, variable_values, walking
from keras_policy_ext.conversion import products_by_operation
from keras_policy_ext.conversion.traced_model import TracedModel
from keras_policy_ext.files import keras_float8
from keras_policy_ext.layers.by_operation import (
    ByOperation,
    foreign_kernels,
    form_by_operation,
    record_of,
)
from keras_policy_ext.layers.drop_in import form_of
from keras_policy_ext.layers.mixin import Float8Mixin
from keras_policy_ext.layers.state import Float8State
from keras_policy_ext.policies.of_layers import is_frozen

NOT_BUILT = "it has no weights yet: it was never called"
"""The reason for an unbuilt layer in a built model."""

_NO_KERNEL = "it has no kernel of its own to multiply with"

# Stock layers with weights that are multiplied and have no float8 form, by
# their names; {0} stands for 1D, 2D and 3D.
_WITHOUT_FORM = {
    "DepthwiseConv{0}": "a depthwise convolution sums over the few taps of "
    "its window only, which is no matrix product for float8 hardware",
    "ConvLSTM{0}": "convolutional recurrent cells have no float8 form",
    "Embedding": "it looks up rows; a product with its table is computed by "
    "another layer, such as a tied head, or by "
    "keras.layers.ReversibleEmbedding",
    "TorchModuleWrapper": "it holds a torch.nn.Module, whose arithmetic Keras "
    "does not see",
    "JaxLayer": "it holds a function of JAX, whose arithmetic Keras does not "
    "see",
    "FlaxLayer": "it holds a Flax module, whose arithmetic Keras does not see",
}


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A layer that can be converted, with the float8 class and the kernels."""

    layer: keras.Layer
    form: type  # The float8 class that conversion gives it.
    kernels: tuple[keras.Variable, ...]  # The weights that are contracted.
    # The layers that have those of the kernels that are not this layer's own.
    owners: tuple[keras.Layer, ...] = ()
    # Whether it is converted only where `convert` is asked to, as a head that
    # multiplies with the table of an embedding.
    is_tied: bool = False

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """For each kernel, the sizes of its summed and its output axes."""
        form: Any = self.form
        return [
            form.float8_axes(self.layer, kernel).sizes(tuple(kernel.shape))
            for kernel in self.kernels
        ]

    @property
    def size(self) -> int:
        """The number of entries of the largest kernel."""
        return max((int(np.prod(k.shape)) for k in self.kernels), default=0)


class SizeFilter:
    """The base class of filters that compare all candidates of a model."""

    def reasons(self, candidates: Sequence[Candidate]) -> dict[int, str]:
        """Return the reason for each layer that this filter leaves out.

        Args:
            candidates: All that could be converted, in the model's order.

        Returns:
            A reason by the index of each candidate that is left out.
        """
        raise NotImplementedError


def not_multiples(summed: int, free: int, multiple: int) -> str | None:
    """Return why a matmul of these sizes is left out, or None."""
    if not (summed % multiple or free % multiple):
        return None
    return (
        f"its product sums over {summed} and yields {free}, not both multiples "
        f"of {multiple}"
    )


@dataclasses.dataclass(frozen=True)
class Unconverted:
    """A layer with weights that stays as it is, with the reason.

    `kernel` is its weight that stays; None for the whole layer.
    """

    layer: keras.Layer
    reason: str
    kernel: keras.Variable | None = None


@dataclasses.dataclass(frozen=True)
class Survey:
    """The layers of a model, sorted into convertible, composite and skipped.

    Candidates can compute in float8. The float8 form of a composite only makes
    float8 children. Skipped layers have weights and are neither.
    """

    candidates: list[Candidate]
    composites: list[keras.Layer]
    skipped: list[Unconverted]


def survey(
    model: keras.Layer,
    attention: bool = False,
    traced: TracedModel | None = None,
) -> Survey:
    """Sort the layers of a model into candidates, composites and skipped.

    With `attention`, layers without a float8 class, and without kernels, are
    composites if their attention can be in float8. `traced` is the model, if
    the caller traces its call too.
    """
    result = Survey([], [], [])
    layers = walking.layers_within(model)
    unknown = [x for x in layers if _has_no_form(x)]
    traced = TracedModel(model) if traced is None else traced
    products_by_operation.record(traced, unknown, attention)
    for layer in layers:
        if isinstance(layer, Float8State):
            continue
        try:
            form = _float8_class(layer, attention)
            kernels = () if form is None else tuple(_kernels(layer, form))
        except _CannotConvert as reason:
            result.skipped.append(Unconverted(layer, str(reason)))
            continue
        if form is not None and kernels:
            result.candidates.append(_candidate(layer, form, kernels))
        elif form is not None:
            result.composites.append(layer)
    return result


def _candidate(
    layer: keras.Layer, form: type, kernels: tuple[keras.Variable, ...]
) -> Candidate:
    """Return the candidate of a layer that is to become a float8 `form`.

    Its owners are the layers that have the weights which it multiplies, as an
    output that is tied to an embedding does.
    """
    # Only products found by operation have such owners. A frozen layer has its
    # kernels itself.
    if not issubclass(form, ByOperation) or is_frozen(layer):
        return Candidate(layer, form, kernels)
    record = record_of(layer)
    is_tied = record is not None and record.is_tied
    owners = tuple(owner for owner, _ in foreign_kernels(layer))
    return Candidate(layer, form, kernels, owners, is_tied)


def path_of(layer: keras.Layer) -> str:
    """Return the path of a layer, or its name if it has no path yet."""
    return layer.path or layer.name


def quantized_by_keras(layer: keras.Layer) -> bool:
    """Return True if a layer is quantized by Keras, not by this package."""
    is_own = isinstance(layer, Float8Mixin)
    return layer.quantization_mode is not None and not is_own


def why_code_differs(layer: keras.Layer) -> str | None:
    """Return why a layer's code may differ from its stock class, or None."""
    cls = type(layer)
    try:
        form = cls if issubclass(cls, Float8Mixin) else form_of(cls)
    except TypeError as error:  # A subclass overrides its `call`, for instance.
        return str(error)
    for name in getattr(form, "float8_replaces", ()):
        if form is not cls and callable(vars(layer).get(name)):
            return (
                f"its `{name}` was replaced on this instance; override it in "
                "a subclass instead"
            )
    return None


def _has_no_form(layer: keras.Layer) -> bool:
    """Return True if a layer has no float8 form, and no known reason why."""
    cls = type(layer)
    if issubclass(cls, Float8Mixin) or _why_without_form(cls) is not None:
        return False
    try:
        return form_of(cls) is None and _quantized_by(layer) is None
    except TypeError:
        return False


class _CannotConvert(Exception):
    """Raised for a layer that cannot be converted; its text says why."""


def _float8_class(layer: keras.Layer, attention: bool) -> type | None:
    """Return a layer's float8 class; None if it needs no conversion."""
    cls = type(layer)
    try:
        form = cls if issubclass(cls, Float8Mixin) else form_of(cls)
    except TypeError as error:
        raise _CannotConvert(_quantized_by(layer) or str(error)) from error
    # Only Keras's own float8 can be replaced.
    if quantized_by_keras(layer):
        mode = layer.quantization_mode
        if not quantization.is_in_float8(layer):
            raise _CannotConvert(f"Keras has quantized it ({mode})")
        if keras_float8.extension() is None:
            raise _CannotConvert(
                f"Keras has quantized it ({mode}), and the extension that "
                f"takes it over, {keras_float8.NAME!r}, is not installed"
            )
    if form is None and not quantized_by_keras(layer):
        form = form_by_operation(layer, attention)
    # A form that does not train, that of an embedding, is for `freeze` alone.
    trains = getattr(form, "float8_trains", True)
    if form is None or (form is not cls and not trains):
        _refuse_if_weights(layer)
        return None
    if not layer.built:
        raise _CannotConvert(NOT_BUILT)
    reason = why_code_differs(layer)
    if reason is not None:
        raise _CannotConvert(reason)
    return form


def _quantized_by(layer: keras.Layer) -> str | None:
    """Return the reason if another library quantizes a layer, else None."""
    # It holds quantizers: layers or other objects with "quantizer" in the names
    # of their classes, which are not classes of Keras.
    held = walking.attributes(layer).values()
    for each in (*held, *walking.layers_directly_in(layer)):
        cls = type(each)
        library = cls.__module__.partition(".")[0]
        if "quantizer" in cls.__name__.lower() and library != "keras":
            return f"{library} quantizes it, by its {cls.__name__}"
    return None


def _why_without_form(cls: type) -> str | None:
    """Return why a stock class with weights has no float8 form, or None."""
    for base in cls.__mro__:
        rank = "".join(re.findall(r"\dD", base.__name__))
        reason = _WITHOUT_FORM.get(re.sub(r"\dD", "{0}", base.__name__))
        if reason and base is getattr(keras.layers, base.__name__, None):
            return reason.format(rank)
    return None


def _refuse_if_weights(layer: keras.Layer) -> None:
    """Raise why a layer without a float8 form stays, if it has weights."""
    cls, own = type(layer), walking.own_weights(layer)
    reason = _why_without_form(cls)
    if reason is not None:
        raise _CannotConvert(reason)
    # Weights that its call reads may be of other layers.
    record = record_of(layer)
    if record is not None and record.refused and not record.products:
        owner = record.refused[0]()  # A weak reference: None if it is gone.
        path = "" if owner is None else path_of(owner)
        raise _CannotConvert(
            f"it multiplies with a kernel of layer {path!r}, which computes "
            "with it too; a kernel in float8 is of one layer"
        )
    if record is not None and record.branch and record.products:
        raise _CannotConvert(_not_recognised(layer) or "")
    if not own:
        return
    if any(len(weight.shape) >= 2 for weight in own):
        raise _CannotConvert(
            _quantized_by(layer)
            or _not_recognised(layer)
            or f"{cls.__name__} has no float8 form; a layer of your own can "
            "derive from Float8Mixin and contract with float8_einsum"
        )
    raise _CannotConvert(_NO_KERNEL)


def _not_recognised(layer: keras.Layer) -> str | None:
    """Return why a recorded call has no float8 product; None for others."""
    record = record_of(layer)
    if record is None:
        return None
    if record.products:  # Found, but in a branch (else there is a form).
        return f"it calls keras.ops.{record.branch}, in which products differ"
    return (
        f"in the call of {type(layer).__name__} no product with a weight of "
        "its own was recognised (keras.ops.matmul, einsum, dot, tensordot); a "
        "layer of your own can derive from Float8Mixin and contract with "
        "float8_einsum"
    )


def _kernels(layer: keras.Layer, form: type) -> list[keras.Variable]:
    """Return the weights of a layer that its float8 form uses in matmuls."""
    own = walking.own_weights(layer)
    kernels: list[keras.Variable] = []
    if isinstance(layer, Float8Mixin):
        kernels = layer.float8_contracted
    elif issubclass(form, Float8Mixin):
        kernels = [v for v in own if form.is_float8_kernel(layer, v)]
        kernels += [kernel for _, kernel in foreign_kernels(layer)]
    # Without weights of its own, a layer may be a composite. `names` is empty
    # for a class of composites, and None where any name will do.
    names = getattr(form, "float8_kernels", ())
    if own and not kernels and names is None:
        raise _CannotConvert(_NO_KERNEL)
    if own and not kernels and names:
        listed = " or ".join(names)
        raise _CannotConvert(f"none of its own weights is called {listed}")
    return kernels


# Layers of Keras whose `build` looks at shapes, and makes no weights.
_NAMES = """
    Add Average AugMix Concatenate Dot Maximum Minimum Multiply RandAugment
    RandomColorJitter Subtract TextVectorization
"""
_WITHOUT_WEIGHTS = [getattr(keras.layers, name) for name in _NAMES.split()]


def check(model: keras.Layer, purpose: str = "can be converted") -> None:
    """Raise unless a model is built; `purpose` says what errors name.

    Raises:
        TypeError: If it is no Keras model or layer.
        ValueError: If the model has no weights yet, a part of an unbuilt model
            has none, or the variables hold no values.
    """
    check_is_layer(model, purpose)
    if not (model.built and has_call(model)):
        _check_parts(model)
    if not all(variable_values.has_value(v) for v in model.variables):
        raise ValueError(
            f"The weights of {model.name!r} are not in its variables now: "
            "Keras takes them out while it trains on JAX, and does not put "
            "them back when training ends in an error. Received: a model in "
            "training, or after an error in training. Allowed: a model before "
            "or after `fit`, or in a callback's `on_epoch_end`. Convert it "
            "there. After an error in training, build the model again."
        )


def check_is_layer(model: object, purpose: str, also: str = "") -> None:
    """Raise a TypeError if `model` is no Keras model or layer."""
    # Not keras.Layer, which libraries such as bert4keras3 replace.
    if not isinstance(model, keras.layers.Layer):
        raise TypeError(
            f"This is not a Keras model or layer, and only those {purpose}. "
            f"Received: {model!r} (of type {type(model).__name__}). Allowed: "
            f"a keras.Model or keras.Layer{also}. Pass the model itself."
        )


def has_call(model: keras.Layer) -> bool:
    """Return True if the class of a model overrides Keras's `call`."""
    return type(model).call not in (keras.Model.call, keras.Layer.call)


def _check_parts(model: keras.Layer) -> None:
    """Raise if a model that has not been called lacks weights in a part."""
    unbuilt = [name for name, _ in _unbuilt_parts(model)]
    # One call would build all parts: if none is built, name the whole model.
    if unbuilt and (model.weights or not has_call(model)):
        raise ValueError(
            f"Parts of {type(model).__name__} {model.name!r} have no weights "
            f"yet. Received: {', '.join(unbuilt)}, not built. Allowed: a "
            "model whose layers with weights are all built. Call each of "
            "these parts on a batch of data, or `part.build(input_shape)`, "
            "first."
        )
    if (not model.weights and not model.built) or _would_get_weights(model):
        raise ValueError(
            f"{type(model).__name__} {model.name!r} has no weights yet. "
            "Received: a model that is not built. Allowed: a built one. Call "
            "it on a batch of data, or `model.build(input_shape)`, first."
        )


def _unbuilt_parts(model: keras.Layer) -> list[tuple[str, Any]]:
    """Return the outermost parts without weights, as (name, layer)."""
    unbuilt = []
    for name, part in _parts(model):
        if not any(map(_would_get_weights, walking.layers_within(part))):
            continue
        # A part without any weights is named itself, not the parts in it.
        inner = _unbuilt_parts(part) if part.weights else []
        unbuilt += [(f"{name}.{under}", layer) for under, layer in inner]
        if not inner:
            described = f"{name} ({type(part).__name__} {path_of(part)!r})"
            unbuilt.append((described, part))
    return unbuilt


def _would_get_weights(layer: keras.Layer) -> bool:
    """Return True if building this layer would create weights in it."""
    if layer.built or type(layer) in _WITHOUT_WEIGHTS:
        return False
    if isinstance(layer, keras.Model) and layer.layers:
        return False  # Its layers do.
    return type(layer).build is not keras.Layer.build


def _parts(model: keras.Layer) -> Iterator[tuple[str, Any]]:
    """Yield the layers directly in a model, as (attribute name, layer)."""
    names: dict[int, str] = {}
    for name, value in walking.attributes(model).items():
        if not name.startswith("_"):
            for suffix, each in leaves(value):
                names.setdefault(id(each), name + suffix)
    for number, layer in enumerate(getattr(model, "layers", ())):
        names.setdefault(id(layer), f"layers[{number}]")
    for layer in walking.layers_directly_in(model):
        yield names.get(id(layer), layer.name), layer


def leaves(value: object) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested lists and dicts, as (subscripts, leaf)."""
    if not isinstance(value, (dict, list, tuple)):
        yield "", value
        return
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in items:
        for suffix, leaf in leaves(each):
            yield f"[{key!r}]{suffix}", leaf
