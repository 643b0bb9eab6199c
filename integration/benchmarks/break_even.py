"""Writes the table that `filter="auto"` goes by, from the committed results.

    python integration/benchmarks/break_even.py [--check]

For each framework and device the size from which on a Dense layer is faster
in float8, under the recipes that were measured: what `layer.py` has measured,
or else what the model of `estimates.py` makes of counts. `--check` writes
nothing, and fails where the table is another.
"""

import itertools
import json
import math
import pathlib

import estimates
from generated import write_or_check

RESULTS = pathlib.Path(__file__).parent / "results"
PACKAGE = pathlib.Path(__file__).parents[2] / "keras_policy_ext"
TABLE = PACKAGE / "conversion" / "break_even.json"
OURS = ("float8 delayed", "float8 current", "float8 rowwise")
PLAIN = ("bfloat16", "float32")
CASE = "dense"
XLA = {"jax": "JAX", "tensorflow": "TensorFlow"}
"""Frameworks whose programs XLA compiles, with their names."""
OTHERS = {
    "backend": "any",
    "device": "any",
    "size": 1024,
    "origin": "assumed, from measurements that torchao publishes for an H100: "
    "a float8 matmul of 1024³ is 1.37 times as fast as in bfloat16",
}
CPU = {
    "backend": "any",
    "device": "cpu",
    "size": None,
    "origin": "there is no float8 matmul that is faster on a CPU",
}


def measured(result):
    """The row for one file of `layer.py`.

    A layer gains if it is faster than the fastest that is not float8, and
    from a size on if all larger ones gain too.
    """
    speedups = _speedups(result["rows"])
    gaining = [
        size
        for size in speedups
        if all(speedups[other] > 1 for other in speedups if other >= size)
    ]
    where = result["environment"]
    low, high = min(speedups.values()), max(speedups.values())
    tried = f"{min(speedups)}³ to {max(speedups)}³"
    device = where["device"]
    size, more = min(gaining, default=None), ""
    if size is None:
        size, more = _beyond(result["rows"])
    return {
        "backend": where["backend"],
        "device": _short(device),
        "size": size,
        "origin": f"measured on {device}: steps of {tried} under "
        f"{_recipes(result['rows'])} scaling at {low:.2f} to {high:.2f} of the "
        f"speed without float8{more}",
    }


def _short(device):
    """A part of the name that is in that of a simulated device too."""
    if device.startswith("CPU"):
        return "cpu"
    known = [name for name in estimates.DEVICES if name in device]
    return known[0] if known else device


def _recipes(rows):
    measured = {row["variant"] for row in rows}
    names = [name.split()[1] for name in OURS if name in measured]
    return " and ".join(names)


def _beyond(rows):
    """The size from which on steps would gain that gained in no size; or None.

    Where matmuls alone gain, and steps do not, something else takes longer. If
    the matmuls are larger than any layer that was measured, the host bounds
    the steps. Its time is the same for any size. From this size on the three
    matmuls of a step in bfloat16 take longer than it. Otherwise it is casts,
    whose time grows with the square of the size, that of matmuls with its cube.

    Returns:
        The size, and the words that say so.
    """
    matmuls = [row for row in rows if row["case"].startswith("matmul")]
    largest = max((row["size"] for row in matmuls), default=0)
    by_name = {r["variant"]: r for r in matmuls if r["size"] == largest}
    steps = _steps(rows)
    tried = max(steps)
    if by_name.get("float8", {}).get("kernel") != "native" or largest < tried:
        return None, ""
    speedup = by_name["float8"]["speedup_over_bfloat16"]
    host = max(ms for name, ms in steps[tried].items() if name in OURS)
    plain = 3 * by_name["bfloat16"]["median_ms"]
    if speedup <= 1:
        return None, ""
    if largest == tried:
        narrow = 3 * by_name["float8"]["median_ms"]
        rest = host - narrow - (steps[tried]["bfloat16"] - plain)
        size = 64 * math.ceil(largest * rest / (plain - narrow) / 64)
        return max(size, largest), (
            f"; matmuls of {largest}³ alone at {speedup:.2f}. The size is "
            "computed: the time of matmuls grows with its cube, that of all "
            "else with its square"
        )
    size = 64 * math.ceil(largest * (host / plain) ** (1 / 3) / 64)
    return max(size, largest), (
        f", since the host takes {host:.1f} ms for a float8 step; matmuls of "
        f"{largest}³ alone at {speedup:.2f}. The size is computed: three "
        "matmuls of it in bfloat16 take as long as the host"
    )


def _steps(rows):
    """Milliseconds of a step by the size of its layer and the variant."""
    sizes = {}
    for row in rows:
        if row["case"] == f"layer {row['size']}":
            times = sizes.setdefault(row["size"], {})
            times[row["variant"]] = row["median_ms"]
    return sizes


def _speedups(rows):
    """How much faster a layer is with float8 than without, by its size."""
    return {
        size: min(times[name] for name in PLAIN if name in times)
        / max(times[name] for name in OURS if name in times)
        for size, times in sorted(_steps(rows).items())
    }


def estimated(rows):
    """Rows for the counts of one framework and device, and its like."""
    dense = {row["variant"]: row for row in rows if row["case"] == CASE}
    ours = [dense[name] for name in OURS if name in dense]
    if "bfloat16" not in dense or not ours:
        return
    counted = rows[0]["device"]
    for device in estimates.SAME_PROGRAM.get(counted, [counted]):
        found = [
            estimates.break_even(row, dense["bfloat16"], device) for row in ours
        ]
        yield {
            "backend": rows[0]["backend"],
            "device": device,
            "size": None if None in found else max(found),
            "origin": "estimated from bytes and kernels counted for the "
            f"{counted}",
        }


def table(folder=RESULTS, counts=estimates.COUNTS):
    """All rows; what was measured comes before what is estimated."""
    files = sorted(folder.glob("layer_*.json"))
    rows = []
    for file in files:
        row = measured(json.loads(file.read_text("utf-8")))
        for device in estimates.SAME_PROGRAM.get(
            row["device"], [row["device"]]
        ):
            rows.append({**row, "device": device})
    known = {_place(row): row for row in rows}
    counted = estimates.read_counts(counts)
    counted.sort(key=_place)
    for _, group in itertools.groupby(counted, key=_place):
        found = estimated(list(group))
        rows += [
            _as_measured(row, known)
            for row in found
            if _place(row) not in known
        ]
    return [*rows, CPU, _others(rows)]


def _as_measured(row, known):
    """A row of an estimate; where XLA was measured there, as with that.

    Args:
        row: An estimated row.
        known: The measured rows by their place.
    """
    for backend, name in XLA.items():
        same = known.get((backend, row["device"]))
        if row["backend"] in XLA and same is not None:
            origin = f"assumed to be as with {name}: XLA compiles for both"
            return {**row, "size": same["size"], "origin": origin}
    return row


def _others(rows):
    """The row of devices that have no other: as on the worst GPU of those."""
    known = [row["size"] for row in rows if row["device"] != "cpu"]
    if not known or None in known:
        return OTHERS
    origin = "assumed to be as on the GPU with the largest size in this table"
    return {**OTHERS, "size": max(known), "origin": origin}


def _place(row):
    return row["backend"], row["device"]


def main():
    text = json.dumps(table(), indent=1, ensure_ascii=False) + "\n"
    write_or_check(TABLE, text)


if __name__ == "__main__":
    main()
