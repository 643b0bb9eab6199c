"""What is saved is what is loaded: weights, state, policy and training.

Files are read by stock Keras, without custom objects. Rows A11 and A12 of the
measured facts are here. What a file cannot keep is named in a test of its own:
LoRA's adapters, which Keras merges into the kernel.
"""

import copy
import functools
import hashlib
import json
import os
import pathlib
import pickle
import subprocess
import sys
import warnings

import h5py
import keras
import numpy as np
import pytest
from keras import ops
from steps import numpy, state_of

import keras_policy_ext as kpe
from keras_policy_ext.layers import state as state_module
from keras_policy_ext.numerics.rules import rule_of
from keras_policy_ext.recipes import OPERANDS

# Many of these models are never compiled alike, and Keras says so.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Skipping variable loading for optimizer"
)

LENGTH = 4
JIT = keras.backend.backend() == "jax"  # XLA takes longer than it saves.


def float8(source="float32", length=LENGTH, **kwargs):
    if "recipe" in kwargs:
        return kpe.Float8DTypePolicy(source, **kwargs)
    return kpe.Float8DTypePolicy(source, amax_history_length=length, **kwargs)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


# Models: each is built from stock layers or from ours, under any policy


@keras.saving.register_keras_serializable("test_saving")
class Gated(kpe.layers.Float8Mixin, keras.layers.Layer):
    """A user's layer with two kernels, one of them without a name."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units

    def build(self, input_shape):
        shape = (input_shape[-1], self.units)
        self.gate = self.add_weight(shape=shape)
        self.value = self.add_weight(shape=shape, name="value")
        self.bias = self.add_weight(shape=shape[1:], name="offset")

    def call(self, inputs):
        gate = ops.sigmoid(self.float8_matmul(inputs, self.gate))
        x = gate * self.float8_matmul(inputs, self.value)
        return x + self.convert_input(ops.convert_to_tensor(self.bias))

    def compute_output_shape(self, input_shape):
        return (*input_shape[:-1], self.units)

    def get_config(self):
        return {**super().get_config(), "units": self.units}


@keras.saving.register_keras_serializable("test_saving")
class Net(keras.Model):
    """A subclassed model that holds its layers in a list and by name."""

    def __init__(self, policy=None, stock=False, **kwargs):
        super().__init__(**kwargs)
        self.policy = kpe.get(policy)
        self.stock = stock
        layers = keras.layers if stock else kpe.layers
        self.blocks = [layers.Dense(6, dtype=self.policy) for _ in range(2)]
        self.first = self.blocks[0]
        self.head = layers.Dense(2, dtype=self.policy)

    def build(self, input_shape):
        for layer in self.blocks:
            layer.build(input_shape)
        self.head.build(input_shape)

    def call(self, x):
        for layer in self.blocks:
            x = ops.tanh(layer(x))
        return self.head(x)

    def get_config(self):
        policy = kpe.serialize(self.policy)
        return {"policy": policy, "stock": self.stock, "name": self.name}


def sequential(layers, policy):
    stack = [
        keras.Input((6,)),
        layers.Dense(5, activation="relu", dtype=policy, name="body"),
        keras.layers.LayerNormalization(dtype=policy),
        layers.Dense(2, dtype=policy),
    ]
    return keras.Sequential(stack, name="model")


def functional(layers, policy):
    inputs = keras.Input((4, 6))
    x = layers.EinsumDense("abc,cd->abd", (4, 5), bias_axes="d", dtype=policy)(inputs)
    y = layers.Conv1D(5, 3, padding="same", dtype=policy)(x)
    x = keras.layers.Flatten()(keras.layers.Add(dtype=policy)([x, y]))
    return keras.Model(inputs, layers.Dense(2, dtype=policy)(x))


def convolutional(layers, policy):
    inputs = keras.Input((4, 4, 4, 2))
    x = layers.Conv3D(3, 2, dtype=policy)(inputs)
    x = keras.layers.Reshape((3, 9, 3), dtype=policy)(x)
    x = layers.Conv2D(4, 2, strides=2, dtype=policy)(x)
    x = keras.layers.Reshape((4, 4), dtype=policy)(x)
    x = layers.Conv1D(2, 2, dtype=policy)(x)
    x = keras.layers.GlobalAveragePooling1D(dtype=policy)(x)
    return keras.Model(inputs, x)


def user_layer(layers, policy):
    return keras.Sequential([keras.Input((6,)), Gated(2, dtype=policy)])


def subclassed(layers, policy):
    model = Net(policy, stock=layers is keras.layers)
    model.build((None, 6))
    return model


BUILDERS = {
    "sequential": (sequential, float8()),
    "functional": (functional, float8("mixed_bfloat16", recipe="current")),
    "convolutional": (convolutional, float8()),
    "user_layer": (user_layer, float8("mixed_bfloat16")),
    "subclassed": (subclassed, float8("mixed_bfloat16", length=1)),
    "rules": (sequential, float8(rules=[("model/body", None)])),
}
CONTAINERS = ["sequential", "functional", "convolutional", "subclassed"]


def fresh(kind, policy=None, layers=kpe.layers):
    builder, default = BUILDERS[kind]
    model = builder(layers, default if policy is None else policy)
    model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=JIT)
    return model


def batch(model, size=8, seed=0):
    """Inputs and targets of the shapes that a model takes and gives."""
    shape = (6,) if isinstance(model, Net) else model.input_shape[1:]
    return normal(size, *shape, seed=seed), normal(size, 2, seed=seed + 1)


def train(model, seed=0):
    """Two steps; the losses."""
    return [
        float(model.train_on_batch(*batch(model, seed=seed + i)))
        for i in range(2)
    ]


def settled(rng, shape):
    """A state as training leaves it behind."""
    matrix = rng.uniform(1, 2, size=tuple(shape)).astype("float32")
    matrix[:, 0] = -1
    matrix[:, 1:9] = 0
    return matrix


def randomized(model, seed=0):
    """Give a model weights, state and optimizer slots as of long training."""
    rng = np.random.default_rng(seed)
    state = {id(v) for v in matrices(model)}
    if model.compiled:
        model.optimizer.build(model.trainable_variables)
    slots = model.optimizer.variables[2:] if model.compiled else []
    for variable in [*model.weights, *slots]:
        if id(variable) in state:
            variable.assign(settled(rng, variable.shape))
        else:
            variable.assign(np.abs(rng.normal(size=tuple(variable.shape))))
    return model


@functools.cache
def observed(kind):
    """A model that looks trained, which the tests only read."""
    return randomized(fresh(kind))


def predictions(model):
    return numpy(ops.cast(model(batch(model)[0], training=False), "float32"))


def float8_layers(model):
    layers = model._flatten_layers(include_self=False)
    return [x for x in layers if isinstance(x, kpe.layers.Float8Mixin)]


def matrices(model):
    return [v for x in float8_layers(model) for v in x.float8_state.matrices]


def own_weights(model):
    """All weights but the state."""
    state = {id(v) for v in matrices(model)}
    return [numpy(v) for v in model.weights if id(v) not in state]


def assert_equal(some, others):
    assert len(some) == len(others)
    for one, other in zip(some, others, strict=True):
        np.testing.assert_array_equal(numpy(one), numpy(other))


def assert_same_policies(model, other):
    # An InputLayer has no policy of its own and takes the global one.
    layers, twins = (
        [x for x in each._flatten_layers(include_self=False) if x.weights]
        for each in (model, other)
    )
    assert [type(x) for x in layers] == [type(x) for x in twins]
    for layer, twin in zip(layers, twins, strict=True):
        assert twin.dtype_policy == layer.dtype_policy
        assert twin.compute_dtype == layer.compute_dtype
        assert twin.quantization_mode == layer.quantization_mode


def assert_same(model, other):
    """Weights, state, policies and predictions are equal, bit for bit."""
    assert other is not model
    assert_same_policies(model, other)
    assert_equal(model.weights, other.weights)
    np.testing.assert_array_equal(predictions(model), predictions(other))


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


def twin_of(model):
    """A clone, which has other weights and no observations."""
    other = keras.models.clone_model(model)
    if not other.built:
        other.build((None, 6))
    for matrix in matrices(other):
        assert np.all(numpy(matrix)[:, 1:] == 0)
    return other


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


@pytest.mark.parametrize(
    "route, kind",
    [(route, kind) for route in WRITTEN for kind in BUILDERS]
    + [(r, k) for r in ROUTES if r not in WRITTEN for k in ("rules", "subclassed")],
)
def test_a_model_comes_back_as_it_was(route, kind, tmp_path):
    model = observed(kind)
    assert_same(model, ROUTES[route](model, tmp_path))


@pytest.mark.parametrize(
    "kind", ["sequential", "functional", "user_layer", "subclassed"]
)
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


def test_a_fresh_process_loads_with_two_imports(tmp_path):
    expected, paths = [], []
    for kind in ("sequential", "functional", "convolutional"):
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
    assert_equal(layer.float8_state.matrices, again.float8_state.matrices)
    # Before, the adapters' part was added unrounded; now it is rounded with
    # the kernel. Half an ulp of e4m3fn is 2^-4 of a number, which a rounding
    # of the inputs enlarges by as much, or 2^-10 of the scale if subnormal.
    x = np.abs(batch(model)[0])
    assert max(x.max(), merged.max()) < LORA_AMAX
    bound = 2**-4 * (1 + 2**-4) * x @ (np.abs(kernel) + np.abs(merged))
    bound += 6 * LORA_AMAX * 2 * 2**-10 * LORA_AMAX / 448
    assert np.all(np.abs(predictions(model) - predictions(other)) <= bound)


# A11: float32 files and float8 models


def datasets(path):
    """Paths of all arrays in a .weights.h5 file."""
    found = set()
    with h5py.File(path, "r") as file:
        file.visititems(
            lambda name, item: (
                found.add(name) if isinstance(item, h5py.Dataset) else None
            )
        )
    return found


@pytest.mark.parametrize("kind", CONTAINERS)
def test_paths_in_a_file_are_those_of_the_stock_model(kind, tmp_path):
    found = []
    for layers in (keras.layers, kpe.layers):
        model = randomized(fresh(kind, layers=layers))
        path = tmp_path / f"{layers.__name__}.weights.h5"
        model.save_weights(path)
        found.append(datasets(path))
    stock, ours = found
    assert len(stock) > 6
    assert stock == {name for name in ours if "/float8_state/" not in name}
    assert (stock == ours) == (kind == "functional")  # recipe without state


@pytest.mark.parametrize("suffix", ["weights.h5", "keras"])
@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_float32_file_loads_into_a_float8_model(kind, suffix, tmp_path):
    path = tmp_path / f"model.{suffix}"
    stock = randomized(fresh(kind, "float32", keras.layers), seed=1)
    save(stock, path)
    model = randomized(fresh(kind))
    model.load_weights(path)
    assert_equal(own_weights(model), stock.weights)
    assert_equal(stock.optimizer.variables, model.optimizer.variables)
    for matrix in matrices(model):
        assert_equal([matrix], [state_module._anew(matrix)])
    anew = twin_of(model)
    anew.set_weights(model.get_weights())
    np.testing.assert_array_equal(predictions(model), predictions(anew))


@pytest.mark.parametrize("suffix", ["weights.h5", "keras"])
@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_float8_file_loads_into_a_float32_model(kind, suffix, tmp_path):
    path = tmp_path / f"model.{suffix}"
    model = observed(kind)
    save(model, path)
    stock = fresh(kind, "float32", keras.layers)
    stock.optimizer.build(stock.trainable_variables)
    stock.load_weights(path)
    assert_equal(own_weights(model), stock.weights)
    assert_equal(stock.optimizer.variables, model.optimizer.variables)
    ours = fresh(kind, "float32")
    ours.load_weights(path)
    np.testing.assert_array_equal(predictions(stock), predictions(ours))


def save(model, path):
    model.save(path) if path.suffix == ".keras" else model.save_weights(path)


def test_a_user_layer_reads_a_file_of_its_float32_form(tmp_path):
    plain = fresh("user_layer", "float32")
    plain.save_weights(tmp_path / "plain.weights.h5")
    model = randomized(fresh("user_layer"), seed=1)
    model.load_weights(tmp_path / "plain.weights.h5")
    assert_equal(own_weights(model), plain.weights)
    assert np.all(numpy(matrices(model)[0])[:, 1:] == 0)


# A11: histories of other lengths


def aged(ring):
    """A history from the newest to the oldest entry."""
    return np.concatenate([ring[:1], ring[:0:-1]])


def dense_with_state(length, scale=0.5, **kwargs):
    """A Dense whose newest amax is 1, the one before it 2, and so on."""
    policy = float8(length=length, **kwargs)
    model = keras.Sequential(
        [keras.Input((4,)), kpe.layers.Dense(4, dtype=policy)]
    )
    (matrix,) = matrices(model)
    newest_first = np.arange(1, length + 1, dtype="float32")
    rings = np.stack([aged(newest_first * factor) for factor in (1, 2, 3)])
    layout = rule_of(matrix.recipe).layout
    scales = np.array([1, 2, 4], "float32") * scale
    matrix.assign(numpy(layout.settled(scales, rings)))
    return model


@pytest.mark.parametrize("length", [1, 3, 4, 16])
@pytest.mark.parametrize("saved", [1, 4, 16])
def test_another_history_length_keeps_the_newest(saved, length, tmp_path):
    path = tmp_path / "model.weights.h5"
    dense_with_state(saved).save_weights(path)
    model = dense_with_state(length, scale=99.0)
    model.load_weights(path)
    kept = min(saved, length)
    expected = np.zeros(length)
    expected[:kept] = np.arange(1, kept + 1)
    for factor, operand in enumerate(OPERANDS, start=1):
        scale, history = state_of(model.layers[0])[operand]
        assert scale == 0.5 * 2 ** (factor - 1)
        np.testing.assert_array_equal(aged(history), factor * expected)


@pytest.mark.parametrize("saved, length", [(4, 16), (16, 4), (4, 1), (1, 4)])
def test_training_goes_on_with_another_history_length(saved, length, tmp_path):
    model = dense_with_state(saved)
    model.save_weights(tmp_path / "model.weights.h5")
    other = dense_with_state(length)
    other.load_weights(tmp_path / "model.weights.h5")
    other.compile(keras.optimizers.SGD(0.0), "mse", jit_compile=JIT)
    x = normal(8, 4)
    other.train_on_batch(x, normal(8, 4))
    _, history = state_of(other.layers[0])["inputs"]
    kept = min(saved, length - 1)
    expected = np.zeros(length)
    expected[0] = np.abs(x).max()
    expected[1 : kept + 1] = np.arange(1, kept + 1)
    np.testing.assert_array_equal(aged(history), expected.astype("float32"))


def test_a_scale_that_was_never_used_is_saved_as_none(tmp_path):
    model = fresh("sequential")
    assert_same(model, through_weights(model, tmp_path))
    assert np.all(numpy(matrices(model)[0])[:, 9] == 0)


# Other recipes


def test_a_file_of_delayed_scaling_loads_under_current_scaling(tmp_path):
    path = tmp_path / "model.weights.h5"
    delayed = observed("sequential")
    delayed.save_weights(path)
    current = fresh("sequential", float8(recipe="current"))
    current.load_weights(path)
    assert_equal(own_weights(delayed), current.weights)
    current.save_weights(path)
    back = randomized(fresh("sequential"), seed=1)
    back.load_weights(path)
    assert_equal(own_weights(delayed), own_weights(back))
    for matrix in matrices(back):
        assert np.all(numpy(matrix)[:, 1:] == 0), "the state starts anew"


def test_histories_survive_a_change_of_margin_and_first_scale(tmp_path):
    path = tmp_path / "model.weights.h5"
    observed("sequential").save_weights(path)
    recipe = kpe.recipes.DelayedScaling(
        amax_history_length=LENGTH, margin=2, initial_scale=1.0
    )
    other = fresh("sequential", float8(recipe=recipe))
    other.load_weights(path)
    assert_equal(matrices(observed("sequential")), matrices(other))
    assert np.all(np.isfinite(predictions(other)))


# A12: the policy says it all


@pytest.mark.parametrize(
    "name",
    [
        "float8/32_from_mixed_bfloat16",
        "float8/delayed(amax_history_length=3,margin=1)_from_float32",
        "float8/delayed(amax_compute='most_recent')_from_bfloat16",
        "float8/current(power_of_two=True)_from_float32",
    ],
)
def test_the_name_in_a_file_says_every_parameter(name, tmp_path):
    policy = kpe.get(name)
    model = keras.Sequential(
        [keras.Input((4,)), kpe.layers.Dense(4, dtype=name)]
    )
    (loaded,) = through_keras(model, tmp_path).layers
    assert loaded.dtype_policy == policy
    assert kpe.get(loaded.dtype_policy.full_name) == policy
    length = policy.amax_history_length
    shapes = [tuple(v.shape) for v in loaded.float8_state.matrices]
    assert shapes == ([] if length is None else [(3, 10 + length)])


@pytest.mark.parametrize(
    "made, given",
    [
        (float8(length=16), float8(length=32)),
        (float8(length=16), "float8_from_float32"),
        (kpe.get("float32"), float8(length=32)),
        (float8(recipe="current"), float8(length=32)),
    ],
    ids=["longer", "by name", "from float32", "from current"],
)
def test_a_built_layer_refuses_a_policy_that_its_state_does_not_fit(
    made, given, tmp_path
):
    layer = kpe.layers.Dense(4, dtype=made)
    model = keras.Sequential([keras.Input((4,)), layer])
    before = layer.get_weights()
    with pytest.raises(ValueError, match="state does not fit this policy"):
        layer.dtype_policy = given
    assert layer.dtype_policy == made
    assert_equal(before, layer.weights)
    loaded = through_keras(model, tmp_path)
    np.testing.assert_array_equal(
        numpy(model(np.eye(4))), numpy(loaded(np.eye(4)))
    )


def test_a_layer_that_is_not_built_takes_any_policy():
    layer = kpe.layers.Dense(4, dtype=float8(length=16))
    layer.dtype_policy = float8(length=32)
    layer.build((None, 4))
    assert layer.float8_state.matrices[0].shape[1] == 32 + 10


@pytest.mark.parametrize(
    "given, mode",
    [
        ("float32", None),
        (float8(recipe="current"), "float8"),
        (float8("mixed_bfloat16", length=16), "float8"),
        (float8(recipe="delayed(amax_history_length=16,margin=1)"), "float8"),
    ],
    ids=["plain", "current", "other source", "margin"],
)
def test_a_built_layer_takes_a_policy_that_fits_and_reloads(
    given, mode, tmp_path
):
    layer = kpe.layers.Dense(4, dtype=float8(length=16))
    model = keras.Sequential([keras.Input((4,)), layer])
    layer.dtype_policy = given
    assert layer.quantization_mode == mode
    assert layer.dtype_policy == kpe.get(given)
    before = numpy(ops.cast(layer(np.eye(4)), "float32"))
    loaded = through_keras(model, tmp_path).layers[0]
    assert loaded.dtype_policy == kpe.get(given)
    after = numpy(ops.cast(loaded(np.eye(4)), "float32"))
    np.testing.assert_array_equal(before, after)


def test_a_policy_set_on_a_built_layer_decides_how_observations_settle():
    layer = kpe.layers.Dense(4, dtype=float8(length=16))
    layer.build((None, 4))
    given = float8(recipe="delayed(amax_history_length=16,margin=1)")
    layer.dtype_policy = given
    assert layer.float8_state.matrices[0].recipe == given.recipe


def test_stock_quantize_leaves_a_float8_layer_as_it_is():
    model = observed("sequential")
    before = model.get_weights()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.quantize("float8")
    assert_equal(before, model.weights)
    (first, *_) = float8_layers(model)
    assert first.dtype_policy.amax_history_length == LENGTH
    assert np.all(np.isfinite(predictions(model)))


# Damaged files: an error that says what, and nothing is half-changed


def user_model(seed):
    """One layer with two kernels, and a state as if it had been trained."""
    model = fresh("user_layer", float8())
    return randomized(model, seed)


def replaced(key, value):
    def damage(group):
        del group[key]
        group[key] = value

    return damage


def removed(*keys):
    def damage(group):
        for key in keys:
            del group[key]

    return damage


SCALE, HISTORY = "1.kernel.scale", "1.kernel.amax_history"
AMAXES = np.ones(LENGTH, "float32")

DAMAGES = {
    "no version": removed("format_version"),
    "version of zero": replaced("format_version", np.int32(0)),
    "fractional version": replaced("format_version", np.float32(1.5)),
    "vector of versions": replaced("format_version", np.array([1, 1])),
    "no history": removed(HISTORY),
    "no scale": removed(SCALE),
    "no operand": removed(SCALE, HISTORY),
    "history of two axes": replaced(HISTORY, np.ones((2, 2), "float32")),
    "history without entries": replaced(HISTORY, np.ones(0, "float32")),
    "scalar history": replaced(HISTORY, np.float32(1)),
    "vector scale": replaced(SCALE, np.ones(3, "float32")),
    "text": replaced(SCALE, "one"),
    "integers": replaced(HISTORY, np.ones(LENGTH, "int32")),
    "NaN in history": replaced(HISTORY, AMAXES * np.nan),
    "inf in history": replaced(HISTORY, AMAXES * np.inf),
    "too large for float32": replaced(HISTORY, np.full(LENGTH, 1e300)),
    "negative history": replaced(HISTORY, -AMAXES),
    "NaN scale": replaced(SCALE, np.float32(np.nan)),
    "inf scale": replaced(SCALE, np.float32(np.inf)),
    "negative scale": replaced(SCALE, np.float32(-1)),
}


@pytest.fixture(scope="module")
def good_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("good") / "good.weights.h5"
    user_model(seed=1).save_weights(path)
    return path


def damaged_file(good_file, folder, damage):
    path = folder / "damaged.weights.h5"
    path.write_bytes(good_file.read_bytes())
    with h5py.File(path, "a") as file:
        found = [x for x in datasets(good_file) if x.endswith("format_version")]
        (version,) = found
        damage(file[str(pathlib.PurePosixPath(version).parent)])
    return path


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_state_is_refused_as_a_whole(damage, good_file, tmp_path):
    path = damaged_file(good_file, tmp_path, DAMAGES[damage])
    model = user_model(seed=2)
    before = [numpy(v) for v in matrices(model)]
    with pytest.raises(ValueError, match="state of '.*gated.*is damaged"):
        model.load_weights(path)
    assert_equal(before, matrices(model))


def test_the_message_about_damage_says_what_and_what_next(good_file, tmp_path):
    path = damaged_file(good_file, tmp_path, DAMAGES["negative scale"])
    with pytest.raises(ValueError) as caught:
        user_model(seed=2).load_weights(path)
    message = str(caught.value)
    for part in ("'1.kernel.scale' is -1", "Received", "Allowed", "Save the"):
        assert part in message


def test_a_file_of_a_newer_version_is_refused(good_file, tmp_path):
    newer = replaced("format_version", np.int32(2))
    path = damaged_file(good_file, tmp_path, newer)
    model = user_model(seed=2)
    before = [numpy(v) for v in matrices(model)]
    with pytest.raises(ValueError, match=r"newer version.*Update"):
        model.load_weights(path)
    assert_equal(before, matrices(model))


def test_the_format_version_is_in_every_group_with_state(tmp_path):
    path = tmp_path / "model.weights.h5"
    observed("convolutional").save_weights(path)
    versions = [x for x in datasets(path) if x.endswith("/format_version")]
    assert len(versions) == 3
    with h5py.File(path, "r") as file:
        assert {int(file[x][()]) for x in versions} == {1}


def test_a_state_without_entries_for_a_kernel_starts_anew(good_file, tmp_path):
    gone = [f"1.{o}.{k}" for o in OPERANDS for k in ("scale", "amax_history")]
    path = damaged_file(good_file, tmp_path, removed(*gone))
    model = user_model(seed=2)
    model.load_weights(path)
    first, second = matrices(model)
    assert_equal([first], [matrices(user_model(seed=1))[0]])
    assert np.all(numpy(second)[:, 1:] == 0)


def test_a_damaged_state_is_not_overlooked_in_a_layer_with_two_names(tmp_path):
    # Keras looks for what failed under the layer's second name, `first`,
    # where the file has nothing: not a float32 file, then, but the same one.
    path = tmp_path / "model.weights.h5"
    observed("subclassed").save_weights(path)
    with h5py.File(path, "a") as file:
        group = file["blocks/dense/float8_state/vars"]
        replaced("0.inputs.scale", np.float32(np.nan))(group)
    model = randomized(fresh("subclassed"), seed=1)
    before = numpy(matrices(model)[0])
    with pytest.raises(ValueError, match="is damaged"):
        model.load_weights(path)
    assert_equal([before], matrices(model)[:1])
    observed("subclassed").save_weights(path)
    model.load_weights(path)
    assert_equal(matrices(observed("subclassed")), matrices(model))


def test_a_truncated_file_changes_nothing(good_file, tmp_path):
    path = tmp_path / "truncated.weights.h5"
    content = good_file.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    model = user_model(seed=2)
    before = model.get_weights()
    with pytest.raises(OSError, match="truncated file"):
        model.load_weights(path)
    assert_equal(before, model.weights)


@pytest.mark.parametrize("units", [2, 3])
def test_a_file_of_another_architecture_leaves_the_state(units, tmp_path):
    other = keras.Sequential(
        [keras.Input((6,)), kpe.layers.Dense(units, dtype=float8())]
    )
    path = tmp_path / "other.weights.h5"
    other.save_weights(path)
    model = user_model(seed=2)
    before = model.get_weights()
    with pytest.raises(ValueError, match="could not be loaded"):
        model.load_weights(path)
    assert_equal(before, model.weights)
    with pytest.warns(UserWarning, match="could not be loaded"):
        model.load_weights(path, skip_mismatch=True)
    assert_equal(before, model.weights)


def test_a_state_is_not_loaded_without_its_kernel(tmp_path):
    path = tmp_path / "model.weights.h5"
    wide = keras.Sequential(
        [keras.Input((4,)), kpe.layers.Dense(5, dtype=float8())]
    )
    wide.save_weights(path)
    model = dense_with_state(LENGTH)
    before = model.get_weights()
    with pytest.warns(UserWarning, match="could not be loaded"):
        model.load_weights(path, skip_mismatch=True)
    assert_equal(before, model.weights)


# Bad arrays for set_weights


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -1.0])
def test_set_weights_refuses_an_array_that_is_no_state(wrong):
    model = user_model(seed=2)
    before = model.get_weights()
    weights = [w.copy() for w in before]
    weights[-1][1, -1] = wrong
    with pytest.raises(ValueError, match="is no float8 state of '.*gated"):
        model.set_weights(weights)
    assert_equal(before, model.weights)


def test_set_weights_refuses_another_history_length():
    model = dense_with_state(4)
    before = model.get_weights()
    with pytest.raises(ValueError, match="not compatible"):
        model.set_weights(dense_with_state(16).get_weights())
    assert_equal(before[-1:], matrices(model))


# Layers that make their weights early, or name them alike


@keras.saving.register_keras_serializable("test_saving")
class Early(kpe.layers.Float8Mixin, keras.layers.Layer):
    """Makes its kernel before it is built."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.kernel = self.add_weight(shape=(6, 6), name="kernel")

    def call(self, inputs):
        return self.float8_matmul(inputs, self.kernel)

    def get_config(self):
        return super().get_config()


def test_kernels_made_in_the_constructor_have_state_of_their_own(tmp_path):
    model = keras.Sequential(
        [keras.Input((6,)), Early(dtype=float8()), Early(dtype=float8())]
    )
    paths = [v.path for v in matrices(model)]
    assert len(set(paths)) == 2
    assert all(path.endswith("/float8_state/kernel_amax") for path in paths)
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=JIT)
    for i in range(2):
        model.train_on_batch(normal(4, 6, seed=i), normal(4, 6))
    first, second = (numpy(v) for v in matrices(model))
    assert np.all(first[:, 10] > 0)
    assert not np.array_equal(first, second)
    assert_equal(model.weights, through_keras(model, tmp_path).weights)


def test_two_kernels_of_one_name_are_refused():
    class Alike(kpe.layers.Float8Mixin, keras.layers.Layer):
        def build(self, input_shape):
            self.a = self.add_weight(shape=(4, 4), name="kernel")
            self.b = self.add_weight(shape=(4, 4), name="kernel")

    with pytest.raises(ValueError, match="must have different names"):
        Alike(dtype=float8()).build((None, 4))
    Alike(dtype="float32").build((None, 4))
