"""What a conversion did."""

from __future__ import annotations

import dataclasses
import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


@dataclasses.dataclass(frozen=True)
class Converted:
    """A layer that computes in another policy now.

    Attributes:
        path: The layer's path, e.g. `"model/block/dense"`.
        class_name: The name of its class.
        policy: The name of its policy: `float8_policy.full_name`, or that of
            a plain policy.
    """

    path: str
    class_name: str
    policy: str


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A layer with weights that stays as it was.

    Attributes:
        path: The layer's path.
        class_name: The name of its class.
        reason: Why.
    """

    path: str
    class_name: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Report:
    """What was converted, and what was not and why.

    `str(report)` is a table of both. Layers without weights are left out.

    Attributes:
        converted: One entry for each layer that was converted.
        skipped: One entry for each other layer that has weights.
    """

    converted: tuple[Converted, ...]
    skipped: tuple[Skipped, ...]

    def as_dict(self) -> dict[str, list[dict[str, Any]]]:
        """The same as JSON types: `{"converted": […], "skipped": […]}`."""
        return {
            "converted": [dataclasses.asdict(e) for e in self.converted],
            "skipped": [dataclasses.asdict(e) for e in self.skipped],
        }

    def __str__(self) -> str:
        from rich import box
        from rich.table import Table

        total = len(self.converted) + len(self.skipped)
        table = Table(
            title=f"{len(self.converted)} of {total} layers converted",
            title_justify="left",
            box=box.SIMPLE_HEAD,
        )
        table.add_column("layer", overflow="fold")
        table.add_column("class", overflow="fold")
        table.add_column("policy, or why it was skipped", overflow="fold")
        for done in self.converted:
            table.add_row(done.path, done.class_name, done.policy)
        for left in self.skipped:
            table.add_row(left.path, left.class_name, f"– {left.reason}")
        return render(table)


def render(table: Table, width: int = 110) -> str:
    """A table as plain text.

    Args:
        table: What to render.
        width: Characters in a line.

    Returns:
        Lines without trailing blanks.
    """
    from rich.console import Console

    console = Console(
        file=io.StringIO(),
        width=width,
        color_system=None,
        force_terminal=False,
        force_jupyter=False,
        markup=False,
        highlight=False,
        legacy_windows=False,
    )
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())
