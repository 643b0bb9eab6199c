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


def test_only_the_forward_matmul_may_accumulate_fast():
    layer = kpe.layers.Dense(5, dtype="float8/4_from_float32")
    layer.build((4, 8))
    weights = [v.value for v in layer.trainable_variables]

    def loss(weights, x):
        with kernels.prefer("native"):
            outputs, _ = layer.stateless_call(weights, [], x, training=True)
        return jnp.sum(outputs * jnp.sin(outputs))

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
    program = gradient.lower(weights, jnp.ones((4, 8))).as_text()
    products = [x for x in program.splitlines() if "dot_general" in x]
    assert all("f8E4M3FN" in x for x in products)
    exact = ["[HIGHEST, HIGHEST]" in x for x in products]
    assert sorted(exact) == [False, True, True]
