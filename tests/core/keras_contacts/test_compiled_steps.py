"""Why `_keras/compiled_steps.py` is needed. See `_keras/__init__.py`."""

import keras
import numpy as np
import pytest

from keras_policy_ext._keras import walking
from public_api import members_about

BACKEND = keras.backend.backend()
X = np.ones((2, 2), "float32")


def test_a_traced_step_is_kept_when_a_layer_changes():
    """PyTorch traces nothing: each step asks the layer."""
    dense = keras.layers.Dense(2, kernel_initializer="ones")
    model = keras.Sequential([keras.Input((2,)), dense])
    assert model.predict(X, verbose=0).max() == 2
    dense.activation = lambda x: 10 * x
    is_kept = BACKEND != "torch"
    assert model.predict(X, verbose=0).max() == (2 if is_kept else 20)
    walking.forget_compiled_functions(model)
    assert model.predict(X, verbose=0).max() == 20
    assert members_about(keras.Model, "trace", "forget", "recompile") == []


def test_a_compiled_model_keeps_the_layers_that_it_had():
    """So what was in a layer that is gone stays in memory."""
    layers = [keras.layers.Dense(2), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    model.compile("sgd", "mse")
    kept = getattr(model, "_compiled_trainable_state", None)
    if kept is None and keras.__version__ < "3.15":
        pytest.skip("Keras before 3.15 remembers no layers")
    model.pop()
    assert layers[1] in kept
    walking.forget_gone_layers(model)
    assert set(kept) & set(layers) == {layers[0]}
