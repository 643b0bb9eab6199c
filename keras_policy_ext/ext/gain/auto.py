"""The filter `"auto"` of `convert`, and the kernel of a layer on a device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_policy_ext import backends, recipes
from keras_policy_ext._types import override
from keras_policy_ext.contractions.plan import make_plan
from keras_policy_ext.conversion.candidates import (
    Candidate,
    SizeFilter,
    not_multiples,
)
from keras_policy_ext.ext.gain.estimate import BreakEven, Matmuls, break_even
from keras_policy_ext.kernels import Choice, Conv, Einsum


def here() -> BreakEven:
    """Return the break-even size of this device, or of the simulated one."""
    backend, device = backends.current.name, backends.engine.device()
    choice = choice_for(Einsum("ab,bc->ac"))
    if choice.native and device.float8:
        return break_even(backend, device)
    # Where float8 matmuls are emulated, no size gains.
    reason = f"{device.title} has no float8 matmul"
    if device.float8:
        reason = f"matmuls are emulated: {choice.reason}"
    return BreakEven(backend, device.title, None, reason)


def choice_for(contraction: Einsum | Conv) -> Choice:
    """Return the kernel that computes a contraction in a compiled step."""
    recipe = recipes.get("current")
    plan = make_plan(contraction, recipe, "bfloat16", "float32")
    # `fit` compiles for a GPU on TensorFlow, and a model is converted before.
    return dataclasses.replace(plan, for_xla=True).with_preference().choice


@dataclasses.dataclass(frozen=True, kw_only=True)
class Auto(SizeFilter):
    """A filter that leaves out layers that float8 would slow down or hurt.

    Hardware multiplies float8 matrices whose sizes are multiples of 16. In a
    small matmul the time saved is less than the time of amaxes and casts. The
    size from which float8 gains depends on the device: see
    `keras-policy-ext doctor`. Emulated matmuls never gain, so without
    `smallest` no layer is converted on a CPU.

    Attributes:
        multiple: Both the summed and the output size must be multiples of it.
        smallest: Neither may be below it, on any device. None: the size comes
            from the table of the device, and emulated matmuls are left out.
        first: Whether the first layer of the model is converted.
        last: Whether the last layer is converted, which computes the logits.
        rows: How many rows the inputs of a layer have in a step, such as
            batch times positions. Used if `smallest` is None.

    Examples:
        >>> layers = [keras.layers.Dense(64), keras.layers.Dense(8)]
        >>> model = keras.Sequential([keras.Input((32,)), *layers])
        >>> report = kpe.convert(model, filter=kpe.filters.Auto(smallest=32))
        >>> len(report.converted), len(report.skipped)
        (1, 1)
    """

    multiple: int = 16
    smallest: int | None = None
    first: bool = True
    last: bool = True
    rows: int = 8192

    def __post_init__(self) -> None:
        for name in ("multiple", "smallest", "rows"):
            value = getattr(self, name)
            if value is None and name == "smallest":
                continue
            is_int = isinstance(value, (int, np.integer))
            if isinstance(value, bool) or not is_int:
                raise TypeError(_wrong(name, value))
            if value < 1:
                raise ValueError(_wrong(name, value))

    @override
    def reasons(self, candidates: Sequence[Candidate]) -> dict[int, str]:
        known = here() if self.smallest is None else None
        found = {
            number: reason
            for number, candidate in enumerate(candidates)
            if (reason := self._reason(candidate, known))
        }
        if candidates and not self.first:
            found[0] = "it is the first layer"
        if candidates and not self.last:
            found[len(candidates) - 1] = "it is the last layer"
        return found

    def _reason(
        self, candidate: Candidate, here: BreakEven | None
    ) -> str | None:
        if here is not None and here.size is None:
            return f"float8 saves no time on this device: {here.origin}"
        if here is not None:
            choice = choice_for(contraction_of(candidate.layer))
            if not choice.native:
                return f"its product would be emulated: {choice.reason}"
        for summed, free in candidate.sizes:
            product = f"its product sums over {summed} and yields {free}"
            if reason := not_multiples(summed, free, self.multiple):
                return reason
            if self.smallest is not None and (
                min(summed, free) < self.smallest
            ):
                return f"{product}, one of them below {self.smallest}"
            if here is not None and (
                reason := self._too_small(here, summed, free)
            ):
                return f"{product}, {reason}"
        return None

    def _too_small(self, here: BreakEven, summed: int, free: int) -> str | None:
        """Return why float8 slows down a matmul of this size, or None."""
        size = Matmuls.of(self.rows, summed, free).size
        if here.size is None or size >= here.size:
            return None
        return (
            f"which with {self.rows} rows gains as much as one of "
            f"{round(size)}³; float8 pays from {here.size}³ on here"
        )


def contraction_of(layer: Any) -> Einsum | Conv:
    """Return a layer's contraction, reduced to what a kernel choice needs."""
    if hasattr(layer, "kernel_size"):
        ones = (1,) * len(layer.kernel_size)
        return Conv(ones, "valid", ones, "channels_last")
    equation = getattr(layer, "equation", "ab,bc->ac")
    return Einsum(equation.replace("...", "").replace(" ", ""))


def _wrong(name: str, value: object) -> str:
    none = " or None" if name == "smallest" else ""
    return (
        f"`{name}` of a filter must be an int >= 1{none}. Received: {value!r} "
        f"(of type {type(value).__name__}). Allowed: 1, 2, 3, …{none}. Leave "
        f"out `{name}` for the default."
    )
