"""Arrays for the programs."""

import keras
import numpy as np

JIT = keras.backend.backend() == "jax"
"""For `compile`: on small models XLA takes longer than it saves."""


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def integers(high, *shape, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, high, size=shape).astype("int32")


def images(count=16, size=8, channels=1, seed=0):
    """Bright squares on noise, and the quarter that each is in."""
    labels = integers(4, count, seed=seed)
    x = 0.1 * normal(count, size, size, channels, seed=seed)
    half = size // 2
    for image, label in zip(x, labels, strict=True):
        row, column = half * (label // 2), half * (label % 2)
        image[row : row + half, column : column + half] += 1.0
    return x, labels


def fit(model, *data, epochs=2, batch_size=8, **kwargs):
    """The loss of each epoch."""
    history = model.fit(
        *data,
        epochs=epochs,
        batch_size=batch_size,
        shuffle=False,
        verbose=0,
        **kwargs,
    )
    return history.history["loss"]


def predict(model, x):
    """What `model.predict` gives, in one array."""
    outputs = keras.tree.flatten(model.predict(x, batch_size=8, verbose=0))
    return np.concatenate([np.ravel(y) for y in outputs])
