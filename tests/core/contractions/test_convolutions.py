"""Convolutions and both their gradients, against a loop over the taps.

The loop runs in float64 on operands that the reference has quantized.
"""

import functools
import itertools

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
import products
from keras_policy_ext._keras import transposed_windows
from keras_policy_ext.recipes import CurrentScaling
from steps import gradients, no_grad, normal, numpy, relative_rms

together = functools.partial(zip, strict=True)

RECIPE = CurrentScaling()
quantized = functools.partial(products.quantized, recipe=RECIPE)
FLOAT32_TOLERANCE = 1e-6
"""Relative RMS of a float32 result against one accumulated in float64."""


class Taps:
    """A convolution, channels last, as a sum over the taps of its kernel.

    Attributes:
        outputs: Spatial shape of the outputs.
    """

    def __init__(self, spatial, kernel_size, strides, padding, dilation):
        self.strides, self.dilation = strides, dilation
        self.kernel_size, self.spatial = kernel_size, spatial
        reach = [(k - 1) * d + 1 for k, d in together(kernel_size, dilation)]
        self.pads = [
            _pads(n, r, s, padding)
            for n, r, s in together(spatial, reach, strides)
        ]
        self.outputs = tuple(
            (n + sum(pad) - r) // s + 1
            for n, pad, r, s in together(spatial, self.pads, reach, strides)
        )

    def _windows(self):
        """Each tap, and the slices of the padded inputs that it sees."""
        for tap in itertools.product(*map(range, self.kernel_size)):
            starts = [t * d for t, d in together(tap, self.dilation)]
            yield (
                tap,
                tuple(
                    slice(start, start + (n - 1) * s + 1, s)
                    for start, n, s in together(
                        starts, self.outputs, self.strides
                    )
                ),
            )

    def _padded(self, x):
        return np.pad(x, [(0, 0), *self.pads, (0, 0)])

    def forward(self, x, w):
        """Outputs (batch, *outputs, filters)."""
        y = np.zeros((len(x), *self.outputs, w.shape[-1]))
        x = self._padded(x)
        for tap, window in self._windows():
            for inputs, filters in _groups(x, w):
                seen = x[:, *window, inputs]
                y[..., filters] += seen @ w[tap][:, filters]
        return y

    def inputs_grad(self, g, w, shape):
        """The transpose of `forward` in `x`."""
        dx = np.zeros_like(self._padded(np.zeros(shape)))
        for tap, window in self._windows():
            for inputs, filters in _groups(dx, w):
                dx[:, *window, inputs] += g[..., filters] @ w[tap][:, filters].T
        crop = [
            slice(b, b + n) for (b, _), n in together(self.pads, self.spatial)
        ]
        return dx[:, *crop]

    def kernel_grad(self, x, g, shape):
        """The transpose of `forward` in `w`."""
        dw = np.zeros(shape)
        x = self._padded(x)
        for tap, window in self._windows():
            for inputs, filters in _groups(x, dw):
                seen = x[:, *window, inputs].reshape(-1, shape[-2])
                flat = g[..., filters].reshape(len(seen), -1)
                dw[tap][:, filters] += seen.T @ flat
        return dw


def _pads(size, reach, stride, padding):
    """Zeros before and after, as TensorFlow pads."""
    if padding == "causal":
        return reach - 1, 0
    outputs = -(-size // stride)
    total = max((outputs - 1) * stride + reach - size, 0)
    total = total if padding == "same" else 0
    return total // 2, total - total // 2


def _groups(x, w):
    """Slices of the input channels and of the filters, group by group."""
    per_group = w.shape[-2]
    groups = x.shape[-1] // per_group
    filters = w.shape[-1] // groups
    for i in range(groups):
        yield (
            slice(i * per_group, (i + 1) * per_group),
            slice(i * filters, (i + 1) * filters),
        )


def moved(x, data_format, to_last):
    if data_format == "channels_last":
        return x
    return np.moveaxis(x, 1, -1) if to_last else np.moveaxis(x, -1, 1)


def convolution(rank, spatial, channels=3, source="float32", **kwargs):
    """A built layer without bias, and its taps."""
    kwargs = {"filters": 4, "kernel_size": 3, **kwargs}
    policy = kpe.Float8DTypePolicy(source, recipe=RECIPE)
    cls = getattr(kpe.layers, f"Conv{rank}D")
    layer = cls(use_bias=False, dtype=policy, **kwargs)
    shape = moved(
        np.empty((2, *spatial, channels)), layer.data_format, False
    ).shape
    layer.build(shape)
    taps = Taps(
        spatial,
        layer.kernel_size,
        layer.strides,
        layer.padding,
        layer.dilation_rate,
    )
    return layer, taps, shape


CASES = {
    "1d valid": (1, (9,), {}),
    "1d same, stride 2, odd": (1, (9,), {"padding": "same", "strides": 2}),
    "1d same, dilation": (1, (9,), {"padding": "same", "dilation_rate": 2}),
    "1d causal, dilation": (1, (8,), {"padding": "causal", "dilation_rate": 2}),
    "1d causal, channels first": (
        1,
        (8,),
        {"padding": "causal", "data_format": "channels_first"},
    ),
    "1d stride beyond kernel": (1, (11,), {"kernel_size": 2, "strides": 4}),
    "1d channels first": (
        1,
        (9,),
        {"padding": "same", "strides": 2, "data_format": "channels_first"},
    ),
    "2d valid": (2, (6, 7), {}),
    "2d same, even kernel": (
        2,
        (5, 6),
        {"kernel_size": (2, 4), "padding": "same"},
    ),
    "2d strides of two sizes": (
        2,
        (8, 7),
        {"padding": "same", "strides": (2, 3)},
    ),
    "2d dilation": (2, (8, 7), {"dilation_rate": (2, 1)}),
    "2d groups": (2, (5, 5), {"groups": 2, "channels": 4, "padding": "same"}),
    "2d depthwise": (2, (5, 5), {"groups": 4, "channels": 4, "filters": 8}),
    "2d channels first": (
        2,
        (6, 5),
        {"padding": "same", "strides": 2, "data_format": "channels_first"},
    ),
    "2d channels first, groups": (
        2,
        (5, 5),
        {"groups": 2, "channels": 4, "data_format": "channels_first"},
    ),
    "3d same": (3, (3, 4, 5), {"padding": "same", "kernel_size": 2}),
    "3d strides": (
        3,
        (4, 5, 3),
        {"strides": (1, 2, 1), "kernel_size": (1, 2, 3)},
    ),
    "3d channels first": (
        3,
        (3, 4, 3),
        {"kernel_size": 2, "data_format": "channels_first"},
    ),
}


def run_layer(layer, x, g):
    """`(y, dx, dkernel)` for the output gradient `g`."""
    g = ops.convert_to_tensor(g)

    def loss(y):
        return ops.sum(ops.multiply(ops.cast(y, "float32"), g))

    y, dx, grads = gradients(layer, x, loss, compiled=True)
    return [numpy(ops.cast(t, "float32")) for t in (y, dx, grads[0])]


@pytest.mark.full_except("1d valid", "3d same", "3d strides")
@pytest.mark.parametrize(
    ("rank", "spatial", "kwargs"), CASES.values(), ids=CASES
)
def test_a_convolution_and_its_gradients_take_quantized_operands(
    rank, spatial, kwargs
):
    layer, taps, shape = convolution(rank, spatial, **kwargs)
    x, w = normal(*shape, seed=0), normal(*layer.kernel.shape, seed=1)
    with no_grad():
        layer.kernel.assign(w)
    qw = quantized(w, "kernel")
    qx = moved(quantized(x, "inputs"), layer.data_format, True)
    expected = taps.forward(qx, qw)
    g = normal(*expected.shape, seed=2)
    qg = quantized(g, "outputs_grad")
    y, dx, dw = run_layer(layer, x, moved(g, layer.data_format, False))
    y, dx = (moved(t, layer.data_format, True) for t in (y, dx))
    assert y.shape == expected.shape
    assert relative_rms(y, expected) < FLOAT32_TOLERANCE
    expected = taps.inputs_grad(qg, qw, qx.shape)
    assert relative_rms(dx, expected) < FLOAT32_TOLERANCE
    expected = taps.kernel_grad(qx, qg, w.shape)
    assert relative_rms(dw, expected) < FLOAT32_TOLERANCE


TRANSPOSED = {
    "1d valid": (1, (5,), {}),
    "1d same, stride 2, odd": (1, (5,), {"padding": "same", "strides": 2}),
    "1d same, dilation": (1, (6,), {"padding": "same", "dilation_rate": 2}),
    "1d stride beyond kernel": (1, (4,), {"kernel_size": 2, "strides": 4}),
    "1d padding of outputs": (1, (4,), {"strides": 3, "output_padding": 0}),
    "2d same, even kernel": (
        2,
        (3, 4),
        {"kernel_size": (2, 4), "padding": "same", "strides": 2},
    ),
    "2d strides of two sizes": (
        2,
        (3, 2),
        {"padding": "same", "strides": (2, 3)},
    ),
    "2d channels first": (
        2,
        (3, 4),
        {"padding": "same", "strides": 2, "data_format": "channels_first"},
    ),
    "3d valid": (3, (2, 3, 2), {"kernel_size": 2, "strides": (1, 2, 1)}),
}


@pytest.mark.full_except("1d padding of outputs")
@pytest.mark.parametrize(
    ("rank", "spatial", "kwargs"), TRANSPOSED.values(), ids=TRANSPOSED
)
def test_a_transposed_convolution_is_the_gradient_of_one(rank, spatial, kwargs):
    """Its gradients are the convolution, then, and the same product."""
    kwargs = {"filters": 4, "kernel_size": 3, **kwargs}
    policy = kpe.Float8DTypePolicy("float32", recipe=RECIPE)
    cls = getattr(kpe.layers, f"Conv{rank}DTranspose")
    layer = cls(use_bias=False, dtype=policy, **kwargs)
    if layer.padding == "same" and transposed_windows.are_own():
        pytest.skip(
            f"Keras {keras.__version__} keeps other outputs on PyTorch, as "
            "tests/core/keras_contacts/test_transposed_windows.py has them"
        )
    shape = (2, *spatial, 3)
    layer.build(moved(np.empty(shape), layer.data_format, False).shape)
    x, w = normal(*shape, seed=0), normal(*layer.kernel.shape, seed=1)
    with no_grad():
        layer.kernel.assign(w)
    outputs = moved(
        np.empty(layer.compute_output_shape(layer_shape(layer, shape))),
        layer.data_format,
        True,
    ).shape
    taps = Taps(
        outputs[1:-1],
        layer.kernel_size,
        layer.strides,
        layer.padding,
        layer.dilation_rate,
    )
    assert taps.outputs == spatial
    qx, qw = quantized(x, "inputs"), quantized(w, "kernel")
    g = normal(*outputs, seed=2)
    qg = quantized(g, "outputs_grad")
    y, dx, dw = run_layer(
        layer, *(moved(t, layer.data_format, False) for t in (x, g))
    )
    y, dx = (moved(t, layer.data_format, True) for t in (y, dx))
    for found, expected in (
        (y, taps.inputs_grad(qx, qw, outputs)),
        (dx, taps.forward(qg, qw)),
        (dw, taps.kernel_grad(qg, qx, w.shape)),
    ):
        assert found.shape == expected.shape
        assert relative_rms(found, expected) < FLOAT32_TOLERANCE


def layer_shape(layer, shape):
    """A shape with channels last as the layer has it."""
    if layer.data_format == "channels_last":
        return shape
    return (shape[0], shape[-1], *shape[1:-1])


@pytest.mark.full
@pytest.mark.parametrize("rank", [1, 2])
def test_of_a_separable_convolution_the_second_is_in_float8(rank):
    policy = kpe.Float8DTypePolicy("float32", recipe=RECIPE)
    how = {"strides": 2, "padding": "same", "depth_multiplier": 2}
    cls = getattr(kpe.layers, f"SeparableConv{rank}D")
    layer = cls(4, 3, dtype=policy, bias_initializer="ones", **how)
    shape = (2, *(6, 5)[:rank], 3)
    layer.build(shape)
    x = normal(*shape, seed=0)
    depthwise = getattr(keras.layers, f"DepthwiseConv{rank}D")
    first = depthwise(3, use_bias=False, **how)
    first.build(shape)
    with no_grad():
        first.kernel.assign(layer.depthwise_kernel)
        between = numpy(first(x))
    w = numpy(layer.pointwise_kernel).reshape(6, 4)
    expected = quantized(between, "inputs") @ quantized(w, "kernel")
    g = normal(*expected.shape, seed=2)
    y, _, grads = gradients(
        layer, x, lambda y: ops.sum(ops.multiply(y, g)), compiled=True
    )
    assert relative_rms(numpy(y), expected + 1) < FLOAT32_TOLERANCE
    qx, qg = quantized(between, "inputs"), quantized(g, "outputs_grad")
    dw = qx.reshape(-1, 6).T @ qg.reshape(-1, 4)
    found = numpy(grads[1]).reshape(6, 4)
    assert relative_rms(found, dw) < FLOAT32_TOLERANCE


def test_sixteen_bit_outputs_are_rounded_once():
    layer, taps, shape = convolution(2, (5, 5), source="mixed_bfloat16")
    x, w = normal(*shape, seed=0), normal(*layer.kernel.shape, seed=1)
    x = numpy(ops.cast(ops.cast(x, "bfloat16"), "float32"))
    with no_grad():
        layer.kernel.assign(w)
    y, _, dw = run_layer(layer, x, np.ones((2, *taps.outputs, 4), "float32"))
    qx, qw = quantized(x, "inputs"), quantized(w, "kernel")
    qg = quantized(np.ones_like(y), "outputs_grad")
    sums = (
        (y, taps.forward, (qx, qw)),
        (dw, lambda x, g: taps.kernel_grad(x, g, w.shape), (qx, qg)),
    )
    for result, multiply, operands in sums:
        exact = multiply(*operands)
        half_an_ulp = 2.0 ** (np.frexp(np.abs(exact))[1] - 9)
        slack = 2.0**-20 * multiply(*map(np.abs, operands))
        assert np.all(np.abs(result - exact) <= half_an_ulp + slack)


def test_the_loop_over_the_taps_is_its_own_transpose():
    """The judge judged: <g, forward(x, w)> is <gradient, operand>."""
    taps = Taps((7, 5), (3, 2), (2, 1), "same", (1, 2))
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 7, 5, 4)), rng.normal(size=(3, 2, 2, 6))
    y = taps.forward(x, w)
    g = rng.normal(size=y.shape)
    pairing = np.sum(g * y)
    dx, dw = taps.inputs_grad(g, w, x.shape), taps.kernel_grad(x, g, w.shape)
    assert np.sum(dx * x) == pytest.approx(pairing)
    assert np.sum(dw * w) == pytest.approx(pairing)
