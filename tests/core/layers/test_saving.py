"""What is saved is what is loaded: weights, state, policy and training.

Files are read by stock Keras, without custom objects. What a
file cannot keep is named in a test of its own: LoRA's adapters, which Keras
merges into the kernel.
"""

import copy
import hashlib
import json
import os
import pickle
import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from keras_policy_ext import reference
from saving_models import (
    BUILDERS,
    assert_equal,
    assert_same,
    batch,
    float8,
    float8_layers,
    fresh,
    matrices,
    observed,
    predictions,
    randomized,
    sequential,
    train,
    twin_of,
)
from steps import numpy, state_of

# Many of these models are never compiled alike, and Keras says so.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Skipping variable loading for optimizer"
)


def test_the_models_of_this_file_are_in_float8():
    modes = {
        kind: [x.quantization_mode for x in float8_layers(observed(kind))]
        for kind in BUILDERS
    }
    assert modes.pop("rules") == [None, "float8"]
    assert all(set(found) == {"float8"} for found in modes.values())


# Every way to save, for every model


def through_keras(model, folder):
    model.save(folder / "model.keras")
    return keras.saving.load_model(folder / "model.keras")


def through_a_folder(model, folder):
    model.save(folder / "model", zipped=False)
    return keras.saving.load_model(folder / "model")


def through_weights(model, folder):
    model.save_weights(folder / "model.weights.h5")
    other = twin_of(model)
    other.load_weights(folder / "model.weights.h5")
    return other


def through_weights_of_a_keras_file(model, folder):
    model.save(folder / "model.keras")
    other = twin_of(model)
    other.load_weights(folder / "model.keras")
    return other


def through_shards(model, folder):
    path = folder / "model.weights.json"
    largest = max(numpy(v).nbytes for v in model.weights)
    model.save_weights(path, max_shard_size=largest / 1024**3)
    assert len(list(folder.glob("model_*.weights.h5"))) > 2
    other = twin_of(model)
    other.load_weights(path)
    return other


def through_get_weights(model, folder):
    other = twin_of(model)
    other.set_weights(model.get_weights())
    return other


def through_json(model, folder):
    other = keras.models.model_from_json(model.to_json())
    if not other.built:
        other.build((None, 6))
    other.set_weights(model.get_weights())
    return other


def through_a_config(model, folder):
    other = type(model).from_config(json.loads(json.dumps(model.get_config())))
    if not other.built:
        other.build((None, 6))
    other.set_weights(model.get_weights())
    return other


def through_pickle(model, folder):
    return pickle.loads(pickle.dumps(model))


def through_deepcopy(model, folder):
    return copy.deepcopy(model)


ROUTES = {
    route.__name__.removeprefix("through_"): route
    for route in (
        through_keras,
        through_a_folder,
        through_weights,
        through_weights_of_a_keras_file,
        through_shards,
        through_get_weights,
        through_json,
        through_a_config,
        through_pickle,
        through_deepcopy,
    )
}


WRITTEN = ["keras", "weights", "get_weights", "json"]


@pytest.mark.full_except(
    "get_weights-functional", "json-functional", "weights-user_layer"
)
@pytest.mark.parametrize(
    "route, kind",
    [(route, kind) for route in WRITTEN for kind in BUILDERS]
    + [
        (r, k)
        for r in ROUTES
        if r not in WRITTEN
        for k in ("rules", "subclassed")
    ],
)
@pytest.mark.slow_except(
    "a_config-rules",
    "json-user_layer",
    "get_weights-rules",
    "weights_of_a_keras_file-rules",
    "shards-rules",
    "a_config-subclassed",
    "json-rules",
    "get_weights-user_layer",
    "json-subclassed",
    "weights_of_a_keras_file-subclassed",
    "a_folder-rules",
    "json-convolutional",
    "get_weights-sequential",
    "get_weights-convolutional",
    "get_weights-subclassed",
    "pickle-subclassed",
)
def test_a_model_comes_back_as_it_was(route, kind, tmp_path):
    model = observed(kind)
    assert_same(model, ROUTES[route](model, tmp_path))


@pytest.mark.full
@pytest.mark.parametrize("kind", ["functional", "user_layer"])
def test_training_goes_on_after_saving_as_without_it(kind, tmp_path):
    model = fresh(kind)
    train(model)
    loaded = through_keras(model, tmp_path)
    again = through_weights(model, tmp_path)
    assert_equal(model.optimizer.variables, loaded.optimizer.variables)
    assert_equal(model.weights, again.weights)
    assert train(loaded, seed=7) == train(model, seed=7)
    assert_equal(model.weights, loaded.weights)
    assert_equal(model.optimizer.variables, loaded.optimizer.variables)
    for matrix in matrices(model):
        assert np.all(numpy(matrix)[:, 10] > 0), "no amax in the history"


def test_a_path_in_a_file_is_the_path_in_the_loaded_model(tmp_path):
    for kind in BUILDERS:
        model = observed(kind)
        for route in (through_keras, through_json):
            if kind == "subclassed":
                continue  # Its layers get new names, as in stock Keras.
            loaded = route(model, tmp_path)
            paths = [layer.path for layer in float8_layers(model)]
            assert [x.path for x in float8_layers(loaded)] == paths
            for each in (model, loaded):
                found = [v.path for v in each.weights]
                assert len(set(found)) == len(found)


@pytest.mark.parametrize("kind", ["Dense", "EinsumDense", "Conv2D"])
def test_a_layer_comes_back_from_its_config(kind):
    given = float8("mixed_bfloat16", rules=[("nothing", None)])
    arguments = {
        "Dense": {"units": 3},
        "EinsumDense": {"equation": "ab,bc->ac", "output_shape": 3},
        "Conv2D": {"filters": 3, "kernel_size": 2},
    }[kind]
    layer = getattr(kpe.layers, kind)(**arguments, dtype=given)
    config = json.loads(json.dumps(layer.get_config()))
    assert type(layer).from_config(config).dtype_policy == given
    serialized = json.loads(json.dumps(keras.layers.serialize(layer)))
    again = keras.layers.deserialize(serialized)
    assert type(again) is type(layer)
    assert again.dtype_policy == given


def test_a_built_layer_comes_back_with_its_weights_and_state(tmp_path):
    layer = observed("sequential").layers[0]
    again = type(layer).from_config(layer.get_config())
    again.build((None, 6))
    again.set_weights(layer.get_weights())
    assert_equal(layer.weights, again.weights)


@pytest.mark.full
def test_a_float16_model_keeps_weights_state_and_policy(tmp_path):
    with kpe.policy_scope(float8("mixed_float16")):
        model = randomized(fresh("sequential", float8("mixed_float16")))
        assert_same(model, through_keras(model, tmp_path))


def test_a_file_that_a_global_policy_made_loads_under_another(tmp_path):
    with kpe.policy_scope(float8("mixed_bfloat16")):
        model = sequential(kpe.layers, None)
    with kpe.policy_scope("float32"):
        assert_same(model, through_keras(model, tmp_path))


FRESH = """
import sys, hashlib
import keras, keras_policy_ext
import numpy as np
for path in sys.argv[1:]:
    model = keras.saving.load_model(path)
    shape = model.input_shape[1:]
    x = np.random.default_rng(0).normal(size=(8, *shape)).astype("float32")
    y = keras.ops.cast(model(x, training=False), "float32")
    digest = hashlib.sha256()
    for array in [y, *model.weights]:
        digest.update(keras.ops.convert_to_numpy(array).tobytes())
    layers = model._flatten_layers(include_self=False)
    modes = [x.quantization_mode for x in layers if x.weights]
    print(digest.hexdigest(), modes.count("float8"))
"""


@pytest.mark.full
def test_a_fresh_process_loads_with_two_imports(tmp_path):
    expected, paths = [], []
    for kind in ("sequential",):
        model = observed(kind)
        paths.append(tmp_path / f"{kind}.keras")
        model.save(paths[-1])
        digest = hashlib.sha256()
        for array in [predictions(model), *model.weights]:
            digest.update(numpy(array).tobytes())
        count = len(float8_layers(model))
        expected.append(f"{digest.hexdigest()} {count}")
    environment = {**os.environ, "KERAS_BACKEND": keras.backend.backend()}
    process = subprocess.run(
        [sys.executable, "-c", FRESH, *map(str, paths)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines()[-3:] == expected


def test_the_old_h5_format_keeps_the_state(tmp_path):
    model = randomized(sequential(kpe.layers, float8()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save(tmp_path / "model.h5")
    loaded = keras.saving.load_model(tmp_path / "model.h5", compile=False)
    assert_same(model, loaded)


# LoRA


LORA_AMAX = 16.0


def with_lora(seed):
    layer = kpe.layers.Dense(3, dtype=float8())
    model = keras.Sequential([keras.Input((6,)), layer])
    layer.enable_lora(2)
    randomized(model, seed)
    (matrix,) = matrices(model)
    state = numpy(matrix).copy()
    state[:, 10:] = LORA_AMAX  # No operand of this test is larger.
    matrix.assign(state)
    return model


def test_set_weights_keeps_the_adapters_bit_for_bit():
    model, other = with_lora(0), with_lora(1)
    other.set_weights(model.get_weights())
    np.testing.assert_array_equal(predictions(model), predictions(other))
    assert np.all(numpy(other.layers[0].lora_kernel_b))


@pytest.mark.parametrize("route", ["keras", "weights"])
def test_a_file_has_the_adapters_merged_as_in_stock_keras(route, tmp_path):
    model = with_lora(0)
    other = ROUTES[route](model, tmp_path)
    (layer,), (again,) = model.layers, other.layers
    adapters = numpy(layer.lora_kernel_a) @ numpy(layer.lora_kernel_b)
    kernel = numpy(layer._kernel)
    merged = kernel + layer.lora_alpha / 2 * adapters
    np.testing.assert_allclose(numpy(again._kernel), merged, rtol=1e-6)
    assert again.lora_enabled
    assert not np.any(numpy(again.lora_kernel_a))
    before, after = state_of(layer), state_of(again)
    for operand in ("inputs", "outputs_grad"):
        np.testing.assert_array_equal(before[operand][1], after[operand][1])
    # The merged kernel was never observed.
    assert not np.any(after["kernel"][1])
    # Before, the adapters' part was added unrounded; now it is rounded with
    # the kernel. Half an ulp of e4m3fn is 2^-4 of a number, which a rounding
    # of the inputs enlarges by as much, or 2^-10 of the scale if subnormal.
    x = np.abs(batch(model)[0])
    assert max(x.max(), merged.max()) < LORA_AMAX
    bound = 2**-4 * (1 + 2**-4) * x @ (np.abs(kernel) + np.abs(merged))
    bound += 6 * LORA_AMAX * 2 * 2**-10 * LORA_AMAX / 448
    assert np.all(np.abs(predictions(model) - predictions(other)) <= bound)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("load", [kpe.load_model, keras.saving.load_model])
def test_loading_tells_of_adapters_that_were_merged(load, frozen, tmp_path):
    model = with_lora(0)
    if frozen:  # Its file has the adapters.
        kpe.freeze(model)
    model.save(tmp_path / "model.keras")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        loaded = load(tmp_path / "model.keras")
    merged = not np.any(numpy(loaded.layers[0].lora_kernel_a))
    texts = [str(x.message) for x in told if "LoRA" in str(x.message)]
    assert merged == (not frozen)
    assert len(texts) == merged


@pytest.mark.full
def test_a_merged_kernel_is_not_scaled_by_the_amax_of_the_old_one(tmp_path):
    dtype = kpe.Float8DTypePolicy("float32", amax_history_length=8)
    layer = kpe.layers.Dense(64, use_bias=False, dtype=dtype)
    model = keras.Sequential([keras.Input((6,)), layer])
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 6)).astype("float32")
    model.compile("sgd", "mse")
    model.fit(x, np.zeros((8, 64), "float32"), verbose=0)
    layer.enable_lora(2)
    layer.lora_kernel_b.assign(np.full((2, 64), 30.0, "float32"))
    exact = x @ keras.ops.convert_to_numpy(layer.kernel)
    path = tmp_path / "model.keras"
    model.save(path)
    loaded = keras.saving.load_model(path).predict(x, verbose=0)
    assert reference.sqnr_db(exact, loaded) > 20
