"""Models of every sort for the tests of saving, trained or as if."""

import functools
import json

import h5py
import keras
import numpy as np
from keras import ops

import keras_policy_ext as kpe
from keras_policy_ext.numerics.scale_sources import source_of
from steps import normal, numpy

LENGTH = 4
JIT = keras.backend.backend() == "jax"  # XLA takes longer than it saves.


def float8(source="float32", length=LENGTH, **kwargs):
    if "recipe" in kwargs:
        return kpe.Float8DTypePolicy(source, **kwargs)
    return kpe.Float8DTypePolicy(source, amax_history_length=length, **kwargs)


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
    x = layers.EinsumDense("abc,cd->abd", (4, 5), bias_axes="d", dtype=policy)(
        inputs
    )
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
    model.reset_metrics()  # Else Keras up to 3.14 averages over calls.
    return [
        float(model.train_on_batch(*batch(model, seed=seed + i)))
        for i in range(2)
    ]


def settled(rng, shape):
    """A state as training leaves it behind."""
    matrix = rng.uniform(1, 2, size=tuple(shape)).astype("float32")
    matrix[:, 0] = -1.0  # Observed.
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


def twin_of(model):
    """A clone, which has other weights and no observations."""
    other = keras.models.clone_model(model)
    if not other.built:
        other.build((None, 6))
    for matrix in matrices(other):
        assert np.all(numpy(matrix)[:, 1:] == 0)
    return other


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
    layout = source_of(matrix.recipe).layout
    scales = np.array([1, 2, 4], "float32") * scale
    state = numpy(matrix)
    state[:, 0] = -1.0  # Observed.
    layout.scale(state)[:], layout.history(state)[:] = scales, rings
    matrix.assign(state)
    return model


def user_model(seed):
    """One layer with two kernels, and a state as if it had been trained."""
    model = fresh("user_layer", float8())
    return randomized(model, seed)


def in_shards(model, folder):
    """Save weights in files as small as Keras writes; return the index."""
    path = folder / "shards.weights.json"
    for size in range(64, 2**20, 64):
        try:
            model.save_weights(path, max_shard_size=size / 1024**3)
            break
        except ValueError:  # An array is larger.
            continue
    places = json.loads(path.read_text())["weight_map"].values()
    assert any(isinstance(each, list) for each in places)
    return path
