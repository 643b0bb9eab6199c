import itertools
import math
import pathlib

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_policy_ext import formats, recipes, reference
from keras_policy_ext.recipes import CurrentScaling, DelayedScaling

pytestmark = pytest.mark.any_backend

GOLDENS = pathlib.Path(__file__).parent / "goldens"
FLOAT8 = ["float8_e4m3fn", "float8_e5m2"]
FNUZ = ["float8_e4m3fnuz", "float8_e5m2fnuz"]
SIGNED = [*FLOAT8, "float4_e2m1fn", *FNUZ]
OPERANDS = recipes.OPERANDS

float32s = st.floats(width=32, allow_nan=True, allow_infinity=True)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
positive = st.floats(2.0**-126, 2.0**127, width=32)
signed = pytest.mark.parametrize("dtype", SIGNED)


def finite_values(dtype):
    f = formats.get(dtype)
    codes = np.arange(2**f.bits, dtype=np.uint8).view(f.dtype)
    values = codes.astype(np.float64)
    return np.unique(values[np.isfinite(values)])


def same(a, b):
    """Equal, NaN counted as equal to NaN and -0.0 different from 0.0."""
    if math.isnan(a) or math.isnan(b):
        return math.isnan(a) and math.isnan(b)
    return a == b and math.copysign(1, a) == math.copysign(1, b)


def casted(x, dtype):
    return float(reference.cast(np.float32(x), dtype).astype(np.float64))


# Casting


@signed
def test_cast_keeps_every_number_of_the_format(dtype):
    f = formats.get(dtype)
    for code in np.arange(2**f.bits, dtype=np.uint8).view(f.dtype):
        x = float(code)
        expected = math.copysign(f.max, x) if math.isinf(x) else x
        assert same(casted(x, dtype), expected)
        assert same(reference.round_scalar(x, dtype), expected)


@signed
def test_cast_and_exact_rounding_agree_around_every_midpoint(dtype):
    values = finite_values(dtype)
    for low, high in itertools.pairwise(values):
        middle = np.float32((low + high) / 2)
        around = [
            np.nextafter(middle, np.float32(-np.inf)),
            middle,
            np.nextafter(middle, np.float32(np.inf)),
        ]
        for x in around:
            rounded = reference.round_scalar(float(x), dtype)
            assert same(casted(x, dtype), rounded)
        assert reference.round_scalar(float(around[0]), dtype) == low
        assert reference.round_scalar(float(around[2]), dtype) == high


@signed
def test_ties_go_to_the_even_code(dtype):
    f = formats.get(dtype)
    for low, high in itertools.pairwise(finite_values(dtype)):
        code = reference.cast((low + high) / 2, dtype)
        bits = int(code.view(np.uint8))
        assert bits % 2 == 0
        assert float(code) in (low, high)
        assert code.dtype == f.dtype


@signed
@given(x=float32s)
def test_cast_and_exact_rounding_agree_on_any_float(dtype, x):
    assert same(casted(x, dtype), reference.round_scalar(x, dtype))


@signed
@given(x=finite)
def test_exact_rounding_finds_a_nearest_number(dtype, x):
    values = finite_values(dtype)
    nearest = np.min(np.abs(values - x))
    assert abs(reference.round_scalar(x, dtype) - x) == nearest


@pytest.mark.parametrize("dtype", FLOAT8)
def test_cast_and_exact_rounding_agree_on_random_floats(dtype):
    bits = np.random.default_rng(0).integers(0, 2**32, 20_000, np.uint64)
    x = bits.astype(np.uint32).view(np.float32)
    cast = reference.cast(x, dtype).astype(np.float64)
    exact = [reference.round_scalar(float(v), dtype) for v in x]
    np.testing.assert_array_equal(cast, exact)


@signed
def test_every_bfloat16_number_is_rounded_exactly(dtype):
    x = np.arange(2**16, dtype=np.uint32) << 16
    x = x.astype(np.uint32).view(np.float32)
    if not formats.get(dtype).nan_codes:
        x = x[~np.isnan(x)]
    found = reference.cast(x, dtype).astype(np.float64)
    exact = np.array([reference.round_scalar(float(v), dtype) for v in x])
    np.testing.assert_array_equal(found, exact)
    signs = np.signbit(found) == np.signbit(exact)
    assert np.all(signs | np.isnan(exact))


@pytest.mark.parametrize("dtype", FNUZ)
def test_formats_with_one_zero_and_one_nan_have_no_other(dtype):
    x = np.float32([np.nan, -np.nan, -0.0, -1e-30, 0.0])
    codes = [0x80, 0x80, 0, 0, 0]
    assert reference.cast(x, dtype).view(np.uint8).tolist() == codes
    bits = 2**16 - 1
    found = reference.stochastic_cast(x, bits, dtype).view(np.uint8)
    assert found[[0, 1, 2, 4]].tolist() == [0x80, 0x80, 0, 0]
    below = reference.stochastic_cast(x, 0, dtype).view(np.uint8)
    assert below.tolist() == codes


@signed
def test_cast_saturates_and_keeps_nan(dtype):
    top = formats.get(dtype).max
    x = np.array([np.inf, -np.inf, 3e38, -3e38, top * 1.04], np.float32)
    expected = [top, -top, top, -top, top]
    assert reference.cast(x, dtype).astype(np.float64).tolist() == expected
    if dtype != "float4_e2m1fn":  # Which has no NaN.
        assert np.isnan(reference.cast(np.nan, dtype).astype(np.float32))


def test_465_becomes_448():
    assert float(reference.cast(465.0, "float8_e4m3fn")) == 448.0


def test_cast_reads_any_dtype_and_shape():
    x = np.ones((2, 0, 3), ml_dtypes.bfloat16)
    assert reference.cast(x, "float8_e5m2").shape == (2, 0, 3)
    assert float(reference.cast(3, "float8_e5m2")) == 3.0


@pytest.mark.parametrize("function", [reference.cast, reference.round_scalar])
def test_exponent_only_format_is_refused(function):
    with pytest.raises(ValueError, match="quantize_mx"):
        function(1.0, "float8_e8m0fnu")


# Quantizing


@given(x=finite, scale=st.floats(2.0**-100, 2.0**100, width=32))
def test_quantize_divides_in_float32_then_casts(x, scale):
    with np.errstate(over="ignore", under="ignore"):
        divided = np.float32(x) / np.float32(scale)
    for dtype in FLOAT8:
        code = reference.quantize(x, scale, dtype)
        assert same(float(code), casted(divided, dtype))


@pytest.mark.parametrize(
    ("dtype", "bits"), [(d, b) for d, b in zip(FLOAT8, (3, 2), strict=True)]
)
@given(data=st.data())
def test_quantization_error_is_at_most_half_a_unit(dtype, bits, data):
    x = np.float32(data.draw(st.floats(-(2.0**100), 2.0**100, width=32)))
    amax = np.float32(
        max(abs(x), data.draw(st.floats(2.0**-66, 2.0**100, width=32)))
    )
    scale = reference.scale_from_amax(amax, dtype)
    error = abs(
        float(reference.quantize_dequantize(x, scale, dtype)) - float(x)
    )
    f = formats.get(dtype)
    # Half the spacing at x: relative 2^-(bits+1) of a normal number, half a
    # subnormal below; and three float32 roundings (scale, division, product).
    relative = 2.0 ** -(bits + 1) + 4 * 2.0**-24
    absolute = 0.5 * f.smallest_subnormal * float(scale)
    assert error <= max(relative * abs(float(x)), absolute * (1 + 2.0**-22))


@pytest.mark.parametrize("dtype", FLOAT8)
def test_quantizing_a_dequantized_code_changes_nothing(dtype):
    f = formats.get(dtype)
    codes = np.arange(256, dtype=np.uint8).view(f.dtype)
    codes = codes[np.isfinite(codes.astype(np.float32))]
    for scale in (1.0, 0.037, 2.0**-20, 12345.678):
        again = reference.quantize(
            reference.dequantize(codes, scale), scale, dtype
        )
        np.testing.assert_array_equal(
            again.view(np.uint8), codes.view(np.uint8)
        )


def test_dequantize_multiplies_in_float32_before_the_cast():
    q = reference.cast([448.0, -1.5], "float8_e4m3fn")
    scale = np.float32(4e-9)  # Zero in float16: must not be cast first.
    result = reference.dequantize(q, scale, "float16")
    expected = (q.astype(np.float32) * scale).astype(np.float16)
    np.testing.assert_array_equal(result, expected)
    assert result.dtype == np.float16
    assert reference.dequantize(q, scale, ml_dtypes.bfloat16).dtype == (
        np.dtype(ml_dtypes.bfloat16)
    )


def test_quantize_divides_rather_than_multiplies_by_the_reciprocal():
    # 175 / 7 = 25 is a tie and goes to 24; 175 * float32(1 / 7) is above it.
    assert float(reference.quantize(175.0, 7.0, "float8_e4m3fn")) == 24.0


def test_scales_broadcast():
    x = np.array([[1.0, 2.0], [4.0, 8.0]])
    q = reference.quantize(x, np.array([[1.0], [4.0]]), "float8_e4m3fn")
    assert q.astype(np.float32).tolist() == [[1.0, 2.0], [1.0, 2.0]]


# Scales


@pytest.mark.parametrize("dtype", FLOAT8)
@given(amax=positive)
def test_the_amax_itself_is_mapped_to_the_largest_number(dtype, amax):
    scale = reference.scale_from_amax(amax, dtype)
    if scale > reference.SMALLEST_SCALE:
        assert float(reference.quantize(amax, scale, dtype)) == (
            formats.get(dtype).max
        )


@given(
    a=positive,
    b=positive,
    dtype=st.sampled_from(FLOAT8),
    margin=st.integers(0, 5),
    power_of_two=st.booleans(),
)
def test_scale_never_falls_when_amax_rises(a, b, dtype, margin, power_of_two):
    low, high = reference.scale_from_amax(
        np.sort(np.float32([a, b])), dtype, margin, power_of_two
    )
    assert low <= high


@given(
    amax=st.floats(0, width=32) | st.just(math.nan),
    dtype=st.sampled_from(FLOAT8),
    margin=st.integers(0, 300),
    power_of_two=st.booleans(),
)
def test_scale_and_reciprocal_are_always_finite_and_positive(
    amax, dtype, margin, power_of_two
):
    scale = reference.scale_from_amax(amax, dtype, margin, power_of_two)
    assert scale.dtype == np.float32
    assert 2.0**-126 <= scale <= 2.0**127
    assert 0 < np.float32(1) / scale < np.inf


@pytest.mark.parametrize("amax", [0.0, np.nan, np.inf])
def test_zero_and_non_finite_amax_keep_the_previous_scale(amax):
    assert reference.scale_from_amax(amax, "float8_e5m2", previous=0.3) == (
        np.float32(0.3)
    )
    assert reference.scale_from_amax(amax, "float8_e5m2") == 1.0


def test_scale_is_vectorised_over_amax_and_previous():
    scales = reference.scale_from_amax(
        [448.0, 0.0, np.nan], "float8_e4m3fn", previous=[7.0, 8.0, 9.0]
    )
    assert scales.tolist() == [1.0, 8.0, 9.0]


@given(amax=st.floats(2.0**-100, 2.0**100, width=32), margin=st.integers(0, 6))
def test_margin_multiplies_by_powers_of_two(amax, margin):
    plain = reference.scale_from_amax(amax, "float8_e4m3fn")
    wide = reference.scale_from_amax(amax, "float8_e4m3fn", margin)
    assert wide == plain * np.float32(2**margin)


@given(amax=positive, dtype=st.sampled_from(FLOAT8))
def test_power_of_two_rounds_up_to_the_next_power(amax, dtype):
    exact = reference.scale_from_amax(amax, dtype)
    power = reference.scale_from_amax(amax, dtype, power_of_two=True)
    assert math.frexp(float(power))[0] == 0.5
    assert power / 2 < exact <= power


@pytest.mark.parametrize("exponent", range(-117, 119))
def test_power_of_two_is_exact_on_and_beside_powers(exponent):
    amax = np.float32(448.0) * np.float32(2.0**exponent)
    above = np.nextafter(amax, np.float32(np.inf)) * np.float32(1 + 2.0**-20)
    scales = reference.scale_from_amax(
        [amax, above], "float8_e4m3fn", power_of_two=True
    )
    assert scales.tolist() == [2.0**exponent, 2.0 ** (exponent + 1)]


def test_amax_is_a_float32_magnitude():
    assert reference.amax(np.array([[-3.5, 2.0]], np.float16)) == 3.5
    assert reference.amax([]) == 0.0
    assert np.isnan(reference.amax([1.0, np.nan]))
    assert reference.amax([1.0, -np.inf]) == np.inf
    assert isinstance(reference.amax([1.0]), np.float32)


# Histories


def test_history_takes_the_newest_at_index_zero_and_drops_the_oldest():
    history = np.zeros(3)
    for amax in (1.0, 2.0, 3.0, 4.0):
        history = reference.update_history(history, amax)
    # Oldest at index 1, as in Keras and Flax.
    assert history.tolist() == [4.0, 2.0, 3.0]


def test_a_non_finite_amax_is_not_inserted():
    for amax in (np.nan, np.inf):
        kept = reference.update_history([3.0, 1.0, 2.0], amax)
        assert kept.tolist() == [3.0, 1.0, 2.0]


def test_a_zero_amax_is_inserted():
    assert reference.update_history([3.0, 1.0], 0.0).tolist() == [0.0, 3.0]


def test_updating_a_history_leaves_the_given_array_alone():
    history = np.ones(3, np.float32)
    for amax in (2.0, np.nan):
        new = reference.update_history(history, amax)
        new[:] = 9
    assert history.tolist() == [1.0, 1.0, 1.0]


def delayed(history, **options):
    options = {"current_amax": 448.0, "previous": 5.0} | options
    return reference.delayed_scale(history, "float8_e4m3fn", **options)


def test_an_unobserved_history_takes_the_current_amax():
    assert delayed([0, 0], previous=None) == 1.0


def test_an_unobserved_history_with_initial_scale_one_has_scale_one():
    options = {"initial_scale": 1.0, "current_amax": 896.0}
    assert delayed([0, 0], previous=None, **options) == 1.0


def test_an_unobserved_history_and_no_amax_have_scale_one():
    for amax in (0.0, np.nan, np.inf):
        assert delayed([0, 0], previous=None, current_amax=amax) == 1.0


def test_a_history_of_zeros_keeps_the_scale_that_there_was():
    for initial_scale in ("current", 1.0):
        assert delayed([0, 0], initial_scale=initial_scale) == 5.0


def test_an_observed_history_ignores_the_current_amax():
    assert delayed([0, 896.0]) == 2.0


def test_most_recent_takes_the_newest_entry():
    history = [448.0, 896.0]
    assert delayed(history, amax_compute="most_recent") == 1.0
    assert delayed(history, amax_compute="max") == 2.0
    assert delayed([0.0, 896.0], amax_compute="most_recent") == 5.0


def test_delayed_scale_takes_a_margin():
    assert delayed([448.0, 0.0], margin=3) == 8.0


# Errors


def test_sqnr_is_in_decibels():
    assert reference.sqnr_db([10.0, 0.0], [10.0, 1.0]) == pytest.approx(20.0)
    assert reference.sqnr_db([1.0], [1.0]) == math.inf
    assert reference.sqnr_db([0.0], [1.0]) == -math.inf


@pytest.mark.parametrize(
    ("dtype", "floor"), [("float8_e4m3fn", 30), ("float8_e5m2", 24)]
)
def test_sqnr_of_a_normal_tensor_is_above_the_uniform_bound(dtype, floor):
    # The relative error of a number with m mantissa bits is uniform within
    # ±2^-(m+1): rms 2^-(m+1)/sqrt(3) at worst, 28.9 dB (m=3) and 22.8 dB
    # (m=2); the average over a binade gives about 2.6 dB more.
    x = np.random.default_rng(0).normal(size=10_000)
    scale = reference.scale_from_amax(reference.amax(x), dtype)
    approximation = reference.quantize_dequantize(x, scale, dtype)
    assert floor < reference.sqnr_db(x, approximation) < floor + 4


def test_underflow_fraction_counts_nonzero_values_only():
    x = [0.0, 2.0**-11, 2.0**-9, 1.0, -(2.0**-12)]
    assert reference.underflow_fraction(x, 1.0, "float8_e4m3fn") == 0.5
    assert reference.underflow_fraction([0.0], 1.0, "float8_e4m3fn") == 0.0
    assert reference.underflow_fraction([], 1.0, "float8_e4m3fn") == 0.0


# Linear layers


def relative_rms(a, b):
    """0 where both are zero."""
    a, b = np.float64(a), np.float64(b)
    noise, signal = np.mean((a - b) ** 2), np.mean(b**2)
    return np.sqrt(noise / signal) if noise else 0.0


def ulps(a, b):
    return np.max(np.abs(np.float64(a) - b) / np.spacing(np.float32(b)))


@pytest.fixture(scope="module")
def flax():
    with np.load(GOLDENS / "delayed_scaling_flax.npz") as file:
        return dict(file)


FLAX_RECIPE = DelayedScaling(amax_history_length=4, initial_scale=1.0)


def test_delayed_scaling_trains_as_flax_does_for_seven_steps(flax):
    """Free-running: nothing but `w0` and the data comes from the golden."""
    layer, kernel = reference.DelayedLinear(FLAX_RECIPE), flax["w0"]
    for step in range(7):
        golden = {k: flax[f"{step}/{k}"] for k in ("x", "t", "y", "dx", "dw")}
        y = layer.forward(golden["x"], kernel)
        loss = np.mean((y - golden["t"]) ** 2)
        assert loss == pytest.approx(flax[f"{step}/loss"], rel=1e-6)
        g = np.float32(2 / y.size) * (y - golden["t"])
        inputs_grad, kernel_grad = layer.backward(g)
        assert relative_rms(y, golden["y"]) < 1e-6
        assert relative_rms(inputs_grad, golden["dx"]) < 1e-6
        assert relative_rms(kernel_grad, golden["dw"]) < 1e-6
        for operand in OPERANDS:
            history = flax[f"{step}/{operand}_amax_history"]
            scale = flax[f"{step}/{operand}_scale"]
            assert ulps(layer.histories[operand], history) <= 1
            assert ulps(layer.scales[operand], scale) <= 1
        kernel = kernel - np.float32(0.1) * kernel_grad


def test_scales_follow_from_the_histories_of_flax_bit_for_bit(flax):
    for operand in OPERANDS:
        previous, history = np.float32(1), np.zeros(4)
        for step in range(7):
            scale = reference.delayed_scale(
                history,
                FLAX_RECIPE.format_of(operand),
                current_amax=np.nan,
                previous=previous,
                initial_scale=1.0,
            )
            golden = flax[f"{step}/{operand}_scale"]
            assert scale == golden
            previous = golden
            history = flax[f"{step}/{operand}_amax_history"]


@pytest.mark.parametrize("dtype", FLOAT8)
@given(amax=st.floats(2.0**-100, 2.0**100, width=32), margin=st.integers(0, 20))
def test_scale_of_the_multiplier_is_within_an_ulp(dtype, amax, margin):
    inverted = reference.scale_of_multiplier(amax, dtype, margin)
    divided = reference.scale_from_amax(amax, dtype, margin)
    assert ulps(inverted, divided) <= 1


@given(
    amax=st.floats(0, width=32) | st.just(math.nan),
    dtype=st.sampled_from(FLOAT8),
    margin=st.integers(0, 300),
)
def test_scale_of_the_multiplier_is_always_finite_and_positive(
    amax, dtype, margin
):
    scale = reference.scale_of_multiplier(amax, dtype, margin)
    assert scale.dtype == np.float32
    assert 2.0**-126 <= scale <= 2.0**126


def test_scale_of_the_multiplier_keeps_the_previous_one_too():
    scales = reference.scale_of_multiplier(
        [0.0, np.nan, np.inf, 448.0], "float8_e4m3fn", previous=[7, 8, 9, 0]
    )
    assert scales.tolist() == [7.0, 8.0, 9.0, 1.0]


def test_current_scaling_agrees_with_torchao():
    with np.load(GOLDENS / "linear_torchao.npz") as golden:
        result = reference.linear(
            golden["x"], golden["kernel"], golden["g"], CurrentScaling()
        )
        pairs = {
            "y": result.y,
            "dx": result.inputs_grad,
            "dkernel": result.kernel_grad,
        }
        for name, value in pairs.items():
            assert relative_rms(value, golden[f"tensorwise/{name}"]) < 1e-6


@pytest.mark.parametrize(
    "recipe",
    [CurrentScaling(), CurrentScaling(power_of_two=True, fp8_format="e4m3")],
)
def test_linear_flattens_leading_axes(recipe):
    rng = np.random.default_rng(1)
    x, kernel = rng.normal(size=(2, 3, 4)), rng.normal(size=(4, 5))
    g = rng.normal(size=(2, 3, 5))
    whole = reference.linear(x, kernel, g, recipe)
    flat = reference.linear(x.reshape(6, 4), kernel, g.reshape(6, 5), recipe)
    np.testing.assert_array_equal(whole.y.reshape(6, 5), flat.y)
    np.testing.assert_array_equal(whole.kernel_grad, flat.kernel_grad)
    assert whole.inputs_grad.shape == x.shape
    for operand, codes in whole.quantized.items():
        assert codes.dtype.name == recipe.format_of(operand)
    # Two operands of 3 (or 2) mantissa bits: 4 % and 7 % at most on average.
    assert relative_rms(whole.y, x @ kernel) < 0.06
    assert relative_rms(whole.kernel_grad, flat_grad(x, g)) < 0.1


def flat_grad(x, g):
    return x.reshape(-1, x.shape[-1]).T @ g.reshape(-1, g.shape[-1])


def test_linear_of_zeros_is_zero_and_finite():
    zero = reference.linear(
        np.zeros((2, 3)), np.zeros((3, 4)), np.zeros((2, 4)), CurrentScaling()
    )
    assert not zero.y.any()
    assert not zero.inputs_grad.any()
    assert all(scale == 1 for scale in zero.scales.values())


def test_linear_without_state_refuses_a_history():
    with pytest.raises(ValueError, match="DelayedLinear"):
        reference.linear([[1.0]], [[1.0]], [[1.0]], DelayedScaling())


def test_a_pass_that_does_not_observe_changes_no_state():
    layer = reference.DelayedLinear(DelayedScaling(amax_history_length=3))
    x, kernel = np.full((2, 2), 3.0), np.full((2, 2), 5.0)
    trained = layer.forward(x, kernel)
    histories = {o: h.copy() for o, h in layer.histories.items()}
    scales = dict(layer.scales)
    layer.forward(x * 100, kernel * 100, observe=False)
    for operand in OPERANDS:
        np.testing.assert_array_equal(
            layer.histories[operand], histories[operand]
        )
        assert layer.scales[operand] == scales[operand]
    np.testing.assert_array_equal(layer.forward(x, kernel), trained)


def test_a_fresh_delayed_layer_is_scaled_from_its_first_step():
    layer = reference.DelayedLinear(DelayedScaling(amax_history_length=2))
    x = np.float32([[1e-4, 2e-4]])
    y = layer.forward(x, np.eye(2))
    assert relative_rms(y, x) < 2.0**-4
    assert layer.histories["inputs"].tolist() == [np.float32(2e-4), 0.0]


def test_zeros_keep_the_scale_and_are_no_first_observation():
    layer = reference.DelayedLinear(DelayedScaling(amax_history_length=1))
    scales = []
    for amax in (0.0, 448.0, 896.0, 0.0, 7.0, 7.0):
        layer.forward(np.full((1, 1), amax), np.eye(1))
        scales.append(float(layer.scales["inputs"]))
    assert scales[:5] == [1.0, 1.0, 1.0, 2.0, 2.0]
    assert scales[5] == np.float32(1) / np.float32(64)


def test_an_infinite_input_does_not_enter_the_history():
    layer = reference.DelayedLinear(DelayedScaling(amax_history_length=2))
    layer.forward(np.full((1, 1), 2.0), np.eye(1))
    y = layer.forward(np.full((1, 1), np.inf), np.eye(1))
    assert layer.histories["inputs"].tolist() == [2.0, 0.0]
    assert y == pytest.approx(2.0)


# Blocks


@pytest.fixture(scope="module")
def te():
    with np.load(GOLDENS / "block_quantizers_te.npz") as file:
        return dict(file)


def bytes_of(codes):
    return codes.view(np.uint8)


@pytest.mark.parametrize("tile", [(1, 128), (128, 128)])
@pytest.mark.parametrize("power_of_two", [True, False])
def test_blocks_agree_with_transformer_engine(te, tile, power_of_two):
    result = reference.quantize_block(
        te["x_256x384"], tile=tile, power_of_two=power_of_two
    )
    key = f"blk_256x384_float8_e4m3fn_{tile[0]}x{tile[1]}_p{power_of_two:d}"
    np.testing.assert_array_equal(bytes_of(result.codes), te[f"{key}_q"])
    # The peer stores 1 / (max / amax): one ulp, none for powers of two.
    assert ulps(result.scales, te[f"{key}_sinv"]) <= (not power_of_two)


@pytest.mark.parametrize(
    ("rounding", "key"), [("round_up", "mx"), ("floor", "mxfloor")]
)
def test_mx_agrees_with_transformer_engine_bit_for_bit(te, rounding, key):
    result = reference.quantize_mx(te["x_256x384"], rounding=rounding)
    np.testing.assert_array_equal(bytes_of(result.codes), te[f"{key}_q"])
    np.testing.assert_array_equal(bytes_of(result.scales), te[f"{key}_s"])


@pytest.mark.parametrize("rows", [1, 16])
def test_nvfp4_agrees_with_transformer_engine_bit_for_bit(te, rows):
    result = reference.quantize_nvfp4(te["x_nv"], (rows, 16))
    values = result.codes.astype(np.float32)
    np.testing.assert_array_equal(values, te[f"nv_{rows}_val"])
    scales = bytes_of(result.scales).repeat(rows, axis=0)
    np.testing.assert_array_equal(scales, te[f"nv_{rows}_sf"])
    assert result.amax == te[f"nv_{rows}_amax"][0]


def test_nvfp4_after_the_hadamard_transform_agrees_too(te):
    columns = te["x_nv"].T
    blocks = columns.reshape(len(columns), -1, 16) @ te["nv_rht_H"]
    result = reference.quantize_nvfp4(blocks.reshape(columns.shape))
    values = result.codes.astype(np.float32)
    np.testing.assert_array_equal(values, te["nv_rht_col_val"])
    np.testing.assert_array_equal(bytes_of(result.scales), te["nv_rht_col_sf"])


@pytest.mark.parametrize(
    ("amax", "byte"),
    [
        (0.0, 0),
        (np.inf, 254),
        (np.nan, 255),
        (448.0, 127),
        (np.nextafter(np.float32(448), np.float32(1e9)), 128),
        (1e-42, 0),
    ],
)
def test_mx_round_up_bytes_of_special_blocks(amax, byte):
    x = np.full((1, 32), amax, np.float32)
    assert bytes_of(reference.quantize_mx(x).scales).tolist() == [[byte]]


@pytest.mark.parametrize(
    ("amax", "byte"),
    [
        (0.0, 0),
        (np.inf, 254),
        (np.nan, 255),
        (256.0, 127),
        (511.0, 127),
        (2.0**-118, 1),
        (2.0**-120, 0),
        (1e-42, 0),
    ],
)
def test_mx_floor_bytes_of_special_blocks(amax, byte):
    x = np.full((1, 32), amax, np.float32)
    result = reference.quantize_mx(x, rounding="floor")
    assert bytes_of(result.scales).tolist() == [[byte]]


def test_a_smaller_last_tile_has_a_scale_of_its_own_values():
    x = np.ones((3, 130), np.float32)
    x[:, 128:] = 448.0
    result = reference.quantize_block(x, tile=(2, 128), power_of_two=False)
    assert result.scales.shape == (2, 2)
    assert result.scales[:, 1].tolist() == [1.0, 1.0]
    assert np.all(result.codes.astype(np.float32) == 448.0)


def test_blocks_of_zeros_are_zero_and_finite():
    zeros = np.zeros((16, 128), np.float32)
    block = reference.quantize_block(zeros)
    assert np.all(block.scales == 1)
    assert not block.codes.astype(np.float32).any()
    assert not reference.quantize_mx(zeros).codes.astype(np.float32).any()
    nv = reference.quantize_nvfp4(zeros)
    assert nv.amax == 0
    assert not nv.codes.astype(np.float32).any()


def test_blocks_need_a_matrix_and_a_known_rounding():
    with pytest.raises(ValueError, match=r"\(rows, columns\)"):
        reference.quantize_block(np.ones(4))
    with pytest.raises(ValueError, match="'round_up' or 'floor'"):
        reference.quantize_mx(np.ones((1, 32)), rounding="nearest")
