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
    ("H200", "jax", "dense", "delayed"): Used(8.7, 5, 0, 17, 1.51),
    ("H200", "jax", "dense", "from one"): Used(8.7, 5, 0, 17, 1.51),
    ("H200", "jax", "dense", "current"): Used(11.4, 8, 0, 14, 1.51),
    ("H200", "jax", "relu", "delayed"): Used(24.8, 240, 72, 331, 0.38),
    ("H200", "jax", "relu", "current"): Used(24.4, 242, 72, 229, 0.38),
    ("H200", "jax", "gelu", "delayed"): Used(28.4, 240, 72, 354, 0.54),
    ("H200", "jax", "gelu", "current"): Used(28.7, 242, 72, 228, 0.54),
    ("H200", "jax", "swiglu", "delayed"): Used(39.6, 313, 96, 525, 1.12),
    ("H200", "jax", "swiglu", "from one"): Used(39.6, 313, 96, 381, 1.12),
    ("H200", "jax", "swiglu", "current"): Used(41.4, 349, 96, 324, 1.08),
    ("H200", "jax", "block", "delayed"): Used(18.7, 66, 30, 92, 0.97),
    ("H200", "jax", "block", "current"): Used(19.5, 73, 30, 57, 0.96),
    # Blackwell's matmuls read any layout.
    ("B200", "jax", "dense", "delayed"): Used(12.4, 7, 0, 15, 2.01),
    ("B200", "jax", "dense", "from one"): Used(11.7, 5, 0, 9, 2.01),
    ("B200", "jax", "dense", "current"): Used(14.4, 9, 0, 7, 2.01),
    ("H200", "tensorflow", "dense", "delayed"): Used(14.7, 9, 3, 9, 1.76),
    ("H200", "tensorflow", "dense", "current"): Used(14.7, 9, 3, 7, 1.76),
    ("H200", "tensorflow", "relu", "delayed"): Used(24.9, 217, 72, 251, 0.35),
    ("H200", "tensorflow", "relu", "current"): Used(24.9, 217, 72, 203, 0.35),
    ("H200", "tensorflow", "gelu", "delayed"): Used(29.2, 217, 72, 251, 0.54),
    ("H200", "tensorflow", "gelu", "current"): Used(29.2, 217, 72, 203, 0.54),
    ("H200", "tensorflow", "block", "delayed"): Used(13.0, 71, 32, 61, 0.9),
    ("H200", "tensorflow", "block", "current"): Used(12.9, 71, 32, 47, 0.89),
    ("B200", "tensorflow", "dense", "delayed"): Used(13.1, 8, 0, 9, 1.51),
    ("B200", "tensorflow", "dense", "current"): Used(13.1, 8, 0, 7, 1.51),
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
    """Not rounded to bfloat16, as the operands of the matmuls."""
    assert not any(count["rounded scales"] for count in counts.values())


@pytest.fixture(scope="module")
def in_float8(counts):
    """The counts of steps that multiply in float8."""
    return {key: counts[key] for key in counts if key[-1] != "bfloat16"}


def test_float8_matmuls_apply_the_scales_and_write_bfloat16(in_float8):
    """So that no kernel behind them reads a result to scale or round it."""
    for key, count in in_float8.items():
        assert count["scaled"] == count["float8"], key
        assert count["written"] == {"bf16": count["float8"]}, key


def test_no_large_kernel_transposes_codes_alone(in_float8):
    """A cast writes both layouts where a GPU needs both."""
    alone = {key: count["codes alone"] for key, count in in_float8.items()}
    assert not any(alone.values()), alone


def test_a_steady_step_has_no_branch(in_float8):
    """A branch on the GPU ends a CUDA graph, and its operands are stored."""
    branches = {key: count["conditionals"] for key, count in in_float8.items()}
    assert not any(branches.values()), branches


def test_matmuls_read_float8_and_gradients_are_accurate(counts):
    """Also with XLA's default flags, by which it could take Triton."""
    assert len(counts) == 37
    for (*_, step, way), count in counts.items():
        # Attention multiplies twice by itself, with two gradients each.
        own = 6 if step == "block" else 0
        contractions = CONTRACTIONS[step]
        float8 = 0 if way == "bfloat16" else contractions
        assert count["float8"] == 3 * float8
        assert count["exact"] == 2 * float8
        assert count["other matmuls"] == 3 * (contractions - float8) + own
