"""Write the files of tests/ext/migration/files with the real tf_keras.

    tox run -e legacy                    compares them with the committed ones
    tox run -e legacy -- --write         writes them anew

Each model is small, has a fixed seed, and is saved as `.h5` and `.keras` (which
is compressed afterwards); an `.npz` beside it has what tf_keras computes:
inputs, predictions, weights, and for trained models the variables of the
optimizer, and the weights after one more update with known gradients. The file
of TensorFlow 2.3 is one of today with the configs that it wrote.
"""

import argparse
import io
import json
import os
import pathlib
import shutil
import tempfile
import zipfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import h5py
import numpy as np
import tensorflow as tf
import tf_keras
from tf_keras import layers, mixed_precision, optimizers

HERE = pathlib.Path(__file__).resolve().parent
FILES = HERE.parents[1] / "tests" / "migration" / "files"
STEPS = 3


def functional_float16():
    """Branches, BatchNormalization, operations, its own loss scaler."""
    inputs = layers.Input((4, 4, 2), name="image")
    x = layers.Conv2D(3, 3, padding="same", name="block/conv")(inputs)
    x = layers.BatchNormalization(name="norm")(x)
    x = layers.ReLU(name="relu")(x)
    y = layers.Conv2D(3, 1, name="shortcut")(inputs)
    x = layers.Add(name="join")([x, y])
    x = tf.reshape(x, (-1, 48)) * 0.5 + 1.0
    x = tf.nn.relu(x - 0.25)[:, 1::2]
    x = layers.Dense(2, dtype="float32", name="logits")(x)
    model = tf_keras.Model(inputs, layers.Softmax(dtype="float32")(x))
    model.compile(
        mixed_precision.LossScaleOptimizer(
            optimizers.Adam(0.01), initial_scale=8, dynamic_growth_steps=2
        ),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


def sequential_float16():
    """The optimizer that `compile` wraps by itself."""
    model = tf_keras.Sequential(
        [
            layers.Dense(4, activation="gelu", input_shape=(5,)),
            layers.Dense(2, dtype="float32"),
        ],
        name="small",
    )
    model.compile("adam", tf_keras.losses.MeanSquaredError())
    return model


def sequential_bfloat16():
    """Built by its first call; an optimizer with two sorts of slots."""
    model = tf_keras.Sequential(
        [
            layers.Dense(4, "swish", kernel_regularizer="l2", name="one"),
            layers.LeakyReLU(0.1),
            layers.Dense(2, name="two"),
        ]
    )
    model.compile(
        optimizers.RMSprop(
            optimizers.schedules.ExponentialDecay(0.01, 10, 0.5),
            momentum=0.5,
            clipnorm=1.0,
        ),
        "mse",
    )
    model(np.zeros((1, 5), "float32"))
    return model


def nested():
    """Models in a model, shared, one of them frozen; never compiled."""
    body = tf_keras.Sequential(
        [layers.Dense(4, activation="relu"), layers.Dense(3)], name="body"
    )
    a = layers.Input((3,), name="a")
    b = layers.Input((3,), name="b")
    start = layers.Input((3,))
    gate = layers.BatchNormalization()(layers.Dense(3)(start))
    gate = tf_keras.Model(start, gate, name="gate")
    gate.trainable = False
    end, middle = body(a), gate(b)
    x = layers.Concatenate()([end, body(middle), a - b])
    outputs = {"sum": end + gate(a), "all": x, "end": end, "middle": middle}
    return tf_keras.Model({"a": a, "b": b}, outputs)


def recurrent():
    """Masks, states, the old hard_sigmoid; an optimizer with decay."""
    tokens = layers.Input((5,), dtype="int32", name="tokens")
    x = layers.Embedding(7, 3, mask_zero=True)(tokens)
    x = layers.Bidirectional(layers.LSTM(2, return_sequences=True))(x)
    x, state = layers.GRU(3, return_sequences=True, return_state=True)(x)
    y = layers.TimeDistributed(layers.Dense(3))(layers.Embedding(7, 2)(tokens))
    y = layers.LSTM(3, recurrent_activation="hard_sigmoid", name="last")(
        y, initial_state=[state, state]
    )
    x = layers.Concatenate()([layers.SimpleRNN(2)(x), y])
    model = tf_keras.Model(tokens, layers.Dense(2)(x))
    model.compile(optimizers.legacy.Adam(0.05, decay=0.1), "mse")
    return model


def attention():
    """Layers whose arguments or weights have changed since."""
    inputs = layers.Input((4, 6))
    known = layers.Normalization(name="known")
    known.adapt(np.random.default_rng(0).normal(2, 3, (8, 4, 6)))
    x = known(inputs)
    x = layers.SeparableConv1D(6, 2, padding="same")(x)
    x = layers.MultiHeadAttention(2, 3)(x, value=inputs)
    x = layers.LayerNormalization()(x)
    x = layers.SpatialDropout1D(0.5)(x)
    x = layers.GlobalAveragePooling1D()(x)
    return tf_keras.Model(inputs, x)


def operations():
    """TensorFlow's functions on symbolic tensors."""
    x = layers.Input((3, 4), name="x")
    y = layers.Input((3, 4), name="y")
    outputs = {
        "abs": tf.abs(x),
        "add": x + y,
        "cast": tf.cast(tf.cast(x, "float16"), "float32"),
        "clip": tf.clip_by_value(x, -0.5, 0.5),
        "concat": tf.concat([x, y], axis=-1),
        "divide": x / (2 + tf.square(y)),
        "elu": tf.nn.elu(x),
        "exp": tf.exp(x),
        "expand": tf.expand_dims(x, 1),
        "gelu": tf.nn.gelu(x, approximate=True),
        "leaky": tf.nn.leaky_relu(x, 0.3),
        "log": tf.math.log(tf.square(x) + 1.0),
        "log_softmax": tf.nn.log_softmax(x),
        "matmul": tf.matmul(x, tf.transpose(y, [0, 2, 1])),
        "max": tf.reduce_max(x, axis=[1, 2]),
        "maximum": tf.maximum(x, y),
        "mean": tf.reduce_mean(x, axis=1, keepdims=True),
        "min": tf.reduce_min(x, axis=-1),
        "minimum": tf.minimum(x, 0.0),
        "negative": -x,
        "power": x**3,
        "prod": tf.reduce_prod(x, axis=1),
        "reflected": 1 - x,
        "relu6": tf.nn.relu6(x * 5.0),
        "reshape": tf.reshape(x, (-1, 2, 6)),
        "rsqrt": tf.math.rsqrt(tf.square(x) + 1.0),
        "selu": tf.nn.selu(x),
        "sigmoid": tf.sigmoid(x),
        "sincos": tf.sin(x) * tf.cos(x),
        "slice": x[:, 1:, ::2],
        "slice_ellipsis": x[..., 1],
        "slice_new": x[:, None, 2],
        "softmax": tf.nn.softmax(x, axis=1),
        "softplus": tf.nn.softplus(x),
        "softsign": tf.nn.softsign(x),
        "sqrt": tf.sqrt(tf.abs(x)),
        "squeeze": tf.squeeze(x[:, :1], axis=1),
        "stack": tf.stack([x, y], axis=1),
        "stopped": tf.stop_gradient(x),
        "sum": tf.reduce_sum(x, axis=2),
        "tanh": tf.tanh(x),
        "tile": tf.tile(x, [1, 2, 1]),
        "where": tf.where(x > y, x, 0.0 * y),
    }
    return tf_keras.Model([x, y], outputs)


def bytecode():
    """A Lambda layer; its code names no path of this machine."""
    double = eval("lambda x: x * 2.0")
    return tf_keras.Sequential(
        [layers.Input((3,)), layers.Lambda(double, name="double")]
    )


MODELS = {
    "functional_float16": ("mixed_float16", functional_float16),
    "sequential_float16": ("mixed_float16", sequential_float16),
    "sequential_bfloat16": ("mixed_bfloat16", sequential_bfloat16),
    "nested": ("float32", nested),
    "recurrent": ("float32", recurrent),
    "attention": ("float32", attention),
    "operations": ("float32", operations),
    "bytecode": ("float32", bytecode),
}
# tf_keras cannot write an ellipsis into an archive; and one with a wrapped
# optimizer is a matter of archives alone.
ENDINGS = {"operations": ("h5",), "sequential_float16": ("keras",)}


def example(shape, dtype, seed, size=4):
    rng = np.random.default_rng(seed)
    if tf.as_dtype(dtype).is_integer:
        return rng.integers(0, 7, (size, *shape)).astype("int32")
    return rng.normal(size=(size, *shape)).astype("float32")


def examples(model):
    """Inputs by name."""
    return {
        tensor.name.split(":")[0]: example(tensor.shape[1:], tensor.dtype, i)
        for i, tensor in enumerate(model.inputs)
    }


def targets(model, size=4):
    if "sparse" in str(model.loss):
        return np.arange(size) % model.output_shape[-1]
    return example(model.output_shape[1:], "float32", 9, size)


def arrays(model):
    """What tf_keras computes with a model."""
    inputs = examples(model)
    fed = inputs if len(inputs) > 1 else next(iter(inputs.values()))
    predicted = model(fed, training=False)
    if not isinstance(predicted, dict):
        predicted = {"": predicted}
    result = {f"inputs/{key}": value for key, value in inputs.items()}
    for key, value in predicted.items():
        result[f"predictions/{key}"] = np.asarray(tf.cast(value, "float32"))
    for layer in model.layers:
        for i, weight in enumerate(layer.get_weights()):
            result[f"weights/{layer.name}/{i}"] = weight
    return result, fed


def train(model):
    if getattr(model, "optimizer", None) is None:
        return {}
    fed = arrays(model)[1]
    for _ in range(STEPS):
        model.train_on_batch(fed, targets(model))
    optimizer = model.optimizer
    variables = getattr(optimizer, "variables", None)
    variables = variables() if callable(variables) else variables
    return {f"slots/{v.name}": np.asarray(v) for v in variables}


def step(model):
    """The weights after one more update, whose gradients a test can make."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return {}
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    variables = model.trainable_variables
    optimizer.apply_gradients([(0.5 * v + 0.125, v) for v in variables])
    return {
        f"next/{layer.name}/{i}": weight
        for layer in model.layers
        for i, weight in enumerate(layer.get_weights())
    }


def write(folder):
    """Write every file into a folder."""
    for name, (policy, build) in MODELS.items():
        tf_keras.backend.clear_session()
        tf_keras.utils.set_random_seed(1)
        mixed_precision.set_global_policy(policy)
        model = build()
        slots = train(model)
        for ending in ENDINGS.get(name, ("h5", "keras")):
            path = folder / f"{name}.{ending}"
            model.save(path)
            if ending == "keras":
                compress(path)
        result = arrays(model)[0] | slots | step(model)
        np.savez_compressed(folder / f"{name}.npz", **result)
    write_tensorflow_2_3(folder)


def compress(path):
    """Deflate an archive, a third of the size: the contents stay."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, part in parts.items():
            archive.writestr(name, part)


def write_tensorflow_2_3(folder):
    """A file of today with the policies and the optimizer of TensorFlow 2.3.

    That version wrote `PolicyV1` with a loss scale, the inner optimizer and
    the loss scale as objects, and neither modules nor registered names.
    """
    tf_keras.backend.clear_session()
    tf_keras.utils.set_random_seed(2)
    mixed_precision.set_global_policy("mixed_float16")
    model = tf_keras.Sequential(
        [
            layers.Dense(3, activation="tanh", input_shape=(4,)),
            layers.Dense(2, dtype="float32"),
        ]
    )
    inner = optimizers.legacy.SGD(0.1, momentum=0.9)
    model.compile(mixed_precision.LossScaleOptimizer(inner), "mse")
    slots = train(model)
    path = folder / "tensorflow_2_3.h5"
    model.save(path)
    result = arrays(model)[0] | slots | step(model)
    np.savez_compressed(path.with_suffix(".npz"), **result)
    policy = {
        "class_name": "PolicyV1",
        "config": {
            "name": "mixed_float16",
            "loss_scale": loss_scale("FixedLossScale", loss_scale_value=128.0),
        },
    }
    with h5py.File(path, "r+") as file:
        file.attrs["keras_version"] = "2.4.0"
        config = json.loads(file.attrs["model_config"])
        config["config"]["layers"][1]["config"]["dtype"] = policy
        file.attrs["model_config"] = json.dumps(without_modules(config))
        training = json.loads(file.attrs["training_config"])
        wrapped = training["optimizer_config"]["config"]["inner_optimizer"]
        training["optimizer_config"] = {
            "class_name": "LossScaleOptimizer",
            "config": {
                "optimizer": wrapped,
                "loss_scale": loss_scale(
                    "DynamicLossScale",
                    initial_loss_scale=64.0,
                    increment_period=5,
                    multiplier=2.0,
                ),
            },
        }
        file.attrs["training_config"] = json.dumps(without_modules(training))


def loss_scale(name, **config):
    return {"class_name": name, "config": config}


def without_modules(value):
    if isinstance(value, list):
        return [without_modules(v) for v in value]
    if not isinstance(value, dict):
        return value
    gone = ("module", "registered_name")
    return {k: without_modules(v) for k, v in value.items() if k not in gone}


def contents(path):
    """Configs, without what differs from run to run, and arrays."""
    if path.suffix == ".npz":
        return {}, dict(np.load(path))
    if path.suffix == ".keras":
        with zipfile.ZipFile(path) as archive:
            configs = {
                "config": stable(json.loads(archive.read("config.json")))
            }
            stream = io.BytesIO(archive.read("model.weights.h5"))
        with h5py.File(stream) as file:
            return configs, datasets(file)
    with h5py.File(path) as file:
        configs = {
            key: stable(json.loads(value))
            for key, value in file.attrs.items()
            if key.endswith("config")
        }
        return configs, datasets(file)


def stable(value):
    if isinstance(value, list):
        return [stable(v) for v in value]
    if not isinstance(value, dict):
        return value
    return {k: stable(v) for k, v in value.items() if k != "shared_object_id"}


def datasets(file):
    found = {}

    def keep(name, item):
        if isinstance(item, h5py.Dataset):
            found[name] = np.asarray(item)

    file.visititems(keep)
    return found


def compare(folder):
    """Raise if the committed files are not those of this tf_keras."""
    names = sorted(p.name for p in folder.iterdir())
    committed = sorted(p.name for p in FILES.iterdir() if p.suffix != ".md")
    if names != committed:
        raise SystemExit(f"files differ: {names} and {committed}")
    for name in names:
        configs, values = contents(folder / name)
        old_configs, old_values = contents(FILES / name)
        if name.startswith("bytecode"):  # of the Python that wrote it
            configs = old_configs = {}
        if configs != old_configs:
            raise SystemExit(f"{name}: the configs differ")
        if sorted(values) != sorted(old_values):
            raise SystemExit(f"{name}: the arrays have other names")
        for key, value in values.items():
            # Another processor may round otherwise in training.
            np.testing.assert_allclose(
                value, old_values[key], rtol=1e-2, atol=1e-4, err_msg=key
            )
        print(f"{name}: as committed")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="into the tests")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write(folder)
        if not arguments.write:
            return compare(folder)
        FILES.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.iterdir()):
            shutil.copy(path, FILES / path.name)
            print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
