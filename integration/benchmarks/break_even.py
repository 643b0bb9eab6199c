"""Writes the table that `filter="auto"` goes by, from the committed results.

    python integration/benchmarks/break_even.py [--check]

For each framework and device the size from which on a Dense layer is faster
in float8, under either recipe: what `layer.py` has measured, or else what the
model of `estimates.py` makes of counts. `--check` writes nothing, and fails
where the table is another.
"""

import itertools
import json
import pathlib

import estimates
from generated import write_or_check

RESULTS = pathlib.Path(__file__).parent / "results"
PACKAGE = pathlib.Path(__file__).parents[2] / "keras_policy_ext"
TABLE = PACKAGE / "conversion" / "break_even.json"
OURS = ("float8 delayed", "float8 current")
PLAIN = ("bfloat16", "float32")
CASE = "dense"
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
    return {
        "backend": where["backend"],
        "device": "cpu" if device.startswith("CPU") else device,
        "size": min(gaining, default=None),
        "origin": f"measured on {device}: {tried} at {low:.2f} to {high:.2f} "
        "of the speed without float8",
    }


def _speedups(rows):
    """How much faster a layer is with float8 than without, by its size."""
    sizes = {}
    for row in rows:
        if row["case"].startswith("layer"):
            times = sizes.setdefault(row["size"], {})
            times[row["variant"]] = row["median_ms"]
    return {
        size: min(times[name] for name in PLAIN if name in times)
        / max(times[name] for name in OURS)
        for size, times in sorted(sizes.items())
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
    rows = [measured(json.loads(f.read_text("utf-8"))) for f in files]
    counted = estimates.read_counts(counts)
    counted.sort(key=_place)
    for _, group in itertools.groupby(counted, key=_place):
        rows += estimated(list(group))
    return [*rows, CPU, _others(rows)]


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
