"""Writes two pages of benchmarks, their charts, and a table of README.md.

    python integration/benchmarks/benchmark_page.py [--check]

The pages are docs/benchmarks.md, for users, and
docs/internals/benchmarks.md, which has all tables. Every figure comes from a
JSON file in `results/`, and those of what bounds a step from `bounds.py`,
which is held to them. What `jax_on_card.py` measured, if there is a file of
it, comes first for users, and is the table of the readme. `--check` writes
nothing, and fails where a text is another.
"""

import collections
import json
import pathlib
import textwrap

import bounds
import cards
import charts
import counts
from generated import write_or_check

from keras_policy_ext.ext.gain import estimate

RESULTS = pathlib.Path(__file__).parent / "results"
ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs" / "benchmarks.md"
TABLES = ROOT / "docs" / "internals" / "benchmarks.md"
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
float8 is faster on your GPU, read [Choose](choose.md). The tables from which
the charts are drawn are [under internals](internals/benchmarks.md).

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
has 1.49 and 1.46. A compiled step of 8192³ under `delayed` has 1.51. These
figures stand in [what was run on a GPU](internals/gpu_runs.md). The
[tables](internals/benchmarks.md#nvidia-h200) of PyTorch are of an earlier
version, in which the host took 5 to 7 ms for a float8 step, and 2 ms for
bfloat16. There a float8 matmul of 8192³ has 1.91, and one of 4096³ has 1.30.
An eager step of 8192³ has 0.90 under `delayed`, 0.97 under `current`, 0.57
with Keras's own float8, and 0.66 with torchao's. At 4096³ torchao's has 0.6,
and 1.5 if it is compiled.
"""

TABLES_HEAD = """# Tables of benchmarks

<!-- Written by integration/benchmarks/benchmark_page.py: do not edit. -->

The tables from which the charts of [Benchmarks](../benchmarks.md) are drawn,
with trials and estimates.

## Trials on an H200

All speeds of this section are in times bfloat16's speed, on an H200 with JAX
0.11.2 and its default flags.

What does the kernel bring that reads each operand once? In one run XLA cast
the operands instead, by a fault that is corrected. There cuBLASLt's matmuls
alone brought, under `delayed`, 1.25 at 4096³ and 1.50 at 8192³. With the
kernel it is 1.44 at 4096³. At 8192³ the package was not measured with the
kernel. The [earlier version](#nvidia-h200) had 0.72 (4096³) and 1.25 (8192³)
under `rowwise`, without the update.

Under `rowwise`, XLA multiplies the results of cuBLASLt's matmuls by the scales
afterwards. A matmul of Mosaic GPU can do that itself. In a trial at 4096³ it
took 103 µs, and cuBLASLt's 132 µs with the scales and 105 µs without; with
accurate sums it was 123 µs and 148 µs. A step with it had 1.26, and 1.33 if
all sums were fast; without it 1.15 in the same trial. But at 8192³ it had
1.30, and 1.37 without it. So it is not in the package.

## Estimated time on a GPU

![Bars of estimated times on a GPU](../images/step_time_estimated.svg)

The times in this chart are estimates, not measurements, and they are of an
earlier version of this package, in which XLA cast the operands and matmuls
wrote float32. [Lowering](lowering.md#what-is-counted) has estimates for the
programs of now: 1.41 times bfloat16's speed for a Dense layer of 4096³ under
`delayed` on an H200, where 1.44 was measured. XLA compiled training steps for
an H200 and a B200, without Triton. We counted the kernels in these compiled
programs, and the bytes that the kernels move, and computed the times from
these counts. Of Keras's own float8, XLA made no float8 matmul with its default
flags on the H200, so the estimates for it hold with
`--xla_gpu_enable_triton_gemm=false` only. Large layers gain most from float8:
when a layer grows, the work of its matmuls grows faster than the work of its
casts. The layers in the chart are square. The twelve blocks are 1024 wide with
4096 in the middle, and have 16384 rows.
"""

APPENDIX = """## Scripts

You run each benchmark with one command, on any of the three frameworks. The
command writes a JSON file. The charts and tables are made from the JSON
files. For example:

```
KERAS_BACKEND=jax python integration/benchmarks/layer.py
```

| script | what it measures |
| --- | --- |
| `layer.py` | matmuls, and training steps of a Dense layer |
| `llama_block.py` | a Llama block (grouped queries, SwiGLU) |
| `transformer_step.py` | steps of `fit` of twelve Llama blocks, and the first |
| `recipes.py` | a layer under each recipe, without an optimizer |
| `memory.py` | the most memory that a step holds at a time |

- A step consists of the forward pass, the backward pass and the update by the
  optimizer. Each benchmark runs the variants of a step in turn, in one
  process.
- The column "against bfloat16" shows the speed relative to `mixed_bfloat16`: 2
  is twice as fast. The benchmark computes this ratio in each round, and the
  table shows the median of all rounds.
- The column "SQNR" shows the signal-to-noise ratio in decibels; more is
  better. The three figures are for the outputs, the gradient of the inputs and
  the gradient of the kernel. Some benchmarks show only one or two of these
  figures.
- The column "kernel" says whether this package chose a native or an emulated
  matmul.
- `memory.py` measures a Functional model that consists of blocks, and one
  layer that calls the blocks "in turn". On PyTorch, float8 steps of the
  Functional model take more memory than float8 steps of the layer, since Keras
  holds the outputs of all layers of a Functional model until the forward pass
  ends. In the rows "swiglu again", `keras.RematScope` makes the backward pass
  compute the multiplication of the gate again.
"""

COUNTED = [
    "framework",
    "device",
    "step",
    "",
    "bytes an element",
    "large kernels",
    "with a transpose",
    "small",
    "float8 matmuls",
    "memory of bfloat16's",
    "against bfloat16",
]

NOTE_OF_CPUS = """On a CPU this package emulates float8, so the figures show
how much time emulation takes. Other programs ran on the CPU at the same time,
so trust the ratios more than the times.
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


def tables(folder=RESULTS, counted=counts.COUNTS):
    """The text of the page that has all tables."""
    parts = [
        TABLES_HEAD,
        APPENDIX,
        *_measured(read(folder)),
        *_estimated(counts.read_counts(counted)),
    ]
    return "\n".join(parts)


def _measured(results):
    yield "## Measured\n"
    if not results:
        yield "Nothing yet.\n"
    for device, found in results.items():
        yield f"### {device}\n"
        if device.startswith("CPU"):
            yield NOTE_OF_CPUS
        for result in found:
            yield from _result(result)


def _result(result):
    where = result["environment"]
    name = result["benchmark"].replace("_", " ")
    yield f"#### {BACKENDS[where['backend']]}, {name}\n"
    yield _versions(where)
    if "note" in result:
        yield textwrap.fill(result["note"], 79) + "\n"
    yield table_of_rows(result["rows"])


def table_of_rows(rows):
    """Rows of a benchmark as a table of Markdown."""
    columns = _columns(rows)
    cells, case = [], None
    for row in rows:
        first = row["case"] if row["case"] != case else ""
        case = row["case"]
        cells.append([first, row["variant"], *(f(row) for _, f in columns)])
    return table(["", "", *(head for head, _ in columns)], cells)


def _versions(where):
    names = ", ".join(f"{k} {v}" for k, v in where["versions"].items())
    return textwrap.fill(f"{names}; {where['date']}.", 79) + "\n"


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


MODEL = (
    "matmuls reach 72% of the peak speed; float8 matmuls of gradients, which "
    "accumulate accurately, reach 0.85 of this share; memory reaches 80% of "
    "its bandwidth; each kernel takes 2 µs more"
)


def _estimated(counted):
    yield "## Estimated\n"
    text = (
        "The kernels of a step on a GPU, and the bytes that the kernels move, "
        "can be [counted without a GPU](lowering.md). We estimate the time of "
        "a step on a GPU from these counts, with these "
        f"assumptions: {MODEL}. The counts of this table are of an earlier "
        "version of this package, in which XLA cast the operands, and without "
        "Triton for matmuls; [lowering](lowering.md#what-is-counted) has "
        "counts of the programs of now. Use the estimates to "
        "rank designs; the estimates are not measurements."
    )
    yield textwrap.fill(text, 79, break_on_hyphens=False) + "\n"
    if not counted:
        yield "No counts are committed yet.\n"
        return
    yield table(COUNTED, [_counted(row) for row in counted])
    yield from bounds.section(table)


def _counted(row):
    """The cells of a row of counts."""
    transposes, held = row["transposes"], row["temporaries_of_bfloat16"]
    speedup = row["estimated_speedup_over_bfloat16"]
    return [
        BACKENDS[row["backend"]],
        row["device"],
        row["case"],
        row["variant"],
        f"{row['bytes_per_element']:.1f}",
        str(row["large_kernels"]),
        "" if transposes is None else str(transposes),
        str(row["small_kernels"]),
        str(row["float8_matmuls"]),
        "" if held is None else f"{held:.2f}",
        "" if speedup is None else f"{speedup:.2f}",
    ]


def _break_even(rows):
    yield "## From which size on it pays\n"
    text = (
        '`convert(model, filter="auto")` leaves a layer out if its matmuls are '
        "smaller than the size in this table. `keras-policy-ext doctor` prints "
        "the size for your machine, and `kpe.plan` [estimates](api/plan.md) a "
        "model by the same speeds: those that were measured, and where there "
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
    lines = "\n".join(cards.in_readme(folder, table))
    return f"{before}{cards.BEGIN}\n{lines}{cards.END}{after}"


def main():
    write_or_check(PAGE, page())
    write_or_check(TABLES, tables())
    write_or_check(README, readme())
    charts.main()


if __name__ == "__main__":
    main()
