"""Wide and deep on a table: named inputs, normalized, hashed, crossed."""

import keras
import numpy as np
from keras import layers

from programs.data import JIT, fit, integers, normal
from programs.data import predict as predicted


def rows():
    x = {
        "age": 40 + 10 * normal(16, 1),
        "hours": 38 + 5 * normal(16, 1, seed=1),
        "job": integers(5, 16, 1),
    }
    return x, (x["age"] > 40).astype("float32")


def make():
    keras.utils.set_random_seed(0)
    table, _ = rows()
    inputs = {
        name: keras.Input((1,), name=name, dtype=str(value.dtype))
        for name, value in table.items()
    }
    numbers = []
    for name in ("age", "hours"):
        normalization = layers.Normalization(name=f"{name}_normalized")
        normalization.adapt(table[name])
        numbers.append(normalization(inputs[name]))
    job = layers.Flatten()(layers.Embedding(5, 3)(inputs["job"]))
    deep = layers.concatenate([*numbers, job])
    for units in (16, 8):
        deep = layers.Dense(units)(deep)
        deep = layers.BatchNormalization()(deep)
        deep = layers.ReLU()(deep)
        deep = layers.Dropout(0.1, seed=units)(deep)
    wide = layers.CategoryEncoding(5, output_mode="one_hot")(inputs["job"])
    merged = layers.concatenate([wide, deep])
    outputs = layers.Dense(1, activation="sigmoid")(merged)
    model = keras.Model(inputs, outputs)
    model.compile(
        keras.optimizers.Ftrl(0.05),
        "binary_crossentropy",
        metrics=[keras.metrics.BinaryAccuracy()],
        jit_compile=JIT,
    )
    return model


def train(model):
    x, y = rows()
    weights = np.where(y[:, 0] > 0, 2.0, 1.0).astype("float32")
    return fit(model, x, y, sample_weight=weights)


def predict(model):
    return predicted(model, rows()[0])
