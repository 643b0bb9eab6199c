"""What libtpu makes of float8 layers for TPUs that are not there.

A training step of a layer is compiled for each: on a TPU7x every matmul of it
must read float8, and on older ones bfloat16, with sums in float32. What such
a program computes is not seen here.
"""

import importlib.util
import os

import pytest

if importlib.util.find_spec("libtpu") is None:
    pytest.skip(
        "libtpu not installed: run `tox run -e tpu`", allow_module_level=True
    )
os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import tpus

import keras_policy_ext as kpe
from keras_policy_ext.backends import devices

E4M3, E5M2 = "f8e4m3fn", "f8e5m2"
HYBRID = [(E4M3, E4M3), (E4M3, E5M2), (E4M3, E5M2)]
POLICIES = {  # What a TPU7x multiplies, and an older one.
    "float8_from_mixed_bfloat16": (HYBRID, "bf16"),
    "float8/current_from_mixed_bfloat16": (HYBRID, "bf16"),
    "float8/current_from_float32": (HYBRID, "bf16"),
    "float8/rowwise_from_mixed_bfloat16": ([(E4M3, E4M3)] * 3, "bf16"),
    "float8/mxfp8_from_mixed_bfloat16": ("bf16", "bf16"),
    "float8/nvfp4_from_mixed_bfloat16": ("bf16", "bf16"),
    # Of which no 16 bits have the numbers.
    "float8/block(power_of_two=False)_from_mixed_bfloat16": ("f32", "f32"),
}


def step(policy):
    """A step of a Dense layer, and what it is given."""
    layer = kpe.layers.Dense(512, dtype=policy)
    layer.build((128, 256))
    weights = [v.value for v in layer.trainable_variables]
    others = [v.value for v in layer.non_trainable_variables]

    def loss(weights, inputs):
        y, _ = layer.stateless_call(weights, others, inputs, training=True)
        return jax.numpy.sum(y.astype("float32") ** 2)

    inputs = jax.ShapeDtypeStruct((128, 256), "float32")
    return jax.grad(loss, argnums=(0, 1)), weights, inputs


@pytest.fixture(autouse=True)
def _nothing_is_kept_of_another_device():
    jax.clear_caches()


@pytest.mark.parametrize("name", tpus.TOPOLOGIES)
def test_a_tpu_is_known_by_what_it_calls_itself(name):
    kind = tpus.device(name).device_kind
    assert devices.TPUS[kind] == name


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", tpus.TOPOLOGIES)
def test_each_tpu_multiplies_what_it_is_fast_at(name, policy):
    wanted = POLICIES[policy][name != "tpu7x"]
    if isinstance(wanted, str):
        wanted = [(wanted, wanted)] * 3
    with devices.pretend(name):
        program = tpus.compiled(name, *step(policy))
    assert tpus.products(program) == wanted


def test_an_older_tpu_would_keep_float8_if_asked_for():
    """So that it is the choice that matters, and the counts can fail."""
    with devices.pretend("v6e"), kpe.kernels.prefer("native"):
        program = tpus.compiled("v6e", *step("float8_from_float32"))
    assert tpus.products(program) == HYBRID
