"""Writes the page of benchmarks, its charts, and a table of README.md.

    python integration/benchmarks/benchmark_page.py [--check]

The page is docs/benchmarks.md. Every figure comes from a JSON file in
`results/`. What `jax_on_card.py` measured, if there is a file of it, comes
first for users, and is the table of the readme. `--check` writes nothing, and
fails where a text is another.
"""

import collections
import json
import pathlib
import textwrap

import cards
import charts
from generated import write_or_check

from keras_policy_ext.ext.gain import estimate

RESULTS = pathlib.Path(__file__).parent / "results"
ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs" / "benchmarks.md"
README = ROOT / "README.md"
BACKENDS = {"jax": "JAX", "tensorflow": "TensorFlow", "torch": "PyTorch"}

HEAD = """# Benchmarks

<!-- Written by integration/benchmarks/benchmark_page.py: do not edit. -->

How much time and memory does a training step take in float8, compared with
bfloat16? A CPU has no float8 units. On a CPU, a float8 step takes less memory
than a bfloat16 step. On a CPU, a float8 step takes more time than a bfloat16
step, except for large layers with JAX. On one GPU, an H200, we measured layers
and a whole model with JAX 0.11.2. `fit` of a Llama of KerasHub under `delayed`
has 1.40 times the speed of bfloat16; the peak of its memory is 0.98 of
bfloat16's. Clearly less memory was a goal, and it is not reached. A step of a
Dense layer has 1.44 times the speed at 4096³, and 0.85 times at 2048³. A size
of 4096³ means a layer with 4096 rows, inputs and outputs. To know whether
float8 is faster on your GPU, read [Choose](choose.md). The figures from which
the charts are drawn are JSON, in `integration/benchmarks/results`, and each
script there measures some of them again in one command.

## Memory of a step

![Bars of the memory of a step](images/step_memory.svg)

In a training step, each layer keeps its inputs in memory until the backward
pass. The kept inputs take one byte an element in float8, and two bytes in
bfloat16. The activation function decides which part of the step's memory these
inputs take. Layers with ReLU and GELU keep little else. SwiGLU multiplies two
activations, and keeps these two activations in bfloat16. JAX does not keep the
results of cheap activation functions, but computes them again in the backward
pass; so float8 saves a larger part of the memory with JAX. The chart shows
steps of twelve blocks 256-1024-256 with 2048 rows, on two CPU cores.

## Time of a step

![Bars of the time of a step](images/step_time.svg)

On a CPU this package emulates float8: it rounds the operands to float8, and
then multiplies the rounded operands in a wider dtype. In small layers the
rounding takes most of the time. With PyTorch, a float8 step of a layer of size
256 takes 2.7 to 4.1 times as long as a bfloat16 step; with size 1024, a float8
step takes one and a half times as long. With JAX and sizes of 512 and more, a
float8 step takes less time than a bfloat16 step. The reason is that this CPU
is slow in bfloat16; a float32 step is faster than a float8 step. The layers in
the chart are square, and each label names the framework and the size of the
layer. Other programs ran on the CPU at the same time, so trust the ratios more
than the times.

![Bars of the time of a step by recipe](images/recipes.svg)

Recipes with one scale for each row or block quantize some operands twice. The
second quantization takes little time compared with the matmuls.

## Time on an H200

All speeds of this section are in times bfloat16's speed, on an H200.

**JAX 0.11.2, default flags.** The tables at the
[top](#measured-on-an-nvidia-h200) have what was measured. At 4096³ `delayed`
has 1.44, `current` 1.42 and `rowwise` 1.10; Keras's own float8, for which XLA
makes no float8 matmul there, has 0.95, and Flax's has 1.29. At 2048³ the
kernels of a `delayed` step take 111 µs, and those of bfloat16 125 µs; but the
step as a whole takes longer, 151 µs and 127 µs.

**PyTorch 2.11.** An eager step of a Dense layer of 4096³ has 0.71 under
`delayed` and 0.85 under `current`, and a compiled one 0.60 and 0.71: there the
host takes longer than the GPU. As a CUDA graph, the forward and backward pass
has 1.49 and 1.46. A compiled step of 8192³ under `delayed` has 1.51. In an
earlier version, in which the host took 5 to 7 ms for a float8 step, and 2 ms
for bfloat16, a float8 matmul of 8192³ had 1.91, and one of 4096³ had 1.30; an
eager step of 8192³ had 0.90 under `delayed`, 0.97 under `current`, 0.57 with
Keras's own float8, and 0.66 with torchao's. At 4096³ torchao's had 0.6, and
1.5 if it was compiled.

**Memory of `fit`.** The peak of the step is in the backward pass of the last
SwiGLU. Weights, moments of Adam and gradients are 5,872 of its 12,390 MiB in
bfloat16, compiled for an H200, and the same in float8. If float8 layers kept
nothing for the backward pass, 0.87 would be left: attention, SwiGLU and
normalization keep bfloat16. To save more, use [one byte for each
moment](api/optimizers.md) or `keras.RematScope`.

## What was run on a GPU

NVIDIA H200s, with Python 3.12 and Keras 3.15.1. On 26 and 27 November 2026 the
19 checks of `tox run -e gpu-torch` and `gpu-jax` were run with an earlier
version: 18 held with PyTorch 2.11, and a fault that the other found is
corrected; 16 held with JAX 0.11.2, and two asked more than XLA's division
gives. All codes of casts were those of the reference. With JAX, all of 3.9
million codes of the kernels that cast since then are those of the reference,
and a small model loses what it does in bfloat16, within 0.1 %. Not run: other
GPUs, several GPUs, TensorFlow on a GPU, the checks with this version, and on
JAX the self-test of the casting kernels, a fault of which is corrected.
"""


def read(folder=RESULTS):
    """The results, by device and then in the order of their names."""
    found = collections.defaultdict(list)
    for path in sorted(folder.glob("*_*.json")):
        result = json.loads(path.read_text("utf-8"))
        if result["benchmark"] not in (cards.BENCHMARK, "torch_on_card"):
            found[result["environment"]["device"]].append(result)
    return dict(found)


def page(folder=RESULTS):
    """The text of the page for users."""
    first, rest = HEAD.split("## Memory of a step", 1)
    parts = [
        first.rstrip() + "\n",
        *cards.section(folder, table, duration),
        f"## Memory of a step{rest}",
        *_break_even(estimate.break_evens()),
        *_not_measured(read(folder)),
    ]
    return "\n".join(parts)


def table_of_rows(rows):
    """Rows of a benchmark as a table of Markdown."""
    columns = _columns(rows)
    cells, case = [], None
    for row in rows:
        first = row["case"] if row["case"] != case else ""
        case = row["case"]
        cells.append([first, row["variant"], *(f(row) for _, f in columns)])
    return table(["", "", *(head for head, _ in columns)], cells)


def _columns(rows):
    """Heads, and functions of a row."""
    columns = [("kernel", lambda row: row["kernel"] or "")]
    if "median_ms" in rows[0]:
        columns += [
            ("time", lambda row: duration(row["median_ms"])),
            (
                "against bfloat16",
                lambda row: f"{row['speedup_over_bfloat16']:.2f}",
            ),
        ]
    if "sqnr_db" in rows[0]:
        columns.append(("SQNR", _quality))
    if "float8_matmuls" in rows[0]:
        columns.append(
            ("float8 matmuls", lambda row: str(row["float8_matmuls"]))
        )
    if "of_current" in rows[0]:
        columns.append(
            ("time of current's", lambda row: f"{row['of_current']:.2f}")
        )
    if "peak_mib" in rows[0]:
        columns += [
            ("MiB", lambda row: f"{row['peak_mib']:.3g}"),
            ("of bfloat16", lambda row: f"{row['of_bfloat16']:.2f}"),
            ("told by", lambda row: row["measured_by"]),
        ]
    return columns


def duration(milliseconds):
    """A time in the unit that a person says, with three digits."""
    for unit, size in (("s", 1e3), ("ms", 1), ("µs", 1e-3)):
        if milliseconds >= 0.9995 * size:
            number = f"{milliseconds / size:.3g}"
            return f"{number} {unit}"
    return f"{1e6 * milliseconds:.3g} ns"


def _quality(row):
    found = row["sqnr_db"].values()
    return " / ".join("exact" if x is None else f"{x:.0f}" for x in found)


def table(heads, rows):
    """A table of Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _break_even(rows):
    yield "## From which size on it pays\n"
    text = (
        '`convert(model, filter="auto")` leaves a layer out if its matmuls are '
        "smaller than the size in this table. `keras-policy-ext doctor` prints "
        "the size for your machine, and `kpe.plan` "
        "[estimates](see_and_act.md#on-a-gpu-that-you-do-not-have) a model "
        "by the same speeds: those that were measured, and where there "
        "are none, those of a model. A size of 8192³ means a matmul with 8192 "
        "rows, inputs and outputs. With PyTorch the steps are eager. Their "
        "sizes are estimated with the time that the host of an H200 took for a "
        "step of one layer of 4096³: 1.5 ms in bfloat16, 1.8 ms under "
        "`current`, 2.2 ms under `delayed`."
    )
    yield textwrap.fill(text, 79, break_on_hyphens=False) + "\n"
    yield table(
        ["framework", "device", "size", "source"],
        [
            [
                BACKENDS[row.backend],
                row.device,
                "never" if row.size is None else f"{row.size}³",
                row.origin,
            ]
            for row in rows
        ],
    )


def _not_measured(results):
    yield "## Not measured\n"
    devices = {
        (result["environment"]["backend"], device)
        for device, found in results.items()
        for result in found
    }
    gpus = {place for place in devices if not place[1].startswith("CPU")}
    missing = [
        name
        for backend, name in BACKENDS.items()
        if backend not in {backend for backend, _ in gpus}
    ]
    if missing:
        yield (
            f"- {', '.join(missing)} on a GPU: we have not run these "
            "benchmarks on a GPU\n  yet. If you have a GPU, run "
            "`tox run -e gpu-jax` (`gpu-tensorflow`, `gpu-torch`).\n  The "
            "run takes ten minutes and writes a page that you can send to us."
        )
    yield (
        "- GPUs that are not above; on those that are above, models with "
        "PyTorch, the\n  recipes that have no row, and a layer of 8192³ with "
        "JAX and the kernels of now.\n"
        "- The memory of a step on a CPU with TensorFlow, since TensorFlow "
        "does not report\n  the memory that a step takes on a CPU.\n"
        "- AMD's GPUs, TPUs, and several devices.\n"
    )


def readme(folder=RESULTS):
    """The text of the readme, with its table written anew."""
    text = README.read_text("utf-8")
    before, rest = text.split(cards.BEGIN)
    _, after = rest.split(cards.END, 1)
    lines = "\n".join(cards.in_readme(folder, table, duration))
    return f"{before}{cards.BEGIN}\n{lines}{cards.END}{after}"


def main():
    write_or_check(PAGE, page())
    write_or_check(README, readme())
    charts.main()


if __name__ == "__main__":
    main()
