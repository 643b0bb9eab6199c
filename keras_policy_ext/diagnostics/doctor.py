"""`keras-policy-ext doctor`: what runs natively in float8, and what gains."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from keras_policy_ext import kernels, recipes
from keras_policy_ext.conversion import break_even
from keras_policy_ext.diagnostics import machine

CONTRACTIONS: dict[str, kernels.Einsum | kernels.Conv] = {
    "matmul (Dense)": kernels.Einsum("bi,io->bo"),
    "einsum over several axes (EinsumDense)": kernels.Einsum("bthk,hkd->btd"),
    "einsum with a shared axis (EinsumDense)": kernels.Einsum("bei,eio->beo"),
    "convolution (Conv1D, Conv2D, Conv3D)": kernels.Conv(
        (1, 1), "valid", (1, 1), "channels_last"
    ),
}


def run(console: Console | None = None) -> None:
    """Print the facts of the machine, a row for each contraction, and sizes.

    Args:
        console: Where to print; None for stdout.
    """
    console = console or Console()
    facts = Table(title="This machine", show_header=False)
    for name, value in machine.facts().items():
        facts.add_row(name, value)
    console.print(facts)
    console.print(_choices())
    console.print(break_even_table())


def rows() -> list[tuple[str, str, str, str]]:
    """Contraction, recipes, kind of kernel and reason.

    Recipes for which the answer is the same share a row.
    """
    found: dict[tuple[str, str, str], list[str]] = {}
    for name, contraction in CONTRACTIONS.items():
        for recipe in recipes.names():
            choice = kernels.select(contraction, recipe, "bfloat16")
            found.setdefault((name, *choice), []).append(recipe)
    return [
        (name, ", ".join(shared), kind, reason)
        for (name, kind, reason), shared in found.items()
    ]


def _choices() -> Table:
    table = Table(title=f"Float8 contractions on {machine.backend()}")
    for heading in ("contraction", "recipe", "kernel", "why"):
        table.add_column(heading)
    for row in rows():
        table.add_row(*row)
    return table


def break_even_table() -> Table:
    """What `filter="auto"` goes by, with the row of this machine first."""
    here = break_even.here()
    table = Table(title='Float8 gains from which size on: `filter="auto"`')
    for heading in ("framework", "device", "size", "known from"):
        table.add_column(heading)
    others = [row for row in break_even.table() if row != here]
    for row in [here, *others]:
        size = "never" if row.size is None else f"{row.size}³"
        device = f"{row.device} (here)" if row == here else row.device
        table.add_row(row.backend, device, size, row.origin)
    return table
