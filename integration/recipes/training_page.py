"""Writes docs/internals/training.md from the committed results.

    python integration/recipes/training_page.py [--check]

Every figure of the page comes from a JSON file in `results/`, which `train.py`
writes. `--check` writes nothing, and fails where the page is another.
"""

import functools
import json
import pathlib
import statistics
import sys
import textwrap

FOLDER = pathlib.Path(__file__).parent
sys.path.append(str(FOLDER.parent / "benchmarks"))

from generated import write_or_check  # noqa: E402

RESULTS = FOLDER / "results"
ROOT = FOLDER.parents[1]
PAGE = ROOT / "docs" / "internals" / "training.md"
BACKENDS = {"torch": "PyTorch", "jax": "JAX", "tensorflow": "TensorFlow"}
BASELINE = "mixed_bfloat16"
NUDGED = f"{BASELINE}; nudged 1"
_NUDGES = ("delayed; nudged 1", "delayed; nudged 2")
STEPS = 300
SEEDS = (0, 1, 2)

EXPECTED = (
    "float32",
    NUDGED,
    "delayed",
    "current",
    "rowwise(power_of_two=False)",
    "block(power_of_two=False)",
    "mxfp8",
    "nvfp4",
    "nvfp4(hadamard=False)",
    "nvfp4(stochastic_rounding=False)",
    "rowwise(power_of_two=True,kernel_grad='high_precision')",
    "current(power_of_two=True)",
    "rowwise(power_of_two=True)",
    "block(power_of_two=True)",
)
"""What is shown for every framework, run or not; anything else if it is."""

HEAD = f"""# How recipes train

<!-- Written by integration/recipes/training_page.py: do not edit. -->

How much does each recipe raise the loss of a trained model? In the test on
this page, a small model was trained under each recipe. Under the 8-bit recipes
the final loss was 0.1 to 0.6 % above the final loss in bfloat16. Under NVFP4,
which has four bits, the final loss was 3 % above the loss in bfloat16.

The test trains the model of `keras-policy-ext demo`, a decoder-only
transformer of two blocks. The model learns to predict the next character of
English text for {STEPS} steps, on a CPU. For each seed, all recipes start from
the same weights and see the same batches. The tables show by how many percent
the validation loss under a recipe is above the loss under `{BASELINE}` with
the same seed. A figure above 0 is worse than `{BASELINE}`. Under every recipe,
the layer that computes the logits stays in `{BASELINE}`.

Which differences are larger than chance? In the row `{NUDGED}`, the initial
weights of the baseline were changed by one part in ten thousand. Differences
as small as those in the row `{NUDGED}` are chance. Float8 runs differ more
between seeds; the column "spread" shows the difference between the best and
the worst seed. The figures show which recipe raises the loss more, for one
small model and three seeds. The figures do not show how much a recipe raises
the loss of a large model.

To run the test yourself, use the following command. The command appends the
results to the JSON file from which this page is written:

```
KERAS_BACKEND=jax python integration/recipes/train.py
```
"""


POWERS = (
    ("current", "current(power_of_two=True)"),
    ("rowwise(power_of_two=False)", "rowwise(power_of_two=True)"),
    ("block(power_of_two=False)", "block(power_of_two=True)"),
)
"""Pairs of recipes: scales as they come, and rounded up to powers of two."""

OF_POWERS = """### What powers of two cost

This table compares each recipe without and with rounding its scales to powers
of two. Each figure is the mean over the seeds that were run both without and
with this rounding. In a single step, scales that are powers of two are as
exact as other scales. Over many steps the losses differ. A possible reason is
this. While a scale stays the same power of two, a weight rounds to the same
float8 number until training has moved the weight by half the distance between
two neighbouring numbers. If the scale changes with the amax in every step, the
same weight is rounded up in one step and down in another step. This reason is
a guess. The size of the effect differs between the backends.
"""

CHANCE = """### Where delayed scaling loses

This table shows variants of delayed scaling. A variant computes one matmul in
high precision, or has another history, margin or format, or does not round one
operand (`unrounded`), which is still scaled. In the rows `nudged`, the initial
weights of delayed scaling were changed by one part in ten thousand. With the
three fraction bits of float8, this small change makes training take another
path. So the losses of two float8 runs with the same seed differ by chance, and
differ more than in `mixed_bfloat16`. The column "below" counts the seeds for
which the loss of a variant is below the loss of every run of delayed scaling,
nudged or not. The column "below" counts only seeds that have nudged runs.
"""

OF_FOUR_BITS = """### Where NVFP4 loses

This table shows variants of NVFP4. A variant computes one matmul in high
precision, or does not round one operand (`unrounded`), which is still scaled,
or keeps the first or the last of the two blocks at eight bits, and the logits
with it (`eight bits`), under `rowwise(power_of_two=False)`.
Operands that NVFP4 rounds stochastically are rounded in every variant.
"""


def read(folder=RESULTS):
    """By backend the environment, and losses by recipe and seed."""
    found = {}
    for backend in BACKENDS:
        path = folder / f"{backend}.json"
        if path.exists():
            content = json.loads(path.read_text("utf-8"))
            found[backend] = content["environment"], content["runs"]
    return found


def page(folder=RESULTS):
    """The text of the page."""
    found = read(folder)
    parts = [HEAD]
    for backend, name in BACKENDS.items():
        parts.append(f"## {name}\n")
        if backend in found:
            parts += _of_backend(*found[backend])
        else:
            parts.append("Not run.\n")
    return "\n".join(parts)


def gaps(runs):
    """Percent over the baseline's loss, by recipe and seed."""
    losses = {
        (run["recipe"], run["seed"]): run["validation_loss"]
        for run in runs
        if run["steps"] == STEPS
    }
    return {
        (recipe, seed): 100.0 * (loss / losses[BASELINE, seed] - 1.0)
        for (recipe, seed), loss in losses.items()
        if recipe != BASELINE and (BASELINE, seed) in losses
    }


def _of_backend(environment, runs):
    """The paragraphs of one framework."""
    known = ", ".join(f"{k} {v}" for k, v in environment.items())
    known_gaps = gaps(runs)
    rows = _rows(known_gaps, EXPECTED)
    yield f"{known}.\n"
    yield _table(rows, ["mean", "spread"], _mean_and_spread)
    missing = [name for name, row in rows.items() if None in row]
    if missing:
        listed = "; ".join(f"`{name}`" for name in missing)
        words = f"Not run, or not with every seed: {listed}.\n"
        yield textwrap.fill(words, 90, break_on_hyphens=False) + "\n"
    yield from _powers(known_gaps)
    yield from _variants(known_gaps)


def _variants(known_gaps):
    """The paragraphs on variants that are not shown for every framework."""
    names = {recipe for recipe, _ in known_gaps if recipe not in EXPECTED}
    of_four_bits = {name for name in names if name.startswith("nvfp4")}
    if names - of_four_bits:
        rows = _rows(known_gaps, sorted({"delayed", *names - of_four_bits}))
        lowest = _lowest_by_chance(rows)
        yield CHANCE
        yield _table(rows, ["below"], functools.partial(_below, lowest))
    if of_four_bits:
        rows = _rows(known_gaps, sorted({"nvfp4", *of_four_bits}))
        yield OF_FOUR_BITS
        yield _table(rows, ["mean", "spread"], _mean_and_spread)


def _powers(known_gaps):
    """The paragraphs on scales that are powers of two, if they were run."""
    lines = []
    for pair in POWERS:
        seeds = [
            seed for seed in SEEDS if {(r, seed) for r in pair} <= {*known_gaps}
        ]
        if seeds:
            means = [
                statistics.mean(known_gaps[name, seed] for seed in seeds)
                for name in pair
            ]
            shown = [f"{mean:+.2f}" for mean in means]
            lines.append([f"`{pair[0].partition('(')[0]}`", *shown])
    if lines:
        heads = ["recipe", "scales as they come", "powers of two"]
        rows = [heads, ["---"] * 3, *lines]
        yield OF_POWERS
        yield "\n".join("| " + " | ".join(r) + " |" for r in rows) + "\n"


def _rows(known_gaps, names):
    return {
        name: [known_gaps.get((name, seed)) for seed in SEEDS] for name in names
    }


def _lowest_by_chance(rows):
    """Of delayed scaling, for each seed; None where it was not nudged."""
    ours = [row for name, row in rows.items() if name in ("delayed", *_NUDGES)]
    of_seeds = [
        [gap for gap in seed if gap is not None]
        for seed in zip(*ours, strict=True)
    ]
    return [min(seed) if len(seed) > 1 else None for seed in of_seeds]


def _below(lowest, row):
    pairs = [
        (a, b) for a, b in zip(row, lowest, strict=True) if None not in (a, b)
    ]
    return [f"{sum(a < b for a, b in pairs)} of {len(pairs)}" if pairs else "–"]


def _mean_and_spread(row):
    known = [gap for gap in row if gap is not None]
    spread = f"{max(known) - min(known):.2f}" if len(known) > 1 else "–"
    return [f"{statistics.fmean(known):+.2f}", spread]


def _table(rows, headings, summary):
    """Lines of Markdown, of the recipes that have a figure."""
    heads = ["recipe", *(f"seed {seed}" for seed in SEEDS), *headings]
    lines = [heads, ["---"] * len(heads)]
    for recipe, row in rows.items():
        if any(gap is not None for gap in row):
            cells = ["–" if gap is None else f"{gap:+.2f}" for gap in row]
            lines.append([f"`{recipe}`", *cells, *summary(row)])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    write_or_check(PAGE, page())
