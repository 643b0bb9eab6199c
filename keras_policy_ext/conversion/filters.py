"""Filters for `convert`: which layers are worth it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from keras_policy_ext.conversion.candidates import Candidate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Auto:
    """Leaves out the layers that float8 would slow down or hurt.

    Hardware multiplies float8 matrices whose sizes are multiples of 16. A
    small product is over before the time for amaxes and casts is won back:
    published measurements on an H100 have a matmul of 1024³ 1.37 times as
    fast as in bfloat16, and a compiled layer of 4096³ still 0.84 times
    (torchao, float8 training, rowwise).

    Attributes:
        multiple: Both the summed and the output size must be multiples of it.
        smallest: Neither may be below it.
        first: Whether the first layer of the model is converted.
        last: Whether the last one is, which makes the logits.
    """

    multiple: int = 16
    smallest: int = 1024
    first: bool = True
    last: bool = True

    def __post_init__(self) -> None:
        for name in ("multiple", "smallest"):
            value = getattr(self, name)
            is_int = isinstance(value, (int, np.integer))
            if isinstance(value, bool) or not is_int:
                raise TypeError(_wrong(name, value))
            if value < 1:
                raise ValueError(_wrong(name, value))

    def reasons(self, candidates: Sequence[Candidate]) -> dict[int, str]:
        """Why layers are left out.

        Args:
            candidates: All that could be converted, in the model's order.

        Returns:
            A reason for each number of a candidate that is left out.
        """
        found = {
            number: reason
            for number, candidate in enumerate(candidates)
            if (reason := self._reason(candidate))
        }
        if candidates and not self.first:
            found[0] = "it is the first layer"
        if candidates and not self.last:
            found[len(candidates) - 1] = "it is the last layer"
        return found

    def _reason(self, candidate: Candidate) -> str | None:
        for summed, free in candidate.sizes:
            if summed % self.multiple or free % self.multiple:
                return (
                    f"its product sums over {summed} and yields {free}, not "
                    f"both multiples of {self.multiple}"
                )
            if min(summed, free) < self.smallest:
                return (
                    f"its product sums over {summed} and yields {free}, one "
                    f"of them below {self.smallest}"
                )
        return None


def _wrong(name: str, value: object) -> str:
    return (
        f"`{name}` of a filter must be an int >= 1. Received: {value!r} (of "
        f"type {type(value).__name__}). Allowed: 1, 2, 3, …. Leave it out "
        "for the default."
    )
