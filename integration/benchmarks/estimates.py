"""How long a step would take on a GPU that was not there, by a model.

What a compiler makes for a GPU is counted by `integration/lowering`: bytes
that kernels other than the matmuls read and write, and how many kernels there
are. `counts.py` takes its counts into `results/counts.json`, a list of rows:

    backend, device, case, variant: What was compiled, and for what.
    bytes_per_element: Read and written beside the matmuls, for each element
        of the three matrices of a layer.
    large_kernels, small_kernels: How many, beside the matmuls.
    transposes: How many of the large ones transpose; None if not counted.
    float8_matmuls: How many matmuls read float8.
    temporaries_of_bfloat16: Memory that a step holds for a time, as a part of
        what one in bfloat16 holds; None if not counted.
    estimated_speedup_over_bfloat16: By the model, of the case itself.
"""

import json
import pathlib
from typing import NamedTuple

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

PEAK_SHARE = 0.72
BANDWIDTH_SHARE = 0.8
ACCURATE = 0.85
"""Speed of a float8 matmul that accumulates accurately, as gradients do."""
KERNEL_SECONDS = 2e-6


class Device(NamedTuple):
    """What its maker says of a GPU, without sparsity.

    Attributes:
        bfloat16: Operations a second in matmuls.
        float8: Likewise.
        bandwidth: Bytes a second.
    """

    bfloat16: float
    float8: float
    bandwidth: float


DEVICES = {
    "H100": Device(989e12, 1979e12, 3.35e12),
    "H200": Device(989e12, 1979e12, 4.8e12),
    "B200": Device(2250e12, 4500e12, 8e12),
}

SAME_PROGRAM = {"H200": ("H200", "H100")}
"""GPUs that run what is compiled for one of them: the memory is another."""

MODEL = (
    f"matmuls reach {PEAK_SHARE:.0%} of the peak speed; float8 matmuls of "
    f"gradients, which accumulate accurately, reach {ACCURATE} of this share; "
    f"memory reaches {BANDWIDTH_SHARE:.0%} of its bandwidth; each "
    f"kernel takes {KERNEL_SECONDS * 1e6:.0f} µs more"
)


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


def seconds(counts, size, device=None):
    """A step of a Dense layer with square matrices.

    Args:
        counts: A row of the counts, of such a layer.
        size: Rows, inputs and outputs.
        device: A key of `DEVICES`; None for that of the row.
    """
    device = DEVICES[device or counts["device"]]
    operations = 2 * size**3
    if counts["float8_matmuls"]:
        matmuls = operations / device.float8 * (1 + 2 / ACCURATE)
    else:
        matmuls = operations / device.bfloat16 * 3
    moved = counts["bytes_per_element"] * 3 * size**2
    kernels = 3 + counts["large_kernels"] + counts["small_kernels"]
    return (
        matmuls / PEAK_SHARE
        + moved / (BANDWIDTH_SHARE * device.bandwidth)
        + kernels * KERNEL_SECONDS
    )


def break_even(float8, bfloat16, device=None):
    """The size from which a step is faster in float8.

    Args:
        float8: Counts of a Dense layer.
        bfloat16: Those of the same in bfloat16.
        device: As for `seconds`.

    Returns:
        The smallest multiple of 64; None if it is above 65536.
    """
    for size in range(64, 65536 + 1, 64):
        both = (seconds(each, size, device) for each in (float8, bfloat16))
        if next(both) < next(both):
            return size
    return None
