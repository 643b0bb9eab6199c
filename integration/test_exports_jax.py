"""A model of JAX as a SavedModel, which needs TensorFlow beside JAX."""

import json

import pytest

from processes import is_installed, run

pytestmark = pytest.mark.skipif(
    not (is_installed("jax") and is_installed("tensorflow")),
    reason="JAX and TensorFlow are not both installed",
)

EXPORT = """
import json, sys
import keras, numpy as np, tensorflow as tf
import keras_policy_ext as kpe

L = keras.layers
rng = np.random.default_rng(0)
found = {}


def exported(name, shape, *layers):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input(shape), *layers])
    kpe.convert(model, sys.argv[2])
    model.compile("sgd", "mse")
    x = rng.normal(size=(5, *shape)).astype("float32")
    model.fit(x, model.predict(x, verbose=0) + 1, verbose=0)
    folder = f"{sys.argv[1]}/{name}"
    model.export(folder, format="tf_saved_model", verbose=False)
    loaded = tf.saved_model.load(folder)
    differences = [
        np.abs(
            loaded.serve(x[:n]).numpy() - model.predict(x[:n], verbose=0)
        ).max()
        for n in (1, 5)
    ]
    found[name] = float(max(differences))


exported("relu", (300,), L.Dense(300, "relu"), L.Dense(4))
exported("gelu", (6, 300), L.Dense(300, "gelu"), L.Dense(4))
exported("convolution", (8, 3), L.Conv1D(4, 3, activation="relu"), L.GRU(3))
print(json.dumps(found))
"""


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_a_saved_model_computes_the_same(tmp_path, recipe):
    found = json.loads(run("jax", EXPORT, tmp_path, recipe).splitlines()[-1])
    assert len(found) == 3
    assert all(each < 1e-5 for each in found.values()), found
