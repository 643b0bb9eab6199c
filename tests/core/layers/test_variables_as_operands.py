"""What a layer passes on may be a variable, an array or a list."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from steps import gradients, normal, numpy, relative_rms

CURRENT = "float8/current_from_float32"
X, G = normal(6, 8), normal(6, 16, seed=1)


def given(variable, form):
    """The variable, or its numbers as an array or a list."""
    return {
        "variable": lambda: variable,
        "array": lambda: numpy(variable),
        "list": lambda: numpy(variable).tolist(),
    }[form]()


def loss(y):
    """A loss whose gradient is `G`."""
    return ops.sum(ops.cast(y, "float32") * ops.reshape(G, y.shape))


class Given(kpe.layers.Float8Mixin, keras.layers.Layer):
    """A layer that computes `way` with a variable or numbers of its own."""

    def __init__(self, way, form="variable", **kwargs):
        super().__init__(**kwargs)
        self.way, self.form = way, form

    def build(self, input_shape):
        def add(name, *shape, float8=False):
            weight = self.add_weight(shape=shape, name=name, float8=float8)
            weight.assign(normal(*shape, seed=len(name)))
            return weight

        self.w = add("w", 8, 16, float8=True)
        self.own = add("own", *SHAPES[self.way])

    def call(self, x, training=None):
        own, w = given(self.own, self.form), self.w
        second, sum_of = (
            self.float8_activations_einsum,
            self.float8_weighted_sum,
        )
        return {
            "bias": lambda: self.float8_einsum("ti,io->to", x, w, bias=own),
            "bias of a bank": lambda: self.float8_einsum(
                "eti,io->eto", ops.reshape(x, (2, 3, 8)), w, bias=own
            ),
            "inputs": lambda: self.float8_einsum("ti,io->to", own, w),
            "first": lambda: second("ij,tj->ti", own, x),
            "second": lambda: second("ti,io->to", x, own),
            "weights": lambda: sum_of("tk,ko->to", own, w),
            "values": lambda: sum_of("tk,ko->to", x, own),
        }[self.way]()


SHAPES = {
    "bias": (16,),
    "bias of a bank": (2, 1, 16),
    "inputs": (6, 8),
    "first": (16, 8),
    "second": (8, 16),
    "weights": (6, 8),
    "values": (8, 16),
}
"""The shape of `own`."""


def found(way, policy, form="variable"):
    """The outputs, and the gradients of `w` and `own` by name."""
    layer = Given(way, form, dtype=policy)
    layer.build(X.shape)
    outputs, _, grads = gradients(layer, X, loss, training=True)
    named = zip(layer.trainable_variables, grads, strict=True)
    known = {v.name: g for v, g in named if g is not None}
    return numpy(outputs), {name: numpy(g) for name, g in known.items()}


@pytest.mark.parametrize(
    ("way", "policy"),
    [
        *((way, CURRENT) for way in SHAPES),
        ("bias", "float8_from_float32"),
        ("weights", "float8/rowwise_from_float32"),
        ("values", "float8/rowwise_from_float32"),
    ],
)
def test_a_variable_is_trained_wherever_it_is_an_operand(way, policy):
    outputs, grads = found(way, policy)
    expected, source = found(way, "float32")
    assert relative_rms(outputs, expected) < 0.06  # 2^-4, of e4m3.
    for name in source:
        if np.any(source[name]):
            # Half a unit in the last place of e5m2 is 2^-3.
            assert relative_rms(grads[name], source[name]) < 0.12


@pytest.mark.parametrize(
    "policy", ["float8_from_float32", "float8_from_mixed_bfloat16"]
)
@pytest.mark.parametrize("way", ["bias", "bias of a bank"])
def test_the_gradient_of_a_bias_is_the_sum_of_that_of_the_outputs(way, policy):
    _, grads = found(way, policy)
    rows = G if way == "bias" else G.reshape(2, 3, 16)
    total = rows.sum(-2).reshape(SHAPES[way])
    # Of a few rounded numbers of bfloat16.
    rtol = 2.0**-6 if policy.endswith("_mixed_bfloat16") else 1e-5
    np.testing.assert_allclose(grads["own"], total, rtol, atol=rtol)


def test_a_frozen_layer_trains_a_bias_that_its_call_passes_on():
    layer = Given("bias", dtype=CURRENT)
    layer.build(X.shape)
    kpe.freeze(layer)
    layer.own.trainable = True
    _, _, (grad,) = gradients(layer, X, loss)
    np.testing.assert_allclose(numpy(grad), G.sum(0), rtol=1e-5, atol=1e-5)


def test_what_a_handler_puts_in_place_of_operands_is_trained_and_read():
    layer = Given("bias", dtype=CURRENT)
    layer.build(X.shape)

    def handler(call):
        planned = call.planned
        return call.run(planned._replace(inputs=X, bias=layer.own))

    with kpe.seams.on_contraction(handler):
        outputs, _, grads = gradients(layer, 0.0 * X, loss)
    expected, _ = found("bias", CURRENT)
    np.testing.assert_allclose(numpy(outputs), expected, rtol=1e-6)
    names = [v.name for v in layer.trainable_variables]
    grad = numpy(grads[names.index("own")])
    np.testing.assert_allclose(grad, G.sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["array", "list"])
@pytest.mark.parametrize("way", SHAPES)
def test_numbers_are_read_as_a_variable_with_them_is(way, form):
    for policy in (CURRENT, "float32"):
        layer = Given(way, dtype=policy)
        expected = numpy(layer(X))
        layer.form = form
        np.testing.assert_array_equal(numpy(layer(X)), expected)


def test_a_bias_is_added_in_the_dtype_of_the_outputs():
    wide = normal(16).astype("float64")
    for policy in ("mixed_float8", "mixed_bfloat16"):
        layer = Given("bias", dtype=policy)
        layer.build(X.shape)
        for dtype in ("bfloat16", "float32"):
            outputs = layer.float8_einsum(
                "ti,io->to", X, layer.w, dtype=dtype, bias=wide
            )
            assert keras.backend.standardize_dtype(outputs.dtype) == dtype


def test_an_array_is_a_kernel_of_a_recipe_without_state():
    layer = Given("bias", dtype=CURRENT)
    layer.build(X.shape)
    expected = layer.float8_einsum("ti,io->to", X, layer.w)
    outputs = layer.float8_einsum("ti,io->to", X, numpy(layer.w))
    np.testing.assert_array_equal(numpy(outputs), numpy(expected))


def test_a_convolution_that_is_called_directly_reads_an_array():
    layer, images = kpe.layers.Conv1D(4, 1, dtype=CURRENT), normal(2, 6, 8)
    expected = numpy(layer(images))
    np.testing.assert_array_equal(numpy(layer.call(images)), expected)


class Constant(keras.layers.Layer):
    """It multiplies an array by its kernel, with `keras.ops`."""

    def build(self, input_shape):
        self.kernel = self.add_weight(shape=(8, 16), name="kernel")

    def call(self, x):
        return ops.matmul(X, self.kernel) + ops.sum(x)


def test_a_product_by_operation_reads_an_array():
    model = keras.Sequential([keras.Input((8,)), Constant()])
    before = numpy(model(0.0 * X))
    kpe.convert(model, "current")
    after = numpy(model(0.0 * X))
    assert model.layers[0].quantization_mode == "float8"
    assert 0.0 < relative_rms(after, before) < 0.06
