"""How many bytes a number is kept for the backward pass, in each recipe."""

import dataclasses

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from cases import mostly
from keras_policy_ext import backends, contractions, recipes
from keras_policy_ext.ext.delayed.observations import VALID_MARK
from keras_policy_ext.numerics.scale_sources import source_of
from ways import BACKEND, array

SIZE = 1024
BYTES = {
    "delayed": (1.000, 1.000),
    "current": (1.000, 1.000),
    "rowwise": (1.004, 1.004),
    "block": (1.031, 1.000),
    "mxfp8": (1.031, 1.031),
    "nvfp4": (1.063, 1.004),
}
"""Of inputs and kernel, as docs/recipes says them to two digits.

Scales of blocks of 128 are float32, those of MX and NVFP4 a byte each.
"""

each = pytest.mark.parametrize("name", mostly(BYTES, "mxfp8"))


@pytest.fixture(autouse=True)
def _narrow(monkeypatch):
    """As on a GPU, where TensorFlow is concerned; see `docs/numerics.md`."""
    if BACKEND == "tensorflow":
        framework = type(backends.current)
        monkeypatch.setattr(framework, "on_cpu", lambda self, x: False)


def kept(name, size):
    """The plan, residuals, and state of one contraction."""
    recipe = recipes.get(name)
    plan = contractions.make_plan(
        contractions.Einsum("ab,bc->ac"), recipe, "float32", "float32", True
    )
    state, shape = (), source_of(recipe).state_shape
    if shape is not None:
        matrix = np.zeros(shape, "float32")
        matrix[:, 0] = VALID_MARK
        state = (ops.convert_to_tensor(matrix),)
    rng = np.random.default_rng(0)
    x, w = (
        ops.convert_to_tensor(rng.normal(size=(size, size)).astype("float32"))
        for _ in range(2)
    )
    return plan, plan.bound.forward(x, w, state, observe=True)[1], state


def bytes_of(leaves):
    return sum(array(leaf).nbytes for leaf in leaves)


@each
def test_operands_are_kept_in_as_many_bytes_as_the_pages_say(name):
    plan, residuals, _ = kept(name, SIZE)
    again = plan.bound.residuals(residuals.leaves(), residuals.shapes)
    found = [
        bytes_of(operand.leaves()) / SIZE**2
        for operand in (again.inputs, again.kernel)
    ]
    np.testing.assert_allclose(found, BYTES[name], atol=6e-4)
    # And a few numbers that say what the state does.
    rest = bytes_of(residuals.leaves()) - sum(found) * SIZE**2
    assert rest <= 64
    codes = [again.inputs.values, again.kernel.values]
    dtypes = {keras.backend.standardize_dtype(c.dtype) for c in codes}
    narrow = "uint8" if name == "nvfp4" or BACKEND == "jax" else "float8_e4m3fn"
    assert dtypes == {narrow}


@pytest.mark.parametrize("name", mostly(BYTES))
def test_gradients_are_those_of_float32_residuals(name):
    """Kept in a byte, and kept as they were computed: the same bits."""
    plan, residuals, state = kept(name, 96)
    again = plan.bound.residuals(residuals.leaves(), residuals.shapes)
    widen = backends.engine.widen
    residuals = dataclasses.replace(
        residuals,
        inputs=residuals.inputs.decoded(widen),
        kernel=residuals.kernel.decoded(widen),
    )
    assert array(residuals.inputs.values).dtype == "float32"
    g = np.random.default_rng(1).normal(size=(96, 96)).astype("float32")
    g = ops.convert_to_tensor(g)
    wide, narrow = (
        plan.bound.backward(each, g, state)[:2] for each in (residuals, again)
    )
    for one, other in zip(wide, narrow, strict=True):
        np.testing.assert_array_equal(array(one), array(other))


@pytest.mark.skipif(BACKEND != "jax", reason="shows what JAX closes over")
@pytest.mark.parametrize("name", BYTES)
def test_a_compiled_step_keeps_no_more(name):
    """What `jax.vjp` of a jitted model holds until the backward pass."""
    import jax

    units = 256
    policy = kpe.Float8DTypePolicy("float32", recipe=recipes.get(name))
    layer = kpe.layers.Dense(units, dtype=policy)
    layer.build((None, units))

    @jax.jit
    def total(trainable, x):
        return ops.sum(layer.stateless_call(trainable, [], x, training=True)[0])

    x = ops.convert_to_tensor(
        np.random.default_rng(0).normal(size=(units, units)).astype("float32")
    )
    _, backward = jax.vjp(
        total, [v.value for v in layer.trainable_variables], x
    )
    leaves = jax.tree_util.tree_leaves(backward)
    large = [leaf for leaf in leaves if leaf.size >= units**2]
    assert [str(leaf.dtype) for leaf in large] == ["uint8", "uint8"]
    # Scales of rows, and a state, weigh more in a matrix as small as this.
    state = bytes_of(v.value for v in layer.float8_state.matrices)
    allowed = (sum(BYTES[name]) + 8 / units) * units**2 + state + 256
    assert bytes_of(leaves) < allowed
