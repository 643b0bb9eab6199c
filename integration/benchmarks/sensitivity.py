"""How well `kpe.tune` orders layers: its scores against brute force.

    KERAS_BACKEND=torch python integration/benchmarks/sensitivity.py \\
        [--model transformer mlp] [--recipe nvfp4 current] [--steps 600]

A small model is trained in float32. `tune` scores its layers on one batch. Then
each layer alone gets the recipe, and the rise of the loss is measured on other
data. The probabilities of the labels of that data are known, so the loss is
their cross-entropy, without the noise of drawn labels. The script prints the
rank correlation (Spearman) of scores and rises, and what the search cost.
"""

import argparse
import re
import time

import keras
import numpy as np
from keras import layers, ops

import keras_policy_ext as kpe
from keras_policy_ext.conversion.in_place import converted

CLASSES, LENGTH, WIDTH = 32, 24, 48


def tokens(number, seed):
    """Sequences of a Markov chain, with the probabilities of what follows."""
    chain = np.random.default_rng(0)
    # What follows depends on the last token and a little on the one before.
    likely = chain.dirichlet(np.full(CLASSES, 0.2), size=(4, CLASSES))
    rng = np.random.default_rng(seed)
    found = rng.integers(0, CLASSES, (number, LENGTH + 1))
    sums = likely.cumsum(-1)
    for step in range(2, LENGTH + 1):
        before = sums[found[:, step - 2] % 4, found[:, step - 1]]
        drawn = rng.random((number, 1)) > before
        found[:, step] = np.minimum(drawn.sum(-1), CLASSES - 1)
    first = np.full((number, 1, CLASSES), 1 / CLASSES)
    after = likely[found[:, :-2] % 4, found[:, 1:-1]]
    x, y = found[:, :-1].astype("int32"), found[:, 1:].astype("int32")
    return x, y, np.concatenate([first, after], 1).astype("float32")


def vectors(number, seed):
    """Vectors of a teacher's classes, with their probabilities."""
    teacher = np.random.default_rng(0)
    a, b = teacher.normal(size=(32, 20)), teacher.normal(size=(20, 10))
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(number, 32)).astype("float32")
    logits = np.tanh(x @ a / 3) @ b / 0.8
    y = (logits + rng.gumbel(size=logits.shape)).argmax(-1)
    likely = np.exp(logits - logits.max(-1, keepdims=True))
    likely /= likely.sum(-1, keepdims=True)
    return x, y.astype("int32"), likely.astype("float32")


class Positions(layers.Layer):
    def build(self, shape):
        self.table = self.add_weight(shape=shape[1:], name="table")

    def call(self, x):
        return x + self.table


def transformer():
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = Positions()(layers.Embedding(CLASSES, WIDTH)(inputs))
    for block in range(3):
        y = layers.LayerNormalization()(x)
        heads = layers.MultiHeadAttention(3, WIDTH // 3, name=f"att{block}")
        x = x + heads(y, y, use_causal_mask=True)
        y = layers.LayerNormalization(name=f"before_up{block}")(x)
        y = layers.Dense(4 * WIDTH, "gelu", name=f"up{block}")(y)
        x = x + layers.Dense(WIDTH, name=f"down{block}")(y)
    x = layers.LayerNormalization()(x)
    return keras.Model(inputs, layers.Dense(CLASSES, name="logits")(x))


def mlp():
    inputs = keras.Input((32,))
    x = layers.Dense(64, name="embed")(inputs)
    for block in range(1, 8):
        y = layers.LayerNormalization(name=f"before_up{block}")(x)
        x = x + layers.Dense(64, "relu", name=f"up{block}")(y)
    return keras.Model(inputs, layers.Dense(10, name="logits")(x))


def plant(model, block, factor):
    """Make two channels larger before a layer; the function is the same."""
    norm, dense = (
        model.get_layer(f"{name}{block}") for name in ("before_up", "up")
    )
    scales = np.ones(norm.gamma.shape[0], "float32")
    scales[[1, 7]] = factor
    for variable in (norm.gamma, norm.beta):
        variable.assign(variable * scales)
    dense.kernel.assign(dense.kernel / scales[:, None])


# The model, its data, outliers by block, examples for a batch and to measure.
MODELS = {
    "transformer": (transformer, tokens, {0: 30, 2: 8}, 256, 2048),
    "mlp": (mlp, vectors, {2: 30, 4: 300, 6: 3000}, 2048, 65536),
}


def trained(name, steps):
    make, data, outliers, batch, measured = MODELS[name]
    keras.utils.set_random_seed(0)
    model = make()
    rate = keras.optimizers.schedules.CosineDecay(2e-3, steps)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(rate), loss)
    x, y, _ = data(64 * steps, 1)
    model.fit(x, y, batch_size=64, verbose=0)
    for block, factor in outliers.items():
        plant(model, block, factor)
    return model, data(batch, 2)[:2], data(measured, 3)


def losses(model, x, likely, size=1024):
    """The cross-entropy of each example."""
    found = []
    for i in range(0, len(x), size):
        logits = ops.stop_gradient(model(x[i : i + size], training=False))
        each = keras.losses.categorical_crossentropy(
            likely[i : i + size], logits, from_logits=True
        )
        each = ops.convert_to_numpy(each).astype("float64")
        found.append(each.reshape(len(each), -1).mean(1))
    return np.concatenate(found)


def brute_force(model, recipe, paths, x, likely):
    """The rise of the loss by each layer alone, and its standard error."""
    before = losses(model, x, likely)
    for path in paths:
        with converted(model, recipe, include=f"^{re.escape(path)}$"):
            rise = losses(model, x, likely) - before
        yield rise.mean(), rise.std() / len(rise) ** 0.5


def spearman(a, b):
    ranks = [np.argsort(np.argsort(each)) for each in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def step_seconds(model, batch):
    """The time of a step in float32, not compiled."""
    model.compile("sgd", model.loss, run_eagerly=True)
    model.train_on_batch(*batch)
    start = time.perf_counter()
    for _ in range(3):
        model.train_on_batch(*batch)
    return (time.perf_counter() - start) / 3


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", nargs="+", default=list(MODELS))
    parser.add_argument("--recipe", nargs="+", default=["nvfp4", "current"])
    parser.add_argument("--steps", type=int, default=1000)
    arguments = parser.parse_args()
    for name in arguments.model:
        model, batch, (x, _, likely) = trained(name, arguments.steps)
        for recipe in arguments.recipe:
            start = time.perf_counter()
            tuned = kpe.tune(model, batch, 1.0, recipe)
            seconds = time.perf_counter() - start
            paths = [score.layer for score in tuned.scores]
            expected = [score.loss_increase for score in tuned.scores]
            rises = []
            found = brute_force(model, recipe, paths, x, likely)
            for path, score, (rise, error) in zip(
                paths, expected, found, strict=True
            ):
                rises.append(rise)
                print(
                    f"  {path:40} expected {score:.2e}, "
                    f"rose by {rise:.2e} ± {error:.0e}",
                    flush=True,
                )
            print(
                f"{keras.backend.backend()}, {name}, {recipe}: Spearman "
                f"{spearman(expected, rises):.2f} for {len(paths)} layers; "
                f"loss {tuned.loss:.3f}, all layers: expected "
                f"{tuned.expected_increase:.2e} ± {tuned.noise:.0e}, "
                f"measured {tuned.measured_increase:.2e}; {seconds:.1f} s",
                flush=True,
            )
        # Last, since it trains.
        print(
            f"  a step takes {step_seconds(model, batch):.2f} s, not compiled"
        )


if __name__ == "__main__":
    main()
