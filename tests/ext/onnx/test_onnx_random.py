"""Random layers on random shapes, in ONNX files, against Keras."""

import functools
import math

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_policy_ext.stored_kernels import Axes
from onnx_files import bound, rounded, run_at_all_levels, store, values

pytestmark = pytest.mark.any_backend

layers = keras.layers
SIZES = st.integers(1, 9)
GRANULARITIES = st.sampled_from(["channel", "tensor", "block"])
ACTIVATIONS = st.sampled_from([None, "dynamic"])
BATCHES = st.sampled_from([1, 7])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("onnx")


def check(folder, layer, shape, batch, axes, shared, how):
    """A file computes what the layer does with a kernel that is stored."""
    granularity, activations = how
    inputs = keras.Input(shape)
    model = keras.Model(inputs, layer(inputs))
    rng = np.random.default_rng(batch)
    layer.set_weights([values(rng, *w.shape) for w in layer.get_weights()])
    x = values(rng, batch, *shape)
    found = run_at_all_levels(
        model, folder, x, granularity=granularity, activations=activations
    )
    store(layer, axes, granularity)
    x = rounded(x, shared) if activations else x
    expected = keras.ops.convert_to_numpy(model(x))
    terms = math.prod(np.take(layer.weights[0].shape, axes.summed))
    for (outputs,) in found:
        assert outputs.shape == expected.shape
        allowed = bound(layer, x, terms)
        assert np.all(np.abs(outputs - expected) <= allowed)


@settings(max_examples=30)
@given(
    st.lists(st.integers(1, 5), max_size=2),
    st.integers(1, 270),
    st.integers(1, 140),
    st.booleans(),
    BATCHES,
    st.tuples(GRANULARITIES, ACTIVATIONS),
)
def test_dense(folder, outer, size, units, use_bias, batch, how):
    layer = layers.Dense(units, use_bias=use_bias)
    shape = (*outer, size)
    check(folder, layer, shape, batch, Axes((0,), (1,)), (-1,), how)


@st.composite
def convolutions(draw):
    """A convolution, and the shape of its inputs."""
    rank = draw(st.integers(1, 3))
    size = [draw(st.integers(1, 4)) for _ in range(rank)]
    rates = draw(st.sampled_from(["strides", "dilation_rate"]))
    rate = [draw(st.integers(1, 3)) for _ in range(rank)]
    padding = ["valid", "same", *["causal"] * (rank == 1)]
    padding = draw(st.sampled_from(padding))
    groups = draw(st.integers(1, 3))
    options = {
        rates: tuple(rate),
        "padding": padding,
        "groups": groups,
        "use_bias": draw(st.booleans()),
        "data_format": draw(
            st.sampled_from(["channels_last", "channels_first"])
        ),
    }
    filters = groups * draw(st.integers(1, 3))
    cls = getattr(layers, f"Conv{rank}D")
    make = functools.partial(cls, filters, tuple(size), **options)
    # At least as large as the window, for outputs that are not empty.
    window = [
        (n - 1) * (r if rates == "dilation_rate" else 1) + 1
        for n, r in zip(size, rate, strict=True)
    ]
    sizes = [n + draw(st.integers(0, 4)) for n in window]
    channels = groups * draw(st.integers(1, 3))
    last = options["data_format"] == "channels_last"
    return make, (*sizes, channels) if last else (channels, *sizes)


@settings(max_examples=60)
@given(convolutions(), BATCHES, st.tuples(GRANULARITIES, ACTIVATIONS))
def test_convolution(folder, case, batch, how):
    make, shape = case
    rank = len(shape) + 1
    axes = Axes(tuple(range(rank - 1)), (rank - 1,))
    check(folder, make(), shape, batch, axes, tuple(range(1, rank)), how)


@settings(max_examples=40)
@given(st.data(), BATCHES, st.tuples(GRANULARITIES, ACTIVATIONS))
def test_einsum(folder, data, batch, how):
    """Axes of a batch (b), of the inputs (r), summed (k) and kept (c)."""
    groups = [data.draw(st.integers(low, 2)) for low in (0, 0, 1, 1)]
    letters = iter("bcdefghijk")
    shared, rows, summed, kept = (
        [next(letters) for _ in range(count)] for count in groups
    )
    sizes = {x: data.draw(SIZES) for x in shared + rows + summed + kept}
    first, second, out = (
        "".join(data.draw(st.permutations(term)))
        for term in (
            shared + rows + summed,
            shared + summed + kept,
            shared + rows + kept,
        )
    )
    layer = layers.EinsumDense(
        f"a{first},{second}->a{out}",
        tuple(sizes[x] for x in out),
        bias_axes=kept[0],
    )
    axes = Axes(
        tuple(second.index(x) for x in first if x in summed),
        tuple(second.index(x) for x in out if x in second),
    )
    over = tuple(1 + first.index(x) for x in summed)
    shape = tuple(sizes[x] for x in first)
    check(folder, layer, shape, batch, axes, over, how)


@settings(max_examples=30)
@given(st.data(), BATCHES)
def test_pooling(folder, data, batch):
    rank = data.draw(st.integers(1, 3))
    kind = data.draw(st.sampled_from(["Max", "Average"]))
    size = tuple(data.draw(st.integers(1, 3)) for _ in range(rank))
    strides = tuple(data.draw(st.integers(1, 3)) for _ in range(rank))
    # Keras on torch averages over edges where padding is uneven.
    padding = data.draw(
        st.sampled_from(["valid", "same"][: 1 + (kind == "Max")])
    )
    shape = (*(n + data.draw(st.integers(0, 4)) for n in size), 3)
    layer = getattr(layers, f"{kind}Pooling{rank}D")(size, strides, padding)
    inputs = keras.Input(shape)
    model = keras.Model(inputs, layer(inputs))
    x = values(np.random.default_rng(0), batch, *shape)
    expected = keras.ops.convert_to_numpy(model(x))
    for (outputs,) in run_at_all_levels(model, folder, x):
        # A mean of at most 27 numbers.
        np.testing.assert_allclose(outputs, expected, rtol=0, atol=2e-5)
