"""What `jax_on_card.py` measured, as the first tables of the pages."""

import json
import textwrap

BENCHMARK = "jax_on_card"
BEGIN = (
    "<!-- What was measured on a GPU: written by "
    "integration/benchmarks/benchmark_page.py, do not edit. -->"
)
END = "<!-- As far as here. -->"
SPEED = "against_bfloat16"

TEXT = """JAX, with XLA's default flags, on one {device}. A step consists of the
forward pass, the backward pass and the update, and is timed by the clock. The
ways to compute are called in turn. Times and speeds are medians of the rounds;
in brackets stand the lowest and the highest speed of a round. The last columns
tell what the first step takes, in which XLA compiles, and how many matmuls of
the compiled program read float8. In one process XLA does not time a matmul
again that it has timed for another program, so that later first steps may be
shorter; each row of `fit` has a process of its own."""


def results(folder):
    """The results of `jax_on_card.py`, one for each device.

    The rows of several runs are put together; of the same row, that of the
    last file is taken. Rows in which there was an error are left out, and of
    a case bfloat16 comes first. `notes` of the files are put together too.
    """
    by_device = {}
    for path in sorted(folder.glob(f"{BENCHMARK}_*.json")):
        result = json.loads(path.read_text("utf-8"))
        device = result["environment"]["device"]
        _, known, notes = by_device.get(device, (None, {}, []))
        for row in result["rows"]:
            if "median_us" in row:
                known[row["case"], row["variant"]] = row
        notes += result.get("notes", [])
        by_device[device] = result["environment"], known, notes
    for where, known, notes in by_device.values():
        cases = list(dict.fromkeys(case for case, _ in known))
        keys = sorted(
            known, key=lambda key: (cases.index(key[0]), key[1] != "bfloat16")
        )
        yield where, [known[key] for key in keys], notes


def section(folder, table, duration):
    """The lines of docs/benchmarks.md.

    Args:
        folder: Of the results.
        table: Makes a table of Markdown of heads and rows.
        duration: Makes words of milliseconds.
    """
    for where, found, notes in results(folder):
        yield f"## Measured on an {where['device']}\n"
        text = TEXT.format(device=where["device"])
        yield textwrap.fill(" ".join(text.split()), 79) + "\n"
        names = ", ".join(f"{k} {v}" for k, v in where["versions"].items())
        yield textwrap.fill(f"{names}; {where['date']}.", 79) + "\n"
        for note in notes:
            yield textwrap.fill(note, 79) + "\n"
        fit = [row for row in found if "tokens_per_s" in row]
        steps = [row for row in found if "tokens_per_s" not in row]
        for title, rows, columns in (
            ("A Llama of KerasHub in `fit`", fit, IN_FIT),
            ("Steps", steps, OF_STEPS),
        ):
            if rows:
                heads = [title, "", *(head for head, _ in columns)]
                yield table(heads, list(_cells(rows, columns, duration)))


def _cells(rows, columns, duration):
    """The cells of a table, in which each case is named once."""
    case = None
    for row in rows:
        first = (
            row["case"].replace(" in fit", "") if row["case"] != case else ""
        )
        case = row["case"]
        cells = (_words(row.get(key), key, duration) for _, key in columns)
        yield [first, row["variant"], *cells]


IN_FIT = (
    ("step", "median_us"),
    ("tokens a second", "tokens_per_s"),
    ("speed", SPEED),
    ("peak memory, MiB", "peak_mib"),
    ("first step, s", "first_step_s"),
)
OF_STEPS = (
    ("time", "median_us"),
    ("speed", SPEED),
    ("kernels", "kernels_us"),
    ("first step, s", "first_step_s"),
    ("float8 matmuls", "float8_matmuls"),
)


def _words(value, key, duration):
    """A value in a table."""
    if value is None:
        return ""
    if key == SPEED:
        return "{:.2f} ({:.2f}–{:.2f})".format(*value)
    if key.endswith("_us"):
        return duration(value / 1e3)
    return f"{value:,}" if isinstance(value, int) else f"{value:.1f}"


def in_readme(folder, table):
    """The lines of README.md: `fit` in bfloat16 and under `delayed`."""
    for where, found, _ in results(folder):
        by_case = {}
        for row in found:
            if "tokens_per_s" in row:
                by_case.setdefault(row["case"], {})[row["variant"]] = row
        for case, rows in by_case.items():
            if not set(PAIR) <= set(rows):
                continue
            head = f"{case}; {where['device']}, JAX {where['versions']['jax']}"
            yield table([head, *PAIR], list(_pairs(*map(rows.get, PAIR))))


PAIR = ("bfloat16", "float8 delayed")


def _pairs(plain, float8):
    """The cells of each line, for one model."""
    for words, key, unit in (
        ("[tokens a second](docs/benchmarks.md)", "tokens_per_s", ""),
        ("most memory that a step holds", "peak_mib", " MiB"),
        ("first step, in which XLA compiles", "first_step_s", " s"),
    ):
        a, b = plain[key], float8[key]
        if a is not None:
            times = f"{b / a:.2f} times as many"
            if unit:
                times = f"{b / a:.2f} of it"
            yield [words, f"{a:,}{unit}", f"**{b:,}{unit}**, {times}"]
