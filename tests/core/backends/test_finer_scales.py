"""Recipes from outside the package, with scales finer than tensors.

Nothing under `layers/` knows of them. What is expected is computed in NumPy
from the equations, without matrices: an operand of a matmul has a scale for
each index of the axes that the result keeps.
"""

import dataclasses
from typing import ClassVar

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from keras_policy_ext import kernels, recipes, reference
from keras_policy_ext.contractions import equations
from keras_policy_ext.contractions.equations import form_of
from keras_policy_ext.numerics import tiles
from keras_policy_ext.recipes import MATMULS, Quantization, Tile
from products import Contract
from steps import gradients, no_grad, numpy
from ways import BACKEND

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerRow(recipes.Recipe):
    name: ClassVar[str] = "per_row_of_a_test"
    granularity: ClassVar[str] = "rowwise"

    def quantization(self, operand, matmul):
        return Quantization(
            format=E5M2 if operand == "outputs_grad" else E4M3,
            tile=Tile(free=1),
            scale_rounding="up",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WideKernelGrad(recipes.Recipe):
    """Rows forward, one scale backward, and `kernel_grad` not in float8."""

    name: ClassVar[str] = "wide_kernel_grad_of_a_test"

    def quantization(self, operand, matmul):
        if matmul == "kernel_grad":
            return None
        whole = (operand, matmul) == ("kernel", "inputs_grad")
        return Quantization(format=E4M3, tile=Tile(None if whole else 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks(recipes.Recipe):
    name: ClassVar[str] = "blocks_of_a_test"
    granularity: ClassVar[str] = "blockwise"

    def quantization(self, operand, matmul):
        tile = Tile(4, 4) if operand == "kernel" else Tile(1, 4)
        return Quantization(format=E4M3, tile=tile, scale_rounding="up")


EQUATIONS = [
    ("ab,bc->ac", (9, 16), (16, 6)),
    ("abc,cd->abd", (2, 5, 8), (8, 3)),
    ("abc,cde->adbe", (2, 5, 8), (8, 2, 3)),
    ("abcd,cde->abe", (2, 3, 4, 5), (4, 5, 6)),
    ("gab,gbc->gac", (3, 4, 8), (3, 8, 5)),
    ("abd,dk->bak", (3, 4, 8), (8, 5)),
]


def normal(*shape, seed=0):
    values = np.random.default_rng(seed).normal(size=shape)
    # Rows of very different sizes, which one scale would not do.
    return (values * 4.0 ** np.arange(shape[-1])).astype("float32")


def kept(x, term, out, asked):
    """What float8 keeps of an operand of the einsum with this output."""
    if asked is None:
        return x.astype("float64")
    summed = tuple(i for i, c in enumerate(term) if c not in out)
    axes = None if asked.tile.is_whole else summed
    amax = np.max(np.abs(x), axis=axes, keepdims=True)
    up = asked.scale_rounding == "up"
    scale = reference.scale_from_amax(amax, asked.format, power_of_two=up)
    codes = reference.quantize(x, scale, asked.format)
    return codes.astype("float64") * scale.astype("float64")


def expected_products(equation, recipe, x, w, g):
    """Outputs and both gradients, in float64."""
    first, second, out = equations.split(equation)
    values = {"inputs": x, "kernel": w, "outputs_grad": g}
    terms = {"inputs": first, "kernel": second, "outputs_grad": out}
    results = {"forward": out, "inputs_grad": first, "kernel_grad": second}
    for matmul, result in results.items():
        a, b = MATMULS[matmul]
        operands = [
            kept(values[o], terms[o], result, recipe.quantization(o, matmul))
            for o in (a, b)
        ]
        yield np.einsum(f"{terms[a]},{terms[b]}->{result}", *operands)


def run_layer(layer, x, g):
    weights = ops.convert_to_tensor(g)
    y, dx, grads = gradients(
        layer, x, lambda y: ops.sum(ops.multiply(y, weights)), compiled=True
    )
    return [numpy(ops.cast(each, "float32")) for each in (y, dx, grads[0])]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["emulated", "native"])
@pytest.mark.parametrize("recipe", [PerRow(), WideKernelGrad()], ids=repr)
@pytest.mark.parametrize(("equation", "inputs", "kernel"), EQUATIONS)
def test_a_scale_per_row_is_right_in_all_three_matmuls(
    equation, inputs, kernel, recipe, kind
):
    policy = kpe.Float8DTypePolicy("float32", recipe=recipe)
    layer = Contract(equation, kernel, dtype=policy)
    layer.build(inputs)
    x, w = normal(*inputs), normal(*kernel, seed=1)
    with no_grad():
        layer.kernel.assign(w)
    g = normal(*np.einsum(equation, x, w).shape, seed=2)
    with kernels.prefer(kind):
        found = run_layer(layer, x, g)
    batched = bool(form_of(equation).batch)
    none = BACKEND == "tensorflow" or (BACKEND == "torch" and batched)
    assert layer.kernel_choice.kind == ("emulated" if none else kind)
    expected = expected_products(equation, recipe, x, w, g)
    for got, exact in zip(found, expected, strict=True):
        error = np.abs(got - exact).max(axis=None)
        assert error <= 2.0**-20 * np.abs(exact).max()


@pytest.mark.full
def test_a_model_learns_with_a_scale_per_row():
    """As well as in float32, where one scale for a tensor would not do."""
    rng = np.random.default_rng(0)
    # The kernel's gradient needs columns of all sizes.
    x = (rng.normal(size=(64, 8)) * 10.0 ** -np.arange(8)).astype("float32")
    y = (x / x.std(axis=0)) @ rng.normal(size=(8, 4)).astype("float32")
    losses = {}
    for name, dtype in {
        "float32": "float32",
        "rows": kpe.Float8DTypePolicy("float32", recipe=PerRow()),
    }.items():
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [
                keras.Input((8,)),
                kpe.layers.Dense(16, activation="relu", dtype=dtype),
                kpe.layers.Dense(4, dtype=dtype),
            ]
        )
        model.compile(keras.optimizers.Adam(0.02), "mse")
        losses[name] = model.fit(x, y, epochs=30, verbose=0).history["loss"]
    assert losses["float32"][-1] < 0.8 * losses["float32"][0]
    assert losses["rows"][-1] < 1.05 * losses["float32"][-1]


@pytest.mark.parametrize(("equation", "inputs", "kernel"), EQUATIONS[:2])
def test_blocks_are_those_of_the_reference(equation, inputs, kernel):
    """Also where they do not fill the matrix."""
    policy = kpe.Float8DTypePolicy("float32", recipe=Blocks())
    layer = Contract(equation, kernel, dtype=policy)
    layer.build(inputs)
    x, w = normal(*inputs), normal(*kernel, seed=1)
    with no_grad():
        layer.kernel.assign(w)
    g = normal(*np.einsum(equation, x, w).shape, seed=2)
    flat_x, flat_g = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
    reads = {
        name: blocks(matrix, tile)
        for name, matrix, tile in (
            ("x", flat_x, (1, 4)),
            ("xt", flat_x.T, (1, 4)),
            ("w", w.T, (4, 4)),
            ("g", flat_g, (1, 4)),
            ("gt", flat_g.T, (1, 4)),
        )
    }
    expected = (
        reads["x"] @ reads["w"].T,
        reads["g"] @ reads["w"],
        reads["xt"] @ reads["gt"].T,
    )
    for got, exact in zip(run_layer(layer, x, g), expected, strict=True):
        error = np.abs(got.reshape(exact.shape) - exact).max()
        assert error <= 2.0**-20 * np.abs(exact).max()


def blocks(matrix, tile):
    """What is kept of a matrix by the reference, padded there with zeros."""
    (m, k), (free, contracted) = matrix.shape, tile
    padded = np.pad(matrix, ((0, -m % free), (0, -k % contracted)))
    codes, scales = reference.quantize_block(padded, tile=tile)
    scales = scales.repeat(free, 0).repeat(contracted, 1)
    return (codes.astype("float64") * scales)[:m, :k]


def test_a_tile_counts_along_a_merged_axis_and_not_across_a_batch():
    form = form_of("gabc,gcd->gabd")
    assert form.batch == "g"
    assert form.rows == "ab"
    x = np.arange(2 * 3 * 4 * 5, dtype="float32").reshape(2, 3, 4, 5)
    matrix = form.matrix("inputs", ops.convert_to_tensor(x))
    assert tuple(matrix.shape) == (2, 12, 5)
    amax = numpy(tiles.tile_amax(matrix, Tile(free=8)))
    rows = x.reshape(2, 12, 5)
    expected = [rows[:, :8].max((1, 2)), rows[:, 8:].max((1, 2))]
    np.testing.assert_array_equal(amax[:, :, 0], np.stack(expected, 1))


def test_a_convolution_has_one_scale_whatever_a_recipe_asks():
    policy = kpe.Float8DTypePolicy("float32", recipe=PerRow())
    whole = kpe.Float8DTypePolicy(
        "float32", recipe=recipes.CurrentScaling(power_of_two=True)
    )
    x = np.random.default_rng(0).normal(size=(2, 6, 3)).astype("float32")
    outputs = []
    for dtype in (policy, whole):
        keras.utils.set_random_seed(0)
        outputs.append(numpy(kpe.layers.Conv1D(4, 3, dtype=dtype)(x)))
    np.testing.assert_array_equal(*outputs)


def test_a_matmul_with_finer_scales_says_why_it_is_not_native():
    with kernels.prefer("native"):
        choice = kernels.select("ab,bc->ac", Blocks())
    assert choice == (
        "emulated",
        f"no float8 matmul of {BACKEND} has scales of blocks",
    )


# What cannot be carried out is refused where it is made


def recipe_of(rule, base=recipes.Recipe):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Refused(base):
        def quantization(self, operand, matmul):
            return rule(operand, matmul)

    Refused.name = "refused"
    return Refused()


def asked(**fields):
    return Quantization(**{"format": E4M3, **fields})


REFUSED = {
    "one operand is in float8": lambda o, m: None if o == "kernel" else asked(),
    "no hardware multiplies e5m2": lambda o, m: asked(format=E5M2),
    "hadamard can be None or 16": lambda o, m: asked(hadamard=32),
    "format can be": lambda o, m: asked(format="float8_e8m0fnu"),
    "cancel only in pairs": lambda o, m: asked(
        hadamard=16 if o == "inputs" else None
    ),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_a_recipe_that_cannot_be_carried_out_is_refused(fault):
    with pytest.raises(ValueError, match=fault) as error:
        recipe_of(REFUSED[fault])
    for word in ("Received", "Allowed", "quantization"):
        assert word in str(error.value)


@pytest.mark.parametrize(
    "fields", [{"tile": Tile(free=1)}, {"rounding": "stochastic"}], ids=str
)
def test_a_history_goes_with_whole_tensors_to_nearest_only(fields):
    with pytest.raises(ValueError, match="one amax for a tensor"):
        recipe_of(lambda o, m: asked(**fields), recipes.DelayedScaling)


def test_a_field_that_a_recipe_does_not_follow_is_refused():
    """Rather than ignored: the matmul would be in float8 after all."""
    with pytest.raises(ValueError, match="does not follow forward"):
        PerRow(forward="high_precision")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"format": "float9"}, "float9"),
        ({"rounding": "up"}, "rounding"),
        ({"scale_rounding": "down"}, "scale_rounding"),
        ({"scale_format": "float8_e8m0fnu"}, "scale_rounding"),
        ({"tile": Tile(0)}, "tile"),
        ({"tile": Tile(1, 32), "hadamard": 16}, "hadamard"),
        ({"scale_format": "float8_e4m3fn"}, "scale_format"),
        (
            {
                "tile": Tile(1, 32),
                "scale_format": "float8_e4m3fn",
                "scale_rounding": "up",
            },
            "scale_rounding",
        ),
        ({"four_over_six": True}, "four_over_six"),
        (
            {"format": "float4_e2m1fn", "four_over_six": True},
            "four_over_six",
        ),
    ],
)
def test_a_quantization_that_does_not_exist_is_refused(fields, named):
    with pytest.raises(ValueError, match=named):
        asked(**fields)


@pytest.mark.parametrize("name", ["block", "mxfp8", "nvfp4"])
def test_a_layer_that_says_no_shape_is_called_without_sizes(name):
    """Keras finds its shape with sizes that are symbols on JAX."""
    layer = Multiplies(dtype=f"float8/{name}_from_float32")
    outputs = layer(keras.Input((None, 20)))
    assert outputs.shape == (None, None, 4)


class Multiplies(kpe.layers.Float8Mixin, keras.layers.Layer):
    def build(self, input_shape):
        self.kernel = self.add_weight(shape=(input_shape[-1], 4))

    def call(self, inputs):
        return self.float8_matmul(inputs, self.kernel)
