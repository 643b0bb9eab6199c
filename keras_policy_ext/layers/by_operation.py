"""Layers of a class without a float8 form, whose products are recognised.

Such a layer multiplies weights by `keras.ops.matmul`, `einsum`, `dot` or
`tensordot`: its own, or those of another layer. `convert` records once which
weight is an operand of which product. From then on these products are computed
in float8, and the rest of the layer's `call` runs unchanged. The layer that
multiplies holds the state, also of a weight of another layer.

A product is recognised by its operand: the variable itself, or a tensor that
Keras's operations made of the variable by casting it or moving its elements.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import math
import operator
import string
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_policy_ext import backends
from keras_policy_ext._keras import products, walking
from keras_policy_ext._keras.products import Args, Kwargs, Operation
from keras_policy_ext._types import Tensor
from keras_policy_ext.contractions import (
    COMPUTE_DTYPES,
    Conv,
    Einsum,
    bank_axis,
    equations,
)
from keras_policy_ext.files.entries import ATTENTION
from keras_policy_ext.layers import attention_products
from keras_policy_ext.layers.attention_products import Attention
from keras_policy_ext.layers.drop_in import new_form
from keras_policy_ext.layers.mixin import Float8Mixin
from keras_policy_ext.layers.operands import (
    MovedKernel,
    Shape,
    TensorNotes,
    cached,
    contraction_of,
)
from keras_policy_ext.layers.stored_weights import StoredVariable
from keras_policy_ext.stored_kernels import Axes

CONVOLUTION = "convolution"
"""What a recorded convolution has in the place of an equation."""


@dataclasses.dataclass(frozen=True)
class RecordedProduct:
    """A product of an activation with a weight."""

    path: str  # The path of the weight.
    # An explicit einsum equation; the second operand is the weight, as it was
    # moved. `CONVOLUTION` for a convolution.
    equation: str
    is_moved: bool  # Whether the operand is a moved copy of the weight.
    # Refers to the layer that has the weight; None: it is that of the product.
    owner: weakref.ref[keras.Layer] | None = None

    @property
    def foreign(self) -> tuple[keras.Layer, keras.Variable] | None:
        """The other layer and its weight; None if it is gone, or frozen."""
        owner = None if self.owner is None else self.owner()
        own = [] if owner is None else walking.own_weights(owner)
        for weight in own:
            is_float = not isinstance(weight, StoredVariable)
            if is_float and weight.path == self.path:
                return owner, weight
        return None


@dataclasses.dataclass(frozen=True)
class Recorded:
    """The products and choices found in the traced call of a layer."""

    # Its products with weights that can be computed in float8.
    products: tuple[RecordedProduct, ...] = ()
    # The name of an operation that it calls with a function; "" for none.
    branch: str = ""
    # Whether it calls a top-k, an argmax, an argmin or a sort.
    chooses: bool = False
    # Whether the weights are a table that other layers look up, or are of a
    # layer elsewhere, so that `convert` has to be asked.
    is_tied: bool = False
    # Layers with whose weights it multiplies, but that do so in float8 too.
    refused: tuple[weakref.ref[keras.Layer], ...] = ()
    # Its products of two activations.
    attention: Attention = dataclasses.field(default_factory=Attention)


_RECORDED: weakref.WeakKeyDictionary[Any, Recorded] = (
    weakref.WeakKeyDictionary()
)

_FORMS: dict[type, type] = {}  # The form of each class of layers.

# Threads that convert layers of one class at a time get one form.
_MAKING_A_FORM = threading.Lock()


def remember(layer: keras.Layer, record: Recorded) -> None:
    """Store what was recorded of a layer."""
    _RECORDED[layer] = record


def record_of(layer: keras.Layer) -> Recorded | None:
    """Return what was recorded of a layer; None before it was recorded."""
    return _RECORDED.get(layer)


def products_of(layer: keras.Layer) -> tuple[RecordedProduct, ...]:
    """Return the products of a layer that can be computed in float8."""
    record = _RECORDED.get(layer)
    # What a branch runs may be left out of a trace, with its products.
    if record is None or record.branch:
        return ()
    return tuple(
        each
        for each in record.products
        if each.owner is None or each.foreign is not None
    )


def can_attend(layer: keras.Layer) -> bool:
    """Return True if products of two activations can be in float8."""
    record = _RECORDED.get(layer)
    if record is None or record.branch:
        return False
    return record.attention.is_recognised


def _own_products(layer: keras.Layer) -> list[RecordedProduct]:
    return [each for each in products_of(layer) if each.owner is None]


def is_own(layer: keras.Layer) -> bool:
    """Return True if a layer multiplies with a weight of its own."""
    return bool(_own_products(layer))


def foreign_kernels(
    layer: keras.Layer,
) -> list[tuple[keras.Layer, keras.Variable]]:
    """Return (owner, weight) of each foreign weight in a float8 product."""
    foreign = (each.foreign for each in products_of(layer))
    by_weight = {id(pair[1]): pair for pair in foreign if pair is not None}
    return list(by_weight.values())


def form_by_operation(layer: keras.Layer, attention: bool = True) -> Any:
    """Return the float8 form of a layer with recorded products, or None.

    The form is a subclass of the layer's class. Files name that class. With
    `attention`, products of two activations count too.
    """
    cls = type(layer)
    if not (products_of(layer) or (attention and can_attend(layer))):
        return None
    with _MAKING_A_FORM:
        if cls not in _FORMS:
            form = _new_form(cls)
            products.follow(form)
            _FORMS[cls] = form
        return _FORMS[cls]


def _new_form(cls: type[keras.Layer]) -> type:
    """Return the subclass of a class whose calls follow products."""

    @functools.wraps(cls.call)
    def call(self: keras.Layer, *args: Any, **kwargs: Any) -> Any:
        """Call the layer, and number its products of activations."""
        # Keras opens this scope, except where PyTorch recomputes a call.
        scope = keras.name_scope(self.name, caller=self)
        with scope, attention_products.numbering(self), _ORIGINS.of_call():
            return cls.call(self, *args, **kwargs)

    def from_config(form: type, config: dict[str, Any]) -> Any:
        # Products were recorded of one layer: its copies have the class `cls`.
        return cls.from_config(config)

    return new_form(
        cls, ByOperation, call=call, from_config=classmethod(from_config)
    )


class ByOperation(Float8Mixin, keras.layers.Layer):
    """The base class of float8 forms whose products are recognised."""

    float8_kernels = ()
    float8_replaces = ()

    def choose_attention(self, attention: str | None) -> None:
        """Set `attention`, as for the attention layers of the package.

        Raises:
            ValueError: If it is `"float8"` and no product of two activations
                was recognised.
        """
        record = record_of(self)
        recorded = None if record is None else record.attention
        if attention is not None and not can_attend(self):
            raise ValueError(
                "in its call no product of two activations was recognised "
                "whose result reaches a softmax, or with the result of one"
            )
        self.float8_controller.attention = recorded if attention else None

    def texts_for_file(self) -> dict[str, str]:
        """Return the strings to save with this layer, such as a policy."""
        texts = super().texts_for_file()
        attends = self.float8_controller.attention is not None
        return {**texts, ATTENTION: "float8"} if attends else texts

    @classmethod
    def is_float8_kernel(
        cls, layer: keras.Layer, variable: keras.Variable
    ) -> bool:
        """Return True if a recorded product of the layer has this weight."""
        return any(x.path == variable.path for x in _own_products(layer))

    @classmethod
    def is_stored_kernel(
        cls, layer: keras.Layer, variable: keras.Variable
    ) -> bool:
        """Return True if all products read this weight in one way, unmoved."""
        own = [x for x in _own_products(layer) if x.path == variable.path]
        moved = any(x.is_moved for x in own)
        return len({x.equation for x in own}) == 1 and not moved

    @classmethod
    def float8_axes(cls, layer: keras.Layer, kernel: keras.Variable) -> Axes:
        """Return a kernel's axes: those that a product sums, and the others."""
        for each in products_of(layer):
            if each.path == kernel.path and not each.is_moved:
                if each.equation == CONVOLUTION:
                    *others, channels = range(len(kernel.shape))
                    return Axes(summed=tuple(others), free=(channels,))
                _, second, out = equations.split(each.equation)
                axes = range(len(second))
                summed = tuple(i for i in axes if second[i] not in out)
                free = tuple(i for i in axes if i not in summed)
                return Axes(summed=summed, free=free)
        return super().float8_axes(layer, kernel)

    @classmethod
    def float8_bank_axis(
        cls, layer: keras.Layer, kernel: keras.Variable
    ) -> int | None:
        """Return the axis of a kernel that all its products take for a bank."""
        axes = {
            None if each.is_moved else _bank_axis(each.equation)
            for each in products_of(layer)
            if each.path == kernel.path
        }
        return axes.pop() if len(axes) == 1 else None


@dataclasses.dataclass(frozen=True)
class _Origin:
    """The variable that a tensor was made of, and how it was moved."""

    # Weak: the tensor may be that of the variable, which it would keep alive.
    reference: weakref.ref[keras.Variable]
    # None if its elements are in their places.
    moved: MovedKernel | None = None

    @property
    def variable(self) -> Any:
        """The variable; None once it is gone."""
        return self.reference()


_ORIGINS: TensorNotes[_Origin | None] = TensorNotes()
"""The origin of each tensor that a recognised operation made of a variable."""


def _origin_of(x: object) -> _Origin | None:
    """Return what an operand was made of; None if of no variable."""
    if isinstance(x, keras.Variable):
        return _Origin(weakref.ref(x))
    origin = _ORIGINS.get(x)
    return None if origin is None or origin.variable is None else origin


def forget_weights(outputs: Any) -> None:
    """Let a layer's outputs be activations, also if it made them of a weight.

    An embedding makes its outputs of its table, for instance.
    """
    for x in keras.tree.flatten(outputs):
        if _ORIGINS.get(x) is not None:
            _ORIGINS.set(x, None)


# The handlers of operations. Each gets the layer in whose call it is, and the
# name of the operation, whether it needs them or not.


def _move(
    _layer: keras.Layer, stock: Operation, name: str, args: Args, kwargs: Kwargs
) -> Any:
    """Run an operation that moves or casts; follow the operand through it."""
    result = stock(*args, **kwargs)
    if not args or result is args[0]:
        return result
    attention_products.pass_on(args[:1], result)
    origin = _origin_of(args[0])
    if origin is None or isinstance(result, keras.Variable):
        return result
    if name in products.CASTS:
        _ORIGINS.set(result, origin)
        return result
    earlier, rest = origin.moved, args[1:]
    # `__getitem__` of a variable takes no tensor, which `move` will get.
    operation = operator.getitem if name == products.ENTRIES else stock

    def move(x: Tensor) -> Any:
        moved = earlier.move(x) if earlier else x
        return operation(moved, *rest, **kwargs)

    if isinstance(result, (list, tuple)):  # Of `split`.
        for n, part in enumerate(result):
            moved = MovedKernel(tuple(part.shape), _part(move, n))
            _ORIGINS.set(part, _Origin(origin.reference, moved))
        return result
    moved = MovedKernel(tuple(result.shape), move)
    _ORIGINS.set(result, _Origin(origin.reference, moved))
    return result


def _part(move: Callable[[Tensor], Any], number: int) -> Any:
    """Return a function that moves a tensor, and takes one of the results."""
    return lambda x: move(x)[number]


def _product(
    layer: keras.Layer, stock: Operation, name: str, args: Args, kwargs: Kwargs
) -> Any:
    """Run a product: in float8 if an operand is a kernel of the layer."""
    product = _product_with_weight(name, args, kwargs)
    if product is None:
        return _multiply_activations(layer, stock, name, args, kwargs)
    compute = functools.partial(stock, *args, **kwargs)
    return _multiply(layer, compute, *product)


def _convolve(
    layer: keras.Layer, stock: Operation, _name: str, args: Args, kwargs: Kwargs
) -> Any:
    """Run a convolution: in float8 if its kernel is a kernel of the layer."""
    compute = functools.partial(stock, *args, **kwargs)
    product = _convolution_with_weight(args, kwargs)
    if product is None:
        return compute()
    return _multiply(layer, compute, *product)


def _multiply(
    layer: keras.Layer,
    stock: Callable[[], Tensor],
    inputs: Tensor,
    operand: Tensor,
    origin: _Origin,
    contraction: Einsum | Conv,
) -> Tensor:
    """Multiply inputs and a kernel in a layer's call; note it if recording."""
    # `stock` computes the product as Keras does. `operand` is the kernel as the
    # product reads it, and `origin` its variable.
    note, kernel = products.recorder(), origin.variable
    if note is not None:  # While `convert` records products, none is computed.
        equation = CONVOLUTION
        if isinstance(contraction, Einsum):
            equation = contraction.equation
        note(layer, Noted(kernel, equation, is_moved=origin.moved is not None))
        return stock()
    count = None if backends.current.is_compiling() else _COUNT.get()
    if count is not None and isinstance(contraction, Einsum):
        count(contraction.equation, tuple(inputs.shape), operand.shape, kernel)
    dtype = keras.backend.result_type(*map(_dtype_of, (inputs, operand)))
    # Codes have scales for the kernel's own axes: if moved, it is dequantized.
    is_moved_code = origin.moved and isinstance(kernel, StoredVariable)
    if (
        getattr(layer, "float8_policy", None) is None
        or is_moved_code
        or not layer.float8_controller.has_kernel(kernel)
        or dtype not in COMPUTE_DTYPES
    ):
        return stock()
    inputs = ops.convert_to_tensor(inputs)
    if isinstance(contraction, Einsum):
        contraction, inputs = _split_by_matrix(
            layer, kernel, contraction, inputs, tuple(operand.shape)
        )
    training = None  # As in the call of the layer.
    with attention_products.leaving_out(layer):
        return layer.float8_controller.contract(
            contraction, inputs, kernel, training, dtype, moved=origin.moved
        )


def _split_by_matrix(
    layer: keras.Layer,
    kernel: keras.Variable,
    contraction: Einsum,
    inputs: Tensor,
    kernel_shape: tuple[int, ...],
) -> tuple[Einsum, Any]:
    """Return the einsum and its inputs; with a bank, one product per matrix."""
    # But only where each matrix has its own scales, or a tile would cover two.
    # Not for a frozen kernel (`trains` is False): its scales are stored.
    recipe = layer.float8_policy.recipe
    if not (recipe.trains and _is_bank(contraction)):
        return contraction, inputs
    controller = layer.float8_controller
    if not controller.scales_each_matrix(kernel) and not _crosses_matrices(
        contraction, kernel_shape, controller.tiles_along_columns
    ):
        return contraction, inputs
    first, second, out = equations.split(contraction.equation)
    # All matrices multiply the same inputs: each one gets a copy.
    inputs = ops.repeat(ops.expand_dims(inputs, 0), kernel_shape[0], axis=0)
    return Einsum(f"{second[0]}{first},{second}->{out}"), inputs


def _multiply_activations(
    layer: keras.Layer, stock: Operation, name: str, args: Args, kwargs: Kwargs
) -> Any:
    """Run a product of two activations: in float8 if it is one of attention.

    While products are recorded, each is.
    """
    operation = _operation(name, args, kwargs)
    is_wanted = products.recorder() or attention_products.attends(layer)
    if operation is None or not is_wanted:
        return stock(*args, **kwargs)
    equation, operands = operation
    ranks = tuple(len(getattr(x, "shape", ())) for x in operands)
    swapped = False  # The second operand is in the place of a kernel.
    explicit = _explicit(name, equation, ranks, swapped)
    are_float = map(keras.backend.is_float_dtype, map(_dtype_of, operands))
    if explicit is None or any(_origin_of(x) for x in operands):
        return stock(*args, **kwargs)  # An origin: it comes from a weight.
    if not (all(ranks) and all(are_float)):
        return stock(*args, **kwargs)
    try:
        contraction_of(explicit, *(tuple(x.shape) for x in operands))
    except ValueError:  # Sizes of 1 that the operation broadcasts.
        return stock(*args, **kwargs)
    compute = functools.partial(stock, *args, **kwargs)
    return attention_products.multiply(layer, compute, explicit, operands)


@cached
def _is_bank(contraction: Einsum) -> bool:
    """Return True if the kernel is a bank, and the inputs are of no matrix."""
    # A bank has three axes or more. The first one, the number of the matrix,
    # is an axis of the outputs. The columns of all matrices are one axis.
    first, second, out = equations.split(contraction.equation)
    return len(second) > 2 and second[0] not in first and second[0] in out


@cached
def _crosses_matrices(
    contraction: Einsum, shape: tuple[int, ...], sizes: tuple[int, ...]
) -> bool:
    """Return True if a tile would lie in two matrices of a bank.

    Args:
        contraction: The product with the bank.
        shape: The shape of the bank.
        sizes: The sizes of tiles along the columns of the kernel.
    """
    # In a matmul the columns of all matrices are one axis, in their order.
    first, second, _ = equations.split(contraction.equation)
    free = zip(second[1:], shape[1:], strict=True)
    # A list: torch.compile would end the graph at a generator (torch 2.13).
    columns = math.prod([n for c, n in free if c not in first])  # Of a matrix.
    return any(columns % size for size in sizes)


def _bank_axis(equation: str) -> int | None:
    """Return the axis of a kernel with the number of its matrix, or None."""
    if equation == CONVOLUTION:
        return None
    if _is_bank(Einsum(equation)):
        return 0
    return bank_axis(equation)


def _product_with_weight(
    name: str, args: Args, kwargs: Kwargs
) -> tuple[Any, Any, _Origin, Einsum] | None:
    """Return (inputs, kernel, its origin, einsum) of a product, or None."""
    operation = _operation(name, args, kwargs)
    if operation is None:
        return None
    equation, operands = operation
    origins = [_origin_of(x) for x in operands]
    if sum(each is not None for each in origins) != 1:
        return None  # A product of two activations, or of two weights.
    first, second = operands
    if any(len(getattr(x, "shape", ())) == 0 for x in operands):
        return None
    ranks = len(first.shape), len(second.shape)
    explicit = _explicit(name, equation, ranks, origins[1] is None)
    if explicit is None:
        return None  # No einsum equation says what the operation computes.
    if origins[0] is not None:
        first, second = second, first
    if not keras.backend.is_float_dtype(_dtype_of(first)):
        return None
    shapes = tuple(first.shape), tuple(second.shape)
    broadcast, explicit = _without_broadcast(explicit, *shapes)
    if broadcast:
        first = ops.squeeze(first, axis=broadcast)
    try:
        contraction = contraction_of(explicit, tuple(first.shape), shapes[1])
    except ValueError:  # The kernel has sizes of 1 that are broadcast.
        return None
    origin: Any = origins[0] or origins[1]
    return first, second, origin, contraction


@cached
def _without_broadcast(
    equation: str, inputs_shape: Shape, kernel_shape: Shape
) -> tuple[tuple[int, ...], str]:
    """Return axes that the inputs only broadcast, and the equation without."""
    # Such as an axis of experts that all multiply the same inputs.
    first, second, out = equations.split(equation)
    of_kernel = zip(second, kernel_shape, strict=True)
    sizes = {letter: size for letter, size in of_kernel if letter in out}
    of_inputs = enumerate(zip(first, inputs_shape, strict=True))
    axes = tuple(
        axis
        for axis, (letter, size) in of_inputs
        if size == 1 and sizes.get(letter, 1) not in (1, None)
    )
    kept = "".join(c for axis, c in enumerate(first) if axis not in axes)
    return axes, f"{kept},{second}->{out}"


def _convolution_with_weight(
    args: Args, kwargs: Kwargs
) -> tuple[Any, Any, _Origin, Conv] | None:
    """Return (inputs, kernel, its origin, convolution) of a call, or None."""
    names = "inputs", "kernel", "strides", "padding", "data_format"
    given = dict(zip((*names, "dilation_rate"), args, strict=False))
    given.update(kwargs)
    inputs, kernel = given.get("inputs"), given.get("kernel")
    origin = _origin_of(kernel)
    if origin is None or _origin_of(inputs) is not None:
        return None
    rank = len(getattr(kernel, "shape", ())) - 2  # Without both channels.
    is_float = keras.backend.is_float_dtype(_dtype_of(inputs))
    if not (1 <= rank <= 3 and is_float):
        return None
    data_format = given.get("data_format") or keras.config.image_data_format()
    contraction = Conv(
        _per_axis(given.get("strides", 1), rank),
        str(given.get("padding", "valid")).lower(),
        _per_axis(given.get("dilation_rate", 1), rank),
        data_format,
    )
    return inputs, kernel, origin, contraction


def _per_axis(size: int | Sequence[int], rank: int) -> tuple[int, ...]:
    """Return a size for each of `rank` spatial axes, from one or several."""
    return (size,) * rank if isinstance(size, int) else tuple(size)


@cached
def _explicit(
    name: str, equation: str | None, ranks: tuple[int, ...], swapped: bool
) -> str | None:
    """Return the explicit equation of a product, the kernel second, or None."""
    # `ranks` are those of its operands as Keras has them; if they are to be
    # `swapped`, the first is the kernel.
    try:
        if equation is None:
            equation = _equation(name, *ranks)
        explicit = equations.explicit(equation, *ranks)
        inputs, kernel, out = equations.split(explicit)
    except ValueError:  # Not a product of two operands, such as a diagonal.
        return None
    if swapped:
        inputs, kernel = kernel, inputs
    # Not if an axis of the kernel is summed alone: the sums are quantized then,
    # and the amax in the state is that of the kernel.
    is_summed_alone = set(kernel) - set(inputs + out)
    return None if is_summed_alone else f"{inputs},{kernel}->{out}"


def _dtype_of(x: object) -> str:
    """Return the name of the dtype of an operand, as the layer reads it."""
    return keras.backend.standardize_dtype(getattr(x, "dtype", "int32"))


def _operation(
    name: str, args: Args, kwargs: Kwargs
) -> tuple[str | None, tuple[Any, Any]] | None:
    """Return (equation, operands) of a product; None for other calls."""
    # The equation is None if it follows from the ranks of the operands.
    if name == "einsum":
        if len(args) != 3 or kwargs or not isinstance(args[0], str):
            return None
        equation, *operands = args
        return (equation, tuple(operands)) if "->" in equation else None
    given = (*args, *(kwargs[k] for k in ("x1", "x2") if k in kwargs))
    if name != "tensordot":
        return (None, given) if len(given) == 2 else None
    if len(given) < 2:
        return None
    first, second, *axes = given
    summed = axes[0] if axes else kwargs.get("axes", 2)
    equation = _of_axes(summed, len(first.shape), len(second.shape))
    return None if equation is None else (equation, (first, second))


def _equation(name: str, first: int, second: int) -> str:
    """Return the equation of `matmul` or `dot`, by ranks; raise for others."""
    # For a `dot` with a second operand of more than two axes backends differ.
    if min(first, second) < 2 or (name == "dot" and second > 2):
        raise ValueError("no such product")
    if name == "matmul":
        return "...xy,...yz->...xz" if second > 2 else "...y,yz->...z"
    return "...y,yz->...z"


def _of_axes(axes: Any, first: int, second: int) -> str | None:
    """Return a tensordot's equation by its `axes` and the ranks, or None."""
    if isinstance(axes, int):
        axes = [list(range(first - axes, first)), list(range(axes))]
    of_both = [[x] if isinstance(x, int) else list(x) for x in axes]
    if len(of_both) != 2:
        return None
    of_first, of_second = of_both  # The axes of each operand that are summed.
    if len(of_first) != len(of_second) or not of_first:
        return None
    a = list(string.ascii_lowercase[:first])
    b = list(string.ascii_uppercase[:second])
    for axis_of_a, axis_of_b in zip(of_first, of_second, strict=True):
        b[axis_of_b] = a[axis_of_a]
    summed = {a[axis] for axis in of_first}
    out = [c for c in (*a, *b) if c not in summed]
    return f"{''.join(a)},{''.join(b)}->{''.join(out)}"


class Noted(NamedTuple):
    """A traced product with a weight; fields are as of `RecordedProduct`."""

    variable: keras.Variable
    equation: str
    is_moved: bool


Note = Callable[[Any, Any], Any]


@contextlib.contextmanager
def recording(note: Note) -> Iterator[None]:
    """In the block, pass what layers compute by operations to `note`.

    `note` gets a layer and what it computes: `Noted` for a product with a
    weight, the name of an operation that chooses or runs functions of the
    caller, or `Multiplied`, `Softmax` or `Fused`. For a `Multiplied` and a
    `Softmax` it returns the block in which they are to be computed.
    """
    with products.wrapped(), products.recording(note):
        yield


Count = Callable[[str, Any, Any, keras.Variable], None]

_COUNT: contextvars.ContextVar[Count | None] = contextvars.ContextVar(
    "what counts products with weights", default=None
)


@contextlib.contextmanager
def counting(count: Count) -> Iterator[None]:
    """In the block, call `count` for each product of a layer with a weight.

    `count` gets the equation, both shapes, and the second operand's weight.
    """
    token = _COUNT.set(count)
    try:
        with products.wrapped(), products.following():
            yield
    finally:
        _COUNT.reset(token)


def _branch(
    layer: keras.Layer, stock: Operation, name: str, args: Args, kwargs: Kwargs
) -> Any:
    """Run an operation with functions of the caller, or a choice; note it."""
    note = products.recorder()
    if note is None:
        return stock(*args, **kwargs)
    # A function that runs in each trace matters only if it has a product in it.
    # Others may be left out of this trace, with their products.
    matters = name not in products.ALL_RUN

    def note_and_look(layer: keras.Layer, noted: object) -> Any:
        """Note what a layer has computed, and whether it is a product."""
        nonlocal matters
        matters = matters or isinstance(noted, Noted)
        return note(layer, noted)

    with products.recording(note_and_look):
        result = stock(*args, **kwargs)
    if matters:
        note(layer, name)
    return result


if keras.backend.backend() == "torch":
    products.ask_for_compiling(lambda: backends.current.is_compiling())

products.watch(
    {
        products.PRODUCTS: _product,
        (products.CONVOLUTION,): _convolve,
        (*products.MOVES, *products.CASTS, products.ENTRIES): _move,
        products.PASSES: attention_products.run_and_pass_on,
        (products.SOFTMAX,): attention_products.softmax,
        (products.ATTENTION,): attention_products.attend,
        (*products.BRANCHES, *products.CHOICES): _branch,
    }
)
