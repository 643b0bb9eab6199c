"""What the rules say of figures: each sign, its cause, and when it is new."""

import math

import pytest

from keras_policy_ext.ext.sampling.figures import Figures
from keras_policy_ext.ext.watch.rules import (
    Around,
    Rules,
    Seen,
    Thresholds,
)
from keras_policy_ext.recipes import CurrentScaling, DelayedScaling

pytestmark = pytest.mark.any_backend

SIZE = 1000.0
E4M3 = DelayedScaling().quantization("inputs", "forward")
E5M2 = CurrentScaling().quantization("outputs_grad", "inputs_grad")


def figures(
    amax=4.0,
    saturated=0.0,
    underflow=0.0,
    nonfinite=0.0,
    scale=None,
    kurtosis=3.0,
    noise=1e-3,
):
    """Of a thousand numbers with a mean of 0 and a deviation of amax / 4."""
    rms = amax / 4
    counts = SIZE, nonfinite, 0.0, SIZE if amax else 0.0
    counts += saturated * SIZE, underflow * SIZE
    powers = 0.0, SIZE * rms**2, 0.0, SIZE * kurtosis * rms**4
    scale = amax / 448 if scale is None else scale
    return Figures(counts, amax, scale, powers, noise * powers[1])


def seen(operand="inputs", *parts, layer="up", asked=E4M3, **numbers):
    return Seen(layer, "kernel", operand, parts or [figures(**numbers)], asked)


def judged(*samples, thresholds=None, **around):
    """The warnings of each sample, as (layer, operand, sign)."""
    rules = Rules(thresholds or Thresholds())
    found = []
    for step, sample in enumerate(samples, start=1):
        at = Around(step, **{k: v[step - 1] for k, v in around.items()})
        sample = [sample] if isinstance(sample, Seen) else sample
        found.append(rules.look(at, sample))
    return found


def only(found):
    """The warning of the last sample; there is no other in any."""
    *before, last = found
    assert not any(before)
    (warning,) = last
    return warning


def test_good_figures_bring_no_warning():
    sample = [seen(operand) for operand in ("inputs", "kernel", "outputs_grad")]
    assert not any(judged(*[sample] * 20))


@pytest.mark.parametrize(
    ("numbers", "sign", "cause"),
    [
        ({"saturated": 0.5, "scale": 1e-4}, "saturated", "of other values"),
        ({"scale": 100.0}, "scale", "of other values"),
        ({"underflow": 0.2}, "underflow", "too small beside the largest"),
        ({"nonfinite": 3.0}, "nonfinite", "layers before it compute them"),
    ],
    ids=["saturated", "scale", "underflow", "nonfinite"],
)
def test_a_sign_in_one_sample(numbers, sign, cause):
    warning = only(judged(seen(**numbers)))
    assert (warning.sign, warning.step, warning.since) == (sign, 1, 1)
    assert cause in warning.message and "layer 'up', inputs:" in warning.message


@pytest.mark.parametrize(
    ("numbers", "sign"),
    [
        ({"saturated": 0.02}, "saturated"),
        ({"noise": 0.2}, "noise"),
        ({"amax": 0.0}, "zeros"),
        ({"kurtosis": None}, "constant"),
    ],
    ids=["saturated", "noise", "zeros", "constant"],
)
def test_a_sign_that_has_to_last(numbers, sign):
    bad = seen(**numbers) if sign != "constant" else constant()
    warning = only(judged(seen(), bad, bad, bad))
    assert (warning.sign, warning.step, warning.since) == (sign, 4, 2)
    assert not any(judged(bad, bad, seen(), bad, bad))


def constant():
    counts = SIZE, 0.0, 0.0, SIZE, 0.0, 0.0
    return seen(
        "inputs", Figures(counts, 0.5, 0.5 / 448, (500, 250, 125, 62.5), 1.0)
    )


@pytest.mark.parametrize(("amax", "count"), [(4.0, 7), (4.0, 8), (9.0, 1)])
def test_a_few_values_of_a_small_tensor_saturate(amax, count):
    """A kernel that grows may have some beyond a scale of the step before."""
    counts = 72.0, 0.0, 0.0, 72.0, float(count), 0.0
    powers = 0.0, 72.0, 0.0, 216.0
    few = seen("kernel", Figures(counts, amax, 4 / 448, powers, 0.07))
    found = judged(few, few, few, few)
    signs = [w.sign for each in found for w in each]
    assert signs == ([] if count == 7 else ["saturated"])


def test_what_never_had_a_gradient_is_no_fault():
    nothing = seen("outputs_grad", amax=0.0)
    assert not any(judged(*[nothing] * 5))
    found = only(judged(seen("outputs_grad"), *[nothing] * 3))
    assert found.sign == "zeros" and "no longer" in found.message


def test_growth_is_seen_from_its_lowest_and_told_once():
    samples = [seen(amax=4 * 1.2 ** max(0, i - 5)) for i in range(30)]
    found = [w for each in judged(*samples) for w in each]
    assert [w.sign for w in found] == ["growth"]
    # 1.2 ** 12 is the first power above 8; the last low sample is the sixth.
    assert (found[0].step, found[0].since) == (18, 2)
    assert "All of them grow" in found[0].message
    few = [seen(), seen(amax=40.0, kurtosis=500.0)]
    assert "A few channels grow" in only(judged(*few)).message
    gradients = [seen("outputs_grad"), seen("outputs_grad", amax=100.0)]
    assert not any(judged(*gradients))


def test_growth_goes_on_until_it_slows_down():
    rules = Rules(Thresholds())
    for step, amax in enumerate([1.0, 9.0, *[9.0 * 1.1**i for i in range(60)]]):
        rules.look(Around(step + 1), [seen(amax=amax)])
    assert [w.sign for w in rules.present] == ["growth"]
    for step in range(100, 120):
        rules.look(Around(step), [seen(amax=2700.0)])
    assert not rules.present


def test_kernels_that_jump_and_kernels_that_learn_too_fast():
    both = [seen("kernel", layer=name) for name in ("up", "down")]
    one = [both[0], seen("kernel", layer="down", amax=40.0)]
    warning = only(judged(both, one))
    assert (warning.layer, warning.sign) == ("down", "jump")
    assert "assigned from outside" in warning.message
    all_of_them = [
        seen("kernel", layer=name, amax=40.0) for name in ("up", "down")
    ]
    _, (first, _) = judged(both, all_of_them)
    assert "learning rate may be too high" in first.message


def learning(*rates):
    """The warnings while a kernel grows 1.2-fold from sample to sample."""
    samples = [seen("kernel", amax=1.2**n) for n in range(len(rates))]
    return judged(*samples, learning_rate=rates)


def test_a_kernel_that_grows_after_the_learning_rate_rose():
    assert not any(learning(*[1e-3] * 7))
    # 1.2 ** 4 is the first power above 2.
    warning = only(learning(1e-3, 1e-3, *[3e-2] * 4))
    assert (warning.sign, warning.since) == ("growth", 3)
    assert "At step 3 the learning rate rose 30-fold to 0.03" in warning.message


def test_growth_of_a_kernel_is_told_from_where_it_is_fast():
    """It learns by 1 % a step, and grows by 15 % from the sixth step on."""
    amaxes = [1.01 ** min(n, 4) * 1.15 ** max(n - 4, 0) for n in range(16)]
    found = judged(*[seen("kernel", amax=amax) for amax in amaxes])
    (warning,) = [w for each in found for w in each]
    assert (warning.sign, warning.since) == ("growth", 6)
    assert "from step 6 on faster than 2 % a step" in warning.message


def test_a_learning_rate_that_is_warmed_up_is_no_fault():
    assert not any(learning(*[1e-3 * n for n in range(7)]))
    rules = Rules(Thresholds())
    for step in (1, 11, 21, 31):  # 11-fold, from one sample to the next
        sample = [seen("kernel", amax=1.4 ** (step / 10))]
        assert not rules.look(Around(step, learning_rate=1e-4 * step), sample)


def test_uses_that_share_a_scale():
    parts = figures(amax=4.0), figures(amax=4e-6, scale=4.0 / 448)
    warning = only(judged(seen("inputs", *parts)))
    assert warning.sign == "shared" and "4e-06 and 4" in warning.message


def test_values_that_are_not_finite_are_named_where_they_begin():
    bad = {"nonfinite": 1.0}
    up = [seen("inputs"), seen("kernel"), seen("outputs_grad", **bad)]
    down = [
        seen("inputs", layer="down"),
        seen("kernel", layer="down", **bad),
        seen("outputs_grad", layer="down", **bad),
    ]
    warning = only(judged([*up, *down]))
    assert (warning.layer, warning.operand) == ("down", "kernel")
    down[1] = seen("kernel", layer="down")
    warning = only(judged([*up, *down], loss_scale=[2.0**20]))
    assert (warning.layer, warning.operand) == ("down", "outputs_grad")
    assert "loss scale, 1.05e+06" in warning.message
    first = only(judged(seen(**bad), batch_is_finite=[False]))
    assert "The batch has such values" in first.message


def test_thresholds_are_numbers_above_zero():
    quiet = Thresholds(underflow=math.inf)
    assert not any(judged(seen(underflow=0.9), thresholds=quiet))
    for wrong in (0, -1.0, math.nan, True, "8", None):
        with pytest.raises(ValueError, match="`growth` is not a threshold"):
            Thresholds(growth=wrong)


def test_a_kernel_that_begins_at_zero_grows_without_a_warning():
    samples = [seen("kernel", amax=0.01 * n) for n in range(10)]
    assert not any(judged(*samples))
    assert any(judged(*samples[1:]))
