"""What XLA makes for GPUs of matmuls with scales finer than a tensor.

As in `test_float8_on_hopper`, from descriptions of a Hopper and a Blackwell.
Some tests say what XLA does not make: where one fails, a kernel may be added.
"""

import json

import pytest
from compiling import FOLDER, printed_by, skip_without_compiler

from processes import run

skip_without_compiler()

SETTINGS = f"""
import sys
sys.path.insert(0, {str(FOLDER)!r})
import gpus
"""

LAYERS = """
import dataclasses
import keras
import keras_policy_ext as kpe
from keras_policy_ext.recipes import Quantization, Recipe, Tile


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fine(Recipe):
    free: int = 1
    contracted: int | None = None
    wide_kernel_grad: bool = False

    def quantization(self, operand, matmul):
        if self.wide_kernel_grad and matmul == "kernel_grad":
            return None
        tile = Tile(self.free, self.contracted)
        if self.wide_kernel_grad and matmul == "inputs_grad":
            tile = tile if operand == "outputs_grad" else Tile()
        return Quantization(
            format="float8_e4m3fn", tile=tile, scale_rounding="up"
        )


Fine.name = "fine"


def dense(units, dtype="mixed_bfloat16", **recipe):
    policy = kpe.Float8DTypePolicy(dtype, recipe=Fine(**recipe))
    return kpe.layers.Dense(units, dtype=policy)


LAYERS = {  # a layer, the shape of its inputs, its matmuls not in float8
    "matrix": (dense(512), (128, 256), 0),
    "float32": (dense(512, "float32"), (128, 256), 0),
    "float16": (dense(512, "mixed_float16"), (128, 256), 0),
    "odd sizes": (dense(510), (4, 31, 250), 0),
    "small sizes": (dense(5), (7, 3), 0),
    "wide": (dense(512, wide_kernel_grad=True), (128, 256), 1),
    "wide, odd sizes": (dense(510, wide_kernel_grad=True), (4, 31, 250), 1),
}
for layer, shape, _ in LAYERS.values():
    layer.build(shape)
"""

TRACE_WITH_TENSORFLOW = """
import sys
import tensorflow as tf
from keras_policy_ext.backends import devices

pretending = devices.pretend("h200")
pretending.__enter__()

for name, (layer, shape, _) in LAYERS.items():

    @tf.function(jit_compile=True)
    def step(inputs):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = layer(inputs, training=True)
            loss = tf.reduce_sum(tf.cast(outputs, tf.float32) ** 2)
        return tape.gradient(loss, [inputs, *layer.trainable_variables])

    traced = step.experimental_get_compiler_ir(tf.zeros(shape))
    with open(f"{sys.argv[1]}/{name}.pb", "wb") as file:
        file.write(traced(stage="hlo_serialized"))
"""

TRACE_WITH_JAX = """
import jax


def traced_by_jax(layer, shape):
    weights = [v.value for v in layer.trainable_variables]

    def loss(weights, inputs):
        with kpe.kernels.prefer("native"):
            y, _ = layer.stateless_call(weights, [], inputs, training=True)
        return jax.numpy.sum(y.astype("float32") ** 2)

    gradient = jax.grad(loss, argnums=(0, 1))
    inputs = jax.ShapeDtypeStruct(shape, "float32")
    return gpus.traced_by_jax(gradient, weights, inputs)
"""

COMPILE = """
import json, pathlib, sys

found = {}
for name, (layer, shape, wide) in LAYERS.items():
    for framework in ("jax", "tensorflow"):
        for kind, gpu in gpus.GPUS.items():
            with gpus.make_ir_context():
                if framework == "jax":
                    module = traced_by_jax(layer, shape)
                else:
                    file = pathlib.Path(sys.argv[1], name + ".pb")
                    module = gpus.traced_by_tensorflow(file.read_bytes())
                program = gpu.compiled(module)
            summary = gpus.summary(program, gpu)
            found[f"{framework}, {kind}: {name}"] = {
                "wide": wide,
                "float8": summary["float8"],
                "exact": summary["exact"],
                "others": summary["other matmuls"],
            }
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs")
    run("tensorflow", LAYERS + TRACE_WITH_TENSORFLOW, folder)
    code = SETTINGS + LAYERS + TRACE_WITH_JAX + COMPILE
    printed = run("jax", code, folder)
    return json.loads(printed.splitlines()[-1])


def test_every_matmul_with_scales_of_rows_reads_float8(programs):
    assert len(programs) == 28
    for name, program in programs.items():
        assert program["float8"] == 3 - program["wide"], name
        assert program["others"] == program["wide"], name


def test_fast_accumulation_is_left_to_the_forward_pass(programs):
    for name, program in programs.items():
        assert program["exact"] == 2 - program["wide"], name


def test_a_step_with_scales_of_rows_reads_each_operand_twice():
    """Of a Dense of 4096: for the amaxes, and for both casts.

    The scales are no powers of two. So two matmuls write float32, which is
    rounded once, when the scales multiply it. The gradient of the kernel is
    rounded before.
    """
    printed = printed_by("jax", "count.py", "H200", "dense", "rowwise")
    count = json.loads(printed.splitlines()[-1])
    assert (count["float8"], count["exact"]) == (3, 2)
    assert count["written"] == {"f32": 2, "bf16": 1}
    assert count["other matmuls"] == count["conditionals"] == 0
    assert count["transposes"] == count["codes alone"] == 0
    assert count["large"] <= 10
    assert count["small"] <= 8
    assert count["bytes an element"] <= 14.8


# Scales of MX blocks

FLAGS = """
import os

kind, folder, flags = sys.argv[1:]
os.environ["XLA_FLAGS"] = " ".join((
    flags,
    "--xla_dump_to=" + folder,
    "--xla_gpu_autotune_level=0 --xla_gpu_enable_command_buffer=",
))
"""

MX = """
import json, pathlib, re

found = {}
for name, units, dtype, shape in (
    ("matrix", 512, "mixed_bfloat16", (128, 256)),
    ("odd sizes", 510, "mixed_bfloat16", (4, 31, 250)),
    ("small sizes", 5, "mixed_float16", (7, 3)),
    ("a vector", 3, "float32", (1, 8)),
):
    layer = dense(units, dtype, contracted=32)
    layer.build(shape)
    before = set(pathlib.Path(folder).glob("*.ptx"))
    try:
        with gpus.make_ir_context():
            module = traced_by_jax(layer, shape)
            program = gpus.GPUS[kind].compiled(module)
    except Exception as error:
        found[name] = str(error)
        continue
    text = program.hlo_modules()[0].to_string()
    written = set(pathlib.Path(folder).glob("*.ptx")) - before
    by_blocks = re.compile(r"mma[a-z0-9_.:]*block_scale")
    found[name] = {
        "products": len(re.findall(r" scaled-dot\\(", text)),
        "by blocks": sum(
            bool(by_blocks.search(file.read_text())) for file in written
        ),
        "others": text.count(" dot(") + text.count("__cublas"),
    }
print(json.dumps(found))
"""


def mx_programs(kind, folder, flags=""):
    # XLA reads its flags when JAX makes the first array.
    code = SETTINGS + FLAGS + LAYERS + TRACE_WITH_JAX + MX
    printed = run("jax", code, kind, folder, flags)
    found = json.loads(printed.splitlines()[-1])
    assert len(found) == 4
    return found


def test_a_blackwell_multiplies_by_scales_of_mx_blocks(tmp_path):
    """By instructions of its tensor cores, in all three matmuls."""
    for name, program in mx_programs("B200", tmp_path).items():
        expected = {"products": 3, "by blocks": 3, "others": 0}
        assert program == expected, name


def test_a_hopper_does_not(tmp_path):
    """One kernel for each product, which multiplies in bfloat16."""
    for name, program in mx_programs("H200", tmp_path).items():
        expected = {"products": 3, "by blocks": 0, "others": 0}
        assert program == expected, name


def test_without_triton_a_scaled_product_does_not_compile(tmp_path):
    """That is why it is tried on the device before it is used."""
    flags = "--xla_gpu_enable_triton_gemm=false"
    for program in mx_programs("B200", tmp_path, flags).values():
        assert "Unsupported instruction opcode: scaled-dot" in program


# Scales of blocks of 128

BLOCKS = """
import json
import jax
import jax.numpy as jnp

SIZE, BLOCK = 4096, 128


def dot(a, b, dtype):
    return jax.lax.dot_general(
        a, b, (((1,), (1,)), ((), ())), preferred_element_type=dtype
    )


def emulated(a, b, row, square):
    a = a.astype("float32") * jnp.repeat(row, BLOCK, 1)
    square = jnp.repeat(jnp.repeat(square, BLOCK, 0), BLOCK, 1)
    return dot(a, b.astype("float32") * square, "float32").astype("bfloat16")


def by_blocks(a, b, row, square):
    total = 0.0
    for i in range(SIZE // BLOCK):
        part = slice(i * BLOCK, (i + 1) * BLOCK)
        scales = row[:, i : i + 1] * jnp.repeat(square[:, i], BLOCK)
        total += dot(a[:, part], b[:, part], "float32") * scales
    return total.astype("bfloat16")


matrix = jax.ShapeDtypeStruct((SIZE, SIZE), "float8_e4m3fn")
blocks = SIZE // BLOCK
scales = [
    jax.ShapeDtypeStruct((n, blocks), "float32") for n in (SIZE, blocks)
]
found = {}
for function in (emulated, by_blocks):
    with gpus.make_ir_context():
        module = gpus.traced_by_jax(function, matrix, matrix, *scales)
        program = gpus.GPUS["H200"].compiled(module, triton=False)
    found[function.__name__] = gpus.summary(program, gpus.GPUS["H200"])
print(json.dumps(found))
"""


def test_a_float8_matmul_for_each_block_would_not_pay():
    """Of 4096: 32 of them write what one product writes, in float32."""
    found = json.loads(run("jax", SETTINGS + BLOCKS).splitlines()[-1])
    assert found["by_blocks"]["float8"] == 32
    assert found["emulated"]["float8"] == 0
    assert found["by_blocks"]["seconds"] > 2 * found["emulated"]["seconds"]
