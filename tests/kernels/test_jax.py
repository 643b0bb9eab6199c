"""JAX: which devices have a float8 matmul, and what XLA is asked for."""

import keras
import pytest

if keras.backend.backend() != "jax":
    pytest.skip(
        f"JAX's kernels; the backend is {keras.backend.backend()}",
        allow_module_level=True,
    )

import jax
import jax.numpy as jnp

import keras_policy_ext as kpe
from keras_policy_ext import kernels


class Device:
    device_kind = "some device"

    def __init__(self, capability):
        if capability is not None:
            self.compute_capability = capability


@pytest.mark.parametrize(
    ("capability", "kind"),
    [
        ("9.0", "native"),
        ("8.9", "native"),
        ("10.0", "native"),
        ("8.0", "emulated"),
        ("gfx942", "emulated"),
        (None, "emulated"),
    ],
)
def test_a_device_without_float8_hardware_emulates(
    monkeypatch, capability, kind
):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [Device(capability)])
    choice = kernels.select("ab,bc->ac")
    assert choice.kind == kind
    if kind == "emulated":
        assert "some device" in choice.reason
    with kernels.prefer("native"):
        assert kernels.select("ab,bc->ac").kind == "native"


def products_of_a_step(rows, policy, platform):
    """The matmuls in a step's program, before XLA sees it."""
    layer = kpe.layers.Dense(5, dtype=policy)
    layer.build((rows, 8))
    weights = [v.value for v in layer.trainable_variables]

    def loss(weights, x):
        with kernels.prefer("native"):
            outputs, _ = layer.stateless_call(weights, [], x, training=True)
        return jnp.sum(outputs * jnp.sin(outputs))

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
    x = jnp.ones((rows, 8), layer.compute_dtype)
    traced = gradient.trace(weights, x)
    program = traced.lower(lowering_platforms=(platform,)).as_text()
    products = [x for x in program.splitlines() if "dot_general" in x]
    assert len(products) == 3
    return products


@pytest.mark.parametrize("platform", ["cpu", "cuda", "rocm", "tpu"])
def test_only_the_forward_matmul_may_accumulate_fast(platform):
    products = products_of_a_step(4, "float8/4_from_float32", platform)
    exact = ["[HIGHEST, HIGHEST]" in x for x in products]
    assert sorted(exact) == [False, True, True]


@pytest.mark.parametrize(
    ("dtype", "written"),
    [("float32", "f32"), ("mixed_bfloat16", "bf16"), ("mixed_float16", "f16")],
)
@pytest.mark.parametrize("recipe", ["float8/4", "float8/current"])
def test_a_matmul_for_cuda_writes_the_compute_dtype(recipe, dtype, written):
    products = products_of_a_step(4, f"{recipe}_from_{dtype}", "cuda")
    # The gradient of a float32 kernel could overflow in float16.
    kernel_grad = "f32" if dtype == "mixed_float16" else written
    results = sorted(x.rpartition("x")[2].partition(">")[0] for x in products)
    assert results == sorted([written, written, kernel_grad])


@pytest.mark.parametrize(
    ("rows", "platform"), [(4, "cpu"), (4, "tpu"), (4, "rocm"), (1, "cuda")]
)
def test_any_other_product_is_one_of_float8_values(rows, platform):
    """Where XLA makes no float8 matmul, scales are not to be rounded."""
    policy = "float8/4_from_mixed_bfloat16"
    for product in products_of_a_step(rows, policy, platform):
        operands, result = product.split(":")[-1].split("->")
        assert operands.count("xf8E") == 2
        assert "xf32>" in result
