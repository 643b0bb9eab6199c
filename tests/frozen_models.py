"""What a frozen kernel must be, computed from its definition in NumPy."""

import itertools

import keras
import ml_dtypes
import numpy as np
from keras import ops

from steps import numpy

JIT = keras.backend.backend() == "jax"  # XLA takes longer than it saves.

LARGEST = {
    "float8_e4m3fn": np.float32(448),
    "float8_e5m2": np.float32(57344),
    "float4_e2m1fn": np.float32(6),
    "int8": np.float32(127),
    "int4": np.float32(7),
    "int3": np.float32(3),
    "int2": np.float32(1),
}
GRANULARITIES = ("channel", "tensor", "block", "group32")
BITS = {"int8": 8, "int4": 4, "int3": 4, "int2": 2, "float4_e2m1fn": 4}
"""How many a number takes in a file."""


def groups_of(shape, summed, free, granularity):
    """The index of the scale of each number of a kernel, an int for each."""
    index = np.zeros(shape, int)
    if granularity == "tensor":
        return index
    for place in itertools.product(*map(range, shape)):
        row = column = 0
        for axis in free:
            row = row * shape[axis] + place[axis]
        for axis in summed:
            column = column * shape[axis] + place[axis]
        if granularity == "channel":
            index[place] = row
        elif granularity == "group32":
            index[place] = row * 10**6 + column // 32
        else:
            index[place] = (row // 128) * 10**6 + column // 128
    return index


def rounded(kernel, summed, granularity="channel", weights="float8_e4m3fn"):
    """`(codes, scale of each number)` of a kernel, group by group.

    Args:
        kernel: Float32.
        summed: Its axes that a product sums over, or a pair of those and of
            the free ones, where their order matters.
        granularity: As for `freeze`.
        weights: As for `freeze`.
    """
    if summed and isinstance(summed[0], tuple):
        summed, free = summed
    else:
        free = tuple(i for i in range(kernel.ndim) if i not in summed)
    index = groups_of(kernel.shape, summed, free, granularity)
    codes = np.zeros(kernel.shape, "uint8")
    scales = np.zeros(kernel.shape, "float32")
    for group in np.unique(index):
        chosen = index == group
        numbers = kernel[chosen]
        scale = np.abs(numbers).max() / LARGEST[weights]
        if np.all(numbers == 0):
            scale = np.float32(1)
        codes[chosen] = codes_of(numbers / scale, weights)
        scales[chosen] = scale
    return codes, scales


def codes_of(numbers, weights):
    """The codes of numbers in the range of a format, uint8."""
    if weights.startswith("int"):
        return np.rint(numbers).astype("int8").view("uint8")
    return numbers.astype(getattr(ml_dtypes, weights)).view("uint8")


def numbers_of(codes, weights):
    """The numbers of codes, float32."""
    is_integer = weights.startswith("int")
    dtype = "int8" if is_integer else getattr(ml_dtypes, weights)
    return codes.view(dtype).astype("float32")


def dequantized(kernel, summed, granularity="channel", weights="float8_e4m3fn"):
    """What a kernel stands for once it is stored, float32."""
    codes, scales = rounded(kernel, summed, granularity, weights)
    return numbers_of(codes, weights) * scales


def rounded_inputs(x, axes=-1, scale=None):
    """Inputs as a product with quantized activations reads them, float32.

    Args:
        x: Float32.
        axes: Those that share a scale, if it is not known before.
        scale: The scale, if it is.
    """
    if scale is None:
        amax = np.abs(x).max(axis=axes, keepdims=True)
        scale = np.where(amax == 0, np.float32(1), amax / np.float32(448))
    bounded = np.clip(x / scale, -448, 448)
    numbers = bounded.astype(ml_dtypes.float8_e4m3fn).astype("float32")
    return numbers * np.asarray(scale, "float32")


def outputs_of(model, x, training=False):
    """Outputs of a call, as one float32 array."""
    y = model(x, training=training)
    return numpy(ops.cast(y, "float32"))


def frozen_layers(model):
    layers = model._flatten_layers(include_self=True)
    return [x for x in layers if getattr(x, "is_frozen", False)]


def float_twin(build, model, summed, granularity="channel", **rest):
    """A stock model with the weights that a frozen one must stand for.

    Args:
        build: Makes the model, before it is frozen.
        model: One made by it, not frozen: its weights are taken.
        summed: The summed axes of each kernel, by the end of its path.
    """
    twin = build()
    pairs = zip(twin.weights, model.weights, strict=True)
    for variable, other in pairs:
        value = numpy(other)
        axes = axes_of(other.path, summed)
        if axes is not None:
            value = value.astype("float32")
            value = dequantized(value, axes, granularity, **rest)
        variable.assign(value)
    return twin


def axes_of(path, summed):
    """The entry for the longest end of a path; None if there is none."""
    ends = [end for end in summed if path.endswith(end)]
    return summed[max(ends, key=len)] if ends else None
