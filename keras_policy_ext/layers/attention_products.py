"""Products of two activations in the attention of layers without a form.

They are computed in float8 if `convert` was called with `attention="float8"`.
It traces the layer once, to record what each product is:

- scores: the values of its result reach a softmax, with no other product in
  between;
- a weighted sum: one operand is the result of a softmax, which operations of
  Keras may have cast, moved or masked.

From then on a product is known by its equation. If scores and weighted sums
have the same equation, as in `matmul(matmul(q, k), v)`, it has to be the same
one in the order of products as well, and the result of a softmax is followed
in the call. A product that is neither, or is not known, stays in floats.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_policy_ext._keras import products
from keras_policy_ext._keras.products import Args, Kwargs, Operation
from keras_policy_ext._types import Tensor
from keras_policy_ext.contractions import COMPUTE_DTYPES, equations
from keras_policy_ext.layers.operands import TensorNotes
from keras_policy_ext.seams import SCORES
from keras_policy_ext.seams import WEIGHTED_SUM as SUM

SWAPPED = "weighted sum, values first"
OTHER = "other"
"""With `SCORES` and `SUM`, the roles of a product of two activations."""

_ROLES_OF_SUMS = (SUM, SWAPPED)
"""The role of a product whose first, or second, operand a softmax made."""


@dataclasses.dataclass(frozen=True)
class Attention:
    """The products of two activations in the traced call of a layer."""

    # The equation and the role of each product, in order.
    roles: tuple[tuple[str, str], ...] = ()
    # Whether it calls `keras.ops.dot_product_attention`.
    is_fused: bool = False
    needs_flash: bool = False  # Whether it does so with `flash_attention=True`.
    # Whether scores of float16 are computed in float32: beyond 65504 they
    # would be infinite, and their softmax NaN.
    widens_float16: bool = False

    @property
    def is_recognised(self) -> bool:
        """True if a product in it can be computed in float8."""
        # Unless it is flash, fused attention is computed by two products.
        can_split = self.is_fused and not self.needs_flash
        return can_split or any(self.roles_of(each) for each, _ in self.roles)

    @property
    def needs_order(self) -> bool:
        """True if products with one equation have several roles."""
        return any(len(self.roles_of(each)) > 1 for each, _ in self.roles)

    @property
    def reason_in_floats(self) -> str | None:
        """Why products in it stay in floats; None if none does."""
        distinct = dict.fromkeys(each for each, _ in self.roles)
        unknown = [each for each in distinct if not self.roles_of(each)]
        if self.needs_flash:
            return (
                "it calls keras.ops.dot_product_attention with "
                "flash_attention=True, one kernel that is not float8"
            )
        if unknown:
            return (
                "it multiplies two activations in a product that is neither "
                "recognised as scores, whose values reach a softmax, nor as a "
                f"sum weighted by the result of one ({', '.join(unknown)})"
            )
        return None

    def roles_of(self, equation: str) -> tuple[str, ...]:
        """Return the roles of products with an equation; () for no float8."""
        roles = dict.fromkeys(r for e, r in self.roles if e == equation)
        return () if OTHER in roles else tuple(roles)


class Multiplied(NamedTuple):
    """A product of two activations, as it is noted while a model is traced."""

    equation: str  # Explicit, with one letter per axis.
    # Which operand a softmax made: 0 or 1, the first; None for none.
    softmax_operand: int | None


class Softmax(NamedTuple):
    """A softmax, as it is noted while a model is traced."""


class Fused(NamedTuple):
    """An operation that computes attention, noted while a model is traced."""

    needs_flash: bool


_PROBABILITIES: TensorNotes[bool] = TensorNotes()
"""Tensors that a softmax made, perhaps moved, cast or masked."""

_thread = threading.local()
"""`call`: the `_Call` in progress whose products are numbered, or None;
`left_out`: the layer of `_left_out`, or None."""


class _Call:
    """A call of a layer, with the number of its products so far."""

    def __init__(self, layer: keras.Layer) -> None:
        self.layer = layer
        self.products = 0


def attends(layer: keras.Layer) -> bool:
    """Return True if products of two activations are in float8 in a layer."""
    controller = getattr(layer, "float8_controller", None)
    return controller is not None and controller.attention is not None


@contextlib.contextmanager
def _numbered_call(layer: keras.Layer) -> Iterator[None]:
    """In the block, a call of a layer, number its products."""
    outer_call = getattr(_thread, "call", None)
    _thread.call = _Call(layer)
    try:
        with products.following(), _PROBABILITIES.of_call():
            yield
    finally:
        _thread.call = outer_call


def numbering(layer: keras.Layer) -> contextlib.AbstractContextManager[None]:
    """Return a block for the call of a layer that numbers its products."""
    # Only if the layer needs that, since each call then notes tensors.
    if attends(layer) and layer.float8_controller.attention.needs_order:
        return _numbered_call(layer)
    return contextlib.nullcontext()


@contextlib.contextmanager
def _left_out(layer: keras.Layer) -> Iterator[None]:
    """In the block, no product of this layer is one of attention."""
    outer_layer = getattr(_thread, "left_out", None)
    _thread.left_out = layer
    try:
        yield
    finally:
        _thread.left_out = outer_layer


def leaving_out(layer: keras.Layer) -> contextlib.AbstractContextManager[None]:
    """Return a block in which no product of a layer is one of attention."""
    # For the emulation of a contraction, which multiplies by `keras.ops` too.
    return _left_out(layer) if attends(layer) else contextlib.nullcontext()


def multiply(
    layer: keras.Layer,
    stock: Callable[[], Tensor],
    equation: str,
    operands: Sequence[Tensor],
) -> Tensor:
    """Multiply two activations in the call of a layer; note it if recording.

    `stock` computes the product as Keras does. The equation is explicit, with
    one letter per axis. Operands are floating, none made of a weight alone.
    """
    softmax_operand = None
    if _notes_softmax():
        of_softmax = (n for n in (0, 1) if _PROBABILITIES.get(operands[n]))
        softmax_operand = next(of_softmax, None)
    product = Multiplied(equation, softmax_operand)
    note = products.recorder()
    if note is not None:
        with note(layer, product):
            return stock()
    role = _role_in_call(layer, product)
    dtype = keras.backend.result_type(*(x.dtype for x in operands))
    if role is None or layer.float8_policy is None:
        return stock()
    if dtype not in COMPUTE_DTYPES:
        return stock()
    has_float16 = any(
        keras.backend.standardize_dtype(x.dtype) == "float16" for x in operands
    )
    if has_float16 and layer.float8_controller.attention.widens_float16:
        # The softmax of wide scores is float32; the layer computes in float16.
        dtype = "float32" if role == SCORES else "float16"
    if role == SCORES:
        compute = layer.float8_activations_einsum
        return compute(equation, *operands, dtype)
    if role == SWAPPED:
        values, weights, out = equations.split(equation)
        equation, operands = f"{weights},{values}->{out}", operands[::-1]
    return layer.float8_weighted_sum(equation, *operands, dtype)


def _role_in_call(layer: keras.Layer, product: Multiplied) -> str | None:
    """Return the role of a product in the call of a layer, or None."""
    if getattr(_thread, "left_out", None) is layer:
        return None
    attention = layer.float8_controller.attention
    call = getattr(_thread, "call", None)
    expected = None  # The (equation, role) at this place of the traced call.
    if call is not None and call.layer is layer:
        expected = next(iter(attention.roles[call.products :]), None)
        call.products += 1
    possible = attention.roles_of(product.equation)
    if len(possible) < 2:
        return possible[0] if possible else None
    # Scores and sums have this equation: it has to be the same product as in
    # the traced call, and a sum has to read the result of a softmax again.
    operand = product.softmax_operand
    role = SCORES if operand is None else _ROLES_OF_SUMS[operand]
    return role if expected == (product.equation, role) else None


def role_in_attention(product: Multiplied, reaches_softmax: bool) -> str:
    """Return the role of a traced product, such as `SCORES` or `OTHER`."""
    if product.softmax_operand is None:
        return SCORES if reaches_softmax else OTHER
    *operands, outputs = equations.split(product.equation)
    weights = operands.pop(product.softmax_operand)
    (values,) = operands
    # `float8_weighted_sum` refuses values with an axis that is in no other
    # term: they would be summed along it, and a key would have several scales.
    if set(values) - set(weights + outputs):
        return OTHER
    return _ROLES_OF_SUMS[product.softmax_operand]


def pass_on(operands: Sequence[Tensor], result: Tensor) -> None:
    """Note that a result is made of the result of a softmax, if it is."""
    if _notes_softmax() and any(map(_PROBABILITIES.get, operands)):
        _PROBABILITIES.set(result, True)


# Handlers of operations, called as `products.Handler` says.


def run_and_pass_on(
    _layer: keras.Layer, stock: Operation, name: str, args: Args, kwargs: Kwargs
) -> Any:
    """Run `dropout` or `where`: entries of an operand are set, as by a mask."""
    result = stock(*args, **kwargs)
    positional = args[1:3] if name == "where" else args[:2]  # No condition.
    named = [kwargs[k] for k in ("inputs", "x1", "x2") if k in kwargs]
    operands = [*positional, *named]
    pass_on([x for x in operands if x is not result], result)
    return result


def softmax(
    layer: keras.Layer, stock: Operation, _name: str, args: Args, kwargs: Kwargs
) -> Any:
    """Run a softmax; note it if recording, and that it made the result."""
    note = products.recorder()
    block = contextlib.nullcontext() if note is None else note(layer, Softmax())
    with block:
        result = stock(*args, **kwargs)
    if _notes_softmax():
        _PROBABILITIES.set(result, True)
    return result


def _notes_softmax() -> bool:
    """Return True if the results of a softmax are to be noted now."""
    # That is while `convert` traces a layer, and within `numbering`.
    in_call = getattr(_thread, "call", None) is not None
    return in_call or products.recorder() is not None


def attend(
    layer: keras.Layer, stock: Operation, _name: str, args: Args, kwargs: Kwargs
) -> Any:
    """Run `dot_product_attention`: by its two products if in float8."""
    note = products.recorder()
    given = args[7] if len(args) > 7 else None  # By position, the eighth.
    needs_flash = kwargs.get("flash_attention", given)
    if note is not None:
        note(layer, Fused(needs_flash=bool(needs_flash)))
    in_float8 = note is None and attends(layer) and not needs_flash
    if not in_float8 or layer.float8_policy is None:
        return stock(*args, **kwargs)
    result = dot_product(layer, *args, **kwargs)
    return stock(*args, **kwargs) if result is None else result


def dot_product(
    layer: keras.Layer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    flash_attention: bool | None = None,
    attn_logits_soft_cap: float | None = None,
) -> Tensor | None:
    """Compute `keras.ops.dot_product_attention`, its products in float8.

    Scores and softmax are in float32, as in Keras. The arguments are those of
    Keras, and `flash_attention` is ignored. `query` is (batch, queries, heads,
    size); `key` and `value` are (batch, keys, heads, size), perhaps with fewer
    heads; `bias` and `mask` fit (batch, heads, queries, keys).

    Returns:
        As `query`; None for shapes and dtypes that Keras refuses, or that
        are not computed in float8.
    """
    tensors = [ops.convert_to_tensor(x) for x in (query, key, value)]
    dtype = keras.backend.result_type(*(x.dtype for x in tensors))
    heads, key_heads = tensors[0].shape[-2], tensors[1].shape[-2]
    if dtype not in COMPUTE_DTYPES or any(len(x.shape) != 4 for x in tensors):
        return None
    if not (heads and key_heads) or heads % key_heads:
        return None  # An unknown number of heads, or one that Keras refuses.
    query, key, value = (ops.cast(x, dtype) for x in tensors)
    if heads > key_heads:  # Several heads of queries share one of keys.
        groups = heads // key_heads
        key, value = (ops.repeat(x, groups, axis=2) for x in (key, value))
    equation = "btnh,bsnh->bnts"  # t: queries, s: keys, n: heads, h: size
    scores = layer.float8_activations_einsum(equation, query, key, "float32")
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    if attn_logits_soft_cap is not None:
        cap = attn_logits_soft_cap
        scores = ops.tanh(scores / cap) * cap
    if bias is not None:
        scores = scores + ops.cast(bias, "float32")
    if is_causal:
        queries, keys = ops.shape(scores)[-2:]
        causal = ops.arange(queries)[:, None] >= ops.arange(keys)
        mask = causal if mask is None else ops.logical_and(mask, causal)
    if mask is not None:
        scores = ops.where(ops.cast(mask, "bool"), scores, _MASKED)
    weights = ops.cast(ops.softmax(scores), dtype)
    return layer.float8_weighted_sum("bnts,bsnh->btnh", weights, value, dtype)


_MASKED = -0.7 * 3.4028235e38
"""The score of a masked key, as in `jax.nn.dot_product_attention`."""
