"""What XLA makes of float8 layers for a Hopper GPU, without having one.

A training step of a layer is traced by JAX and by TensorFlow. XLA compiles
both for an H200 from a description of that device, and its program is read:
each matmul of the step must be cuBLASLt's float8 one. What such a program
computes, and how fast, is not seen here.
"""

import importlib.util
import json

import pytest

from processes import run

needed = ("jax", "tensorflow", "jax_plugins.xla_cuda12")
missing = [name for name in needed if not importlib.util.find_spec(name)]
if missing:
    pytest.skip(
        f"{', '.join(missing)} not installed: run `tox run -e lowering`",
        allow_module_level=True,
    )

SETTINGS = """
import os

os.environ.update(
    JAX_PLATFORMS="cpu",
    # The CUDA libraries are not needed to compile.
    JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1",
    # No device to time variants on, nor kernels that are hard to read.
    XLA_FLAGS="--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false",
)
"""

LAYERS = """
import keras
import keras_policy_ext as kpe

bfloat16 = "float8_from_mixed_bfloat16"
LAYERS = {  # a layer, the shapes of its inputs, its contractions
    "matrix, float32": (
        kpe.layers.Dense(512, dtype="float8_from_float32"), [(128, 256)], 1
    ),
    "matrix, bfloat16": (
        kpe.layers.Dense(512, dtype=bfloat16), [(128, 256)], 1
    ),
    "matrix, float16": (
        kpe.layers.Dense(512, dtype="float8_from_mixed_float16"),
        [(128, 256)],
        1,
    ),
    "matrix, current": (
        kpe.layers.Dense(512, dtype="float8/current_from_mixed_bfloat16"),
        [(128, 256)],
        1,
    ),
    "sequence of odd sizes": (
        kpe.layers.Dense(510, dtype=bfloat16), [(4, 31, 250)], 1
    ),
    "to heads": (
        kpe.layers.EinsumDense("abc,cde->abde", (None, 8, 64), dtype=bfloat16),
        [(4, 32, 256)],
        1,
    ),
    "from heads": (
        kpe.layers.EinsumDense("abde,dec->abc", (None, 256), dtype=bfloat16),
        [(4, 32, 8, 64)],
        1,
    ),
    "attention": (
        kpe.layers.MultiHeadAttention(4, 64, dtype=bfloat16),
        [(4, 32, 256), (4, 32, 256)],
        4,
    ),
    "attention, its products too": (
        kpe.layers.MultiHeadAttention(
            4, 64, attention="float8", dtype=bfloat16
        ),
        [(4, 32, 256), (4, 32, 256)],
        6,
    ),
}
for layer, shapes, _ in LAYERS.values():
    layer.build(*shapes)
"""

TRACE_WITH_TENSORFLOW = """
import sys
import tensorflow as tf

for name, (layer, shapes, _) in LAYERS.items():

    @tf.function(jit_compile=True)
    def step(*inputs):
        with kpe.kernels.prefer("native"), tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = layer(*inputs, training=True)
            loss = tf.reduce_sum(tf.cast(outputs, tf.float32) ** 2)
        return tape.gradient(loss, [*inputs, *layer.trainable_variables])

    inputs = [tf.zeros(shape) for shape in shapes]
    traced = step.experimental_get_compiler_ir(*inputs)
    with open(f"{sys.argv[1]}/{name}.pb", "wb") as file:
        file.write(traced(stage="hlo_serialized"))
"""

COMPILE = """
import json, pathlib, re, sys
import jax
from jax._src import compiler
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir
from jax.experimental import topologies
from jaxlib import _jax, xla_client

H200 = '''
gpu_device_info {
  cuda_compute_capability { major: 9 }
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  clock_rate_ghz: 1.98
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  device_memory_size: 150754820096
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 12 minor: 8 }
device_description_str: "NVIDIA H200"
'''
device = topologies.get_topology_desc(
    platform="cuda", topology="1x1x1", target_config=H200
).devices[0]


def compiled(module):
    options = compiler.get_compile_options(num_replicas=1, num_partitions=1)
    devices = _jax.DeviceList((device,))
    program = device.client.compile(
        module, executable_devices=devices, compile_options=options
    )
    return program.hlo_modules()[0].to_string()


def traced_by_jax(layer, shapes):
    weights = [v.value for v in layer.trainable_variables]
    others = [v.value for v in layer.non_trainable_variables]

    def loss(weights, inputs):
        with kpe.kernels.prefer("native"):
            y, _ = layer.stateless_call(weights, others, *inputs, training=True)
        return jax.numpy.sum(y.astype("float32") ** 2)

    inputs = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    step = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(weights, inputs)
    lowered = step.lower(lowering_platforms=("cuda",))
    return lowered.compiler_ir("stablehlo")


def traced_by_tensorflow(name):
    program = pathlib.Path(sys.argv[1], name + ".pb").read_bytes()
    computation = xla_client.XlaComputation(program)
    return ir.Module.parse(
        _jax.mlir.xla_computation_to_mlir_module(computation)
    )


found = {}
for name, (layer, shapes, contractions) in LAYERS.items():
    for framework in ("jax", "tensorflow"):
        if framework == "jax":
            text = compiled(traced_by_jax(layer, shapes))
        else:
            with mlir.make_ir_context():
                text = compiled(traced_by_tensorflow(name))
        calls = re.findall("custom_call_target=.*", text)
        matmuls = [x for x in calls if "__cublas" in x]
        found[f"{framework}: {name}"] = {
            "contractions": contractions,
            "matmuls": [x.split('"')[1] for x in matmuls],
            "exact": sum('["HIGHEST","HIGHEST"]' in x for x in matmuls),
            "others": len(re.findall(" dot[(]", text))
            + sum("__triton" in x for x in calls),
        }
print(json.dumps(found))
"""

FLOAT8 = "__cublas$lt$matmul$f8"


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs")
    run("tensorflow", LAYERS + TRACE_WITH_TENSORFLOW, folder)
    printed = run("jax", SETTINGS + LAYERS + COMPILE, folder)
    return json.loads(printed.splitlines()[-1])


def test_every_matmul_of_a_step_reads_float8(programs):
    assert len(programs) == 18
    for name, program in programs.items():
        # Attention multiplies twice by itself, unless asked for float8.
        own = 2 if name.endswith("attention") else 0
        float8 = [x for x in program["matmuls"] if x == FLOAT8]
        assert len(float8) == 3 * program["contractions"], name
        others = len(program["matmuls"]) - len(float8) + program["others"]
        assert others == 3 * own, name


def test_fast_accumulation_is_left_to_the_forward_pass(programs):
    for name, program in programs.items():
        assert program["exact"] == 2 * program["contractions"], name
