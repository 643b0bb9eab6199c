"""Takes counts of `integration/lowering` into `results/counts.json`.

    python integration/lowering/count.py H200 dense bfloat16,delayed,current \
        | python integration/benchmarks/counts.py jax
    python integration/lowering/torch_counts.py \
        | python integration/benchmarks/counts.py torch

Lines of standard input are JSON, as these two print them; the argument is the
framework that made the programs. Rows of the same framework, GPU and case are
replaced. Then `benchmark_page.py` follows. The file is a list of rows:

    backend, device, case, variant: What was compiled, and for what.
    bytes_per_element: Read and written beside the matmuls, for each element
        of the three matrices of a layer.
    large_kernels, small_kernels: How many, beside the matmuls.
    transposes: How many of the large ones transpose; None if not counted.
    float8_matmuls: How many matmuls read float8.
    temporaries_of_bfloat16: Memory that a step holds for a time, as a part of
        what one in bfloat16 holds; None if not counted.
    estimated_speedup_over_bfloat16: By the seconds that `count.py` gives the
        kernels; None for PyTorch.
"""

import json
import pathlib
import sys

COUNTS = pathlib.Path(__file__).parent / "results" / "counts.json"
FIELDS = (
    "backend",
    "device",
    "case",
    "variant",
    "bytes_per_element",
    "large_kernels",
    "small_kernels",
    "transposes",
    "float8_matmuls",
    "temporaries_of_bfloat16",
    "estimated_speedup_over_bfloat16",
)

VARIANTS = {
    "bfloat16": "bfloat16",
    "delayed": "float8 delayed",
    "from one": "float8 delayed, initial_scale=1.0",
    "current": "float8 current",
    "stock": "stock float8",
}


def read_counts(path=COUNTS):
    """The rows, checked; none if there is no file.

    Raises:
        ValueError: If a row has other fields.
    """
    if not path.exists():
        return []
    rows = json.loads(path.read_text(encoding="utf-8"))
    for row in rows:
        if set(row) != set(FIELDS):
            raise ValueError(
                f"A row of {path.name} has other fields. Received: "
                f"{sorted(row)}. Allowed: {sorted(FIELDS)}."
            )
    return rows


def rows(lines, backend):
    """The rows of counts that were printed."""
    read = _of_torch if backend == "torch" else _of_xla
    found = [read(json.loads(line)) for line in lines if line[:1] == "{"]
    plain = {
        (row["device"], row["case"]): row
        for row in found
        if row["variant"] == "bfloat16"
    }
    for row in found:
        place = row["device"], row["case"]
        if place not in plain:
            sys.exit(f"There are no counts of bfloat16 for {place}.")
        took = row["seconds"]
        speedup = took and round(plain[place]["seconds"] / took, 3)
        held = row["temporaries"]
        held = held and held / plain[place]["temporaries"]
        yield {
            "backend": backend,
            **{name: row[name] for name in row if name in FIELDS},
            "temporaries_of_bfloat16": held and round(held, 3),
            "estimated_speedup_over_bfloat16": speedup,
        }


def _of_xla(line):
    """A line of `count.py`, whose seconds are the sum over the kernels."""
    return {
        "device": line["gpu"],
        "case": line["step"],
        "variant": VARIANTS[line["way"]],
        "bytes_per_element": round(line["bytes an element"], 2),
        "large_kernels": line["large"],
        "small_kernels": line["small"],
        "transposes": line["transposes"],
        "float8_matmuls": line["float8"],
        "temporaries": line["temporaries"],
        "seconds": line["seconds"],
    }


def _of_torch(line):
    """A line of `torch_counts.py`, which counts less."""
    variant = VARIANTS[line["recipe"]]
    if line["recipe"] != "bfloat16" and not line["triton"]:
        variant += ", without Triton"
    kept = ("bytes_per_element", "large_kernels", "small_kernels")
    return {
        "device": "H200",
        "case": "dense",
        "variant": variant,
        **{name: line[name] for name in kept},
        "transposes": None,
        "float8_matmuls": line["float8_matmuls"],
        "temporaries": None,
        "seconds": None,
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
    found = merged(read_counts(), new)
    text = json.dumps(found, indent=1) + "\n"
    COUNTS.write_text(text, encoding="utf-8")
    print(f"{len(new)} rows into {COUNTS}")


if __name__ == "__main__":
    main()
