"""The figures of operands at some steps of a run, in memory and in rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

FIGURES = (
    "amax",
    "peak_amax",
    "scale",
    "saturated_fraction",
    "underflow_fraction",
    "zero_fraction",
    "sqnr_db",
    "kurtosis",
    "nonfinite",
)
KEYS = ("layer", "kernel", "operand")
COLUMNS = ("step", *KEYS, *FIGURES, "uses", "note")
"""The keys of a row, in their order in files."""

MOST = 64
"""The most samples in memory. With 100 layers they take 0.8 MB."""

Key = tuple[str, str, str]
Row = dict[str, Any]


class Measured(NamedTuple):
    """The figures of an operand in a sample.

    Attributes:
        figures: The value of each of `FIGURES`; NaN for none.
        uses: The number of times that the batch uses the kernel.
        note: What is unusual; "" for nothing.
    """

    figures: Iterable[float]
    uses: int
    note: str


class _Sample(NamedTuple):
    """A sample: figures and uses by place of an operand; notes but ""."""

    numbers: np.ndarray
    notes: dict[int, str]


class Samples:
    """Samples of a run, at most `MOST`; of more, every second one is dropped.

    Attributes:
        last_step: The step of the last sample, which is always kept; None
            before the first.
        unexamined: The paths of layers without figures in the last sample,
            with the reasons.
    """

    def __init__(self) -> None:
        self.last_step: int | None = None
        self.unexamined: dict[str, str] = {}
        self._keys: dict[Key, int] = {}
        self._kept: dict[int, _Sample] = {}
        self._last: _Sample | None = None
        self._taken, self._stride = 0, 1

    def __len__(self) -> int:
        return self._taken

    def add(
        self,
        step: int,
        found: Mapping[Key, Measured],
        unexamined: Mapping[str, str],
    ) -> None:
        """Add a sample.

        Args:
            step: The number of the step, above that of the sample before.
            found: What the sample has, by layer, kernel and operand.
            unexamined: The layers without figures, with the reasons.
        """
        for key in found:
            self._keys.setdefault(key, len(self._keys))
        width = len(FIGURES) + 1
        sample = _Sample(np.full((len(self._keys), width), np.nan, "f4"), {})
        for key, each in found.items():
            place = self._keys[key]
            sample.numbers[place] = (*each.figures, each.uses)
            if each.note:
                sample.notes[place] = each.note
        self.last_step, self._last = step, sample
        self.unexamined = dict(unexamined)
        if self._taken % self._stride == 0:
            self._kept[step] = sample
        self._taken += 1
        if len(self._kept) > MOST:
            self._stride *= 2
            self._kept = dict(list(self._kept.items())[::2])

    def last(self) -> list[Row]:
        """Return the rows of the last sample; [] before the first."""
        if self.last_step is None or self._last is None:
            return []
        return list(self._rows(self.last_step, self._last))

    def last_of_layers(self) -> list[Row]:
        """Return the rows of the last sample, and of layers without figures."""
        # The row of such a layer has the reason as its note, and no kernel.
        empty = dict.fromkeys(FIGURES)
        start = {"step": self.last_step}
        return self.last() + [
            {**start, **named(path, "", ""), **empty, "uses": 0, "note": why}
            for path, why in self.unexamined.items()
        ]

    def history(self) -> list[Row]:
        """Return the rows of all samples in memory."""
        kept = self._kept.items()
        return [row for each in kept for row in self._rows(*each)]

    def column(self, name: str) -> np.ndarray:
        """Return a figure of each operand in the last sample, without NaN."""
        if self._last is None:
            return np.zeros(0)
        found = self._last.numbers[:, FIGURES.index(name)]
        return found[~np.isnan(found)]

    def curve(self, key: Key, *names: str) -> list[tuple[float, float]]:
        """Return the steps of an operand, with the largest of some figures."""
        place = self._keys[key]
        columns = [FIGURES.index(name) for name in names]
        found = []
        for step, (numbers, _) in self._with_last():
            if place < len(numbers):
                known = numbers[place, columns]
                known = known[~np.isnan(known)]
                if known.size:
                    found.append((float(step), float(known.max())))
        return found

    def _with_last(self) -> Iterable[tuple[int, _Sample]]:
        kept = dict(self._kept)
        if self.last_step is not None and self._last is not None:
            kept[self.last_step] = self._last
        return kept.items()

    def _rows(self, step: int, sample: _Sample) -> Iterator[Row]:
        # Later samples may have more operands.
        keys = list(self._keys)[: len(sample.numbers)]
        for place, (key, row) in enumerate(
            zip(keys, sample.numbers, strict=True)
        ):
            if np.isnan(row[-1]):  # This sample did not have it.
                continue
            values = (None if np.isnan(x) else float(x) for x in row[:-1])
            yield {
                "step": step,
                **named(*key),
                **dict(zip(FIGURES, values, strict=True)),
                "uses": int(row[-1]),
                "note": sample.notes.get(place, ""),
            }


def named(*key: str) -> Row:
    """Return layer, kernel and operand as the beginning of a row."""
    return dict(zip(KEYS, key, strict=True))


def check_sampling(every: Any, share: Any) -> None:
    """Check how often something is done: by steps, or by a share of the time.

    Raises:
        ValueError: If `every` is neither None nor an integer of at least 1, or
            `share` is no number between 0 and 1.
    """
    is_count = isinstance(every, (int, np.integer)) and every >= 1
    if every is not None and not is_count:
        raise ValueError(
            f"`every` is not a number of steps. Received: {every!r}. Allowed: "
            "an integer >= 1, or None. Leave it out to go by time."
        )
    if not (isinstance(share, (int, float)) and 0 < share < 1):
        raise ValueError(
            f"`share` is not a share of the time. Received: {share!r}. "
            "Allowed: a number between 0 and 1, such as 0.02."
        )


def check_count(name: str, value: Any, of_what: str, default: int) -> None:
    """Check a number of things.

    Raises:
        ValueError: If it is no integer of at least 1.
    """
    if not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(
            f"`{name}` is not a number of {of_what}. Received: {value!r}. "
            f"Allowed: an integer >= 1. Leave it out for {default}."
        )
