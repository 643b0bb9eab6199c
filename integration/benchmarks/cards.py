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
    a case bfloat16 comes first.
    """
    by_device = {}
    for path in sorted(folder.glob(f"{BENCHMARK}_*.json")):
        result = json.loads(path.read_text("utf-8"))
        device = result["environment"]["device"]
        _, known = by_device.get(device, (None, {}))
        for row in result["rows"]:
            if "median_us" in row:
                known[row["case"], row["variant"]] = row
        by_device[device] = result["environment"], known
    for where, known in by_device.values():
        cases = list(dict.fromkeys(case for case, _ in known))
        keys = sorted(
            known, key=lambda key: (cases.index(key[0]), key[1] != "bfloat16")
        )
        yield where, [known[key] for key in keys]


def section(folder, table, duration):
    """The lines of docs/benchmarks.md.

    Args:
        folder: Of the results.
        table: Makes a table of Markdown of heads and rows.
        duration: Makes words of milliseconds.
    """
    for where, found in results(folder):
        yield f"## Measured on an {where['device']}\n"
        text = TEXT.format(device=where["device"])
        yield textwrap.fill(" ".join(text.split()), 79) + "\n"
        names = ", ".join(f"{k} {v}" for k, v in where["versions"].items())
        yield textwrap.fill(f"{names}; {where['date']}.", 79) + "\n"
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
    """The lines of README.md: bfloat16 and `delayed`, side by side."""
    for where, found in results(folder):
        versions, lines = where["versions"], []
        for case, rows in _by_case(found).items():
            if set(PAIR) <= set(rows):
                plain, float8 = (rows[name] for name in PAIR)
                lines += _pairs(case, plain, float8, duration)
        head = f"measured on an {where['device']}, JAX {versions['jax']}"
        if lines:
            yield table([head, *PAIR], lines)


PAIR = ("bfloat16", "float8 delayed")


def _by_case(rows):
    found = {}
    for row in rows:
        found.setdefault(row["case"], {})[row["variant"]] = row
    return found


def _pairs(case, plain, float8, duration):
    """The lines of a case."""
    speed = f"{float8[SPEED][0]:.2f} times the speed"
    if "tokens_per_s" not in plain:
        times = [duration(row["median_us"] / 1e3) for row in (plain, float8)]
        yield [f"step: {case}", times[0], f"**{times[1]}**, {speed}"]
        return
    tokens = [f"{row['tokens_per_s']:,}" for row in (plain, float8)]
    yield [f"tokens a second: {case}", tokens[0], f"**{tokens[1]}**, {speed}"]
    if plain["peak_mib"] is not None:
        peaks = [row["peak_mib"] for row in (plain, float8)]
        gib = [f"{peak / 1024:.1f} GiB" for peak in peaks]
        part = f"{peaks[1] / peaks[0]:.2f} of it"
        yield ["its peak memory", gib[0], f"**{gib[1]}**, {part}"]
