"""`freeze(model, to="keras")`: Keras's own layers, which load without us."""

import inspect
import subprocess
import sys

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from steps import normal, numpy

pytestmark = pytest.mark.skipif(
    "config" not in inspect.signature(keras.layers.Dense.quantize).parameters,
    reason="Keras before 3.13 rounds inputs whenever it quantizes a layer",
)

X = normal(4, 6, 64)


def model_of():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6, 64))
    x = keras.layers.Dense(96, activation="relu", name="dense")(inputs)
    x = keras.layers.EinsumDense("btd,dnh->btnh", (None, 4, 9), name="heads")(x)
    x = keras.layers.EinsumDense("btnh,nhd->btd", (None, 17), name="out")(x)
    return keras.Model(inputs, x)


def frozen_outputs(**how):
    model = model_of()
    kpe.freeze(model, **how)
    return numpy(model(X))


HOWS = {
    "int8": dict(weights="int8"),
    "int4": dict(weights="int4"),
    "groups": dict(weights="int4", granularity="group"),
    "clipped": dict(weights="int4", scales="least_squares"),
}


@pytest.mark.parametrize("kind", HOWS)
def test_outputs_are_those_of_the_frozen_model(kind, tmp_path):
    model = model_of()
    report = kpe.freeze(model, to="keras", **HOWS[kind])
    assert len(report.stored) == 3
    mode = HOWS[kind]["weights"]
    for layer in model.layers[1:]:
        assert type(layer).__module__.startswith("keras.src")
        assert layer.quantization_mode == mode
    expected, outputs = frozen_outputs(**HOWS[kind]), numpy(model(X))
    assert np.abs(outputs - expected).max() < 1e-5 * np.abs(expected).max()
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(numpy(loaded(X)), outputs)


def test_inputs_may_be_rounded_too():
    model = model_of()
    how = dict(weights="int8", activations="dynamic")
    kpe.freeze(model, to="keras", **how)
    expected = frozen_outputs(**how)
    # A number of int8 may round the other way, since Keras adds 1e-7.
    error = np.abs(numpy(model(X)) - expected).max()
    assert error < 2e-2 * np.abs(expected).max()


@pytest.mark.parametrize("kind", HOWS)
def test_codes_and_scales_are_ours(kind):
    model, twin = model_of(), model_of()
    kpe.freeze(model, to="keras", **HOWS[kind])
    kpe.freeze(twin, **HOWS[kind])
    for name in ("dense", "heads", "out"):
        stored = twin.get_layer(name).kernel.stored
        layer = model.get_layer(name)
        held = {each.name: numpy(each) for each in layer.weights}
        codes = held["kernel"]
        if stored.weights == "int4":
            _, rows = stored.axes.sizes(stored.codes.shape)
            unpacked = keras.quantizers.unpack_int4(codes, rows, axis=-1)
            codes = numpy(unpacked).reshape(stored.codes.shape)
        np.testing.assert_array_equal(codes, stored.codes.view("int8"))
        scale = held["kernel_scale"]
        if stored.granularity == "channel":
            np.testing.assert_allclose(
                1 / scale.reshape(-1), stored.scale.reshape(-1), rtol=1e-6
            )
        else:
            np.testing.assert_array_equal(scale, stored.scale.T)
            assert not held["kernel_zero"].any()


def test_embeddings_are_stored_by_rows():
    words = np.array([[1, 5, 7]])

    def model_of_words():
        keras.utils.set_random_seed(0)
        layer = keras.layers.Embedding(20, 48, name="words")
        return keras.Sequential([keras.Input((3,), dtype="int32"), layer])

    for how in (dict(weights="int8"), HOWS["int4"], HOWS["groups"]):
        model, twin = model_of_words(), model_of_words()
        kpe.freeze(model, to="keras", **how)
        kpe.freeze(twin, **how)
        np.testing.assert_allclose(
            numpy(model(words)), numpy(twin(words)), rtol=1e-5, atol=1e-7
        )


@pytest.mark.parametrize(
    "how, fault",
    [
        (dict(weights="int3"), "its kernel is in int3"),
        (dict(weights="float4_e2m1fn"), "its kernel is in float4_e2m1fn"),
        (dict(weights="int8", granularity="group"), "per group32"),
        (dict(), "its kernel is in float8_e4m3fn"),
        (
            dict(weights="int4", granularity="group", activations="dynamic"),
            "inputs are not quantized",
        ),
    ],
)
def test_what_keras_cannot_hold_is_refused_first(how, fault):
    model = model_of()
    before = numpy(model(X))
    with pytest.raises(ValueError, match=fault) as error:
        kpe.freeze(model, to="keras", **how)
    for word in ("Received", "Allowed", "`exclude`"):
        assert word in str(error.value)
    np.testing.assert_array_equal(numpy(model(X)), before)
    assert type(model.get_layer("dense")) is keras.layers.Dense


def test_layers_that_keras_does_not_quantize_are_refused():
    layer = keras.layers.Conv1D(4, 3, name="conv")
    model = keras.Sequential([keras.Input((6, 8)), layer])
    with pytest.raises(ValueError, match="its class is Conv1D"):
        kpe.freeze(model, weights="int8", to="keras")
    moved = keras.layers.EinsumDense("btd,ndh->btnh", (None, 2, 4))
    model = keras.Sequential([keras.Input((6, 8)), moved])
    with pytest.raises(ValueError, match="moves axes of the kernel"):
        kpe.freeze(model, weights="int8", to="keras")
    with pytest.raises(ValueError, match="to='tflite'"):
        kpe.freeze(model, weights="int8", to="tflite")


PROGRAM = """
import sys, keras, numpy as np
model = keras.saving.load_model(sys.argv[1])
assert "keras_policy_ext" not in sys.modules
x = np.load(sys.argv[2])
np.save(sys.argv[3], keras.ops.convert_to_numpy(model(x)))
"""


@pytest.mark.full
def test_a_program_without_this_package_loads_the_file(tmp_path):
    model = model_of()
    kpe.convert(model, "int4(group=32)")
    kpe.freeze(model, to="keras")
    outputs = numpy(model(X))
    model.save(tmp_path / "model.keras")
    np.save(tmp_path / "x.npy", X)
    paths = [tmp_path / name for name in ("model.keras", "x.npy", "y.npy")]
    given = [sys.executable, "-c", PROGRAM, *map(str, paths)]
    subprocess.run(given, check=True, cwd=tmp_path)
    np.testing.assert_array_equal(np.load(paths[-1]), outputs)
