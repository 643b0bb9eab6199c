"""What XLA makes for GPUs of products with kernels that are stored as codes.

A GPU without float8 is described as an A100: XLA is told of its capability.
"""

import json

import pytest
from compiling import FOLDER, skip_without_compiler

from processes import run

skip_without_compiler()

PROGRAMS = f"""
import sys
sys.path.insert(0, {str(FOLDER)!r})
import gpus

import dataclasses, json, re
import jax, keras
import keras_policy_ext as kpe
from keras_policy_ext.backends import devices

H200 = gpus.GPUS["H200"]
GPUS = {{
    "H200": (H200, (9, 0)),
    "A100": (dataclasses.replace(H200, name="A100", major=8), (8, 0)),
}}
found = []
for name, (gpu, capability) in GPUS.items():
    for policy in ("mixed_bfloat16", "mixed_float16", "float32"):
        for rows in (1, 16, 512):
            for widened in (False, True):
                layer = keras.layers.Dense(4096, dtype=policy)
                layer.build((rows, 2048))
                kpe.freeze(layer)
                device = devices.of_nvidia(capability, name)
                with devices.pretend(device):
                    if widened:
                        kpe.widen(layer)
                weights = [
                    [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in each]
                    for each in (
                        layer.trainable_variables,
                        layer.non_trainable_variables,
                    )
                ]
                x = jax.ShapeDtypeStruct((rows, 2048), layer.compute_dtype)
                module = gpus.traced_by_jax(
                    lambda w, x: layer.stateless_call(*w, x)[0], weights, x
                )
                text = gpu.compiled(module).hlo_modules()[0].to_string()
                entry = text[text.index("ENTRY"):]
                written = re.findall(
                    r"= (f32|bf16|f16|s16|s32)"
                    r"\\[(?:2048,4096|4096,2048)\\]\\S* "
                    r"(?!parameter|bitcast)",
                    entry,
                )
                found.append([name, policy, rows, widened, written])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def programs():
    return json.loads(run("jax", PROGRAMS).splitlines()[-1])


def test_the_cast_is_in_the_matmul_of_a_gpu_with_float8(programs):
    """But for one row in float32, for which XLA has no Triton matmul."""
    for name, policy, rows, widened, written in programs:
        if name == "H200" and not (policy == "float32" and rows == 1):
            assert written == [], (policy, rows, widened)


def test_without_float8_it_is_once_the_kernel_is_widened(programs):
    """XLA casts float8 in a kernel of its own there, but for one row."""
    for name, policy, rows, widened, written in programs:
        if name == "A100" and policy != "float32":
            expected = not widened and rows > 1
            assert bool(written) == expected, (policy, rows, widened)
