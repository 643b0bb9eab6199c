"""`what_if`: what each recipe would do to the operands of each layer."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import keras
from keras import ops

from keras_policy_ext import user_code
from keras_policy_ext.conversion.candidates import check_is_layer, path_of
from keras_policy_ext.conversion.in_place import converted
from keras_policy_ext.ext.sampling.captured import (
    SQUARES,
    Batch,
    Loss,
    Use,
    by_kernel,
    captured,
    differing,
    lacks_targets,
    note_of,
)
from keras_policy_ext.ext.sampling.figures import Figures, measured, total
from keras_policy_ext.ext.sampling.page import (
    in_percent,
    name_of,
    page,
    shade,
    table_of_operands,
)
from keras_policy_ext.ext.sampling.recipes_compared import (
    NOTHING_ROUNDED,
    read_recipes,
    short,
)
from keras_policy_ext.recipes import OPERANDS, Quantization, Recipe, matmuls_of
from keras_policy_ext.reports import BaseReport, Column, Table, counted


@dataclasses.dataclass(frozen=True)
class QuantizedOperand:
    """An operand of a layer, quantized by a recipe for one of its matmuls.

    Fractions are from 0 to 1.

    Attributes:
        layer: The path of the layer.
        class_name: The name of its class.
        kernel: The name of the weight that it contracts.
        operand: `"inputs"`, `"kernel"` or `"outputs_grad"`.
        matmul: The matmul that reads it: `"forward"`, `"inputs_grad"` or
            `"kernel_grad"`.
        recipe: The recipe, as in the names of policies.
        uses: The number of times that the batch uses the kernel.
        amax: The largest magnitude of the values that are rounded.
        zero_fraction: The fraction of values that are 0 before.
        sqnr_db: The signal-to-quantization-noise ratio, in dB; None if no
            value changes.
        saturated_fraction: The fraction of nonzero values that would round
            beyond the largest number of the format.
        underflow_fraction: The fraction of nonzero values that become 0.
        nonfinite: The number of values that are infinite or NaN; the other
            figures leave them out.
        note: What is unusual: `"frozen"` for a kernel that is not trained;
            `"no values"`, such as an expert without tokens; `"zeros"`;
            `"no gradient"` for outputs that no gradient of the loss reaches;
            `"not in float8"` for a matmul that the recipe leaves out; else "".
    """

    layer: str
    class_name: str
    kernel: str
    operand: str
    matmul: str
    recipe: str
    uses: int
    amax: float
    zero_fraction: float
    sqnr_db: float | None
    saturated_fraction: float
    underflow_fraction: float
    nonfinite: int
    note: str = ""


@dataclasses.dataclass(frozen=True, repr=False)
class WhatIf(BaseReport):
    """The report of `what_if`: an entry per layer, operand, matmul and recipe.

    `str` has a table that fits on a screen of 24 lines, the lowest SQNR first;
    `table(full=True)` has all layers. `heat_map` returns a page of HTML.

    Attributes:
        entries: In the order of the layers in the model.
        recipes: The recipes, as in the names of policies.
        loss: Which loss the gradients are of, in words.
        value: Its value.
        unexamined: The paths of layers that could be in float8 and have no
            entries, with the reasons.
    """

    entries: tuple[QuantizedOperand, ...]
    recipes: tuple[str, ...]
    loss: str
    value: float
    unexamined: dict[str, str] = dataclasses.field(default_factory=dict)

    _every = "Every layer: report.table(full=True); colours: report.heat_map()"

    def _count(self) -> int:
        return len(self._rows())

    def _rows(self) -> dict[tuple[str, str, str], dict[str, QuantizedOperand]]:
        """Return the entry of the lower SQNR by layer, kernel and operand."""
        found: dict[tuple[str, str, str], dict[str, QuantizedOperand]] = {}
        for entry in self.entries:
            key = entry.layer, entry.kernel, entry.operand
            row = found.setdefault(key, {})
            known = row.get(entry.recipe, entry)
            row[entry.recipe] = min(known, entry, key=_level)
        return found

    def _parts(self, full: bool, number: int) -> Iterator[str | Table]:
        """Yield a table of recipes, a table of operands, and notes."""
        rows = self._rows()
        operands = counted(len(rows), "operand")
        yield f"{operands} of float8 layers. Gradients of {self.loss}."
        if rows:
            yield self._of_recipes()
            yield self._of_operands(rows, full, number)
            if left := len(rows) - (len(rows) if full else number):
                yield f"and {left} more"
            yield (
                "SQNR in dB, of the matmul that reads the operand worse; "
                "–: no value changes. All scales are of this batch."
            )
        if bad := sorted({e.layer for e in self.entries if e.nonfinite}):
            yield f"Infinite or NaN values: {', '.join(bad)}."
        if self.unexamined:
            shown = list(self.unexamined.items())[: None if full else 3]
            words = "; ".join(f"{path}: {reason}" for path, reason in shown)
            layers = counted(len(self.unexamined), "layer")
            yield f"Without figures: {layers}. {words}."

    def _of_recipes(self) -> Table:
        columns = [
            Column(heading, right=heading not in ("recipe", "lowest at"))
            for heading in (
                "recipe",
                "inputs",
                "kernel",
                "outputs grad",
                "lowest",
                "saturated",
                "underflow",
            )
        ]
        rows = []
        for recipe in self.recipes:
            own = [e for e in self.entries if e.recipe == recipe]
            rows.append(
                [
                    recipe,
                    *(
                        _median(e for e in own if e.operand == operand)
                        for operand in OPERANDS
                    ),
                    _decibels(min(own, key=_level).sqnr_db),
                    in_percent(max(e.saturated_fraction for e in own)),
                    in_percent(max(e.underflow_fraction for e in own)),
                ]
            )
        title = "Median SQNR by operand, and the worst of all layers"
        return Table(columns, rows, title)

    def _of_operands(
        self,
        rows: dict[tuple[str, str, str], dict[str, QuantizedOperand]],
        full: bool,
        number: int,
    ) -> Table:
        columns = [
            Column("layer", apart=True),
            Column("operand"),
            *(Column(short(recipe), right=True) for recipe in self.recipes),
        ]
        has_notes = any(_note(row.values()) for row in rows.values())
        if has_notes:
            columns.append(Column("note"))
        items = list(rows.items())
        if not full:
            items.sort(key=lambda item: min(map(_level, item[1].values())))
            items = items[:number]
        cells = [
            [
                name_of(layer, kernel),
                operand,
                *(_decibels(row[recipe].sqnr_db) for recipe in self.recipes),
                *([_note(row.values())] if has_notes else []),
            ]
            for (layer, kernel, operand), row in items
        ]
        return Table(columns, cells)

    def heat_map(self) -> str:
        """Return one HTML page: a cell per operand and recipe, in colours.

        The page needs no network. A cell shows the lower SQNR of the two
        matmuls; pointing at it shows the other figures.
        """
        table = table_of_operands(
            [f"<th>{html.escape(each)}</th>" for each in self.recipes],
            (
                (
                    name_of(layer, kernel),
                    operand,
                    _note(row.values()),
                    "".join(_cell(row[recipe]) for recipe in self.recipes),
                )
                for (layer, kernel, operand), row in self._rows().items()
            ),
        )
        body = (
            f"<p>{html.escape(f'Gradients of {self.loss}.')} SQNR in dB, of "
            f"the matmul that reads the operand worse.</p>{table}"
        )
        for path, reason in self.unexamined.items():
            body += f"<p>{html.escape(f'{path}: {reason}')}</p>"
        return page("What each recipe would do", body)


def _cell(entry: QuantizedOperand) -> str:
    title = (
        f"{entry.matmul}: amax {entry.amax:.3g}, "
        f"saturated {in_percent(entry.saturated_fraction)}, "
        f"underflow {in_percent(entry.underflow_fraction)}, "
        f"zeros {in_percent(entry.zero_fraction)}"
    )
    return (
        f'<td style="{shade(entry.sqnr_db)}" title="{html.escape(title)}">'
        f"{_decibels(entry.sqnr_db)}</td>"
    )


def _level(entry: QuantizedOperand) -> float:
    return float("inf") if entry.sqnr_db is None else entry.sqnr_db


def _median(entries: Iterable[QuantizedOperand]) -> str:
    found = sorted(e.sqnr_db for e in entries if e.sqnr_db is not None)
    return _decibels(found[len(found) // 2] if found else None)


def _decibels(level: float | None) -> str:
    return "–" if level is None else f"{level:.1f}"


def _note(row: Iterable[QuantizedOperand]) -> str:
    entries = list(row)
    notes = dict.fromkeys(
        e.note for e in entries if e.note and e.note != "not in float8"
    )
    if entries[0].uses > 1:
        notes[f"{entries[0].uses} uses"] = None
    return ", ".join(notes)


@user_code.once
def what_if(
    model: keras.Layer,
    data: Any,
    recipes: Sequence[Recipe | str] | Recipe | str | None = None,
    loss: Loss | None = None,
    attention: Literal["float8"] | None = None,
) -> WhatIf:
    """Show what each recipe would do to the operands of each layer.

    The model need not be in float8. It runs one forward and one backward pass
    over a batch, without rounding. The inputs, the kernel and the gradient of
    the outputs of each layer that `convert` would convert are then quantized by
    each recipe, for each matmul that reads them. The model, its optimizer, its
    states and its random seeds are not changed.

    The scales are of this batch. So delayed scaling is shown as in its first
    step, and saturates nothing here.

    Args:
        model: A built model or layer, in float8 or not.
        data: A batch: `x`, `(x, y)` or `(x, y, sample_weight)`, as arrays; or
            what has such batches, of which it takes the first. All operands
            of the batch are in memory at once.
        recipes: Recipes, or their names; None for all names.
        loss: `f(y, outputs)`, a scalar tensor. None for the loss that the
            model was compiled with; if it was not compiled, for the sum of
            squares of the outputs. If the optimizer scales losses, the
            gradients are of the scaled loss. If the loss needs targets and
            `data` has none, gradients have no figures.
        attention: `"float8"` to show the two products of attention layers
            too, as for `convert`. A model that was converted with it shows
            them without.

    Returns:
        An entry for each layer, operand, matmul and recipe; `print` it for a
        table.

    Raises:
        TypeError: If `model` is not a Keras model or layer, or `data` not a
            batch.
        ValueError: If the model is not built, there is no such recipe, or the
            loss lacks targets, or `data` has no batch left.

    Examples:
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        >>> x = np.random.default_rng(0).normal(size=(16, 8))
        >>> report = kpe.what_if(model, x, ["current", "nvfp4"])
        >>> forward = [e for e in report.entries if e.matmul == "forward"]
        >>> [(e.operand, e.recipe) for e in forward[:2]]
        [('inputs', 'current'), ('inputs', 'nvfp4')]
        >>> forward[0].sqnr_db > forward[1].sqnr_db + 6
        True
    """
    check_is_layer(model, "have operands to quantize")
    wanted = read_recipes(recipes)
    batch = Batch.read(data)
    lacks = loss is None and lacks_targets(model, batch)
    lacks = lacks and not isinstance(batch.x, list)  # Perhaps (x, y) is meant.
    with converted(model, NOTHING_ROUNDED, attention=attention):
        found = captured(model, batch, _squares if lacks else loss)
        if lacks:
            for use in found.uses:
                use.outputs_grad = None
        entries = tuple(_entries(found.uses, wanted))
    kind = found.loss
    if lacks:
        kind = "no loss, since `data` has no targets: there are none"
    if kind == SQUARES:
        kind += ", since the model is not compiled with a loss"
    return WhatIf(
        entries,
        tuple(recipe.spec or recipe.name for recipe in wanted),
        kind,
        found.value,
        found.unexamined,
    )


def _squares(y: Any, outputs: Any) -> Any:
    """Return a loss for a forward pass whose gradients nobody reads."""
    return sum(
        ops.sum(ops.square(ops.cast(x, "float32")))
        for x in keras.tree.flatten(outputs)
    )


def _entries(
    uses: Sequence[Use], recipes: Sequence[Recipe]
) -> Iterator[QuantizedOperand]:
    for own in by_kernel(uses):
        for operand in OPERANDS:
            for matmul in matmuls_of(operand):
                yield from _of_matmul(own, operand, matmul, recipes)


def _of_matmul(
    uses: Sequence[Use], operand: str, matmul: str, recipes: Sequence[Recipe]
) -> Iterator[QuantizedOperand]:
    """Yield an entry for each recipe; equal quantizations are computed once."""
    number, uses = len(uses), differing(uses, operand)
    known: dict[Any, Figures] = {}
    first = uses[0]
    for recipe in recipes:
        own, limit = first.recipe_of(recipe)
        asked = first.plan.contraction.quantization(
            own.quantization(operand, matmul)
        )
        if (asked, limit) not in known:
            known[asked, limit] = total(
                _figures(uses, operand, matmul, asked, limit)
            )
        figures = known[asked, limit]
        yield QuantizedOperand(
            layer=path_of(first.layer),
            class_name=type(first.layer).__name__,
            kernel=first.kernel.name,
            operand=operand,
            matmul=matmul,
            recipe=recipe.spec or recipe.name,
            uses=number,
            amax=figures.amax,
            zero_fraction=figures.zero_fraction,
            sqnr_db=figures.sqnr_db,
            saturated_fraction=figures.saturated_fraction,
            underflow_fraction=figures.underflow_fraction,
            nonfinite=int(figures.nonfinite),
            note=note_of(uses, operand, figures)
            or ("" if asked else "not in float8"),
        )


def _figures(
    uses: Sequence[Use],
    operand: str,
    matmul: str,
    asked: Quantization | None,
    limit: float | None,
) -> Iterator[Figures]:
    for use in uses:
        x = use.folded(operand, limit)
        if x is None or 0 in x.shape:
            continue
        numbers = measured(use.plan.contraction, operand, matmul, asked, x)
        yield Figures.read(ops.convert_to_numpy(numbers))
