"""Rules that say, from the figures of operands, what goes wrong and where."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from keras_policy_ext import formats
from keras_policy_ext.ext.sampling.figures import Figures, total
from keras_policy_ext.recipes import Quantization
from keras_policy_ext.reports import counted

SAMPLES = 16
"""The number of earlier samples that growth is judged against."""

RECENT = 500
"""The number of steps after which an earlier sample no longer counts."""

FEW = 8
"""The number of values from which a slight saturation counts.

In a small tensor a single value is a large share.
"""

SLOW = 1.02
"""The factor per step by which kernels may grow while they learn."""

WORDS = {
    "inputs": "inputs",
    "kernel": "kernel",
    "outputs_grad": "gradient of the outputs",
}
"""The words for operands in sentences."""

#: What a recipe can do something about.
OF_PRECISION = ("saturated", "scale", "shared", "underflow", "noise", "growth")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thresholds:
    """The figures beyond which `watch` warns and `autopilot` acts.

    Growth is judged against the last 16 samples that are at most 500 steps old.

    Attributes:
        saturated: The fraction of nonzero values that saturate.
        underflow: The fraction of nonzero values that become 0.
        sqnr_db: The lowest signal-to-quantization-noise ratio, dB.
        scale: How many times larger the largest number under the scale may be
            than the amax, as a share of what leaves seven bits between the
            amax and the smallest normal number of the format.
        growth: The factor by which the amax of inputs grows.
        gradient_growth: The same for the gradient of the outputs.
        kernel_growth: The factor by which the root mean square of a kernel
            grows.
        kernel_jump: The factor by which it changes, either way, from one
            sample to the next, beside 2 % a step.
        patience: The number of samples in a row in which all values are 0 or
            the same, or at least 8 values saturate and none is twice what the
            scale covers.

    Raises:
        ValueError: If one is not a number > 0.
    """

    saturated: float = 0.01
    underflow: float = 0.1
    sqnr_db: float = 10.0
    scale: float = 1.0
    growth: float = 8.0
    gradient_growth: float = 64.0
    kernel_growth: float = 4.0
    kernel_jump: float = 2.0
    patience: int = 3

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            is_number = isinstance(value, (int, float, np.number))
            if not is_number or isinstance(value, bool) or not value > 0:
                raise ValueError(
                    f"`{name}` is not a threshold. Received: {value!r}. "
                    "Allowed: a number > 0; math.inf switches most rules off. "
                    "Leave it out for the default."
                )


@dataclasses.dataclass(frozen=True)
class WatchWarning:
    """A warning about an operand of a layer.

    Attributes:
        step: The step, from 1, of the sample in which it was found.
        since: The step of the sample in which it began.
        layer: The path of the layer.
        kernel: The name of the kernel.
        operand: `"inputs"`, `"kernel"` or `"outputs_grad"`.
        sign: What is seen: `"nonfinite"`, `"zeros"`, `"constant"`,
            `"saturated"`, `"scale"`, `"shared"`, `"underflow"`, `"noise"`,
            `"growth"` or `"jump"`.
        value: The figure.
        message: What it is, and the likely cause.
    """

    step: int
    since: int
    layer: str
    kernel: str
    operand: str
    sign: str
    value: float
    message: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        """The layer, kernel, operand and sign."""
        return self.layer, self.kernel, self.operand, self.sign

    def as_dict(self) -> dict[str, Any]:
        """Return the attributes as JSON types."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return self.message


class Seen(NamedTuple):
    """The figures of an operand in a sample.

    Attributes:
        layer: The path of the layer.
        kernel: The name of the kernel.
        operand: The operand.
        parts: Its figures in each use of the kernel.
        quantization: How it is quantized; None for not at all.
    """

    layer: str
    kernel: str
    operand: str
    parts: Sequence[Figures]
    quantization: Quantization | None

    @property
    def key(self) -> tuple[str, str, str]:
        """The layer, kernel and operand."""
        return self.layer, self.kernel, self.operand


class Around(NamedTuple):
    """The facts about a step that rules need beside the figures.

    Attributes:
        step: The step.
        batch_is_finite: Whether all values of the batch are finite.
        learning_rate: Of the optimizer; NaN if unknown.
        loss_scale: Of the optimizer; 1 without one.
    """

    step: int
    batch_is_finite: bool = True
    learning_rate: float = math.nan
    loss_scale: float = 1.0


class _Then(NamedTuple):
    """An operand in an earlier sample."""

    step: int
    learning_rate: float
    amax: float
    rms: float
    kurtosis: float


class _Sign(NamedTuple):
    sign: str
    value: float
    since: int
    words: str
    has_to_last: bool = False


class Rules:
    """The rules, with what they remember of earlier samples.

    Attributes:
        present: The warnings of the last sample, new or not.
    """

    def __init__(self, thresholds: Thresholds):
        self.present: list[WatchWarning] = []
        self._limits = thresholds
        self._before: dict[tuple[str, str, str, str], WatchWarning] = {}
        self._rows: dict[tuple[str, str, str], int] = {}
        self._past: collections.deque[tuple[int, float, Any]]
        self._past = collections.deque(maxlen=SAMPLES)
        # Signs that count if they last: since when, and in how many samples.
        self._lasting: dict[tuple[str, str, str, str], tuple[int, int]] = {}
        self._alive: set[tuple[str, str, str]] = set()
        self._count = 0
        # The number of the sample that had a warning last.
        self._told: dict[tuple[str, str, str, str], int] = {}

    def look(
        self, around: Around, sample: Sequence[Seen]
    ) -> list[WatchWarning]:
        """Judge a sample; return the warnings that the last 16 had not.

        Args:
            around: What is known beside the figures.
            sample: The operands in the order in which the layers ran.
        """
        self._before = {each.key: each for each in self.present}
        self.present = []
        broken = _first_nonfinite(around, sample)
        if broken is not None:
            self._add(around, *broken)
        else:
            grown = self._grown_kernels(around, sample)
            lasting, self._lasting = self._lasting, {}
            for seen in sample:
                figures = total(seen.parts)
                for sign in self._signs(around, seen, figures, grown):
                    if sign.has_to_last:
                        key = (*seen.key, sign.sign)
                        since, count = lasting.get(key, (around.step, 0))
                        self._lasting[key] = since, count + 1
                        if count + 1 < self._limits.patience:
                            continue
                        sign = sign._replace(since=since)
                    self._add(around, seen, sign)
                    break
            # What a wrong scale makes of a layer is not what the next ones get.
            if not any(x.sign in ("scale", "shared") for x in self.present):
                self._remember(around, sample)
        self._count += 1
        told, count = self._told, self._count
        recent = {k: at for k, at in told.items() if at > count - SAMPLES}
        self._told = recent | {x.key: count for x in self.present}
        return [each for each in self.present if each.key not in told]

    def _add(self, around: Around, seen: Seen, found: _Sign) -> None:
        known = self._before.get((*seen.key, found.sign))
        since = found.since if known is None else known.since
        message = (
            f"Step {around.step}, layer {seen.layer!r}, "
            f"{WORDS[seen.operand]}: {found.words}"
        )
        self.present.append(
            WatchWarning(
                around.step, since, *seen.key, found.sign, found.value, message
            )
        )

    def _remember(self, around: Around, sample: Sequence[Seen]) -> None:
        for seen in sample:
            self._rows.setdefault(seen.key, len(self._rows))
        numbers = np.full((len(self._rows), 3), np.nan, "float32")
        for seen in sample:
            figures = total(seen.parts)
            kurtosis = figures.kurtosis or math.nan
            row = figures.amax, _rms(figures), kurtosis
            numbers[self._rows[seen.key]] = row
        self._past.append((around.step, around.learning_rate, numbers))

    def _earlier(self, around: Around, seen: Seen) -> list[_Then]:
        """Return an operand in earlier samples in which it was not zero."""
        place, found = self._rows.get(seen.key), []
        for step, rate, numbers in self._past:
            is_recent = around.step - step <= RECENT
            if place is None or place >= len(numbers):
                continue
            if is_recent or step == self._past[-1][0]:
                amax, rms, kurtosis = map(float, numbers[place])
                if amax > 0:
                    found.append(_Then(step, rate, amax, rms, kurtosis))
        return found

    def _was_zero(self, seen: Seen) -> bool:
        """Return True if all values were 0 in a sample that is remembered."""
        place = self._rows.get(seen.key)
        rows = (numbers for _, _, numbers in self._past)
        return place is not None and any(
            place < len(numbers) and numbers[place, 0] == 0 for numbers in rows
        )

    def _grown_kernels(self, around: Around, sample: Sequence[Seen]) -> float:
        """Return the share of kernels that grew by half, or more."""
        grown = []
        for seen in sample:
            past = self._earlier(around, seen)
            if seen.operand == "kernel" and past:
                rms = _rms(total(seen.parts))
                grown.append(rms > 1.5 * min(then.rms for then in past))
        return sum(grown) / max(len(grown), 1)

    def _signs(
        self, around: Around, seen: Seen, figures: Figures, grown: float
    ) -> Iterator[_Sign]:
        """Yield what is wrong with an operand, the likeliest cause first."""
        past = self._earlier(around, seen)
        # A kernel that begins at 0, as in an adapter, grows from there.
        if seen.operand == "kernel" and not self._was_zero(seen):
            yield from self._of_kernel(around, seen.key, figures, past, grown)
        yield from self._idling(around, seen, figures)
        if not figures.amax:
            return
        yield from self._of_scale(around, seen, figures, past)
        limits = self._limits
        if figures.underflow_fraction > limits.underflow:
            share = figures.underflow_fraction
            yield _Sign(
                "underflow",
                share,
                around.step,
                f"{share * 100:.0f} % of the values become 0. They are too "
                f"small beside the largest one, {figures.amax:.3g}.",
            )
        if seen.operand != "kernel":
            yield from self._growing(seen, figures, past)
        sqnr = figures.sqnr_db
        if sqnr is not None and sqnr < limits.sqnr_db:
            cause = "The format has too few bits for these values."
            if figures.saturated_fraction:
                cause = "The largest values are beyond what the scale covers."
            yield _Sign(
                "noise",
                sqnr,
                around.step,
                f"rounding leaves a signal-to-noise ratio of {sqnr:.1f} dB. "
                f"{cause}",
                has_to_last=True,
            )

    def _of_kernel(
        self,
        around: Around,
        key: tuple[str, str, str],
        figures: Figures,
        past: Sequence[_Then],
        grown: float,
    ) -> Iterator[_Sign]:
        rms = _rms(figures)
        if not past or not rms:
            return
        lowest = min(past, key=lambda then: then.rms)
        growth, last = rms / lowest.rms, past[-1]
        change = max(rms / last.rms, last.rms / rms)
        limit = self._limits.kernel_growth
        before, since, rate = _rise(around, past)
        if before is not None and rms / before.rms > math.sqrt(limit):
            times = rate / before.learning_rate
            yield _Sign(
                "growth",
                rms / before.rms,
                since,
                f"it grew {rms / before.rms:.3g}-fold since step "
                f"{before.step}. At step {since} the learning rate rose "
                f"{times:.3g}-fold to {rate:.3g}: it is too high.",
            )
        jump = self._limits.kernel_jump
        if change > jump * SLOW ** (around.step - last.step):
            cause = (
                "It was assigned from outside of training."
                if grown <= 0.5
                else "So did other kernels: the learning rate may be too high."
            )
            yield _Sign(
                "jump",
                change,
                around.step,
                f"its root mean square went from {last.rms:.3g} to {rms:.3g} "
                f"since step {last.step}. {cause}",
            )
        if (*key, "growth") in self._before:
            limit = math.sqrt(limit)
        if growth > limit:
            cause = (
                "What it computes, such as logits, grows with it."
                if grown <= 0.5
                else "So did other kernels: the learning rate may be too high."
            )
            since = _start(around.step, rms, past, lowest)
            faster = ""
            if since != lowest.step:
                faster = f", and from step {since} on faster than 2 % a step"
            yield _Sign(
                "growth",
                growth,
                since,
                f"it grew {growth:.3g}-fold since step {lowest.step}{faster}. "
                f"{cause}",
            )

    def _idling(
        self, around: Around, seen: Seen, figures: Figures
    ) -> Iterator[_Sign]:
        sign = ""
        if seen.operand != "kernel":
            if not figures.amax:
                sign = "zeros"
            elif figures.size > 1 and figures.kurtosis is None:
                sign = "constant"
        if not sign:
            self._alive.add(seen.key)
            return
        # What never got a gradient is so by the design of the model.
        if seen.operand == "outputs_grad" and seen.key not in self._alive:
            return
        cause = {
            ("zeros", "inputs"): "It is an expert without tokens, or what "
            "comes before it is dead.",
            ("zeros", "outputs_grad"): "The loss no longer depends on the "
            "layer: it is an unused expert, or what comes after it is dead.",
            ("constant", "inputs"): "The layer learns nothing from them: look "
            "at the data, or at what comes before it.",
            ("constant", "outputs_grad"): "The loss does not depend on the "
            "examples.",
        }[sign, seen.operand]
        value = figures.powers[0] / max(figures.size, 1.0)
        words = f"all values are {value:.3g}. {cause}"
        yield _Sign(sign, value, around.step, words, has_to_last=True)

    def _of_scale(
        self,
        around: Around,
        seen: Seen,
        figures: Figures,
        past: Sequence[_Then],
    ) -> Iterator[_Sign]:
        """Yield a scale that is too small or too large for the values."""
        asked = seen.quantization
        if asked is None:
            return
        largest = formats.get(asked.format).max
        covered = figures.scale * largest
        share = figures.saturated_fraction
        is_mild = figures.amax <= 2 * covered
        is_rare = is_mild and figures.saturated < FEW
        if share > self._limits.saturated and not is_rare:
            cause = "A few values are beyond what their scale covers."
            if past and figures.amax > 2 * past[-1].amax:
                cause = (
                    f"The largest grew from {past[-1].amax:.3g} to "
                    f"{figures.amax:.3g} since step {past[-1].step}, and the "
                    "scale is of earlier steps."
                )
            elif figures.amax > 2 * covered:
                cause = (
                    f"The largest is {figures.amax:.3g}, and the scale is for "
                    f"{covered:.3g}: it is of other values, such as those "
                    "of another file or of earlier steps."
                )
            yield _Sign(
                "saturated",
                share,
                around.step,
                f"{share * 100:.0f} % of the values saturate. {cause}",
                has_to_last=is_mild,
            )
        if not asked.has_one_scale:
            return
        bits = largest / formats.get(asked.format).smallest_normal / 2**7
        most = bits * self._limits.scale
        parts = [x for x in seen.parts if x.amax]
        ratios = [x.scale * largest / x.amax for x in parts]
        if max(ratios) <= most:
            return
        amaxes = sorted(x.amax for x in parts)
        is_shared = min(ratios) <= most
        if is_shared:
            cause = (
                f"The uses of the layer share a scale, and their largest "
                f"values are {amaxes[0]:.3g} and {amaxes[-1]:.3g}."
            )
        elif not past or max(then.amax for then in past) < 4 * figures.amax:
            cause = (
                "It is of other values, such as those of another file, or of "
                "one outlier in the history."
            )
        else:
            cause = "The values shrank, and the scale is of earlier steps."
        yield _Sign(
            "shared" if is_shared else "scale",
            max(ratios),
            around.step,
            f"the scale is for values {max(ratios):.3g} times as large. "
            f"{cause}",
        )

    def _growing(
        self, seen: Seen, figures: Figures, past: Sequence[_Then]
    ) -> Iterator[_Sign]:
        if not past:
            return
        lowest = min(past, key=lambda then: then.amax)
        growth, limit = figures.amax / lowest.amax, self._limits.growth
        if seen.operand == "outputs_grad":
            limit = self._limits.gradient_growth
        if (*seen.key, "growth") in self._before:
            limit = math.sqrt(limit)  # It goes on, until it slows down.
        if growth <= limit:
            return
        cause = "All of them grow: look at the layers before it."
        if seen.operand == "outputs_grad":
            cause = "Look at the loss, and at the layers behind it."
        kurtosis = figures.kurtosis or 0.0
        if kurtosis > 2 * lowest.kurtosis:
            cause = (
                "A few channels grow and the others do not, as in gated "
                f"blocks: the kurtosis went from {lowest.kurtosis:.3g} to "
                f"{kurtosis:.3g}."
            )
        since = lowest.step
        yield _Sign(
            "growth",
            growth,
            since,
            f"the largest grew {growth:.3g}-fold since step {since}, to "
            f"{figures.amax:.3g}. {cause}",
        )


def _first_nonfinite(
    around: Around, sample: Sequence[Seen]
) -> tuple[Seen, _Sign] | None:
    """Return where values that are not finite begin, and why; or None."""
    forward = [seen for seen in sample if seen.operand != "outputs_grad"]
    backward = [seen for seen in sample if seen.operand == "outputs_grad"]
    for seen in (*forward, *reversed(backward)):
        count = total(seen.parts).nonfinite
        if not count:
            continue
        cause = "The layers before it compute them."
        if seen.operand == "kernel":
            cause = "An update or an assignment wrote them."
        elif seen.operand == "outputs_grad":
            cause = "The loss or what comes after the layer computes them."
            if around.loss_scale > 1:
                cause = (
                    f"The loss scale, {around.loss_scale:.3g}, may be too high."
                )
        elif not around.batch_is_finite:
            cause = "The batch has such values."
        values = counted(int(count), "infinite or NaN value")
        words = f"there are {values}. {cause}"
        return seen, _Sign("nonfinite", count, around.step, words)
    return None


def _start(step: int, rms: float, past: Sequence[_Then], lowest: _Then) -> int:
    """Return the step since which a kernel grew faster than 2 % a step."""
    since = lowest.step  # if it never did
    for at, value in [*((then.step, then.rms) for then in past), (step, rms)]:
        is_slow = value <= lowest.rms * SLOW ** (at - lowest.step)
        if at < lowest.step or is_slow:
            since = lowest.step
        elif since == lowest.step:
            since = at
    return since


def _rise(
    around: Around, past: Sequence[_Then]
) -> tuple[_Then | None, int, float]:
    """Return (sample before a fourfold rise or None, step after, its rate)."""
    rates = [(then.step, then.learning_rate) for then in past]
    rates.append((around.step, around.learning_rate))
    for before, (since, rate) in zip(past, rates[1:], strict=True):
        # A rise in proportion to the number of steps is that of a warm-up.
        most = 4 * before.learning_rate * since / before.step
        if 0 < most <= rate:
            return before, since, rate
    return None, around.step, around.learning_rate


def _rms(figures: Figures) -> float:
    return math.sqrt(figures.powers[1] / max(figures.size, 1.0))
