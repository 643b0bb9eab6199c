"""Takes counts of `integration/lowering` into `results/counts.json`.

    python integration/lowering/count.py H200 dense bfloat16,delayed,current \
        | python integration/benchmarks/counts.py jax

Lines of standard input are JSON, as `count.py` prints them; the argument is
the framework that traced the programs. Rows of the same framework, GPU and
case are replaced. Then `break_even.py` and `benchmark_page.py` follow.
"""

import json
import sys

import estimates

VARIANTS = {
    "bfloat16": "bfloat16",
    "delayed": "float8 delayed",
    "current": "float8 current",
    "stock": "stock float8",
}


def rows(lines, backend):
    """The rows of counts that were printed."""
    found = [json.loads(line) for line in lines if line.startswith("{")]
    plain = {
        (each["gpu"], each["step"]): each["seconds"]
        for each in found
        if each["way"] == "bfloat16"
    }
    for each in found:
        place = each["gpu"], each["step"]
        if place not in plain:
            sys.exit(f"There are no counts of bfloat16 for {place}.")
        yield {
            "backend": backend,
            "device": each["gpu"],
            "case": each["step"],
            "variant": VARIANTS[each["way"]],
            "bytes_per_element": round(each["bytes an element"], 2),
            "large_kernels": each["large"],
            "small_kernels": each["small"],
            "transposes": each["transposes"],
            "float8_matmuls": each["float8"],
            "estimated_speedup_over_bfloat16": round(
                plain[place] / each["seconds"], 3
            ),
        }


def merged(before, new):
    """Rows of which those of the same places are the new ones."""

    def place(row):
        return row["backend"], row["device"], row["case"]

    replaced = {place(row) for row in new}
    kept = [row for row in before if place(row) not in replaced]
    return sorted([*kept, *new], key=place)


def main():
    if len(sys.argv) != 2 or sys.argv[1] not in ("jax", "tensorflow", "torch"):
        sys.exit("Say which framework traced: jax, tensorflow or torch.")
    new = list(rows(sys.stdin, sys.argv[1]))
    found = merged(estimates.read_counts(), new)
    text = json.dumps(found, indent=1) + "\n"
    estimates.COUNTS.write_text(text, encoding="utf-8")
    print(f"{len(new)} rows into {estimates.COUNTS}")


if __name__ == "__main__":
    main()
