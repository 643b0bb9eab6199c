"""What Triton makes of the kernels for a Hopper and a Blackwell GPU.

It compiles without a GPU; what is compiled is not run.
"""

import importlib.util
import os
import re
import subprocess
import sys

import pytest

if not importlib.util.find_spec("triton"):
    pytest.skip(
        "needs Triton: run `tox run -e triton`", allow_module_level=True
    )

COMPILE = """
import sys

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from keras_policy_ext import recipes
from keras_policy_ext.backends.torch import triton_casts
from keras_policy_ext.ext.moments.torch import triton_codes as triton_moments
from keras_policy_ext.ext.delayed.torch import triton_states
from keras_policy_ext.backends.both_layouts import ScaleHint
from keras_policy_ext.numerics.scale_sources import ScaleRule
from keras_policy_ext.numerics.scale_sources import source_of

capability, name, format_name = int(sys.argv[1]), *sys.argv[2:]
asked = recipes.Quantization(format=format_name)
known = ScaleHint("a scale", "a flag", ScaleRule(by_multiplier=True))
shape = 4096, 4096
tile = {"TILE": triton_casts.tile_of(shape)}
cast = triton_casts.cast_constants(asked, known, shape, False, OBSERVE=True)
state = triton_states.state_constants(source_of(recipes.DelayedScaling()))
settle = {**state, "KERNEL_ROW": 1, "OBSERVED": 2}
observation = {"WIDTH": state["WIDTH"], "BLOCK": state["BLOCK"], "PARTS": 4096}
counts = "first_count", "second_count", "third_count"
matrix = {"m": "i32", "k": "i32", "by_row": "i32"}
casts = "cast", "cast of what was seen lately"
narrow = {"float8_e4m3fn": "fp8e4nv", "float8_e5m2": "fp8e5"}[format_name]
kernels = {
    name: (
        triton_casts.cast_kernel,
        f"x:bf16 scale:fp32 unseen:i1 used:fp32 values:{narrow} "
        f"across:{narrow} amaxes:fp32 sums:fp32",
        matrix,
        {**cast, "by_column": 1, "FOUND_BEFORE": name == casts[0]},
    )
    for name in casts
} | {
    "amax": (
        triton_casts.amax_kernel,
        "x:bf16 wanted:i1 amaxes:fp32",
        matrix,
        {**tile, "by_column": 1, "ALWAYS": False, "INDEX": 0},
    ),
    "edges": (
        triton_casts.edges_kernel,
        "x:bf16 amaxes:i32",
        matrix,
        {**tile, "by_column": 1},
    ),
    "cast of rows": (
        triton_casts.cast_rows_kernel,
        f"x:bf16 amaxes:i32 values:{narrow} across:{narrow} row_scales:fp32 "
        "column_scales:fp32 sums:fp32",
        matrix,
        {
            **triton_casts.format_constants(asked, False),
            **tile,
            **dict.fromkeys(("MARKS_ROWS", "MARKS_COLUMNS", "SUMS"), True),
            "by_column": 1,
        },
    ),
    "sums": (
        triton_casts.sums_kernel,
        "sums:fp32 found:bf16",
        {"parts": "i32", "k": "i32"},
        triton_casts.sums_constants(),
    ),
    "history": (
        triton_states.history_kernel,
        "state:fp32 scales:fp32 unseen:i1 host_flags:i1",
        {},
        state,
    ),
    "observation": (
        triton_states.observation_kernel,
        "first:fp32 second:fp32 third:fp32 found:fp32",
        dict.fromkeys(("column", *counts), "i32"),
        observation,
    ),
    "settle": (
        triton_states.settle_kernel,
        "value:fp32 latest:fp32 earlier:fp32 previous:fp32 settled:fp32",
        {},
        settle,
    ),
}
moment = "first", "float8", 256
kernels |= {
    "quantize moments": (
        triton_moments.quantize_kernel,
        "x:fp32 key:i32 codes:u8 scales:fp32",
        {"blocks": "i32"},
        triton_moments.quantize_constants(*moment, True),
    ),
    "dequantize moments": (
        triton_moments.dequantize_kernel,
        "codes:u8 scales:fp32 found:fp32",
        {"blocks": "i32"},
        triton_moments.dequantize_constants(*moment),
    ),
    "key of a moment": (
        triton_moments.key_kernel,
        "step:i32 found:i32",
        {"number": "i32"},
        {},
    ),
}
function, pointers, sizes, constants = kernels[name]
pointers = dict(pair.split(":") for pair in pointers.split())
known_types = {name: "*" + kind for name, kind in pointers.items()} | sizes
# In the order of the parameters, as when it is launched.
signature = {
    name: known_types.get(name, "constexpr") for name in function.arg_names
}
# As at run time for sizes that 16 divides.
aligned = [*pointers, *(name for name in sizes if name in matrix)]
attributes = {
    (function.arg_names.index(name),): [["tt.divisibility", 16]]
    for name in aligned
}
source = ASTSource(
    fn=function, signature=signature, constexprs=constants, attrs=attributes
)
target = GPUTarget("cuda", capability, 32)
print(compile(source, target=target, options={"num_warps": 4}).asm["ptx"])
"""


def compiled(capability, name, format_name="float8_e4m3fn"):
    """The text of a kernel for a GPU."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(capability), name, format_name],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "0"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize(
    "name",
    [
        *("amax", "history", "observation", "settle"),
        *("edges", "cast of rows", "sums"),
        *("quantize moments", "dequantize moments", "key of a moment"),
    ],
)
def test_kernels_compile(capability, name):
    assert f".target sm_{capability}" in compiled(capability, name)


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize(
    ("format_name", "conversion"),
    [("float8_e4m3fn", "e4m3x2"), ("float8_e5m2", "e5m2x2")],
)
def test_the_cast_is_the_one_of_the_hardware(
    capability, format_name, conversion
):
    text = compiled(capability, "cast", format_name)
    assert f"cvt.rn.satfinite.{conversion}.f32" in text
    per_thread = 64 * 64 // 128
    # Two numbers a conversion.
    assert text.count(f".{conversion}.") == per_thread // 2
    # Each program writes an amax of its own: nothing has to be zero before.
    assert "atom" not in text
    # No division for each number: one for the reciprocal, and those of the
    # branch for tiny scales.
    assert len(re.findall(r"\bdiv\.rn", text)) <= per_thread + 6


@pytest.mark.parametrize("name", ["cast", "cast of what was seen lately"])
def test_memory_is_read_and_written_in_wide_pieces(name):
    text = compiled(90, name)
    loads = re.findall(r"ld\.global\S*\.v(\d)\.b32", text)
    assert loads, "numbers are loaded one by one"
    assert set(loads) == {"4"}
    assert re.search(r"st\.global\S*\.v\d\.b32", text)
