"""What XLA makes of float8 layers for a Hopper GPU, without having one.

A training step of a layer is traced by JAX and by TensorFlow. XLA compiles
both for an H200 from a description of that device, and its program is read:
each matmul of the step must be cuBLASLt's float8 one. XLA's flags are those
that users have. What such a program
computes, and how fast, is not seen here.
"""

import json

import pytest
from compiling import FOLDER, skip_without_compiler

from processes import run

skip_without_compiler()

SETTINGS = f"""
import sys
sys.path.insert(0, {str(FOLDER)!r})
import gpus
"""

LAYERS = """
import keras
import keras_policy_ext as kpe

bfloat16 = "float8_from_mixed_bfloat16"
LAYERS = {  # a layer, the shapes of its inputs, its contractions
    "matrix, float32": (
        kpe.layers.Dense(2048, dtype="float8_from_float32"), [(2048, 2048)], 1
    ),
    "matrix, bfloat16": (
        kpe.layers.Dense(2048, dtype=bfloat16), [(2048, 2048)], 1
    ),
    "matrix, current": (
        kpe.layers.Dense(2048, dtype="float8/current_from_mixed_bfloat16"),
        [(2048, 2048)],
        1,
    ),
    "matrix, float16": (
        kpe.layers.Dense(512, dtype="float8_from_mixed_float16"),
        [(128, 256)],
        1,
    ),
    "small matrix": (
        kpe.layers.Dense(512, dtype=bfloat16), [(128, 256)], 1
    ),
    "few columns": (kpe.layers.Dense(8, dtype=bfloat16), [(4096, 4096)], 1),
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
from keras_policy_ext.backends import devices

pretending = devices.pretend("h200")
pretending.__enter__()

for name, (layer, shapes, _) in LAYERS.items():

    @tf.function(jit_compile=True)
    def step(*inputs):
        with tf.GradientTape() as tape:
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
import json, pathlib, sys
import jax
from keras_policy_ext.backends import devices

H200 = gpus.GPUS["H200"]
KEYS = (
    *("float8", "exact", "scaled", "written", "other matmuls"),
    *("rounded scales", "conditionals"),
)


def traced_by_jax(layer, shapes):
    weights = [v.value for v in layer.trainable_variables]
    others = [v.value for v in layer.non_trainable_variables]

    def loss(weights, inputs):
        with kpe.kernels.prefer("native"):
            y, _ = layer.stateless_call(weights, others, *inputs, training=True)
        return jax.numpy.sum(y.astype("float32") ** 2)

    inputs = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    gradient = jax.grad(loss, argnums=(0, 1))
    return gpus.traced_by_jax(gradient, weights, inputs)


def traced_by_tensorflow(name):
    program = pathlib.Path(sys.argv[1], name + ".pb").read_bytes()
    return gpus.traced_by_tensorflow(program)


found = {}
for name, (layer, shapes, contractions) in LAYERS.items():
    for framework in ("jax", "tensorflow"):
        with gpus.make_ir_context():
            if framework == "jax":
                with devices.pretend("h200"):
                    module = traced_by_jax(layer, shapes)
            else:
                module = traced_by_tensorflow(name)
            program = H200.compiled(module)
        summary = gpus.summary(program, H200)
        found[f"{framework}: {name}"] = {
            **{key: summary[key] for key in KEYS},
            "contractions": contractions,
            "computes in": layer.compute_dtype,
        }
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs")
    run("tensorflow", LAYERS + TRACE_WITH_TENSORFLOW, folder)
    printed = run("jax", SETTINGS + LAYERS + COMPILE, folder)
    return json.loads(printed.splitlines()[-1])


def test_every_matmul_of_a_step_reads_float8(programs):
    assert len(programs) == 22
    for name, program in programs.items():
        # Attention multiplies twice by itself, unless asked for float8.
        own = 2 if name.endswith("attention") else 0
        assert program["float8"] == 3 * program["contractions"], name
        assert program["other matmuls"] == 3 * own, name


def test_fast_accumulation_is_left_to_the_forward_pass(programs):
    for name, program in programs.items():
        assert program["exact"] == 2 * program["contractions"], name


DTYPES = {"float32": "f32", "bfloat16": "bf16"}


FRAMEWORKS = pytest.mark.parametrize(
    "framework",
    [
        "jax",
        pytest.param(
            "tensorflow",
            marks=pytest.mark.xfail(
                strict=True,
                reason="XLA may write a product transposed, and scale it then",
            ),
        ),
    ],
)


@FRAMEWORKS
def test_large_matmuls_apply_the_scales_and_write_the_compute_dtype(
    programs, framework
):
    for name, program in programs.items():
        if not name.startswith(framework):
            continue
        if "matrix," in name and "float16" not in name.split():
            dtype = DTYPES[program["computes in"]]
            assert program["scaled"] == program["float8"], name
            assert program["written"] == {dtype: program["float8"]}, name


@FRAMEWORKS
def test_no_scale_is_rounded_to_the_compute_dtype(programs, framework):
    """As it would be where XLA splits a small matmul, whose parts it adds."""
    for name, program in programs.items():
        if not name.startswith(framework):
            continue
        assert program["rounded scales"] == 0, name


def test_a_steady_step_has_no_branch(programs):
    for name, program in programs.items():
        assert program["conditionals"] == 0, name
