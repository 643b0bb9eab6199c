"""Models of stock layers that are converted, and blocks that users write."""

import keras
import numpy as np
from keras import ops

import keras_policy_ext as kpe
from steps import numpy

JIT = keras.backend.backend() == "jax"  # XLA takes longer than it saves.
DELAYED = "float8/4_from_float32"
CURRENT = "float8/current(power_of_two=True)_from_float32"


@keras.saving.register_keras_serializable("converted_models")
class Block(keras.layers.Layer):
    """Makes its layers itself, as stock layers, whenever it is made."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.wide = keras.layers.Dense(2 * units, activation="tanh")
        self.norm = keras.layers.LayerNormalization()
        self.rest = [keras.layers.Dense(units)]

    def build(self, input_shape):
        self.norm.build(input_shape)
        self.wide.build(input_shape)
        wide = (*input_shape[:-1], 2 * self.units)
        self.rest[0].build(wide)

    def call(self, x):
        return ops.add(x, self.rest[0](self.wide(self.norm(x))))

    def get_config(self):
        return {**super().get_config(), "units": self.units}


@keras.saving.register_keras_serializable("converted_models")
class AttentionBlock(keras.layers.Layer):
    """Makes a layer that makes layers, and recurrent ones."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention = keras.layers.MultiHeadAttention(2, 2)
        self.recurrent = keras.layers.GRU(4, return_sequences=True)

    def build(self, input_shape):
        self.attention.build(input_shape, input_shape)
        self.recurrent.build(input_shape)

    def call(self, x):
        return self.recurrent(self.attention(x, x))


@keras.saving.register_keras_serializable("converted_models")
class Scaled(keras.layers.Dense):
    """A user's Dense, whose float8 form is a class made for it."""

    float8_calls_super = True

    def call(self, inputs, training=None):
        return 2.0 * super().call(inputs, training=training)


@keras.saving.register_keras_serializable("converted_models")
class Net(keras.Model):
    """A subclassed model with a model in it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = keras.Sequential([keras.layers.Dense(4), Block(4)])
        self.heads = {"a": [Scaled(3)], "b": [keras.layers.Dense(3)]}

    def build(self, input_shape):
        self.inner.build(input_shape)
        for (head,) in self.heads.values():
            head.build((*input_shape[:-1], 4))

    def call(self, x):
        x = self.inner(x)
        return ops.mean(self.heads["a"][0](x) - self.heads["b"][0](x), axis=1)


def blocks():
    """Blocks and a stock composite, all converted alike."""
    inputs = keras.Input((6, 4))
    x = keras.layers.MultiHeadAttention(2, 2, name="attention")(inputs, inputs)
    x = Block(4, name="block")(x)
    x = keras.layers.Flatten()(x)
    model = keras.Model(inputs, keras.layers.Dense(3)(x), name="model")
    return model, [dict(policy=DELAYED)]


def subclassed():
    """Each layer with a policy of its own, one left out."""
    model = Net(name="net")
    model(np.zeros((1, 6, 4), "float32"))
    return model, [
        dict(policy=DELAYED, include="wide|/dense"),
        dict(policy=CURRENT, include="scaled"),
    ]


def composites():
    """Composites that a block makes anew, and one converted in part."""
    inputs = keras.Input((6, 4))
    x = AttentionBlock(name="block")(inputs)
    x = keras.layers.MultiHeadAttention(1, 2, name="partly")(x, x)
    x = keras.layers.TimeDistributed(Scaled(4))(x)
    x = keras.layers.Bidirectional(keras.layers.LSTM(3))(x)
    model = keras.Model(inputs, keras.layers.Dense(3)(x), name="model")
    return model, [dict(policy=DELAYED, exclude="partly/query")]


def mixed():
    """Layers that compute in bfloat16 beside others that do not."""
    inputs = keras.Input((6, 4))
    x = keras.layers.Conv1D(4, 3, dtype="mixed_bfloat16")(inputs)
    x = Block(4, dtype="mixed_bfloat16")(x)
    x = keras.layers.Flatten()(x)
    model = keras.Model(inputs, keras.layers.Dense(3)(x), name="model")
    return model, [dict(policy=DELAYED)]


BUILDERS = {f.__name__: f for f in (blocks, subclassed, composites, mixed)}


def stock(kind, seed=0):
    """The model as it is before its conversion, compiled."""
    keras.utils.set_random_seed(seed)
    model, _ = BUILDERS[kind]()
    model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=JIT)
    return model


def model_in_float8():
    """Attention, a user's block, Adam; no dropout, whose seeds Keras loses."""
    model = stock("blocks")
    kpe.convert(model, DELAYED)
    return model


def converted(kind, seed=0, **changes):
    """A converted model, with weights, state and slots as of training."""
    keras.utils.set_random_seed(seed)
    model, conversions = BUILDERS[kind]()
    model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=JIT)
    for conversion in conversions:
        kpe.convert(model, **{**conversion, **changes})
    return randomized(model, seed)


def randomized(model, seed=0):
    """Give every number of a model, but dropout's, another positive value."""
    rng = np.random.default_rng(seed)
    model.optimizer.build(model.trainable_variables)
    states = {id(v) for v in states_of(model)}
    for variable in [*model.weights, *model.optimizer.variables[2:]]:
        value = rng.uniform(0.1, 1, size=tuple(variable.shape))
        if id(variable) in states:
            value[:, 0], value[:, 1:9] = -1, 0
        if "float" in variable.dtype:
            variable.assign(value)
    return model


def float8_layers(model):
    layers = model._flatten_layers(include_self=False)
    mixin = kpe.layers.Float8Mixin
    return [x for x in layers if isinstance(x, mixin) and x.float8_policy]


def states_of(model):
    return [v for x in float8_layers(model) for v in x.float8_state.matrices]


def float_weights(model):
    """All weights but the state."""
    states = {id(v) for v in states_of(model)}
    return [numpy(v) for v in model.weights if id(v) not in states]


def batch_for(model, size=8, seed=0):
    """Inputs and targets of the shapes that a model takes and gives."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(size, 6, 4))
    return x.astype("float32"), rng.normal(size=(size, 3)).astype("float32")


def predictions(model):
    return numpy(
        ops.cast(model(batch_for(model)[0], training=False), "float32")
    )
