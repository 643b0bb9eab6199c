"""A model trained and saved on one backend goes on training on another.

Each backend saves once and loads once, in a process of its own; the tests
compare what the processes wrote down.
"""

import json

import numpy as np
import pytest

from processes import BACKENDS, is_installed, run

PAIRS = [(a, b) for a in BACKENDS for b in BACKENDS if a != b]
WAYS = ("keras", "weights", "arrays")

COMMON = """
import json, pathlib, sys
import keras, numpy as np
import keras_policy_ext as kpe

folder = pathlib.Path(sys.argv[1])
rng = np.random.default_rng(0)
x = rng.normal(size=(16, 6, 8)).astype("float32")
y = rng.normal(size=(16, 3)).astype("float32")

# XLA takes longer than it saves, but JAX knows no other compiler.
jit = keras.backend.backend() == "jax"

def numpy(tensor):
    return keras.ops.convert_to_numpy(keras.ops.cast(tensor, "float32"))

def arrays(model):
    return {f"{i:03}": numpy(v) for i, v in enumerate(model.weights)}

@keras.saving.register_keras_serializable("on_a_load_on_b")
class Block(keras.layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.wide = keras.layers.Dense(16, activation="relu")
        self.rest = keras.layers.Dense(8)

    def build(self, input_shape):
        self.wide.build(input_shape)
        self.rest.build((*input_shape[:-1], 16))

    def call(self, x):
        return x + self.rest(self.wide(x))

def stock():
    inputs = keras.Input((6, 8))
    h = keras.layers.MultiHeadAttention(2, 4)(inputs, inputs)
    h = keras.layers.GlobalAveragePooling1D()(Block()(h))
    return keras.Model(inputs, keras.layers.Dense(3)(h))

def write(name, model):
    outputs = numpy(model(x, training=False))
    np.savez(folder / f"{name}.npz", outputs=outputs, **arrays(model))
"""

SAVE = """
policy = kpe.Float8DTypePolicy("float32", amax_history_length=4)
inputs = keras.Input((6, 8))
h = kpe.layers.EinsumDense("abc,cd->abd", (6, 8), bias_axes="d", dtype=policy)(
    inputs
)
h = kpe.layers.Conv1D(8, 3, padding="same", activation="tanh", dtype=policy)(h)
h = keras.layers.LayerNormalization(dtype=policy)(h)
h = keras.layers.GlobalAveragePooling1D(dtype=policy)(h)
model = keras.Model(inputs, kpe.layers.Dense(3, dtype=policy)(h))
model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=jit)
for _ in range(3):
    model.train_on_batch(x, y)
model.save(folder / "model.keras")
model.save_weights(folder / "model.weights.h5")
(folder / "model.json").write_text(model.to_json())
np.savez(folder / "slots.npz", *map(numpy, model.optimizer.variables))
write("saved", model)

model = stock()
model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=jit)
kpe.convert(model, "float8/4_from_float32")
for _ in range(3):
    model.train_on_batch(x, y)
model.save(folder / "converted.keras")
np.savez(folder / "converted-slots.npz", *map(numpy, model.optimizer.variables))
write("converted", model)

model = stock()
rng = np.random.default_rng(1)
for variable in model.weights:
    variable.assign(rng.normal(size=variable.shape).astype("float32"))
model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=jit)
kpe.convert(model, "float8/4_from_float32")
kpe.calibrate(model, x)
kpe.freeze(model, include="attention", granularity="block")
kpe.freeze(model, include="block", activations="dynamic")
kpe.freeze(
    model,
    exclude="attention|block",
    granularity="tensor",
    activations="static",
)
write("frozen-untrained", model)
codes = [numpy(v) for v in model.variables if v.dtype == "uint8"]
np.savez(folder / "codes.npz", *codes)
model.train_on_batch(x, y)
model.save(folder / "frozen.keras")
write("frozen", model)
"""

LOAD = """
def load(way, source):
    if way == "keras" and source.name != "torch":
        return keras.saving.load_model(source / "model.keras")
    if way == "keras":
        # Files of torch name torch's own optimizer class, and it runs on no
        # other backend (keras 3.15, stock layers too): take its slots only.
        path = source / "model.keras"
        model = keras.saving.load_model(path, compile=False)
        model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=jit)
        model.optimizer.build(model.trainable_variables)
        model.load_weights(path)
        return model
    model = keras.models.model_from_json((source / "model.json").read_text())
    model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=jit)
    if way == "weights":
        model.load_weights(source / "model.weights.h5")
        return model
    stored = np.load(source / "saved.npz")
    names = sorted(name for name in stored.files if name != "outputs")
    model.set_weights([stored[name] for name in names])
    return model

for source in map(pathlib.Path, sys.argv[2:]):
    model = kpe.load_model(source / "frozen.keras")
    write(f"{source.name}-frozen-loaded", model)
    loss = float(model.train_on_batch(x, y))
    (folder / f"{source.name}-frozen.json").write_text(json.dumps(loss))
    model = kpe.load_model(source / "converted.keras")
    model.jit_compile = jit
    write(f"{source.name}-converted-loaded", model)
    np.savez(
        folder / f"{source.name}-converted-slots.npz",
        *map(numpy, model.optimizer.variables),
    )
    layers = [x for x in model._flatten_layers() if x.count_params()]
    facts = {
        "modes": [x.quantization_mode for x in layers if hasattr(x, "bias")],
        "loss": float(model.train_on_batch(x, y)),
        "optimizer": type(model.optimizer).__name__,
    }
    text = json.dumps(facts)
    (folder / f"{source.name}-converted.json").write_text(text)
    for way in ("keras", "weights", "arrays"):
        model = load(way, source)
        write(f"{source.name}-{way}-loaded", model)
        slots = map(numpy, model.optimizer.variables)
        np.savez(folder / f"{source.name}-{way}-slots.npz", *slots)
        mixin = kpe.layers.Float8Mixin
        layers = [x for x in model.layers if isinstance(x, mixin)]
        facts = {
            "modes": [layer.quantization_mode for layer in layers],
            "names": [layer.dtype_policy.full_name for layer in layers],
            "paths": [variable.path for variable in model.weights],
        }
        if way == "keras":
            model.jit_compile = jit
            facts["loss"] = float(model.train_on_batch(x, y))
            write(f"{source.name}-trained", model)
        text = json.dumps(facts)
        (folder / f"{source.name}-{way}.json").write_text(text)
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folder of each installed backend, after saving and loading."""
    root = tmp_path_factory.mktemp("backends")
    found = {b: root / b for b in BACKENDS if is_installed(b)}
    for backend, folder in found.items():
        folder.mkdir()
        run(backend, COMMON + SAVE, folder)
    for backend, folder in found.items():
        others = [other for other in found.values() if other != folder]
        run(backend, COMMON + LOAD, folder, *others)
    return found


@pytest.fixture(params=PAIRS, ids="->".join)
def pair(request, folders):
    missing = [backend for backend in request.param if backend not in folders]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed")
    return tuple(folders[backend] for backend in request.param)


@pytest.fixture(params=WAYS)
def way(request):
    return request.param


def read(folder, name):
    with np.load(folder / f"{name}.npz") as file:
        return dict(file)


def state_names(facts):
    """The keys of the arrays that are float8 state, and of the others."""
    paths = enumerate(facts["paths"])
    return [f"{i:03}" for i, path in paths if "/float8_state/" in path]


def facts_of(pair, way):
    saved, loaded = pair
    return json.loads((loaded / f"{saved.name}-{way}.json").read_text())


def test_weights_and_state_are_equal_bit_for_bit(pair, way):
    saved, loaded = pair
    expected = read(saved, "saved")
    found = read(loaded, f"{saved.name}-{way}-loaded")
    assert found.keys() == expected.keys()
    for name in expected.keys() - {"outputs"}:
        np.testing.assert_array_equal(found[name], expected[name])
    states = [expected[name] for name in state_names(facts_of(pair, way))]
    assert len(states) == 3
    for state in states:
        assert np.all(np.count_nonzero(state[:, 10:], axis=1) == 3)


def test_the_optimizer_goes_with_a_keras_file(pair):
    saved, loaded = pair
    expected = read(saved, "slots")
    found = read(loaded, f"{saved.name}-keras-slots")
    assert len(found) == len(expected) == 2 + 2 * 8
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)


def test_policy_and_mode_are_equal(pair, way):
    facts = facts_of(pair, way)
    assert facts["modes"] == ["float8"] * 3
    assert set(facts["names"]) == {"float8/4_from_float32"}


def test_predictions_agree(pair, way):
    # Scales are equal, so layers see equal numbers up to float32 rounding of
    # sums of 24 terms at most. Where that rounding falls on the boundary of
    # two float8 numbers, an element of the next layer's inputs moves by one
    # ulp of e4m3fn: 2^-3 of itself at most. Of 8 inputs to a unit of the last
    # layer, whose sizes are alike, let two do so. Measured: no difference,
    # since sums of few products of float8 numbers are exact in float32.
    saved, loaded = pair
    expected = read(saved, "saved")["outputs"]
    found = read(loaded, f"{saved.name}-{way}-loaded")["outputs"]
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error < 2**-3 * 2 / 8


def test_one_more_step_moves_weights_and_state(pair):
    saved, loaded = pair
    before = read(loaded, f"{saved.name}-keras-loaded")
    after = read(loaded, f"{saved.name}-trained")
    facts = facts_of(pair, "keras")
    assert np.isfinite(facts["loss"])
    assert np.any(before["000"] != after["000"])
    for name in state_names(facts):
        newest, oldest = before[name][:, 10], after[name][:, -1]
        np.testing.assert_array_equal(newest, oldest)
        assert np.all(after[name][:, 10] > 0)
        assert np.all(after[name][:, 0] == -1)


def test_a_converted_model_comes_back_whole(pair):
    saved, loaded = pair
    expected = read(saved, "converted")
    found = read(loaded, f"{saved.name}-converted-loaded")
    assert found.keys() == expected.keys()
    for name in expected.keys() - {"outputs"}:
        np.testing.assert_array_equal(found[name], expected[name])
    slots = read(saved, "converted-slots")
    found_slots = read(loaded, f"{saved.name}-converted-slots")
    assert len(found_slots) == len(slots) == 2 + 2 * 14
    for name, value in slots.items():
        np.testing.assert_array_equal(found_slots[name], value)
    # As above; the last layer has 8 inputs too.
    error = np.linalg.norm(found["outputs"] - expected["outputs"])
    assert error < 2**-3 * 2 / 8 * np.linalg.norm(expected["outputs"])


def test_a_converted_model_goes_on_training(pair):
    saved, loaded = pair
    text = (loaded / f"{saved.name}-converted.json").read_text()
    facts = json.loads(text)
    assert facts["modes"] == ["float8"] * 7
    assert facts["optimizer"] == "Adam"
    assert np.isfinite(facts["loss"])


def test_a_frozen_model_comes_back_whole(pair):
    saved, loaded = pair
    expected = read(saved, "frozen")
    found = read(loaded, f"{saved.name}-frozen-loaded")
    assert found.keys() == expected.keys()
    for name in expected.keys() - {"outputs"}:
        np.testing.assert_array_equal(found[name], expected[name])
    # As above; the last layer has 8 inputs too.
    error = np.linalg.norm(found["outputs"] - expected["outputs"])
    assert error < 2**-3 * 2 / 8 * np.linalg.norm(expected["outputs"])
    text = (loaded / f"{saved.name}-frozen.json").read_text()
    assert np.isfinite(json.loads(text))


def test_equal_weights_have_equal_bytes(pair):
    one, other = (read(folder, "frozen-untrained") for folder in pair)
    assert one.keys() == other.keys()
    for name in one.keys() - {"outputs"}:
        np.testing.assert_array_equal(one[name], other[name])
    codes, others = (np.load(folder / "codes.npz") for folder in pair)
    assert codes.files == others.files and len(codes.files) >= 7
    for name in codes.files:
        np.testing.assert_array_equal(codes[name], others[name])
    difference = np.linalg.norm(one["outputs"] - other["outputs"])
    assert difference < 2**-3 * 2 / 8 * np.linalg.norm(one["outputs"])
