"""JAX: quotients that are correctly rounded where XLA's are not."""

import keras
import pytest

if keras.backend.backend() != "jax":
    pytest.skip(
        f"JAX's arithmetic; the backend is {keras.backend.backend()}",
        allow_module_level=True,
    )

import jax
import jax.numpy as jnp
import numpy as np

from keras_policy_ext.backends.jax import backend
from keras_policy_ext.numerics import scaling


def operands(count=10**5):
    """Normal numbers whose quotients are normal."""
    rng = np.random.default_rng(0)
    x, y = rng.uniform(1.0, 2.0, (2, count))
    y *= 2.0 ** rng.integers(-30, 30, count)
    return np.float32(x * 2.0 ** rng.integers(-60, 60, count)), np.float32(y)


@pytest.mark.parametrize("ulps", [-2, -1, 0, 1, 2])
def test_a_quotient_is_corrected_by_its_error(ulps):
    """A GPU's first quotient may be that far from the nearest number."""
    x, y = operands()
    expected = x / y
    near = jnp.asarray((expected.view("int32") + ulps).view("float32"))
    rest = iter([near])

    class Approximate:
        """A dividend whose first quotient is not exact."""

        def __truediv__(self, other):
            return next(rest)

        def __sub__(self, other):
            return jnp.asarray(x) - other

    found = backend._correctly_divided(Approximate(), jnp.asarray(y))
    assert (np.asarray(found) != expected).mean() <= 1e-5


def test_scales_for_a_gpu_are_corrected(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    def scale(amax):
        return scaling.scale_of_multiplier(amax, 448.0)

    traced = jax.jit(scale).trace(jnp.float32([0.37, 3.0, 447.0]))
    counts = {}
    for platform in ("cuda", "cpu"):
        program = traced.lower(lowering_platforms=(platform,)).as_text()
        counts[platform] = program.count("stablehlo.divide")
    # Both quotients, and the correction of each.
    assert counts == {"cuda": 4, "cpu": 2}
