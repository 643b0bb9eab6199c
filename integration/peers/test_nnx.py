"""Models in Keras's NNX mode, where layers are modules of Flax."""

import pytest

from processes import run

SETUP = """
import sys
import keras, numpy as np
import keras_policy_ext as kpe

assert keras.config.is_nnx_enabled()
rng = np.random.default_rng(0)
x, y = rng.normal(size=(16, 8)), rng.normal(size=(16, 2))
path = sys.argv[1] + "/model.keras"

def made(layers=keras.layers, **options):
    keras.utils.set_random_seed(0)
    hidden = layers.Dense(16, "relu", **options), layers.Dense(2, **options)
    model = keras.Sequential([keras.Input((8,)), *hidden])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model

def losses(model):
    return model.fit(x, y, epochs=3, shuffle=False, verbose=0).history["loss"]

def assert_same(model, other):
    found, wanted = (each.predict(x, verbose=0) for each in (other, model))
    np.testing.assert_array_equal(found, wanted)
    assert losses(other) == losses(model)
"""

TRAINING = """
for recipe in ("delayed", "current", "rowwise", "block", "mxfp8", "nvfp4"):
    model = made()
    before = losses(made())
    report = kpe.convert(model, recipe)
    assert len(report.converted) == 2
    found = losses(model)
    assert found[-1] < found[0] and found != before, recipe
    np.testing.assert_allclose(found, before, rtol=0.2)
    kpe.revert(model)
    assert all(type(each) is keras.layers.Dense for each in model.layers)
"""

FROM_THE_START = """
in_float8, model = made(kpe.layers, dtype="float8_from_float32"), made()
kpe.convert(model, "float8_from_float32")
assert_same(model, in_float8)
"""

FILES = """
for change in (kpe.convert, kpe.freeze):
    for load in (kpe.load_model, keras.saving.load_model):
        model = made()
        change(model)
        losses(model)
        model.save(path)
        assert_same(model, load(path))
    other, wanted = made(), load(path).predict(x, verbose=0)
    kpe.load_weights(other, path, as_saved=True)
    np.testing.assert_array_equal(other.predict(x, verbose=0), wanted)
other = made()
kpe.load_weights(other, path, dequantize=True)
np.testing.assert_allclose(other.predict(x, verbose=0), wanted, rtol=1e-4)
kpe.thaw(model)
losses(model)
"""

LAYERS = """
from keras_policy_ext.layers.drop_in import drop_ins

inputs = keras.Input((8, 8, 4))
h = keras.layers.Conv2D(8, 3)(inputs)
h = keras.layers.Reshape((36, 8))(h)
h = keras.layers.MultiHeadAttention(2, 4)(h, h)
model = keras.Model(inputs, keras.layers.EinsumDense("abc,cd->abd", (36, 2))(h))
for change in (kpe.convert, kpe.revert, kpe.freeze, kpe.thaw):
    change(model)
    assert np.isfinite(model.predict(np.ones((2, 8, 8, 4)), verbose=0)).all()

def layout(cls):
    while cls.__base__.__dictoffset__:
        cls = cls.__base__
    return cls.__base__

assert {layout(each) for each in drop_ins().values()} == {
    layout(keras.layers.Layer)
}
"""

FLAX = """
from flax import nnx

dense = keras.layers.Dense(16, "relu"), keras.layers.Dense(2)
model = keras.Sequential([keras.Input((8,)), *dense])
kpe.convert(model, "delayed")
wanted = np.asarray(model(x))
compiled = nnx.jit(lambda model, x: model(x))
np.testing.assert_allclose(np.asarray(compiled(model, x)), wanted, rtol=1e-5)
merged = nnx.merge(*nnx.split(model))
np.testing.assert_array_equal(np.asarray(merged(x)), wanted)
"""


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(TRAINING, id="training"),
        pytest.param(FROM_THE_START, id="from_the_start"),
        pytest.param(FILES, id="files"),
        pytest.param(LAYERS, id="layers"),
        pytest.param(FLAX, id="flax"),
    ],
)
def test_models_of_nnx_are_in_float8_as_others(program, tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_NNX_ENABLED", "true")
    run("jax", SETUP + program, tmp_path)
