"""Loss scalers that Keras's own compile put on, in files."""

import warnings

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from steps import numpy

X = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")
JIT = keras.backend.backend() == "jax"


def compiled(policy):
    with kpe.policy_scope(policy):
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
        model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=JIT)
    model.fit(X, X[:, :2], epochs=2, verbose=0)
    return model


@pytest.mark.full_except("float32-False")
@pytest.mark.parametrize("convert", [False, True])
@pytest.mark.parametrize("policy", ["mixed_float16", "float32"])
def test_the_scaler_is_as_it_was_under_any_policy(policy, convert, tmp_path):
    model = compiled(policy)
    if convert:
        kpe.convert(model, "float8/4_from_float32")
    model.save(tmp_path / "model.keras")
    expected = [numpy(v) for v in model.optimizer.variables]
    wrapped = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert wrapped == (policy == "mixed_float16")
    for other in ("mixed_float16", "float32"):
        with kpe.policy_scope(other), warnings.catch_warnings():
            warnings.filterwarnings("error", message="Skipping variable")
            loaded = kpe.load_model(tmp_path / "model.keras")
        assert (
            isinstance(loaded.optimizer, keras.optimizers.LossScaleOptimizer)
            == wrapped
        )
        for variable, value in zip(
            loaded.optimizer.variables, expected, strict=True
        ):
            np.testing.assert_array_equal(numpy(variable), value)
    losses = [
        each.fit(X, X[:, :2], verbose=0).history["loss"]
        for each in (model, loaded)
    ]
    np.testing.assert_allclose(*losses, rtol=1e-6)
