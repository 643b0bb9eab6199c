"""Scales, histories and linear layers of the reference."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_policy_ext import formats, recipes, reference
from keras_policy_ext.recipes import CurrentScaling, DelayedScaling
from reference_numbers import FLOAT8, GOLDENS, positive, ulps

pytestmark = pytest.mark.any_backend
OPERANDS = recipes.OPERANDS


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
