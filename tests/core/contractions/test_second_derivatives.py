"""The gradients of gradients, of what the three matmuls read."""

import numpy as np
import pytest
from keras import ops

from cases import mostly, needs_sums_in_float64
from keras_policy_ext import contractions, recipes, reference
from keras_policy_ext.numerics.scale_sources import source_of
from penalties import slopes
from products import quantized
from steps import normal
from ways import BACKEND, array

ERRORS = {
    "jax": NotImplementedError,
    "tensorflow": LookupError,
    "torch": NotImplementedError,
}

try:
    from keras_policy_ext.ext.recurrent.rnn import Gates
except ModuleNotFoundError:  # the core alone
    Gates = None

CONVOLUTION = {
    "strides": (2, 1),
    "padding": "same",
    "dilation_rate": (1, 1),
    "data_format": "channels_last",
}

CONTRACTIONS = {
    "matrices": (contractions.Einsum("ab,bc->ac"), (6, 5), (5, 4)),
    "heads": (contractions.Einsum("abc,cde->abde"), (2, 3, 5), (5, 4, 2)),
    "batch": (contractions.Einsum("abc,adc->abd"), (2, 3, 5), (2, 4, 5)),
    "summed alone": (contractions.Einsum("abc,cd->ad"), (2, 3, 5), (5, 4)),
    "convolution": (
        contractions.Conv(**CONVOLUTION),
        (2, 5, 4, 3),
        (3, 2, 3, 4),
    ),
    "transposed": (
        contractions.ConvTranspose(**CONVOLUTION),
        (2, 4, 3, 3),
        # A kernel of 2 with a stride of 1 is refused by Keras 3.12 on PyTorch.
        (3, 3, 4, 3),
    ),
}

if Gates:
    gates = Gates("ai,igu->agu", 3, 1, 3)
    CONTRACTIONS["gates"] = (gates, (4, 5), (5, 6))

SUMMED_WITH_OTHERS = [name for name in CONTRACTIONS if name != "summed alone"]
"""Those whose operands are rounded as they are."""


def contracted(contraction, recipe, dtype="float32", training=True):
    """A function of inputs and a kernel."""
    source = source_of(recipe)
    states = [source.layout.never_observed()] if source.state_shape else []
    state = [ops.convert_to_tensor(matrix) for matrix in states]

    def call(x, w):
        dtypes = dtype, "float32"
        plan = contractions.make_plan(contraction, recipe, *dtypes, training)
        return contractions.run(plan, ops.cast(x, dtype), w, *state)

    return call


def unquantized(contraction):
    """The same in float32."""
    if isinstance(contraction, contractions.Conv):
        return contraction.of
    if Gates is None or not isinstance(contraction, Gates):
        return lambda x, w: ops.einsum(contraction.equation, x, w)

    def of_gates(x, w):
        rows, columns = w.shape
        shape = rows, contraction.count, columns // contraction.count
        w = ops.reshape(w, shape)[:, contraction.first : contraction.last]
        return ops.einsum(contraction.equation, x, w)

    return of_gates


def first(call, x, w, g):
    """Both gradients of a product, where that of its outputs is `g`."""

    def total(x, w):
        return ops.sum(ops.cast(call(x, w), "float32") * g)

    return slopes(total, x, w)


def second(call, x, w, g, v, u):
    """What `first` returns, differentiated by x, w and g.

    Args:
        call: Function of x and w.
        x: Array.
        w: Array.
        g: Array, the gradient of the outputs.
        v: Array, the gradient of that of x.
        u: Array, the gradient of that of w.
    """
    v, u = map(ops.convert_to_tensor, (v, u))

    def total(x, w, g):
        of_x, of_w = first(call, x, w, g)
        return ops.sum(of_x * v) + ops.sum(of_w * u)

    return [
        array(d) for d in slopes(total, *map(ops.convert_to_tensor, (x, w, g)))
    ]


def operands(name, make):
    """x, w, g, v and u of a contraction, made of a shape and a seed."""
    contraction, *shapes = CONTRACTIONS[name]
    x, w = (make(shape, seed) for seed, shape in enumerate(shapes))
    outputs = unquantized(contraction)(*map(ops.convert_to_tensor, (x, w)))
    g = make(tuple(outputs.shape), 2)
    v, u = (make(shape, seed) for seed, shape in enumerate(shapes, 3))
    return contraction, (x, w, g, v, u)


def integers(shape, seed):
    """Numbers of every format, whose products and sums float32 holds."""
    values = np.random.default_rng(seed).integers(-2, 3, shape)
    return values.astype("float32")


def numbers(shape, seed):
    return normal(*shape, seed=seed)


@pytest.mark.full
@pytest.mark.parametrize(
    "name", mostly(CONTRACTIONS, "matrices", "batch", "convolution")
)
def test_where_nothing_is_rounded_they_are_those_of_float32(name):
    contraction, tensors = operands(name, integers)
    recipe = recipes.DelayedScaling(initial_scale=1.0)
    found = second(contracted(contraction, recipe), *tensors)
    expected = second(unquantized(contraction), *tensors)
    for one, other in zip(found, expected, strict=True):
        assert np.any(other)
        np.testing.assert_array_equal(one, other)


@pytest.mark.full
@pytest.mark.parametrize(
    "name", mostly(SUMMED_WITH_OTHERS, "heads", "transposed")
)
def test_elsewhere_they_are_those_of_the_rounded_operands(name):
    contraction, tensors = operands(name, numbers)
    recipe = recipes.CurrentScaling()
    found = second(contracted(contraction, recipe), *tensors)
    x, w = (
        quantized(tensor, operand, recipe).astype("float32")
        for tensor, operand in zip(tensors, ("inputs", "kernel"), strict=False)
    )
    expected = second(unquantized(contraction), x, w, *tensors[2:])
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


def kept(x, asked):
    """What a matmul that sums the last axis reads of a matrix, float64."""
    whole = reference.quantize_matrices(x[np.newaxis], asked).dequantize()[0]
    if asked.hadamard:
        count = whole.shape[-1]
        basis = reference.hadamard(np.eye(count)).astype("float64")
        whole = whole @ basis.T
    return whole[:, : x.shape[-1]]


FINER = [
    recipes.RowwiseScaling(),
    recipes.BlockScaling(),
    recipes.MXFP8Scaling(),
    recipes.NVFP4Scaling(),
    recipes.NVFP4Scaling(hadamard=False),
    recipes.CurrentScaling(kernel_grad="high_precision"),
]


@pytest.mark.full
@pytest.mark.parametrize(
    "recipe", mostly(FINER, FINER[0], recipes.NVFP4Scaling()), ids=str
)
def test_under_finer_scales_they_are_of_the_copies_that_are_kept(recipe):
    contraction = contractions.Einsum("ab,bc->ac")
    x, w = numbers((21, 34), 0), numbers((34, 18), 1)
    g, v, u = numbers((21, 18), 2), numbers(x.shape, 3), numbers(w.shape, 4)
    found = second(contracted(contraction, recipe), x, w, g, v, u)
    # Each of them is read with the axis last that is summed.
    asked = recipe.quantization("inputs", "kernel_grad")
    rounded = x if asked is None else kept(x.T, asked).T
    kernel = kept(w, recipe.quantization("kernel", "inputs_grad"))
    expected = g @ u.T, v.T @ g, v @ kernel + rounded @ u
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", mostly(["bfloat16", "float16"], "bfloat16"))
def test_in_half_precision_they_are_rounded_to_it(dtype):
    contraction, tensors = operands("heads", numbers)
    recipe = recipes.CurrentScaling()
    found = second(contracted(contraction, recipe, dtype), *tensors)
    expected = second(contracted(contraction, recipe), *tensors)
    # A rounding of x moves it to another number of float8 here and there.
    for one, other in zip(found, expected, strict=True):
        error = np.linalg.norm(one - other) / np.linalg.norm(other)
        assert 0.0 < error < 0.03


@pytest.mark.full
@pytest.mark.parametrize("name", ["matrices", "convolution"])
@pytest.mark.parametrize("recipe", mostly(["delayed", "nvfp4"], "delayed"))
def test_a_gradient_that_is_differentiated_has_the_same_bits(name, recipe):
    contraction, arrays = operands(name, numbers)
    x, w, g, v, u = map(ops.convert_to_tensor, arrays)
    call = contracted(contraction, recipes.get(recipe))
    alone = first(call, x, w, g)
    seen = []

    def total(x, w):
        found = first(call, x, w, g)
        seen.extend(found)
        return ops.sum(found[0] * v) + ops.sum(found[1] * u)

    if BACKEND == "jax":
        import jax

        def both(x, w):
            value = total(x, w)
            return value, tuple(seen)

        seen = jax.grad(both, argnums=(0, 1), has_aux=True)(x, w)[1]
    else:
        slopes(total, x, w)
    for one, other in zip(seen, alone, strict=True):
        np.testing.assert_array_equal(array(one), array(other))


@pytest.mark.full
def test_a_third_derivative_is_refused():
    contraction, tensors = operands("matrices", numbers)
    call = contracted(contraction, recipes.CurrentScaling())
    *tensors, v, u = map(ops.convert_to_tensor, tensors)

    def total(x, w, g):
        of_x, of_w = first(call, x, w, g)
        return ops.sum(of_x * v) + ops.sum(of_w * u)

    def steepness(x, w, g):
        return sum(ops.sum(ops.square(d)) for d in slopes(total, x, w, g))

    with pytest.raises(ERRORS[BACKEND], match="cannot be differentiated again"):
        slopes(steepness, *tensors)


class ForwardOnly(recipes.Recipe):
    """Gradients read inputs and kernel as they are."""

    def quantization(self, operand, matmul):
        if matmul != "forward":
            return None
        return recipes.Quantization(format="float8_e4m3fn")


@pytest.mark.skipif(BACKEND == "jax", reason="JAX makes float64 float32")
@needs_sums_in_float64
def test_what_is_not_quantized_keeps_its_digits():
    contraction, arrays = operands("heads", numbers)
    x, w, g, v, u = (ops.convert_to_tensor(a, "float64") / 3 for a in arrays)
    plan = contractions.make_plan(
        contraction, ForwardOnly(), *["float64"] * 2, True
    )
    residuals = plan.bound.forward(x, w, (), False)[1]
    found, _, _ = plan.bound.second_derivatives(residuals, g, v, u)
    call = unquantized(contraction)
    expected = array(call(v, w)) + array(call(x, u))
    np.testing.assert_allclose(array(found), expected, rtol=1e-13, atol=1e-13)
