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


def in_readme(folder, table, duration):
    """The lines of README.md: a model in `fit`, and steps of single layers."""
    for where, found, _ in results(folder):
        by_case = {}
        for row in found:
            by_case.setdefault(row["case"], {})[row["variant"]] = row
        fits, steps = [], []
        for case, rows in by_case.items():
            if set(IN_README) <= set(rows) and "tokens_per_s" in rows[PLAIN]:
                fits += _fit(case, *map(rows.get, IN_README))
            elif case.startswith("Dense") and {PLAIN, CURRENT} <= set(rows):
                steps.append(_step(case, rows[PLAIN], rows[CURRENT], duration))
        if fits:
            head = f"on an {where['device']}, JAX {where['versions']['jax']}"
            yield table([head, "bfloat16", "float8"], fits + steps)


PLAIN, CURRENT = "bfloat16", "float8 current"
IN_README = PLAIN, "float8 delayed"


def _fit(case, plain, float8):
    """The cells of each line, for one model."""
    name = case.replace("KerasHub Llama in fit", "`fit` of a KerasHub Llama")
    for words, key, unit, told in (
        (f'{name}, `"delayed"`', "tokens_per_s", " tokens/s", "times as many"),
        ("most memory that its step holds", "peak_mib", " MiB", "of it"),
    ):
        a, b = plain[key], float8[key]
        if a is not None:
            times = f"{b / a:.2f} {told}"
            yield [words, f"{a:,}{unit}", f"**{b:,}{unit}**, {times}"]


def _step(case, plain, float8, duration):
    """The cells of a step of one layer."""
    a, b = plain["median_us"], float8["median_us"]
    return [
        f'a step of a {case} layer, `"current"`',
        duration(a / 1e3),
        f"**{duration(b / 1e3)}**, {float8[SPEED][0]:.2f} times as fast",
    ]
