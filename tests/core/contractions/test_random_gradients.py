"""Output gradients that are rounded at random: right on average, and equal
in equal runs.

`plan.backward` is called with states of any number of steps, by which the
random bits differ.
"""

import dataclasses
import functools
from typing import ClassVar

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from cases import SLOW, mostly
from keras_policy_ext import contractions, formats, recipes, reference
from keras_policy_ext.contractions.operands import PassOptions
from keras_policy_ext.ext.delayed.observations import VALID_MARK
from keras_policy_ext.ext.reference.scales import spread
from keras_policy_ext.ext.stochastic.rounding import key_of_use
from keras_policy_ext.numerics.scale_sources import source_of
from steps import gradients, no_grad, numpy
from ways import BACKEND, array, compiled

NVFP4 = recipes.NVFP4Scaling()
E5M2 = "float8_e5m2"
COMPILED = BACKEND == "jax"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WholeAtRandom(recipes.Recipe):
    """One scale for a tensor, output gradients in e5m2 at random."""

    name: ClassVar[str] = "whole_at_random_of_a_test"

    seed: int = 0

    def quantization(self, operand, matmul):
        if operand != "outputs_grad":
            return recipes.Quantization(format="float8_e4m3fn")
        return recipes.Quantization(format=E5M2, rounding="stochastic")


each = pytest.mark.parametrize(
    "recipe",
    mostly([NVFP4, WholeAtRandom()], NVFP4),
    ids=lambda recipe: recipe.name,
)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def counted(recipe, steps):
    """A state after some steps."""
    source = source_of(recipe)
    matrix = np.zeros(source.state_shape, "float32")
    matrix[0, 0], matrix[0, -1] = VALID_MARK, steps
    return matrix


@functools.cache
def differentiated(equation, recipe, slot):
    """Takes operands and a state, if any; returns both gradients."""
    plan = contractions.make_plan(
        contractions.Einsum(equation), recipe, "float32", "float32", True, slot
    )

    def both(x, w, g, *state):
        _, residuals = plan.bound.forward(x, w, state, observe=True)
        return plan.bound.backward(residuals, g, state, slot=slot)[:2]

    return compiled(both, "jit" if COMPILED else "eager")


def backward(equation, recipe, x, w, g, steps=0, slot=0):
    """Both gradients in a step."""
    state = [counted(recipe, steps)] if recipe.remembers else []
    tensors = map(ops.convert_to_tensor, (x, w, g, *state))
    found = differentiated(equation, recipe, slot)(*tensors)
    return [array(each) for each in found]


SMALL = normal(0, 6, 32), normal(1, 32, 20), normal(2, 6, 20)


def small(recipe=NVFP4, factor=1.0, **where):
    x, w, g = SMALL
    return backward("ab,bc->ac", recipe, x, w, g * np.float32(factor), **where)


def assert_others(found, other):
    for one, two in zip(found, other, strict=True):
        assert np.mean(one != two) > 0.5


# Which bits


@each
def test_bits_are_those_of_the_step_the_use_and_the_seed(recipe):
    first = small(recipe, steps=3)
    for one, two in zip(first, small(recipe, steps=3), strict=True):
        np.testing.assert_array_equal(one, two)
    assert_others(first, small(recipe, steps=4))
    assert_others(first, small(recipe, steps=3, slot=1))
    seeded = dataclasses.replace(recipe, seed=1)
    assert_others(first, small(seeded, steps=3))


@each
def test_an_equal_key_and_another_amax_give_other_bits(recipe):
    """As in micro-batches, replicas and steps of a scan.

    Twice the gradient would be rounded to twice the numbers by equal bits.
    """
    first = small(recipe)
    assert_others([2 * each for each in first], small(recipe, factor=2.0))
    nearest = recipes.NVFP4Scaling(stochastic_rounding=False)
    twice = small(nearest, factor=2.0)
    for one, two in zip(small(nearest), twice, strict=True):
        np.testing.assert_array_equal(2 * one, two)


class OneMatmul(kpe.layers.Float8Mixin, keras.layers.Layer):
    """The product with a kernel, some times; also a cell of an RNN."""

    state_size = output_size = 4

    def __init__(self, times=1, **kwargs):
        super().__init__(dtype="float8/nvfp4_from_float32", **kwargs)
        self.times = times

    def build(self, input_shape):
        self.kernel = self.add_weight(shape=(16, 4), name="kernel")

    def call(self, inputs, states=None, training=None):
        found = [
            self.float8_matmul(inputs, self.kernel, training=training)
            for _ in range(self.times)
        ]
        return sum(found) if states is None else (sum(found), states)


@pytest.mark.full
def test_uses_of_a_kernel_in_a_step_get_other_bits():
    x, found = normal(0, 8, 16), {}
    for times in (1, 2):
        layer = OneMatmul(times, name="one")
        layer.build(x.shape)
        with no_grad():
            layer.kernel.assign(normal(1, 16, 4))
        g = ops.convert_to_tensor(normal(2, 8, 4))
        _, dx, (dw, *_) = gradients(layer, x, lambda y, g=g: ops.sum(y * g))
        found[times] = [numpy(dx), numpy(dw)]
    assert_others([2 * each for each in found[1]], found[2])


def two_layers(recipe, kernel):
    """A model of two layers side by side, and no names of its own."""
    policy = kpe.Float8DTypePolicy("float32", recipe=recipe)
    inputs = keras.Input((16,))
    layers = [
        kpe.layers.Dense(4, use_bias=False, dtype=policy) for _ in range(2)
    ]
    model = keras.Model(inputs, sum(layer(inputs) for layer in layers))
    with no_grad():
        for layer in layers:
            layer.kernel.assign(kernel)
    return model


def kernel_gradients(model):
    g = ops.convert_to_tensor(normal(2, 8, 4))
    x = normal(0, 8, 16)
    _, _, found = gradients(model, x, lambda y: ops.sum(y * g))
    variables = model.trainable_variables
    return [
        numpy(each)
        for each, variable in zip(found, variables, strict=True)
        if tuple(variable.shape) == (16, 4)
    ]


@each
def test_two_equal_layers_with_one_output_gradient_get_other_bits(recipe):
    kernel = normal(1, 16, 4)
    first, second = kernel_gradients(two_layers(recipe, kernel))
    assert_others([first], [second])
    again = kernel_gradients(two_layers(recipe, kernel))
    np.testing.assert_array_equal(again, [first, second])


def test_the_bits_are_the_same_after_a_model_was_loaded(tmp_path):
    model = two_layers(NVFP4, normal(1, 16, 4))
    model.save(tmp_path / "model.keras")
    loaded = kpe.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(
        kernel_gradients(loaded), kernel_gradients(model)
    )


def test_two_equal_layers_that_are_called_alone_get_other_bits():
    found = []
    for name in ("one", "other", "one"):
        layer = OneMatmul(name=name)
        layer.build((8, 16))
        with no_grad():
            layer.kernel.assign(normal(1, 16, 4))
        g = ops.convert_to_tensor(normal(2, 8, 4))
        _, _, (dw, *_) = gradients(
            layer, normal(0, 8, 16), lambda y, g=g: ops.sum(y * g)
        )
        found.append(numpy(dw))
    assert_others(found[:1], found[1:2])
    np.testing.assert_array_equal(found[0], found[2])


@pytest.mark.full
def test_steps_of_a_scan_get_other_bits():
    """The gradient of each is twice that of the one before."""
    layer = keras.layers.RNN(OneMatmul(), return_sequences=True)
    x = np.repeat(normal(0, 8, 1, 16), 3, axis=1)
    layer.build(x.shape)
    g = normal(2, 8, 1, 4) * np.float32([[[1], [2], [4]]])
    g = ops.convert_to_tensor(g)
    _, dx, _ = gradients(layer, x, lambda y: ops.sum(y * g), compiled=COMPILED)
    first, second, third = np.moveaxis(numpy(dx), 1, 0)
    assert_others([2 * first, 2 * second], [second, third])


# Right on average


def unrounded(matrix, asked):
    """What a matmul would read, but for the rounding of the values.

    A scale in e4m3fn may be rounded down, and what is then beyond the largest
    number saturates, whatever the random bits.
    """
    nearest = dataclasses.replace(asked, rounding="nearest")
    read = reference.quantize_matrices(matrix, nearest)
    x = reference.hadamard(matrix) if asked.hadamard else np.float32(matrix)
    scale = spread(read.scales.astype("float64"), read.tile, x.shape)
    if read.tensor_scale is not None:
        scale = scale * np.float64(read.tensor_scale)
    limit = formats.get(asked.format).max
    return np.clip(x.astype("float64") / scale, -limit, limit) * scale


def dequantized(matrix, asked):
    return reference.quantize_matrices(matrix, asked).dequantize()


DRAWS, STEPS = 512, 8


@pytest.mark.full
@each
def test_gradients_are_right_on_average(recipe):
    """4096 draws: equal matrices of a batch, in eight steps."""
    x, w, g = normal(0, 16, 8), normal(1, 8, 16), normal(2, 16, 16)

    def batch(one):
        return np.repeat(one[None], DRAWS, axis=0)

    draws = [
        backward("gac,gcd->gad", recipe, *map(batch, (x, w, g)), steps=step)
        for step in range(STEPS)
    ]

    def asked(operand, matmul):
        return recipe.quantization(operand, matmul)

    rows, columns = g[None], g.T[None]
    home = unrounded(rows, asked("outputs_grad", "inputs_grad"))[0]
    turned = unrounded(columns, asked("outputs_grad", "kernel_grad"))[0]
    kernel = dequantized(w[None], asked("kernel", "inputs_grad"))[0]
    inputs = dequantized(x.T[None], asked("inputs", "kernel_grad"))[0]
    expected = home @ kernel.T, inputs @ turned.T
    for which, exact in enumerate(expected):
        found = np.concatenate([draw[which] for draw in draws])
        assert len(found) == DRAWS * STEPS
        assert len({one.tobytes() for one in found}) == len(found)
        error = found.std(axis=0, dtype="float64") / np.sqrt(len(found))
        away = np.abs(found.mean(axis=0, dtype="float64") - exact)
        assert np.all(away < 4 * error)


# Whole runs


def trained(seed=0, rounding=True, **options):
    keras.utils.set_random_seed(0)
    recipe = recipes.NVFP4Scaling(seed=seed, stochastic_rounding=rounding)
    policy = kpe.Float8DTypePolicy("float32", recipe=recipe)
    hidden = kpe.layers.Dense(16, "gelu", dtype=policy)
    model = keras.Sequential(
        [keras.Input((16,)), hidden, kpe.layers.Dense(4, dtype=policy)]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse", **options)
    model.fit(normal(3, 16, 16), normal(4, 16, 4), 8, epochs=2, verbose=0)
    return model


MODES = {"eager": {"run_eagerly": True}, "compiled": {"jit_compile": COMPILED}}


@pytest.mark.full
@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("eager", marks=SLOW),
        pytest.param("compiled"),
    ],
)
def test_equal_seeds_give_equal_runs(mode):
    first, again, other = (trained(seed, **MODES[mode]) for seed in (0, 0, 1))
    for one, two in zip(first.weights, again.weights, strict=True):
        np.testing.assert_array_equal(numpy(one), numpy(two))
    assert np.any(numpy(first.weights[0]) != numpy(other.weights[0]))


def test_a_recipe_to_nearest_keeps_no_state():
    layer = kpe.layers.Dense(
        4, dtype="float8/nvfp4(stochastic_rounding=False)_from_float32"
    )
    layer.build((None, 8))
    assert len(layer.weights) == 2
    assert source_of(layer.dtype_policy.recipe).state_shape is None


# One scale for a tensor


@pytest.mark.parametrize(
    "equation", mostly(["abc,cd->bad", "gac,gcd->gad"], "abc,cd->bad")
)
def test_whole_tensors_at_random_are_those_of_the_reference(equation):
    sizes = {"a": 3, "b": 5, "c": 9, "d": 6, "g": 2}
    first, second, result = equation.replace("->", ",").split(",")
    x, w, g = (
        normal(i, *(sizes[c] for c in term))
        for i, term in enumerate((first, second, result))
    )
    recipe = WholeAtRandom(seed=5)
    found = backward(equation, recipe, x, w, g, steps=7, slot=2)
    steps = ops.convert_to_tensor(7, "int32")
    key = int(key_of_use(steps, seed=5, slot=2))
    exact = reference.einsum(equation, x, w, g, recipe, key)
    for one, two in zip(found, exact[1:3], strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)


def test_a_native_matmul_reads_float8_that_was_rounded_at_random():
    """The random rounding itself is in float32."""
    g, state = (
        ops.convert_to_tensor(normal(2, 16, 16)),
        counted(WholeAtRandom(), 7),
    )
    found = {}
    for kind in ("native", "emulated"):
        with kpe.kernels.prefer(kind):
            plan = contractions.make_plan(
                contractions.Einsum("ab,bc->ac"),
                WholeAtRandom(),
                "float32",
                "float32",
                True,
            )
            known = plan.source.read(ops.convert_to_tensor(state))
            read = plan.bound.outputs_grad.quantize(
                g, PassOptions(known, False)
            )
        native = kernels_are_native(plan)
        assert native == (kind == "native" and BACKEND != "tensorflow")
        for each in (read.first, read.second):
            assert (E5M2 in str(each.values.dtype)) == native
        found[kind] = array(ops.cast(read.first.values, "float32"))
    np.testing.assert_array_equal(found["native"], found["emulated"])


def kernels_are_native(plan):
    """Whether float8 matmuls read the gradient of the outputs."""
    return plan.bound.outputs_grad.first.native
