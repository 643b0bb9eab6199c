"""JAX: an output gradient that is cast in the pass that finds its amax."""

import keras
import pytest

if keras.backend.backend() != "jax":
    pytest.skip(
        f"JAX stores codes; the backend is {keras.backend.backend()}",
        allow_module_level=True,
    )

import jax
import jax.numpy as jnp
import numpy as np

import keras_policy_ext as kpe
from keras_policy_ext import contractions, kernels, recipes
from keras_policy_ext.backends import devices
from keras_policy_ext.numerics.scale_sources import source_of

DELAYED = recipes.DelayedScaling(amax_history_length=4)
FIXED = recipes.DelayedScaling(amax_history_length=4, initial_scale=1.0)


def random():
    """Inputs and a kernel."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(16, 32)), rng.normal(size=(32, 64))


def gradients(recipe, cast_before_amax, grads, operands, prefer="native"):
    """Bits of the gradients of each step, and of the state after it."""
    source = source_of(recipe)
    with kernels.prefer(prefer):
        plan = contractions.make_plan(
            contractions.Einsum("ab,bc->ac"),
            recipe,
            "bfloat16",
            "float32",
            True,
            cast_before_amax=cast_before_amax,
        )
    x, w = (
        jnp.asarray(each, dtype)
        for each, dtype in zip(operands, ("bfloat16", "float32"), strict=True)
    )
    state, found = jnp.zeros(source.state_shape, "float32"), []

    @jax.jit
    def step(x, w, state, g):
        def outputs(x, w, state):
            return contractions.run(plan, x, w, state)

        return jax.vjp(outputs, x, w, state)[1](g)

    for g in grads:
        *both, observed = step(x, w, state, jnp.asarray(g, "bfloat16"))
        state = source.settle(observed, state)
        found += [np.asarray(each).tobytes() for each in (*both, state)]
    return found


def hostile(rows, bad):
    """Output gradients of three steps: ties, zeros, subnormals, overflow."""
    rng = np.random.default_rng(1)
    first = rng.normal(size=(rows, 64)) * 1e-3
    first[0, :4] = 0.0, -0.0, 1e-40, 2.0**-130
    second = rng.normal(size=(rows, 64)) * 10.0
    second[1, :8] = np.arange(8) * 1.125
    if bad is not None:
        first[3, 3] = second[5, 5] = bad
    return first, second, second


every_recipe = pytest.mark.parametrize(
    "recipe", [DELAYED, FIXED], ids=["current", "one"]
)
every_number = pytest.mark.parametrize("bad", [None, np.nan, np.inf])


@pytest.mark.full_except("None-one")
@every_recipe
@every_number
def test_the_numbers_are_the_same_in_one_pass(recipe, bad):
    grads, operands = hostile(16, bad), random()
    found = gradients(recipe, True, grads, operands)
    assert found == gradients(recipe, False, grads, operands)


@pytest.mark.gpu
@every_recipe
@every_number
def test_the_numbers_are_the_same_on_a_gpu(recipe, bad):
    """Of sums of one term, which are exact in any order."""
    grads, operands = hostile(64, bad), (np.eye(64), np.eye(64))
    found = gradients(recipe, True, grads, operands, "auto")
    assert found == gradients(recipe, False, grads, operands, "auto")


def program(layer, platform="cuda", rank=2):
    """What JAX hands to XLA of a training step of a layer."""
    shape = (16, *(8,) * (rank - 2), 32)
    layer.build(shape)
    weights = [v.value for v in layer.trainable_variables]

    def loss(weights, x):
        with kernels.prefer("native"):
            outputs, _ = layer.stateless_call(weights, [], x, training=True)
        return jnp.sum(outputs * jnp.sin(outputs))

    traced = jax.jit(jax.grad(loss, (0, 1))).trace(
        weights, jnp.ones(shape, layer.compute_dtype)
    )
    return traced.lower(lowering_platforms=(platform,)).as_text()


def is_in_one_pass(layer, **how):
    lines = program(layer, **how).splitlines()
    stored = (line for line in lines if "optimization_barrier" in line)
    return any("f8E5M2" in line for line in stored)


POLICY = "float8/4_from_mixed_bfloat16"


@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("rank", [2, 3])
def test_xla_is_to_store_the_codes_of_a_gradient(activation, rank):
    layer = kpe.layers.Dense(64, activation, dtype=POLICY)
    assert is_in_one_pass(layer, rank=rank)


@pytest.mark.parametrize("platform", ["cpu", "tpu", "rocm"])
def test_codes_are_left_to_the_compilers_of_other_devices(platform):
    layer = kpe.layers.Dense(64, dtype=POLICY)
    assert not is_in_one_pass(layer, platform=platform)


@pytest.mark.parametrize(
    ("device", "units", "stored"),
    [
        ("h200", 24, True),
        ("b200", 40, True),
        ("mi350", 56, False),
        ("tpu7x", 72, False),
    ],
)
def test_a_gradient_is_stored_for_devices_where_that_was_counted(
    device, units, stored
):
    """Each of a size of its own: what is traced is not traced again."""
    with devices.pretend(device):
        layer = kpe.layers.Dense(units, dtype=POLICY)
        assert is_in_one_pass(layer) == stored


@pytest.mark.parametrize(
    "layer",
    [
        lambda: kpe.layers.Dense(64, use_bias=False, dtype=POLICY),
        lambda: kpe.layers.EinsumDense("ab,bc->ac", 64, dtype=POLICY),
        lambda: kpe.layers.Dense(
            64, dtype="float8/current_from_mixed_bfloat16"
        ),
    ],
    ids=["no bias", "any equation", "scales from the gradient"],
)
def test_a_gradient_that_xla_makes_twice_is_cast_as_it_was(layer):
    assert not is_in_one_pass(layer())


def test_a_rectified_gradient_is_not_stored():
    """A ReLU has a barrier of its own."""
    plain = program(kpe.layers.Dense(64, dtype=POLICY))
    rectified = program(kpe.layers.Dense(64, "relu", dtype=POLICY))
    count = plain.count("optimization_barrier")
    assert rectified.count("optimization_barrier") == count


def test_a_gradient_that_several_devices_may_share_is_cast_as_it_was(
    monkeypatch,
):
    """Of a size of its own: what JAX has traced it does not trace again."""
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert not is_in_one_pass(kpe.layers.Dense(48, dtype=POLICY))
