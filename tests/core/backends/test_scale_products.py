"""Products of two scales that are no normal numbers, where the results are."""

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from finer_scales import ANY_ROW, ROW, WHOLE
from keras_policy_ext.backends.emulated import times_scales
from keras_policy_ext.numerics.quantized import Quantized
from ways import WAYS, array, run

ROWS, COLUMNS = 64, 48
KINDS = {
    "tensors": (WHOLE, WHOLE),
    "rows": (ROW, ROW),
    "rows with a tensor": (ROW, WHOLE),
    "rows, any scale": (ANY_ROW, ANY_ROW),
}
kinds = pytest.mark.parametrize("kind", KINDS)
NORMAL = 2.0**-126, float(np.finfo("float32").max)


def scales_of(asked, size, exponent, seed):
    """Of a tensor or of rows, which differ by up to 2^8."""
    rng = np.random.default_rng(seed)
    shape = (1, 1, 1) if asked.tile.is_whole else (1, size, 1)
    powers = 2.0 ** (exponent + rng.integers(0, 9, shape))
    any_scale = asked.scale_rounding == "nearest"
    factor = rng.uniform(1, 2, shape) if any_scale else 1.0
    return (powers * factor).astype("float32")


def scaled(kind, way, product, scales):
    first, second = KINDS[kind]

    def multiplied(product, a, b):
        values = product[:, :, :1]
        x, y = Quantized(values, a, first), Quantized(values, b, second)
        return times_scales(product + 0.0, x, y)

    return array(run(multiplied, way, product, *scales))


def products(exponent):
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=(1, ROWS, COLUMNS)) * 2.0**exponent
    numbers[0, 0] = 0.0
    return numbers.astype("float32")


@WAYS
@kinds
@pytest.mark.parametrize(
    ("exponents", "size"),
    [((-70, -70), 20), ((-120, -20), 20), ((64, 64), -16), ((118, 10), -20)],
    ids=str,
)
def test_normal_results_are_exact_where_the_scales_multiply_to_none(
    kind, exponents, size, way
):
    product = products(size)
    each = zip(KINDS[kind], (ROWS, COLUMNS), exponents, strict=True)
    scales = [scales_of(*of, seed) for seed, of in enumerate(each)]
    found = scaled(kind, way, product, scales)
    wanted = product.astype("float64") * scales[0] * scales[1].swapaxes(1, 2)
    normal = (wanted == 0) | (np.abs(wanted) >= NORMAL[0])
    normal &= np.abs(wanted) <= NORMAL[1]
    assert normal.mean() > 0.9
    # Two roundings, of the scales and of the result.
    np.testing.assert_allclose(
        found[normal], wanted[normal], rtol=2.0**-23, atol=0
    )


@WAYS
@kinds
@pytest.mark.parametrize("exponents", [(-5, -9), (-60, -55), (70, 20)], ids=str)
def test_scales_that_multiply_to_normal_numbers_give_the_same_bits(
    kind, exponents, way
):
    product = products(3)
    each = zip(KINDS[kind], (ROWS, COLUMNS), exponents, strict=True)
    scales = [scales_of(*of, seed) for seed, of in enumerate(each)]
    found = scaled(kind, way, product, scales)
    wanted = product * (scales[0] * scales[1].swapaxes(1, 2))
    np.testing.assert_array_equal(found, wanted)


@WAYS
def test_a_scale_that_is_no_number_marks_its_row_alone(way):
    scales = [np.full((1, n, 1), 0.5, "float32") for n in (ROWS, COLUMNS)]
    scales[0][0, 3] = np.nan
    found = scaled("rows", way, products(0), scales)
    assert np.isnan(found[0, 3]).all()
    assert np.isfinite(np.delete(found[0], 3, 0)).all()


@pytest.mark.parametrize("name", ["current", "delayed", "rowwise"])
def test_small_numbers_pass_through_a_layer(name):
    policy = kpe.get(f"float8/{name}_from_float32")
    layer = kpe.layers.Dense(4, use_bias=False, dtype=policy)
    layer.build((4, 4))
    layer.kernel.assign(np.eye(4))
    for size in (1e-32, 1e-34, 1e-35):
        y = keras.ops.convert_to_numpy(layer(np.full((4, 4), size, "float32")))
        # A number of e4m3fn has three bits after its first.
        np.testing.assert_allclose(np.diag(y), size, rtol=2.0**-4)
