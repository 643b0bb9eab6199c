"""`keras-policy-ext doctor`: what runs natively in float8, and what gains."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from keras_policy_ext import backends, recipes, stored_kernels
from keras_policy_ext.backends.devices import pretend, pretended
from keras_policy_ext.contractions.frozen import frozen_plan
from keras_policy_ext.contractions.plan import make_plan
from keras_policy_ext.ext.gain import auto, estimate
from keras_policy_ext.ext.gain.products import device_named
from keras_policy_ext.ext.sampling import machine
from keras_policy_ext.kernels import Choice, Conv, Einsum
from keras_policy_ext.policies.plain import for_this_device
from keras_policy_ext.reports import BaseReport, Column, Table

Cells = tuple[str, ...]

CONTRACTIONS: dict[str, Einsum | Conv] = {
    "matmul (Dense)": Einsum("bi,io->bo"),
    "einsum over several axes": Einsum("bthk,hkd->btd"),
    "einsum with a shared axis": Einsum("bei,eio->beo"),
    "convolution": Conv((1, 1), "valid", (1, 1), "channels_last"),
}


@dataclasses.dataclass(frozen=True, repr=False)
class DoctorReport(BaseReport):
    """The report of `doctor`: what a device runs natively in float8, and gains.

    Attributes:
        verdict: A sentence on whether training in float8 is faster there.
        notes: More sentences.
        machine: What is installed here; empty for a simulated device.
        device: What the device can do, and the source of that.
        backend: The name of the framework.
        contractions: Contractions, recipes, kind of kernel and reason.
        frozen: Granularities of stored kernels, their inputs, kind of kernel
            and reason.
        break_even: Framework, device, the size from which float8 gains, and
            the source of that; the row of this device comes first.
    """

    verdict: str
    notes: tuple[str, ...]
    machine: dict[str, str]
    device: dict[str, str]
    backend: str
    contractions: tuple[Cells, ...]
    frozen: tuple[Cells, ...]
    break_even: tuple[Cells, ...]

    def _parts(self, full: bool, number: int) -> Iterator[str | Table]:
        """Yield the verdict, the notes, and a table per other attribute."""
        yield from (self.verdict, *self.notes)
        facts = (Column(""), Column("", wraps=True))
        if self.machine:
            yield Table(facts, tuple(self.machine.items()), "This machine")
        which = "This device" if self.machine else "A device that is elsewhere"
        yield Table(facts, tuple(self.device.items()), which)
        yield _wide(
            f"Float8 contractions on {self.backend}",
            ("contraction", "recipe", "kernel", "why"),
            self.contractions,
        )
        yield _wide(
            "Frozen kernels (Dense)",
            ("scales per", "inputs", "kernel", "why"),
            self.frozen,
        )
        columns = (
            *(Column(h) for h in ("framework", "device", "size")),
            Column("source", wraps=True),
        )
        title = 'Float8 gains from which size on: `filter="auto"`'
        yield Table(columns, self.break_even, title)


def _wide(title: str, headings: Cells, rows: tuple[Cells, ...]) -> Table:
    columns = [Column(h, wraps=h != "kernel") for h in headings]
    return Table(columns, rows, title, spaced=True)


def report(device: str | None = None) -> DoctorReport:
    """Return a `DoctorReport` on this machine or on a simulated device.

    Args:
        device: The name of a device to simulate, as `device_named` takes it.
            None for the device of this machine.

    Raises:
        ValueError: If a device of this name is not known.
    """
    there = pretend(device_named(device)) if device else None
    with there or contextlib.nullcontext():
        found = backends.engine.device()
        return DoctorReport(
            verdict=verdict(),
            notes=() if device else bfloat16_note(),
            machine={} if device else machine.facts(),
            device={
                "device": found.title,
                "float8": found.summary,
                "source": found.source,
            },
            backend=machine.backend(),
            contractions=tuple(rows()),
            frozen=tuple(frozen_rows()),
            break_even=tuple(break_even_rows()),
        )


def verdict() -> str:
    """Return a sentence on whether float8 speeds up training on this device."""
    row = auto.here()
    choice = auto.choice_for(CONTRACTIONS["matmul (Dense)"])
    device = backends.engine.device()
    title = device.title
    where = f"{title[0].upper()}{title[1:]} with {machine.backend()}"
    if not choice.native:
        usual = " in the usual formats" if device.float8 else ""
        return (
            f"{where}: float8 is emulated{usual}, which shows what float8 "
            f"training computes and saves no time ({choice.reason})."
        )
    if row.size is None:
        return (
            f"{where}: float8 matmuls run natively, and training is no faster "
            f"than in bfloat16 ({row.origin})."
        )
    return (
        f"{where}: float8 matmuls run natively, and training is faster than "
        f"in bfloat16 where matrices are larger than about {row.size} by "
        f"{row.size} ({row.origin})."
    )


def bfloat16_note() -> tuple[str, ...]:
    """Time two matmuls; return a warning if bfloat16 is slower than float32."""
    times = machine.slowdown()
    if times < machine.SLOW:
        return ()
    return (
        f"A matmul takes {times:.0f} times as long in bfloat16 as in float32 "
        "here: this machine has no instructions for bfloat16. Train in "
        "float32, or in float8 from float32.",
    )


def rows() -> list[Cells]:
    """Return table rows: contractions, recipes, native or emulated, and reason.

    Contractions and recipes with the same kernel and reason share a row. If
    the matmuls of a recipe differ, it has several rows for a contraction,
    which name the matmuls.
    """
    by_contraction: dict[tuple[str, Choice], list[str]] = {}
    for name, contraction in CONTRACTIONS.items():
        for choice, users in _choices(contraction).items():
            all_of_them = tuple(users) == recipes.names()
            shown = "all" if all_of_them else ", ".join(users)
            by_contraction.setdefault((shown, choice), []).append(name)
    return [
        (", ".join(names), users, *choice)
        for (users, choice), names in by_contraction.items()
    ]


def _choices(contraction: Einsum | Conv) -> dict[Choice, list[str]]:
    """Return, for each kernel choice, the recipes and matmuls that get it."""
    found: dict[Choice, list[str]] = {}
    for recipe in recipes.names():
        there = for_this_device(recipes.get(recipe))
        plan = _as_there(make_plan(contraction, there, "bfloat16", "float32"))
        of_recipe: dict[Choice, list[str]] = {}
        for matmul in recipes.MATMULS:
            of_recipe.setdefault(plan.choose(matmul)[1], []).append(matmul)
        for choice, matmuls in of_recipe.items():
            every = len(matmuls) == len(recipes.MATMULS)
            user = recipe if every else f"{recipe}: {' and '.join(matmuls)}"
            found.setdefault(choice, []).append(user)
    return found


def _as_there(plan: Any) -> Any:
    """Return a plan; on a simulated device, the one for XLA."""
    if pretended() is None:
        return plan
    # `fit` on a GPU with TensorFlow uses XLA: it has no other float8 matmul.
    return dataclasses.replace(plan, for_xla=True)


def frozen_rows() -> list[Cells]:
    """Return table rows on frozen kernels: scales, inputs, kernel, reason."""
    # Of the forward matmul of a Dense layer. Granularities with the same kernel
    # and reason share a row.
    found: dict[tuple[str, Choice], list[str]] = {}
    contraction = CONTRACTIONS["matmul (Dense)"]
    for activations in recipes.ACTIVATIONS:
        for per in stored_kernels.GRANULARITIES[:3]:  # Groups have no matmul.
            recipe = recipes.FrozenKernels(per=per, activations=activations)
            axes = stored_kernels.Axes((0,), (1,))
            plan = _as_there(frozen_plan(contraction, recipe, axes, "bfloat16"))
            key = str(activations or "not quantized"), plan.choice
            found.setdefault(key, []).append(per)
    return [
        (", ".join(granularities), inputs, *choice)
        for (inputs, choice), granularities in found.items()
    ]


def break_even_rows() -> Iterator[Cells]:
    """Yield the rows of the break-even table, beginning with this device."""
    here = auto.here()
    mark = "(asked)" if pretended() else "(here)"
    others = [row for row in estimate.break_evens() if row != here]
    for row in [here, *others]:
        size = "never" if row.size is None else f"{row.size}³"
        device = f"{row.device} {mark}" if row == here else row.device
        yield row.backend, device, size, row.origin
