"""What eight Hopper GPUs do for operands that are cut, and exchange for them.

A step of two layers, in bfloat16, from a description of the GPUs. Where
nothing is said of gathering a kernel that is cut along the batch, XLA gathers
one of the kernels twice.
"""

import collections
import json
import math
import re

import pytest
from compiling import FOLDER, skip_without_compiler

from processes import run

skip_without_compiler()

STEP = f"""
import sys
sys.path.insert(0, {str(FOLDER)!r})
import gpus, hlo
import dataclasses, json, re
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from keras_policy_ext import contractions, recipes
from keras_policy_ext.backends import devices as known_devices
from keras_policy_ext.backends.jax.backend import Gathering
from keras_policy_ext.numerics.scale_sources import source_of

# What is traced is for eight such GPUs.
jax.device_count = lambda: 8
pretending = known_devices.pretend("h200")
pretending.__enter__()
hopper = dataclasses.asdict(gpus.GPUS["H200"])
devices = topologies.get_topology_desc(
    platform="cuda",
    topology="1x1x8",
    target_config=gpus.DESCRIPTION.format(**hopper),
).devices
alone = Mesh(np.array(devices), ("batch",))
both = Mesh(np.array(devices).reshape(2, 4), ("batch", "model"))


def text(recipe, mesh, cuts, gathering):
    equation, recipe = contractions.Einsum("ab,bc->ac"), recipes.get(recipe)
    shape = source_of(recipe).state_shape
    shapes = (1024, 2048), (2048, 1024), (8192, 1024), (2048,), (1024,)
    cuts = [*cuts, ("batch",), cuts[0][1:], cuts[1][1:]]
    places = [NamedSharding(mesh, PartitionSpec(*cut)) for cut in cuts]
    dtypes = "float32", "float32", "bfloat16", "bfloat16", "bfloat16"
    operands = [
        jax.ShapeDtypeStruct(*known[:2], sharding=known[2])
        for known in zip(shapes, dtypes, places)
    ]
    whole = NamedSharding(mesh, PartitionSpec())
    states = []
    if shape is not None:
        state = jax.ShapeDtypeStruct(shape, "float32", sharding=whole)
        states = [state, state]

    def loss_of(up, down, states, x, bias, other):
        of_up, of_down = ([each] for each in states) if states else ([], [])
        with contractions.prefer("native"):
            one, two = (
                contractions.make_plan(
                    equation, recipe, "bfloat16", "float32", True, 0, each
                )
                for each in gathering
            )
            y = contractions.run(one, x, up, *of_up, bias=bias)
            hidden = jax.nn.relu(y)
            y = contractions.run(two, hidden, down, *of_down, bias=other)
        return jnp.mean((y - x).astype("float32") ** 2)

    def step(up, down, *others):
        found = jax.grad(loss_of, (0, 1, 2, 4, 5))(up, down, *others)
        return up - 0.1 * found[0], down - 0.1 * found[1], found[2:]

    placed = places[0], places[1], None
    traced = jax.jit(step, out_shardings=placed).trace(
        *operands[:2], states, *operands[2:]
    )
    compiled = traced.lower(lowering_platforms=("cuda",)).compile()
    return compiled.as_text()


def said(mesh, *cuts):
    axes = [tuple((each,) if each else () for each in cut) for cut in cuts]
    return [Gathering(mesh, each, "batch") for each in axes]


rows, kept, nothing = ("batch", None), (None, None), [None, None]
ways = {{
    f"{{recipe}} {{way}}": (recipe, alone, (rows, rows), gathering)
    for recipe in ("current", "rowwise")
    for way, gathering in (
        ("said", said(alone, rows, rows)), ("unsaid", nothing)
    )
}}
ways["data"] = "delayed", alone, (kept, kept), nothing
ways["rowwise data"] = "rowwise", alone, (kept, kept), nothing
cuts = (None, "model"), ("model", None)
ways["model"] = "delayed", both, cuts, nothing
cuts = ("batch", "model"), ("model", "batch")
ways["both"] = "delayed", both, cuts, said(both, *cuts)
results = {{}}
for name, way in ways.items():
    found = text(*way)
    entry = found[found.index("ENTRY"):]
    results[name] = {{
        "gathered": [
            line.split(" all-gather")[0] for line in found.splitlines()
            if re.search(r" all-gather(-done)?\\(", line)
        ],
        "float8": found.count('custom_call_target="__cublas$lt$matmul$f8"'),
        "Pallas": found.count('custom_call_target="__gpu$xla.gpu.triton"'),
        "rounded scales": hlo.rounded_scales(found),
        "reduced": re.findall(
            r"= (\\w+\\[[\\d,]*\\])\\S* all-reduce(?:-start)?\\(", entry
        ),
    }}
print(json.dumps(results))
"""

NUMBERS = 2 * 1024 * 2048
BYTES = {"u8": 1, "f8e4m3fn": 1, "bf16": 2, "f32": 4}


@pytest.fixture(scope="module")
def results():
    return json.loads(run("jax", STEP).splitlines()[-1])


def gathered(lines):
    """The bytes of large arrays that are gathered, by dtype."""
    found = collections.Counter()
    for dtype, sizes in re.findall(r"(\w+)\[([\d,]+)\]", "".join(lines)):
        numbers = math.prod(map(int, sizes.split(",")))
        if numbers >= NUMBERS // 2:
            found[dtype] += BYTES[dtype] * numbers
    return found


def test_kernels_are_gathered_once_and_in_bytes(results):
    found = results["current said"]
    assert gathered(found["gathered"]) == {"u8": NUMBERS}
    assert found["float8"] == 5


def test_kernels_that_are_read_twice_are_gathered_twice_in_bytes(results):
    """The second time for the gradient of the inputs of the second layer."""
    found = results["rowwise said"]
    assert gathered(found["gathered"]) == {"u8": NUMBERS + NUMBERS // 2}
    assert found["float8"] == 5


def test_unsaid_xla_gathers_a_kernel_twice(results):
    """Where this fails, XLA may do without being told."""
    found = results["current unsaid"]
    # One of the two kernels.
    assert gathered(found["gathered"]) == {"f8e4m3fn": NUMBERS + NUMBERS // 2}
    assert found["float8"] == 5


def test_what_is_added_up_over_devices_is_scaled_in_float32(results):
    """XLA adds up the products of all devices before it scales the sum."""
    assert not any(each["rounded scales"] for each in results.values())


@pytest.mark.parametrize("name", ["data", "model", "rowwise data"])
def test_pallas_casts_every_operand_and_nothing_is_gathered(results, name):
    found = results[name]
    assert found["gathered"] == []
    assert found["float8"] == 5
    # Six casts; scales of rows take two kernels. Kernels that every device
    # has whole find their first amax by a kernel too.
    assert found["Pallas"] == {"data": 8, "model": 6, "rowwise data": 12}[name]


def test_a_kernel_that_is_gathered_is_cast_by_xla(results):
    """Pallas casts the inputs and the gradients of both layers."""
    found = results["both"]
    # The parts of a column of devices.
    assert gathered(found["gathered"]) == {}
    assert "u8[1024,512]" in "".join(found["gathered"])
    assert "f32[1024" not in "".join(found["gathered"])
    assert (found["float8"], found["Pallas"]) == (5, 4)


@pytest.mark.parametrize("name", ["data", "model"])
def test_a_steady_step_reduces_all_amaxes_at_once(results, name):
    amaxes = [each for each in results[name]["reduced"] if "s32" in each]
    assert amaxes == [{"data": "s32[4]", "model": "s32[6]"}[name]]
    # Products, gradients and sums of columns.
    others = {"data": 1, "model": 2}[name]
    assert len(results[name]["reduced"]) == 1 + others
