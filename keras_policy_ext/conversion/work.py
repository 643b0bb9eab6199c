"""Count the multiplications of each layer of a model.

The count is of multiplications (each with its addition) with kernels, for one
sample, which is one row of the batch. Matmuls of two activations, such as the
scores of an attention, are not counted.

The call of the model is traced for two samples and for three. An operand that
is larger for three is an activation. A matmul with one such operand is one
with a kernel. The difference of the two counts is that of one sample.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import keras

from keras_policy_ext._keras import walking
from keras_policy_ext.conversion import traced_calls
from keras_policy_ext.layers.drop_in import drop_in_of
from keras_policy_ext.layers.mixin import Float8Mixin
from keras_policy_ext.policies.of_layers import is_frozen

SAMPLES = (2, 3)
"""Sizes of the batches that are traced."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """The kernel entries of one layer, and the multiplications with them.

    Attributes:
        parameters: Entries of the kernels that it multiplies with; of its own
            weights if it has no kernel.
        multiplications: Multiplications, each with its addition, in the
            products of one sample with them; 0 without a kernel.
        plain_multiplications: How many of these are not in float8 though the
            layer is, such as those of a depthwise kernel.
        sizes_known: Whether all sizes of the inputs were known; one that is
            not counts as 1.
    """

    parameters: int = 0
    multiplications: int = 0
    plain_multiplications: int = 0
    sizes_known: bool = True
    plain_parameters: int = 0


class Works:
    """Counts the parameters and multiplications of each layer of a model."""

    def __init__(self, model: keras.Layer) -> None:
        self._model = model
        self._layers = {id(x): x for x in walking.layers_within(model)}
        self._counted: dict[int, list[_Counted]] = {}
        self._unknown: set[int] = set()
        self._are_sizes_known = True
        self._pair = pair = _traced(model)
        if pair is None:
            self._unknown.update(self._layers)
            return
        self._are_sizes_known = pair.are_sizes_known
        for layer, counted in pair.products:
            self._layers[id(layer)] = layer
            self._counted.setdefault(id(layer), []).append(counted)
        self._unknown.update(map(id, pair.unknown))

    @property
    def chooses(self) -> bool:
        """True if the call looks for the largest entries of a tensor."""
        return self._pair is not None and self._pair.chooses

    def followed(self) -> traced_calls.Call | None:
        """Return the call with what reaches which choice; None if unknown."""
        if self._pair is not None:
            args, kwargs = self._pair.inputs.of(SAMPLES[0])
            with contextlib.suppress(Exception):
                return traced_calls.follow(self._model, args, kwargs)
        return None

    def hold_for(self, converted: Iterable[keras.Layer]) -> bool:
        """Return True if the counts hold once these layers are in float8.

        They were taken before. A layer that has multiplied by itself then, and
        has its float8 form do it now, is counted anew.
        """
        return self._pair is not None and all(
            each.has_float8_form
            for layer in converted
            for each in self._counted.get(id(layer), ())
        )

    @property
    def multiplying(self) -> list[keras.Layer]:
        """The layers whose calls multiply with a kernel."""
        return [self._layers[key] for key in self._counted]

    def of(self, layer: keras.Layer) -> Work:
        """Return the `Work` of a layer: its parameters and multiplications."""
        own = walking.own_weights(layer)
        if id(layer) in self._unknown and not self._counted.get(id(layer)):
            return _once(layer, own)
        counted = self._counted.get(id(layer), ())
        if not counted:
            return Work(parameters=scalars(_stored(layer) or own))
        in_float8 = traced_calls.multiplies_in_float8(layer)
        parameters = _entries(layer, own, counted)
        plain = _plain_entries(layer, own, counted, parameters)
        if is_frozen(layer):
            parameters = scalars(_stored(layer)) + plain
        return Work(
            parameters=parameters,
            plain_parameters=plain,
            multiplications=sum(each.number for each in counted),
            plain_multiplications=sum(
                each.number
                for each in counted
                if not (in_float8 and each.has_float8_form)
            ),
            sizes_known=self._are_sizes_known
            and id(layer) not in self._unknown,
        )

    def of_parts(
        self, layer: keras.Layer, left: list[keras.Variable]
    ) -> tuple[Work, list[Work]]:
        """Return the `Work` of a frozen layer without some of its kernels.

        Args:
            layer: A frozen layer, in the model when it was counted.
            left: Kernels of it that are not stored.

        Returns:
            That of the layer, and that of each of these kernels.
        """
        whole = self.of(layer)
        counted = self._counted.get(id(layer), ())
        plain = [x for x in counted if not x.has_float8_form]
        parts = []
        for kernel in left:
            size = scalars([kernel])
            mine = [x for x in plain if len(left) == 1 or x.size == size]
            plain = [x for x in plain if x not in mine]
            number = sum(x.number for x in mine)
            part = Work(
                parameters=size,
                multiplications=number,
                sizes_known=whole.sizes_known,
            )
            parts.append(part)
        number = sum(each.multiplications for each in parts)
        rest = dataclasses.replace(
            whole,
            parameters=whole.parameters - whole.plain_parameters,
            plain_parameters=0,
            multiplications=whole.multiplications - number,
            plain_multiplications=whole.plain_multiplications - number,
        )
        return rest, parts


def count(model: keras.Layer, layers: Iterable[keras.Layer]) -> list[Work]:
    """Return the `Work` of each of some layers of a model, in order."""
    works = Works(model)
    return [works.of(layer) for layer in layers]


def scalars(variables: Iterable[keras.Variable]) -> int:
    """Return the total number of elements of these variables."""
    return sum(math.prod(v.shape) for v in variables)


class _Counted(NamedTuple):
    """A matmul with a kernel: its multiplications, the kernel's entries."""

    number: int
    size: int
    has_float8_form: bool


def _entries(
    layer: keras.Layer,
    own: list[keras.Variable],
    counted: Iterable[_Counted],
) -> int:
    """Return the number of entries of the kernels in a layer's matmuls."""
    mixin = isinstance(layer, Float8Mixin)
    contracted: list[Any] = layer.float8_contracted if mixin else []
    own = [v for v in own if "bias" not in v.name]
    found: dict[int, keras.Variable] = {}
    sizes = {each.size for each in counted}
    for size in sizes:
        for weights in (contracted, own):
            alike = {id(v): v for v in weights if scalars([v]) == size}
            if alike:
                found.update(alike)
                break
    return scalars(found.values()) or sum(sizes)


def _stored(layer: Any) -> list[keras.Variable]:
    """Return the kernels of a layer that are stored in float8."""
    return layer.float8_contracted if is_frozen(layer) else []


def _plain_entries(
    layer: keras.Layer,
    own: list[keras.Variable],
    counted: Iterable[_Counted],
    parameters: int,
) -> int:
    """Return the number of entries of kernels that are not in float8."""
    if not isinstance(layer, Float8Mixin) or layer.float8_policy is None:
        return 0
    if not is_frozen(layer):
        in_float8 = [x for x in counted if x.has_float8_form]
        return parameters - _entries(layer, own, in_float8)
    sizes = {x.size for x in counted if not x.has_float8_form}
    stored = set(map(id, _stored(layer)))
    others = [v for v in own if id(v) not in stored and "bias" not in v.name]
    return sum(size for v in others if (size := scalars([v])) in sizes)


class _Pair(NamedTuple):
    """The matmuls found by tracing a model with two batch sizes."""

    products: list[tuple[keras.Layer, _Counted]]
    unknown: list[keras.Layer]
    inputs: _Inputs
    chooses: bool

    @property
    def are_sizes_known(self) -> bool:
        return self.inputs.are_sizes_known


def _traced(model: keras.Layer) -> _Pair | None:
    """Count matmuls by tracing a model; None if it rejects symbolic inputs."""
    for inputs in _inputs(model):
        with contextlib.suppress(Exception):
            small, large = traced_calls.trace(model, map(inputs.of, SAMPLES))
            pairs, loops = traced_calls.paired(small, large)
            products = list(_with_kernels(pairs))
            unknown = [*small.unknown, *large.unknown, *loops]
            return _Pair(products, unknown, inputs, small.chooses)
    return None


def traced_once(model: keras.Layer) -> bool:
    """Trace a model's call with shapes only; return whether that succeeded."""
    for inputs in _inputs(model):
        with contextlib.suppress(Exception):
            traced_calls.trace(model, [inputs.of(SAMPLES[0])])
            return True
    return False


def traced_within(model: keras.Layer, within: tuple[type, ...]) -> bool:
    """Trace a model's call like `traced_once`, and follow its values.

    Args:
        model: A built model.
        within: As for `traced_calls.trace_within`.
    """
    for inputs in _inputs(model):
        with contextlib.suppress(Exception):
            traced_calls.trace_within(model, *inputs.of(SAMPLES[0]), within)
            return True
    return False


def _with_kernels(
    paired: Iterable[tuple[traced_calls.Counted, traced_calls.Counted]],
) -> Iterator[tuple[keras.Layer, _Counted]]:
    """Yield (layer, matmul) for matmuls with a kernel, per sample."""
    for one, other in paired:
        pairs = zip(one.product.sizes, other.product.sizes, strict=True)
        kernels = [before for before, after in pairs if before == after]
        number = other.product.multiplications - one.product.multiplications
        if one.entries is not None and not kernels:
            kernels = [one.entries]  # A kernel of each token is gathered.
        if len(kernels) == 1 and number:
            counted = _Counted(number, kernels[0], one.has_float8_form)
            yield one.layer, counted


@dataclasses.dataclass(frozen=True)
class _Inputs:
    """Arguments with which a model can be called, as symbolic tensors.

    Attributes:
        args: A structure with a `keras.KerasTensor` for each tensor.
        kwargs: The keyword arguments, in the same form.
        dtype: The dtype of all tensors; None for that of each tensor.
        filler: The size that replaces unknown sizes.
    """

    args: Any
    kwargs: Any
    dtype: str | None
    filler: int

    def of(self, samples: int) -> tuple[Any, Any]:
        """Return symbolic arguments for a batch of this many samples."""

        def filled(x: Any) -> Any:
            if not isinstance(x, keras.KerasTensor):
                return x
            sizes = [self.filler if n is None else n for n in x.shape[1:]]
            shape = (samples, *sizes) if x.shape else ()
            return keras.KerasTensor(shape, self.dtype or x.dtype)

        return keras.tree.map_structure(filled, (self.args, self.kwargs))

    @property
    def are_sizes_known(self) -> bool:
        """True if all sizes except the batch are known."""
        given = keras.tree.flatten((self.args, self.kwargs))
        return not any(
            None in x.shape[1:]
            for x in given
            if isinstance(x, keras.KerasTensor)
        )


# In place of a size that is not known. More where the model refuses less:
# layers shorten images, and sound even more.
_FILLERS = (1, 32, 1024)


def _inputs(model: keras.Layer) -> Iterator[_Inputs]:
    """Yield guesses of a model's call arguments, the likeliest first."""
    if getattr(model, "inputs", None):
        structure = model.inputs
        if isinstance(model, keras.Sequential):
            structure = model.inputs[0]
        elif hasattr(model, "input"):
            structure = model.input
        args: Any = (structure,)
        kwargs: Any = {}
        dtypes: tuple[str | None, ...] = (None,)
    else:
        found = _recorded(model)
        if found is None:
            return
        args, kwargs = found
        # Shapes are recorded without dtypes: activations, or indices.
        dtypes = (None, "int32")
    if "training" in inspect.signature(model.call).parameters:
        kwargs = {**kwargs, "training": False}
    for filler in _FILLERS:
        for dtype in dtypes:
            inputs = _Inputs(args, kwargs, dtype, filler)
            yield inputs
        if inputs.are_sizes_known:
            return


def _recorded(layer: keras.Layer) -> tuple[Any, Any] | None:
    """Return call arguments of the shapes on which a layer was built."""
    config = keras.Layer.get_build_config(layer) or {}
    shapes = config.get("shapes_dict")
    if shapes is None:
        shape = config.get("input_shape")
        return None if shape is None else ((_tensors(layer, shape),), {})
    named = {
        name.removesuffix("_shape"): _tensors(layer, shape)
        for name, shape in shapes.items()
        # The path is added by `BuiltUnderSavedPath`.
        if shape is not None and name != "path"
    }
    if list(named) == ["input"]:
        return (named["input"],), {}
    return (), named


def _tensors(layer: keras.Layer, shapes: Any) -> Any:
    """Replace each shape in nested shapes by a symbolic tensor.

    Raises:
        TypeError: If there is something else than shapes.
    """
    if not isinstance(shapes, (dict, list, tuple)):
        raise TypeError(f"{shapes!r} is no shape")
    if isinstance(shapes, dict):
        return {name: _tensors(layer, each) for name, each in shapes.items()}
    if all(size is None or isinstance(size, int) for size in shapes):
        return keras.KerasTensor(tuple(shapes), layer.compute_dtype)
    return [_tensors(layer, each) for each in shapes]


# What is said of a layer whose calls are not known: by its names and shapes.

DEPTHWISE = "depthwise_kernel"
"""A kernel that is multiplied in the source policy in float8 layers too."""

# In names of weights that are looked up or added, and not multiplied with.
_NO_KERNEL = ("bias", "embed", "pos_", "position", "table", "token")

# In names of weights that are multiplied with, though they do not train: most
# that do not are caches, indices and statistics.
_FIXED_KERNEL = ("kernel", "filter", "matrix")


def _once(layer: keras.Layer, own: list[keras.Variable]) -> Work:
    """Return the `Work` of one call on the shape that a layer was built on."""
    kernels = _kernels(layer, own)
    if not kernels:
        return Work(parameters=scalars(_stored(layer) or own))
    entries = scalars(kernels)
    found = None
    with contextlib.suppress(Exception):
        _, *sizes = _first_shape(keras.Layer.get_build_config(layer))
        shape = (1, *(1 if size is None else size for size in sizes))
        found = traced_calls.of_call(layer, shape)
    number = sum(each.product.multiplications for each in found or ())
    in_floats = is_frozen(layer) and not traced_calls.multiplies_in_float8(
        layer
    )
    return Work(
        parameters=entries,
        multiplications=number or entries,
        plain_multiplications=(number or entries) if in_floats else 0,
        sizes_known=False,
        plain_parameters=entries - scalars(_stored(layer))
        if is_frozen(layer)
        else 0,
    )


def _kernels(
    layer: keras.Layer, own: list[keras.Variable]
) -> list[keras.Variable]:
    """Return the weights with which the call of a layer multiplies."""
    beside = [v for v in own if v.name == DEPTHWISE]
    if isinstance(layer, Float8Mixin) and layer.float8_contracted:
        contracted = layer.float8_contracted
        return [v for v in contracted if not _looks_up(layer, v)] + beside
    # By the stock class, also where a subclass computes something else.
    form = drop_in_of(type(layer))
    if form is not None and issubclass(form, Float8Mixin):
        return [v for v in own if form.is_float8_kernel(layer, v)] + beside
    if traced_calls.keras_class(layer).__name__ in traced_calls.OTHERS:
        return [v for v in own if _looks_like_kernel(layer, v)]
    return [v for v in own if v.name.endswith("kernel")]


def _looks_up(layer: keras.Layer, kernel: keras.Variable) -> bool:
    """Return True if a frozen layer only looks up rows of this kernel."""
    stored = layer.is_stored_kernel(layer, kernel)
    return stored and not layer.is_float8_kernel(layer, kernel)


def _looks_like_kernel(layer: keras.Layer, variable: keras.Variable) -> bool:
    axes = [size for size in variable.shape if size > 1]
    if len(axes) < 2 or not keras.backend.is_float_dtype(variable.dtype):
        return False
    if layer.trainable and not variable.trainable:
        return any(word in variable.name for word in _FIXED_KERNEL)
    return not any(word in variable.name for word in _NO_KERNEL)


def _first_shape(shapes: Any) -> Any:
    """Return the first shape in nested lists and dicts of shapes."""
    if isinstance(shapes, dict):
        shapes = list(shapes.values())
    if not isinstance(shapes, (list, tuple)) or not shapes:
        return None
    if all(size is None or isinstance(size, int) for size in shapes):
        return shapes
    return _first_shape(shapes[0])
