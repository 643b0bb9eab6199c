"""What eight Hopper GPUs gather of kernels that are cut along the batch.

A step of two layers, in bfloat16, from a description of the GPUs. Where
nothing is said of gathering, XLA gathers one of the kernels twice.
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
mesh = Mesh(np.array(devices), ("batch",))
rows = NamedSharding(mesh, PartitionSpec("batch"))
x, up, down = (
    jax.ShapeDtypeStruct(shape, dtype, sharding=rows)
    for shape, dtype in (
        ((8192, 1024), "bfloat16"),
        ((1024, 2048), "float32"),
        ((2048, 1024), "float32"),
    )
)


def text(recipe, gathering):
    equation, recipe = contractions.Einsum("ab,bc->ac"), recipes.get(recipe)
    known = recipe, "bfloat16", "float32", True, 0, gathering

    def loss_of(up, down, x):
        with contractions.prefer("native"):
            plan = contractions.make_plan(equation, *known)
            hidden = jax.nn.relu(contractions.run(plan, x, up))
            y = contractions.run(plan, hidden, down)
        return jnp.mean((y - x).astype("float32") ** 2)

    def step(up, down, x):
        one, two = jax.grad(loss_of, (0, 1))(up, down, x)
        return up - 0.1 * one, down - 0.1 * two

    traced = jax.jit(step, out_shardings=(rows, rows)).trace(up, down, x)
    compiled = traced.lower(lowering_platforms=("cuda",)).compile()
    return compiled.as_text()


said = Gathering(mesh, (("batch",), ()), "batch")
results = {{}}
for recipe in ("current", "rowwise"):
    for way, gathering in (("said", said), ("unsaid", None)):
        found = text(recipe, gathering)
        results[recipe + " " + way] = [
            [line.split(" all-gather")[0] for line in found.splitlines()
             if re.search(r" all-gather(-done)?\\(", line)],
            found.count('custom_call_target="__cublas$lt$matmul$f8"'),
            hlo.rounded_scales(found),
        ]
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
    lines, matmuls, _ = results["current said"]
    assert gathered(lines) == {"u8": NUMBERS}
    assert matmuls == 5


def test_kernels_that_are_read_twice_are_gathered_twice_in_bytes(results):
    """The second time for the gradient of the inputs of the second layer."""
    lines, matmuls, _ = results["rowwise said"]
    assert gathered(lines) == {"u8": NUMBERS + NUMBERS // 2}
    assert matmuls == 5


def test_unsaid_xla_gathers_a_kernel_twice(results):
    """Where this fails, XLA may do without being told."""
    lines, matmuls, _ = results["current unsaid"]
    # One of the two kernels.
    assert gathered(lines) == {"f8e4m3fn": NUMBERS + NUMBERS // 2}
    assert matmuls == 5


def test_what_is_added_up_over_devices_is_scaled_in_float32(results):
    """XLA adds up the products of all devices before it scales the sum."""
    assert {each: found[2] for each, found in results.items()} == dict.fromkeys(
        results, 0
    )
