"""Smooth SwiGLU: even out the channels that enter the down projection."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_policy_ext import backends, user_code
from keras_policy_ext._keras import calls
from keras_policy_ext._keras.walking import layers_within, own_weights
from keras_policy_ext.conversion.candidates import check_is_layer, path_of
from keras_policy_ext.conversion.training import all_optimizers
from keras_policy_ext.layers.transaction import unchanged_on_error
from keras_policy_ext.policies.of_layers import layers_in_float8

LARGEST = 20
"""The largest power of two that a scale has, up or down."""

PROBE = (2.0**-10, 1.0, 2.0**10)
"""Factors of channels, in turn, by which products are found."""

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class Smoothed:
    """A projection whose input channels were evened out.

    Attributes:
        down: The path of the layer that reads the product.
        up: The path of the layer whose outputs are a factor of it.
        before: The ratio of the largest and the median amax of the channels.
        after: The same with scales.
    """

    down: str
    up: str
    before: float
    after: float


@dataclasses.dataclass(eq=False)
class _Call:
    """The inputs and outputs of a call of a layer."""

    inputs: Array
    outputs: Any
    order: int
    uses: int = 1


@user_code.once
def smooth_swiglu(model: keras.Layer, batch: Any) -> tuple[Smoothed, ...]:
    """Fold a scale of each channel into gated blocks, in place.

    A gated block computes `down(act(gate(x)) * up(x))`. Channels of the
    product can differ by orders of magnitude, and one scale for all is bad
    for most. Each output channel of `up` is multiplied by a power of two, and
    the row of `down` that reads it is divided by it. The function of the
    model is the same bit for bit, as long as no number overflows or becomes
    subnormal. The amaxes of channels differ by less than two then.

    Call it before `convert`, and before the first training step. Blocks are
    found by what they compute, not by names: an output of `up` is multiplied
    by a power of two, and the input of `down` must be multiplied by the very
    same. Layers are `Dense`, or `EinsumDense` with a kernel of two axes.

    Source: "Scaling FP8 training to trillion-token LLMs" (arXiv 2409.12517),
    which computes the scales again in each step.

    Args:
        model: A built model whose layers are not in float8.
        batch: Inputs for one call of the model, from which the amaxes of the
            channels are computed.

    Returns:
        What was changed; empty if the model has no gated blocks.

    Raises:
        TypeError: If the model is no Keras layer.
        ValueError: If layers are in float8, or an optimizer has been used: its
            slots belong to the present weights.

    Examples:
        >>> x = keras.Input((8,))
        >>> gate = keras.layers.Dense(16, "silu", name="gate")(x)
        >>> product = gate * keras.layers.Dense(16, name="up")(x)
        >>> y = keras.layers.Dense(8, name="down")(product)
        >>> model = keras.Model(x, y)
        >>> batch = np.ones((4, 8), "float32")
        >>> (found,) = kpe.conversion.smooth_swiglu(model, batch)
        >>> found.up, found.down, found.after <= found.before
        ('up', 'down', True)
    """
    check_is_layer(model, "are smoothed")
    _check(model)
    layers = [x for x in layers_within(model) if _is_matrix(x)]
    outputs, seen = _recorded(model, batch, layers)
    pairs: dict[int, tuple[keras.Layer, keras.Layer]] = {}
    partners = {id(d): _partners(d, layers, seen) for d in layers}
    for turn in range(max(map(len, partners.values()), default=0)):
        tried = [
            (each[turn], down)
            for down in layers
            if len(each := partners[id(down)]) > turn and id(down) not in pairs
        ]
        for up, down in _found(model, batch, tried, outputs, seen):
            pairs[id(down)] = up, down
    changed = [
        weight
        for pair in pairs.values()
        for layer in pair
        for weight in own_weights(layer)
    ]
    with unchanged_on_error((), changed):
        folded = tuple(_fold(up, down, seen) for up, down in pairs.values())
        found = _arrays(model(batch, training=False))
        if not all(map(np.array_equal, found, outputs)):
            raise ValueError(_MOVED)
    return folded


_MOVED = (
    "Folding scales into gated blocks changes the outputs of this model, so it "
    "was not done. Received: a model in which another layer reads a kernel of "
    "such a block, or numbers close to the limits of float32. Allowed: blocks "
    "whose kernels no other layer reads. Call `convert` without "
    "`smooth_swiglu`."
)


def _check(model: keras.Layer) -> None:
    in_float8 = layers_in_float8(model)
    if in_float8:
        raise ValueError(
            "Scales are folded into the weights of float layers. Received: a "
            f"model whose layer {path_of(in_float8[0])!r} is in float8. "
            "Allowed: a model before `convert`. Call `revert`, or `thaw` "
            "where it is frozen, then `smooth_swiglu`, then `convert`."
        )
    used = [each for each in all_optimizers(model) if each.built]
    if used:
        raise ValueError(
            "The slots of the optimizer belong to the present weights, which "
            f"would change. Received: a model with a built {used[0].name}. "
            "Allowed: a model that has not been trained since `compile`. "
            "Call `smooth_swiglu` first, or `compile` anew."
        )


def _is_matrix(layer: keras.Layer) -> bool:
    """Return True if a layer multiplies the last axis by a matrix."""
    if getattr(layer, "lora_enabled", False) or not layer.built:
        return False
    if isinstance(layer, keras.layers.EinsumDense):
        equation = layer.equation.replace(" ", "")
        form = r"(\.\.\.|[A-Za-z]+)(.),\2(.)->\1\3"
        bias = layer.bias is None or len(layer.bias.shape) == 1
        return bias and re.fullmatch(form, equation) is not None
    return isinstance(layer, keras.layers.Dense)


def _partners(
    down: keras.Layer, layers: list[keras.Layer], seen: dict[int, _Call]
) -> list[keras.Layer]:
    """Return the layers whose outputs can be a factor of a layer's inputs."""
    call = seen.get(id(down))
    if call is None or call.uses > 1:
        return []
    found = []
    for layer in layers:
        other = seen.get(id(layer))
        linear = layer.activation in (None, keras.activations.linear)
        if other is None or other.uses > 1 or not linear:
            continue
        same = tuple(other.outputs.shape) == call.inputs.shape
        if same and other.order < call.order:
            found.append(layer)
    # The nearest first: those of the same block.
    return sorted(found, key=lambda each: -seen[id(each)].order)[:4]


Change = Callable[[keras.Layer, Any, Callable[[Any], Any]], Any]
"""What to do in a call of a layer: it gets the layer, inputs and the call."""


@contextlib.contextmanager
def _calling(layers: list[keras.Layer], change: Change) -> Iterator[None]:
    known = {id(each) for each in layers}

    def call(stock: Any, layer: Any, inputs: Any, *args: Any, **kw: Any) -> Any:
        def run(x: Any) -> Any:
            return stock(layer, x, *args, **kw)

        if id(layer) not in known:
            return run(inputs)
        return change(layer, inputs, run)

    with contextlib.ExitStack() as stack:
        for cls in (keras.layers.Dense, keras.layers.EinsumDense):
            stack.enter_context(calls.in_place_of("call", call, cls))
        stack.enter_context(backends.current.step_by_step())
        yield


def _recorded(
    model: keras.Layer, batch: Any, layers: list[keras.Layer]
) -> tuple[list[Array], dict[int, _Call]]:
    """Call the model; return its outputs, and what each layer computed."""
    seen: dict[int, _Call] = {}

    def note(layer: keras.Layer, inputs: Any, run: Any) -> Any:
        outputs = run(inputs)
        if id(layer) in seen:
            seen[id(layer)].uses += 1
        else:
            seen[id(layer)] = _Call(_array(inputs), outputs, len(seen))
        return outputs

    with _calling(layers, note):
        outputs = model(batch, training=False)
    return _arrays(outputs), seen


Pair = tuple[keras.Layer, keras.Layer]


def _found(
    model: keras.Layer,
    batch: Any,
    tried: list[Pair],
    outputs: list[Array],
    seen: dict[int, _Call],
) -> list[Pair]:
    """Return the pairs where the product, and only it, follows the factor."""
    if not tried:
        return []
    follows, others = _probed(model, batch, tried, outputs, seen)
    if others and len(tried) > 1:  # Something else follows one of the factors.
        alone = [_found(model, batch, [p], outputs, seen) for p in tried]
        return [pair for each in alone for pair in each]
    return [] if others else follows


def _probed(
    model: keras.Layer,
    batch: Any,
    tried: list[Pair],
    outputs: list[Array],
    seen: dict[int, _Call],
) -> tuple[list[Pair], bool]:
    """Multiply factors; return the pairs that follow, and if others do."""
    ups = {id(up): up for up, _ in tried}
    downs = {id(down): (up, down) for up, down in tried}
    follows: list[Pair] = []
    others = False

    def change(layer: keras.Layer, inputs: Any, run: Any) -> Any:
        nonlocal others
        call = seen[id(layer)]
        if id(layer) in downs:
            wanted = call.inputs * _probe(call.inputs.shape[-1])
            if wanted.any() and np.array_equal(_array(inputs), wanted):
                follows.append(downs[id(layer)])
            result = call.outputs  # As before: nothing after it follows.
        else:
            others |= not np.array_equal(_array(inputs), call.inputs)
            result = run(inputs)
        if id(layer) in ups:
            factors = _probe(result.shape[-1])
            result = result * ops.convert_to_tensor(factors, result.dtype)
        return result

    layers = [x for x in layers_within(model) if id(x) in seen]
    with _calling(layers, change):
        found = _arrays(model(batch, training=False))
    same = all(map(np.array_equal, found, outputs))
    # A factor that only its own product follows leaves all the rest alone.
    return follows, others or not same


def _fold(
    up: keras.Layer, down: keras.Layer, seen: dict[int, _Call]
) -> Smoothed:
    """Multiply the channels of `up`, and divide the rows of `down`."""
    inputs = np.abs(seen[id(down)].inputs)
    amax = inputs.reshape(-1, inputs.shape[-1]).max(axis=0)
    known = np.isfinite(amax) & (amax > 0)
    exponents = np.frexp(np.where(known, amax, 1.0))[1]
    middle = int(np.median(exponents[known])) if known.any() else 0
    powers = np.clip(middle - exponents, -LARGEST, LARGEST)
    scale = np.ldexp(np.float32(1), np.where(known, powers, 0))
    scale = scale.astype("float32")
    up.kernel.assign(ops.multiply(up.kernel, scale))
    if up.bias is not None:
        up.bias.assign(ops.multiply(up.bias, scale))
    down.kernel.assign(ops.divide(down.kernel, scale[:, np.newaxis]))
    return Smoothed(
        path_of(down), path_of(up), _spread(amax), _spread(amax * scale)
    )


def _spread(amax: Array) -> float:
    """Return the ratio of the largest and the median amax of channels."""
    known = amax[amax > 0]
    return float(known.max() / np.median(known)) if known.size else 1.0


def _probe(size: int) -> Array:
    return np.resize(np.array(PROBE, "float32"), size)


def _array(x: Any) -> Array:
    """Return a tensor as float32 numbers, which hold those of 16 bits."""
    return ops.convert_to_numpy(ops.cast(x, "float32"))


def _arrays(outputs: Any) -> list[Array]:
    return [_array(each) for each in keras.tree.flatten(outputs)]
