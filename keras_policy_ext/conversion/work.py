"""How much each layer of a model multiplies.

Counted are the multiplications (each with its addition) of one sample, that
is of one row of the batch, in the products with kernels. Products of
activations, such as the scores of an attention, are not among them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_policy_ext._keras import walking
from keras_policy_ext.kernels import einsum
from keras_policy_ext.layers.drop_in import drop_in_of
from keras_policy_ext.layers.mixin import Float8Mixin

Shape = Sequence[int | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What a layer multiplies with, and how often.

    Attributes:
        parameters: Entries of the kernels that it multiplies with; if there
            are none, of its own weights.
        multiplications: Multiplications, each with its addition, in the
            products of one sample with them; 0 without a kernel.
        sizes_known: Whether all sizes of the inputs were known; one that is
            not counts as 1.
    """

    parameters: int = 0
    multiplications: int = 0
    sizes_known: bool = True


class _Rows(NamedTuple):
    """How often a kernel is multiplied with for one sample."""

    number: int = 1
    known: bool = True

    def times(self, sizes: Iterable[int | None]) -> _Rows:
        """Rows times all sizes; a size of None counts as 1."""
        sizes = list(sizes)
        number = math.prod(1 if size is None else size for size in sizes)
        return _Rows(self.number * number, self.known and None not in sizes)


class _Place(NamedTuple):
    """A layer in a model: its calls for one sample, and what it is built on."""

    calls: _Rows
    shape: Shape | None


_UNKNOWN = _Rows(1, False)

# One product for each position of the outputs, or of the inputs.
_BY_OUTPUTS = frozenset(
    f"{kind}Conv{rank}D"
    for kind in ("", "Depthwise", "Separable")
    for rank in (1, 2, 3)
)
_BY_INPUTS = frozenset(f"Conv{rank}DTranspose" for rank in (1, 2, 3))

# Classes of Keras that hold the arithmetic of another library.
_FOREIGN = frozenset(
    ("TorchModuleWrapper", "JaxLayer", "FlaxLayer", "TFSMLayer")
)

# Classes of Keras whose arithmetic is that of what derives from them.
_BASES = frozenset(
    ("Layer", "Model", "Functional", "Sequential", "RNN", "Wrapper")
)

_BESIDE = "depthwise_kernel"
"""The kernel of a layer that is multiplied in its source policy."""

# In names of weights that are looked up or added, and not multiplied with.
_NO_KERNEL = ("bias", "embed", "pos_", "position", "table", "token")

# In names of weights that are multiplied with, though they do not train: most
# that do not are caches, indices and statistics.
_FIXED_KERNEL = ("kernel", "filter", "matrix")


def count(model: keras.Layer, layers: Iterable[keras.Layer]) -> list[Work]:
    """Count the work of layers in a model; nothing is called.

    A layer in a recurrent one or in `TimeDistributed` is counted for each time
    step, and one that a Functional model uses several times for each use.
    """
    places = _places(model)
    return [_work(layer, places[id(layer)]) for layer in layers]


def scalars(variables: Iterable[keras.Variable]) -> int:
    """The number of entries of all these variables."""
    return sum(int(np.prod(v.shape)) for v in variables)


def _work(layer: keras.Layer, place: _Place) -> Work:
    own = walking.own_weights(layer)
    kernels = _kernels(layer, own)
    if not kernels:
        return Work(parameters=scalars(own))
    parameters, once = scalars(kernels), _rows(layer, place.shape)
    rows = place.calls.times([once.number])
    return Work(
        parameters=parameters,
        multiplications=parameters * rows.number,
        sizes_known=rows.known and once.known,
    )


def _places(model: keras.Layer) -> dict[int, _Place]:
    """Each layer in a model, by its id."""
    found: dict[int, _Place] = {}
    waiting = [(model, _Place(_Rows(), _input_shape(model)))]
    while waiting:
        layer, place = waiting.pop()
        if id(layer) in found:
            continue
        found[id(layer)] = place
        inside = _inside(layer, place)
        uses = walking.uses_in_graph(layer)
        for child in walking.layers_directly_in(layer):
            # One that looks up and projects is used twice and multiplies once.
            tied = isinstance(child, keras.layers.ReversibleEmbedding)
            calls = 1 if tied else uses.get(id(child), 1)
            shape = _filled(_input_shape(child), inside.shape)
            waiting.append((child, _Place(inside.calls.times([calls]), shape)))
    return found


def _inside(layer: keras.Layer, place: _Place) -> _Place:
    """What the layers in a layer see: in some, each time step for itself."""
    if not isinstance(layer, (keras.layers.RNN, keras.layers.TimeDistributed)):
        return place
    shape = place.shape
    if shape is None or len(shape) < 2:
        return _Place(place.calls.times([None]), None)
    steps = place.calls.times([shape[1]])
    return _Place(steps, [*shape[:1], *shape[2:]])


def _filled(shape: Shape | None, outer: Shape | None) -> Shape | None:
    """A shape with sizes of the layer around it where it has none itself.

    Layers that build others write None for axes that they do not care about,
    as `MultiHeadAttention` does for its output projection.
    """
    if shape is None or outer is None:
        return shape
    known = [*outer[:-1], *(None for _ in shape)]
    return [
        other if size is None else size
        for size, other in zip(shape, known, strict=False)
    ]


def _kernels(
    layer: keras.Layer, own: list[keras.Variable]
) -> list[keras.Variable]:
    """The weights that a layer multiplies with, in float8 or not."""
    beside = [v for v in own if v.name == _BESIDE]
    if isinstance(layer, Float8Mixin) and layer.float8_contracted:
        contracted = layer.float8_contracted
        return [v for v in contracted if not _looks_up(layer, v)] + beside
    # By the stock class, also where a subclass computes something else.
    form = drop_in_of(type(layer))
    if form is not None and issubclass(form, Float8Mixin):
        return [v for v in own if form.is_float8_kernel(layer, v)] + beside
    if _keras_class(layer).__name__ in _BASES | _FOREIGN:
        return [v for v in own if _looks_like_kernel(layer, v)]
    return [v for v in own if v.name.endswith("kernel")]


def _looks_up(layer: Any, kernel: keras.Variable) -> bool:
    """Whether a kernel is stored in float8, and not multiplied with."""
    stored = layer.is_stored_kernel(layer, kernel)
    return stored and not layer.is_float8_kernel(layer, kernel)


def _keras_class(layer: keras.Layer) -> type[keras.Layer]:
    """The nearest class of Keras itself."""
    return next(
        base
        for base in type(layer).__mro__
        if base.__module__.partition(".")[0] == "keras"
    )


def _looks_like_kernel(layer: keras.Layer, variable: keras.Variable) -> bool:
    axes = [size for size in variable.shape if size > 1]
    if len(axes) < 2 or not keras.backend.is_float_dtype(variable.dtype):
        return False
    if layer.trainable and not variable.trainable:
        return any(word in variable.name for word in _FIXED_KERNEL)
    return not any(word in variable.name for word in _NO_KERNEL)


def _rows(layer: keras.Layer, shape: Shape | None) -> _Rows:
    """How often a layer multiplies with its kernels in one call."""
    if shape is None or _keras_class(layer).__name__ in _FOREIGN:
        return _UNKNOWN
    try:
        return _Rows().times(_row_sizes(layer, shape))
    except (AttributeError, TypeError, ValueError):
        # A subclass with other attributes than the stock layer computes
        # something else.
        return _UNKNOWN


def _row_sizes(layer: keras.Layer, shape: Shape) -> Iterable[int | None]:
    stock = _keras_class(layer)
    name = stock.__name__
    if name == "EinsumDense":
        return _einsum_rows(layer, shape)
    if name in _BY_OUTPUTS:
        return _positions(layer, stock.compute_output_shape(layer, shape))
    if name in _BY_INPUTS:
        return _positions(layer, shape)
    if name == "ConvLSTMCell":
        outputs, _ = stock.compute_output_shape(layer, shape)
        return _positions(layer, outputs)
    if name == "ReversibleEmbedding":
        # Built on what it projects, or on the indices that it looks up.
        projects = len(shape) > 2 and shape[-1] == layer.output_dim
        return shape[1:-1] if projects else shape[1:]
    return shape[1:-1]


def _einsum_rows(layer: keras.Layer, shape: Shape) -> list[int | None]:
    """Sizes of what the inputs and the outputs have, without the batch."""
    equation = einsum.explicit(
        layer.equation, len(shape), len(layer.kernel.shape)
    )
    first, second, out = einsum.split(equation)
    return [
        size
        for letter, size in zip(first[1:], shape[1:], strict=True)
        if letter in out and letter not in second
    ]


def _positions(layer: keras.Layer, shape: Shape) -> Shape:
    return shape[1:-1] if layer.data_format == "channels_last" else shape[2:]


def _input_shape(layer: keras.Layer) -> Shape | None:
    """The shape of the first argument when the layer was built, if known."""
    config = keras.Layer.get_build_config(layer) or {}
    shapes = config.get("shapes_dict", config)
    return _first_shape(list(shapes.values()))


def _first_shape(shapes: Any) -> Shape | None:
    """The first shape in a structure of them."""
    if isinstance(shapes, dict):
        shapes = list(shapes.values())
    if not isinstance(shapes, (list, tuple)) or not shapes:
        return None
    if all(size is None or isinstance(size, int) for size in shapes):
        return shapes
    return _first_shape(shapes[0])
