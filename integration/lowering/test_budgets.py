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
    ("H200", "jax", "dense", "delayed"): Used(8.1, 5, 0, 17, 1.51),
    ("H200", "jax", "dense", "from one"): Used(8.1, 5, 0, 12, 1.51),
    ("H200", "jax", "dense", "current"): Used(10.8, 8, 0, 11, 1.51),
    ("H200", "jax", "relu", "delayed"): Used(15.4, 144, 0, 367, 0.37),
    ("H200", "jax", "relu", "current"): Used(18.0, 204, 0, 265, 0.37),
    ("H200", "jax", "gelu", "delayed"): Used(16.7, 144, 0, 318, 0.54),
    ("H200", "jax", "gelu", "current"): Used(17.8, 192, 0, 264, 0.54),
    ("H200", "jax", "swiglu", "delayed"): Used(25.8, 204, 0, 550, 0.86),
    ("H200", "jax", "swiglu", "from one"): Used(25.8, 204, 0, 370, 0.86),
    ("H200", "jax", "swiglu", "current"): Used(26.3, 252, 0, 372, 0.83),
    ("H200", "jax", "block", "delayed"): Used(12.6, 58, 10, 113, 0.98),
    ("H200", "jax", "block", "current"): Used(13.4, 66, 10, 65, 0.97),
    # Blackwell's matmuls read any layout.
    ("B200", "jax", "dense", "delayed"): Used(7.1, 5, 0, 17, 1.26),
    ("B200", "jax", "dense", "from one"): Used(7.1, 5, 0, 12, 1.26),
    ("B200", "jax", "dense", "current"): Used(9.8, 8, 0, 11, 1.26),
    # Pallas is JAX's. XLA transposes codes for a Hopper.
    ("H200", "tensorflow", "dense", "delayed"): Used(10.4, 9, 5, 9, 1.01),
    ("H200", "tensorflow", "dense", "current"): Used(10.4, 9, 5, 7, 1.01),
    ("H200", "tensorflow", "relu", "delayed"): Used(15.5, 251, 96, 251, 0.29),
    ("H200", "tensorflow", "relu", "current"): Used(15.5, 251, 96, 203, 0.29),
    ("H200", "tensorflow", "gelu", "delayed"): Used(19.7, 251, 96, 251, 0.53),
    ("H200", "tensorflow", "gelu", "current"): Used(19.7, 251, 96, 203, 0.51),
    ("H200", "tensorflow", "block", "delayed"): Used(11.5, 82, 37, 61, 0.96),
    ("H200", "tensorflow", "block", "current"): Used(11.4, 82, 37, 47, 0.93),
    ("B200", "tensorflow", "dense", "delayed"): Used(8.4, 6, 0, 9, 1.01),
    ("B200", "tensorflow", "dense", "current"): Used(8.4, 6, 0, 7, 1.01),
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
    """A cast writes both layouts where a GPU needs both.

    But for TensorFlow on a Hopper, where XLA transposes what it cast.
    """
    alone = {key: count["codes alone"] for key, count in in_float8.items()}
    for key in [*alone]:
        if key[:2] == ("H200", "tensorflow"):
            assert alone.pop(key) <= 3 * CONTRACTIONS[key[2]]
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
