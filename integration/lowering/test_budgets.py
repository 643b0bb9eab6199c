"""What a training step may move on a GPU, beside its matmuls.

Counted in programs that XLA makes for GPUs which are not there: exact numbers
of what is going to run, and no measurement of time. A budget that is passed
says that a change made XLA do more; one that is far from reached may fall.
"""

import json
from typing import NamedTuple

import pytest
from compiling import printed_by, skip_without_compiler

skip_without_compiler()

WAYS = ("bfloat16", "delayed", "current")
MODELS = ("dense", "relu", "gelu", "swiglu", "block")
COUNTED = [  # GPU, who traces, steps, ways
    ("H200", "jax", MODELS, WAYS),
    ("B200", "jax", ("dense",), WAYS),
    ("H200", "jax", ("dense", "swiglu"), ("from one",)),
    ("B200", "jax", ("dense",), ("from one",)),
    ("H200", "tensorflow", ("dense", "relu", "gelu", "block"), WAYS),
    ("B200", "tensorflow", ("dense",), WAYS),
    ("H200", "tensorflow", ("dense",), ("from one",)),
]


class Used(NamedTuple):
    """What a step moves, runs and holds.

    Attributes:
        moved: Beside the matmuls, in bytes per number of the three matrices
            of a Dense, or in GiB.
        large: Kernels beside the matmuls that move a MiB or more.
        transposes: How many of them transpose.
        small: Kernels that move less.
        temporaries: Their memory, where that of bfloat16 is 1.
    """

    moved: float
    large: int
    transposes: int
    small: int
    temporaries: float


BUDGETS = {
    ("H200", "jax", "dense", "delayed"): Used(9.01, 6, 3, 13, 1.26),
    ("H200", "jax", "dense", "from one"): Used(9.01, 5, 2, 12, 1.26),
    ("H200", "jax", "dense", "current"): Used(10.7, 7, 3, 8, 1.26),
    ("H200", "jax", "relu", "delayed"): Used(14.5, 180, 72, 325, 0.34),
    ("H200", "jax", "relu", "current"): Used(15.0, 204, 72, 217, 0.34),
    ("H200", "jax", "gelu", "delayed"): Used(17.9, 180, 72, 336, 0.52),
    ("H200", "jax", "gelu", "current"): Used(19.2, 204, 72, 216, 0.52),
    ("H200", "jax", "swiglu", "delayed"): Used(27.4, 252, 96, 480, 0.84),
    ("H200", "jax", "swiglu", "from one"): Used(24.4, 240, 96, 444, 0.84),
    ("H200", "jax", "swiglu", "current"): Used(29.3, 288, 96, 288, 0.80),
    ("H200", "jax", "block", "delayed"): Used(16.9, 64, 30, 78, 0.97),
    ("H200", "jax", "block", "current"): Used(17.7, 71, 30, 48, 0.96),
    # Blackwell's matmuls read any layout.
    ("B200", "jax", "dense", "delayed"): Used(7.7, 5, 0, 13, 1.51),
    ("B200", "jax", "dense", "from one"): Used(7.1, 3, 0, 12, 1.51),
    ("B200", "jax", "dense", "current"): Used(9.7, 7, 0, 8, 1.51),
    ("H200", "tensorflow", "dense", "delayed"): Used(10.1, 7, 3, 8, 1.01),
    ("H200", "tensorflow", "dense", "current"): Used(10.1, 7, 3, 8, 1.01),
    ("H200", "tensorflow", "relu", "delayed"): Used(17.0, 216, 72, 227, 0.32),
    ("H200", "tensorflow", "relu", "current"): Used(17.0, 216, 72, 204, 0.32),
    ("H200", "tensorflow", "gelu", "delayed"): Used(19.6, 204, 72, 227, 0.55),
    ("H200", "tensorflow", "gelu", "current"): Used(19.6, 204, 72, 204, 0.52),
    ("H200", "tensorflow", "block", "delayed"): Used(11.2, 70, 32, 75, 0.97),
    ("H200", "tensorflow", "block", "current"): Used(11.1, 70, 32, 45, 0.97),
    ("B200", "tensorflow", "dense", "delayed"): Used(8.4, 6, 0, 9, 1.01),
    ("B200", "tensorflow", "dense", "current"): Used(8.4, 6, 0, 8, 1.01),
}
CONTRACTIONS = {"dense": 1, "relu": 24, "gelu": 24, "swiglu": 36, "block": 7}


@pytest.fixture(scope="module")
def counts(tmp_path_factory):
    """The counts by GPU, framework, step and way."""
    folder = tmp_path_factory.mktemp("programs")
    steps, ways = "dense,relu,gelu,block", ",".join(WAYS)
    for traced in ((steps, ways), ("dense", "from one")):
        printed_by("tensorflow", "trace_tensorflow.py", folder, *traced)
    found = {}
    for gpu, framework, steps, ways in COUNTED:
        more = ("--folder", folder) if framework == "tensorflow" else ()
        lines = printed_by(
            "jax", "count.py", gpu, ",".join(steps), ",".join(ways), *more
        ).splitlines()
        for count in map(json.loads, lines):
            found[gpu, framework, count["step"], count["way"]] = count
    return found


@pytest.mark.parametrize("budget", BUDGETS, ids=" ".join)
def test_a_step_stays_within_its_budget(counts, budget):
    count = counts[budget]
    *same, step, _ = budget
    plain = counts[(*same, step, "bfloat16")]
    used = Used(
        count["bytes an element" if step == "dense" else "GiB"],
        count["large"],
        count["transposes"],
        count["small"],
        count["temporaries"] / plain["temporaries"],
    )
    pairs = zip(used, BUDGETS[budget], strict=True)
    assert all(each <= allowed for each, allowed in pairs), used


def test_matmuls_take_the_scales_as_they_are(counts):
    """Not rounded to bfloat16, in which they are written for XLA."""
    assert not any(count["rounded scales"] for count in counts.values())


def test_matmuls_read_float8_and_gradients_are_accurate(counts):
    assert len(counts) == 37
    for (*_, step, way), count in counts.items():
        # Attention multiplies twice by itself, with two gradients each.
        own = 6 if step == "block" else 0
        contractions = CONTRACTIONS[step]
        float8 = 0 if way == "bfloat16" else contractions
        assert count["float8"] == 3 * float8
        assert count["exact"] == 2 * float8
        assert count["other matmuls"] == 3 * (contractions - float8) + own
