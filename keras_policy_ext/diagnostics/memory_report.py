"""What `memory` found, as data and as tables."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

from keras_policy_ext.conversion import summary, tables
from keras_policy_ext.conversion.summary import readable_bytes
from keras_policy_ext.conversion.tables import Column, Table

AS_IT_IS = "as it is"
WITHOUT = "without float8"


@dataclasses.dataclass(frozen=True)
class LayerMemory:
    """A layer, in bytes.

    Attributes:
        path: Its path.
        class_name: The name of its class.
        policy: The full name of the policy that it follows.
        weights: Its own weights, without those of layers in it.
        state: Its float8 state.
        activations: What it keeps for the backward pass, of the batch.
        weight_copies: What it keeps of its weights alone: casts of them, and
            float8 numbers. As large for any batch.
    """

    path: str
    class_name: str
    policy: str
    weights: int = 0
    state: int = 0
    activations: int = 0
    weight_copies: int = 0

    @property
    def kept(self) -> int:
        """All that it keeps for the backward pass."""
        return self.activations + self.weight_copies

    @property
    def total(self) -> int:
        """All of the layer."""
        return self.weights + self.state + self.kept


@dataclasses.dataclass(frozen=True)
class ModelMemory:
    """A model under one policy, in bytes.

    Attributes:
        name: `"as it is"`, `"without float8"`, or the policy or recipe.
        layers: One entry for each layer that has or keeps something.
        counted_by: How it was found out what is kept.
        planned: What XLA plans for both passes, beside weights, batch,
            outputs and gradients; None if it was not asked.
    """

    name: str
    layers: tuple[LayerMemory, ...]
    counted_by: str
    planned: int | None = None

    @property
    def weights(self) -> int:
        """Bytes of the weights of all layers."""
        return sum(layer.weights for layer in self.layers)

    @property
    def state(self) -> int:
        """The float8 state of all layers."""
        return sum(layer.state for layer in self.layers)

    @property
    def activations(self) -> int:
        """Bytes that all layers save of the batch."""
        return sum(layer.activations for layer in self.layers)

    @property
    def weight_copies(self) -> int:
        """Bytes that all layers save of their weights."""
        return sum(layer.weight_copies for layer in self.layers)

    @property
    def kept(self) -> int:
        """All that is kept for the backward pass."""
        return self.activations + self.weight_copies


@dataclasses.dataclass(frozen=True, repr=False)
class MemoryReport(tables.Page):
    """What a training step keeps in memory, by layer.

    `str` has the totals, and a row for the layers of each class; it fits on
    a screen of 24 lines. `table(full=True)` has a row for each layer.

    Attributes:
        model: The name of the model.
        forms: The model as it is, and under each policy that was asked for;
            where it was converted and no policy was asked for, as it is and
            without float8.
        batch: Bytes of the batch.
        optimizer: Bytes of the optimizer; None if that is not known. The same
            in all forms, since float8 states have no slots.
    """

    model: str
    forms: tuple[ModelMemory, ...]
    batch: int
    optimizer: int | None

    def __getitem__(self, name: str) -> ModelMemory:
        """A form by its name.

        Raises:
            KeyError: If there is none of this name.
        """
        for form in self.forms:
            if form.name == name:
                return form
        raise KeyError(f"{name!r}; there are {[f.name for f in self.forms]}")

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON types: `{"model": …, "forms": […], …}`."""
        return dataclasses.asdict(self)

    def table(self, full: bool = False, every: str | None = None) -> str:
        """Tables as text.

        Args:
            full: Whether there is a row for each layer. False: one for the
                layers of a class, as many as fit on a screen.
            every: What the short table says of how to see every layer.
        """
        width = shutil.get_terminal_size((80, 24)).columns
        above = [self._head(), "", *self._totals().text(width), ""]
        rows = self._full_rows() if full else self._short_rows()
        notes = self._notes(None if full else every or _EVERY)

        def lines_of(number: int, most: int | None) -> list[str]:
            left = len(rows) - number
            more = [f"and {left:,} more"] if left else []
            table = Table(self._columns(full), rows[:number])
            below = [
                line for note in notes for line in tables.wrap(note, width)
            ]
            return [*above, *table.text(width, most), *more, "", *below]

        if full:
            return "\n".join(lines_of(len(rows), None))
        return "\n".join(tables.fitted(len(rows), lines_of, summary.LINES))

    def _page(self) -> Iterator[str | Table]:
        """The short tables with all rows."""
        yield self._head()
        yield self._totals()
        yield Table(self._columns(False), self._short_rows())
        yield from self._notes(_EVERY)

    @property
    def _shown(self) -> list[ModelMemory]:
        """The forms as columns, what was before the others first."""
        return sorted(self.forms, key=lambda form: form.name != WITHOUT)

    def _head(self) -> str:
        return (
            f"A training step of {tables.printable(self.model)!r}, on a batch "
            f"of {readable_bytes(self.batch)}"
        )

    def _totals(self) -> Table:
        forms = self._shown
        rows: list[tuple[str, list[int | None]]] = [
            ("weights", [form.weights for form in forms]),
            ("optimizer", [self.optimizer] * len(forms)),
            ("float8 state", [form.state for form in forms]),
            ("kept for the backward pass", [form.kept for form in forms]),
            ("of which copies of weights", [f.weight_copies for f in forms]),
            ("both passes, by XLA", [form.planned for form in forms]),
        ]
        shown = [row for row in rows if any(row[1])]
        columns = [Column(""), *self._of_forms()]
        return Table(
            columns, [[name, *_compared(numbers)] for name, numbers in shown]
        )

    def _of_forms(self) -> list[Column]:
        return [Column(form.name, right=True) for form in self._shown]

    def _columns(self, full: bool) -> list[Column]:
        first = [Column("layer", path=True, above=True)] if full else []
        heads = first or [Column("layers", right=True)]
        return [*heads, Column("class"), *self._of_forms()]

    def _short_rows(self) -> list[list[str]]:
        """What the layers of each class keep, the largest first."""
        groups: dict[str, list[tuple[LayerMemory, ...]]] = {}
        for entries in self._layers():
            if any(entry.kept for entry in entries):
                groups.setdefault(entries[0].class_name, []).append(entries)
        found = [
            (name, len(group), _sums(group)) for name, group in groups.items()
        ]
        found.sort(key=lambda each: -max(each[2]))
        return [
            [f"{count:,}", name, *_compared(sums)]
            for name, count, sums in found
        ]

    def _full_rows(self) -> list[list[str]]:
        return [
            [
                tables.printable(entries[0].path),
                entries[0].class_name,
                *_compared([entry.kept for entry in entries]),
            ]
            for entries in self._layers()
        ]

    def _layers(self) -> list[tuple[LayerMemory, ...]]:
        """The entries of each layer, one for each form."""
        known = [{x.path: x for x in form.layers} for form in self._shown]
        paths = dict.fromkeys(path for form in known for path in form)
        found = []
        for path in paths:
            some = next(form[path] for form in known if path in form)
            none = LayerMemory(path, some.class_name, some.policy)
            found.append(tuple(form.get(path, none) for form in known))
        return found

    def _notes(self, every: str | None) -> list[str]:
        ways = dict.fromkeys(form.counted_by for form in self.forms)
        notes = [f"Kept: {' or '.join(ways)}. Loss and metrics not counted."]
        return [*notes, *([every] if every else [])]


_EVERY = "Every layer: report.table(full=True)"


def _sums(group: Sequence[tuple[LayerMemory, ...]]) -> list[int]:
    return [sum(e.kept for e in column) for column in zip(*group, strict=True)]


def _compared(numbers: Sequence[int | None]) -> list[str]:
    """Cells of bytes, those after the first with their part of it."""
    first, *rest = numbers
    cells = ["–" if first is None else readable_bytes(first)]
    for number in rest:
        cell = "–" if number is None else readable_bytes(number)
        if first and number not in (None, first):
            cell += f" ({number / first:.2f}×)"
        cells.append(cell)
    return cells
