"""Writes docs/benchmarks.md and its charts from the committed results.

    python integration/benchmarks/benchmark_page.py [--check]

Every figure of the page comes from a JSON file in `results/`, and those of
what bounds a step from `bounds.py`, which is held to them. `--check`
writes nothing, and fails where the page is another.
"""

import collections
import json
import pathlib
import textwrap

import bounds
import charts
import estimates
from generated import write_or_check

RESULTS = pathlib.Path(__file__).parent / "results"
ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs" / "benchmarks.md"
TABLE = ROOT / "keras_policy_ext" / "conversion" / "break_even.json"
BACKENDS = {"jax": "JAX", "tensorflow": "TensorFlow", "torch": "PyTorch"}

HEAD = """# Benchmarks

<!-- Written by integration/benchmarks/benchmark_page.py: do not edit. -->

What does float8 cost, and what does it save? A CPU has no float8 units. On a
CPU, a float8 step takes less memory than a bfloat16 step. A float8 step takes
more time there, except for large layers with JAX. On a GPU nothing has been
measured yet. Compilers can make programs for a GPU without a GPU. From these
programs, a float8 step of large layers is estimated to take 0.6 to 0.9 of the
time in bfloat16. The [appendix](#appendix) has the tables behind the charts.

## Memory of a step

![Bars of the memory of a step](images/step_memory.svg)

A training step holds the inputs of each layer until the backward pass. The
inputs take one byte an element under float8, and two bytes under bfloat16. The
activation function decides how large this part of the memory is. ReLU and GELU
layers need little else. SwiGLU multiplies two activations and holds both in
bfloat16. JAX computes cheap activation functions again in the backward pass,
and so saves more. The chart is for twelve blocks 256-1024-256 and 2048 rows,
on two CPU cores.

## Time of a step

![Bars of the time of a step](images/step_time.svg)

A CPU emulates float8: it rounds the operands, and then multiplies in a wider
dtype. With small layers the rounding takes most of the time. With PyTorch a
step of a layer of size 256 takes 2.7 to 4.1 times as long as in bfloat16; with
size 1024 a step takes one and a half times as long. With JAX and sizes of 512
and more, a step takes less time than in bfloat16. The reason is that this CPU
is slow in bfloat16; float32 is faster still. Layers are square, and each label
has the framework and the size of the layer. Other programs ran at the same
time, so trust the ratios more than the times.

![Bars of the time of a step by recipe](images/recipes.svg)

Recipes with finer scales quantize some operands twice. The extra time is small
against the time of the matmuls.

## Estimated time on a GPU

![Bars of estimated times on a GPU](images/step_time_estimated.svg)

The times in this chart are estimates, not measurements. The bytes and kernels
of the programs that XLA makes for an H200 and a B200 were counted. The times
are computed from these counts. Large layers gain most: with the size of a
layer, the work of a matmul grows faster than the work of the casts. Layers are
square. The twelve blocks are 1024 wide with 4096 in the middle, and have 16384
rows.
"""

APPENDIX = """## Appendix

Each benchmark is one command and runs on any of the three frameworks. The
command writes a JSON file, and the charts and tables are made from this file:

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

- A step is the forward pass, the backward pass and the optimizer. All variants
  of a step are called in turn in one process.
- "against bfloat16" is the speed relative to `mixed_bfloat16`: 2 is twice as
  fast. Each round gives a ratio, and the table has the median.
- "SQNR" is the signal-to-noise ratio in decibels; more is better. The figures
  are for the outputs, the gradient of the inputs and the gradient of the
  kernel. Some benchmarks compare only one or two of these tensors.
- "kernel" says whether this package chose a native or an emulated matmul.
- Memory was measured with a Functional model of blocks, and with one layer
  that calls the blocks "in turn". The two differ on PyTorch: there, Keras
  holds the outputs of all layers of a Functional model until the forward pass
  ends. In "swiglu again", `keras.RematScope` computes the multiplication of
  the gate again in the backward pass.
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

NOTE_OF_CPUS = """On a CPU float8 is emulated, and the figures say what
emulation costs. Other programs were running, so trust the ratios more than the
times.
"""


def read(folder=RESULTS):
    """The results, by device and then in the order of their names."""
    found = collections.defaultdict(list)
    for path in sorted(folder.glob("*_*.json")):
        result = json.loads(path.read_text("utf-8"))
        found[result["environment"]["device"]].append(result)
    return dict(found)


def page(folder=RESULTS, counts=estimates.COUNTS, sizes=TABLE):
    """The text of the page."""
    results = read(folder)
    break_even = json.loads(sizes.read_text("utf-8"))
    parts = [
        HEAD,
        *_break_even(break_even),
        *_not_measured(results),
        APPENDIX,
        *_measured(results),
        *_estimated(estimates.read_counts(counts)),
    ]
    return "\n".join(parts)


def _measured(results):
    yield "### Measured\n"
    if not results:
        yield "Nothing yet.\n"
    for device, found in results.items():
        yield f"#### {device}\n"
        if device.startswith("CPU"):
            yield NOTE_OF_CPUS
        for result in found:
            yield from _result(result)


def _result(result):
    where = result["environment"]
    name = result["benchmark"].replace("_", " ")
    yield f"##### {BACKENDS[where['backend']]}, {name}\n"
    yield _versions(where)
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


def _estimated(counts):
    yield "### Estimated\n"
    text = (
        "The kernels of a step on a GPU, and the bytes that the kernels move, "
        "can be [counted without a GPU](lowering.md). The time is estimated "
        f"from the counts with these assumptions: {estimates.MODEL}. The time "
        "that eager PyTorch needs on the host is not included. Estimates are "
        "for ranking designs; they are not measurements."
    )
    yield textwrap.fill(text, 79, break_on_hyphens=False) + "\n"
    if not counts:
        yield "No counts are committed yet.\n"
        return
    yield table(COUNTED, [_counted(row) for row in counts])
    yield from bounds.section(table)


def _counted(row):
    """The cells of a row of counts."""
    transposes, held = row["transposes"], row["temporaries_of_bfloat16"]
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
        f"{row['estimated_speedup_over_bfloat16']:.2f}",
    ]


def _break_even(rows):
    yield "## From which size on it pays\n"
    yield (
        '`convert(model, filter="auto")` does not convert layers '
        "whose matmuls are below\nthese sizes. `keras-policy-ext doctor` shows "
        "the row of the machine. `any` stands\nfor all frameworks or devices "
        "that have no row of their own.\n"
    )
    yield table(
        ["framework", "device", "size", "source"],
        [
            [
                BACKENDS.get(row["backend"], row["backend"]),
                row["device"],
                "never" if row["size"] is None else f"{row['size']}³",
                row["origin"],
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
            f"- {', '.join(missing)} on a GPU: these benchmarks were not "
            "run there yet.\n  If you have a GPU, run `tox run -e gpu-jax` "
            "(`gpu-tensorflow`, `gpu-torch`). The run\n  takes ten minutes and "
            "writes a page that you can send in."
        )
    else:
        yield "- GPUs that are not above."
    yield (
        "- Memory of a step on a CPU with TensorFlow, since TensorFlow does "
        "not report it.\n"
        "- AMD's GPUs, TPUs, and several devices.\n"
    )


def main():
    write_or_check(PAGE, page())
    charts.main()


if __name__ == "__main__":
    main()
