"""Derivatives of frozen models that JAX takes otherwise than training does."""

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from steps import normal

jax = pytest.importorskip("jax", reason="the functions are of JAX")
pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "jax", reason="the functions are of JAX"
)

X = normal(4)


def functions():
    """A frozen model, and what `thaw` makes of it, as functions of a row."""
    layers = [keras.layers.Dense(5, "tanh"), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    kpe.freeze(model)
    twin = keras.models.clone_model(model)
    twin.set_weights(model.get_weights())
    kpe.thaw(twin)
    models = (model, twin)
    return [lambda x, each=each: each(x[None])[0] for each in models]


@pytest.mark.full
@pytest.mark.parametrize("derivative", ["jacrev", "hessian"])
def test_reverse_mode_and_what_is_taken_of_it(derivative):
    frozen, thawed = (getattr(jax, derivative)(f)(X) for f in functions())
    np.testing.assert_allclose(frozen, thawed, rtol=1e-5, atol=1e-6)


def test_forward_mode_is_refused_by_frozen_layers_alone():
    frozen, thawed = functions()
    assert jax.jacfwd(thawed)(X).shape == (3, 4)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jacfwd(frozen)(X)
