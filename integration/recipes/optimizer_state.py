"""Trains small models with optimizer state in one byte a number.

    KERAS_BACKEND=jax python integration/recipes/optimizer_state.py text \\
        [--steps 400] [--seeds 0 1 2] [--optimizers adam lion] \\
        [--states float32 float8 mx]

The task is `text`, the demo's decoder on the demo's text, or `images`, a
convnet that finds one of ten patterns in noise. Images are never repeated.
The learning rate rises for a tenth of the steps, and falls to a hundredth.
For each seed all states start from the same weights and see the same batches.

A state is `float32`; `float8` or `mx`, as `quantize_state` has them; `nudged`,
which is float32 from weights that differ by one part in ten thousand, and shows
how much is chance; or one of FORMS, with Adam: other ways to store second
moments, which the package does not have. Every run is appended to the file of
results, and one that is there already is not repeated. Then the table of the
file is printed.
"""

import argparse
import collections
import json
import math
import os
import pathlib

import keras
import numpy as np
from keras import ops

import keras_policy_ext as kpe
from keras_policy_ext.ext.demo import Settings, text, train
from keras_policy_ext.ext.moments.codes import (
    dequantize_moments,
    quantize_moments,
)
from keras_policy_ext.ext.stochastic.rounding import (
    key_of_use,
    random_bits,
    round_to_neighbour,
)

RESULTS = pathlib.Path(__file__).parent / "results"
E4M3 = "float8_e4m3fn"
ROUND_TO_NEAREST = 1 << 15
SIZES = Settings(context=64, width=64, heads=4, hidden=256, blocks=2)

OPTIMIZERS = {
    "adam": lambda rate: keras.optimizers.Adam(rate),
    "adamw": lambda rate: keras.optimizers.AdamW(rate, weight_decay=0.05),
    "lion": lambda rate: keras.optimizers.Lion(rate),
    "sgd": lambda rate: keras.optimizers.SGD(rate, momentum=0.9),
}
RATES = {"adam": 2e-3, "adamw": 2e-3, "lion": 3e-4, "sgd": 0.1}


class Text:
    """Tell the next character of Python's help topics."""

    def __init__(self):
        self.corpus = text.load(None, SIZES.context)

    def model(self):
        return train.decoder(self.corpus.tokens, SIZES, "float32")

    def batch(self, step, seed):
        return self.corpus.batch(step, seed, 8, SIZES.context)

    def test(self):
        return self.corpus.validation_batch(1024, SIZES.context)


class Images:
    """Tell which of ten patterns is hidden in an image of noise."""

    def __init__(self):
        self.patterns = np.random.default_rng(0).normal(0.0, 0.9, (10, 5, 5))

    def model(self):
        x = inputs = keras.Input((12, 12, 1))
        for filters, stride in ((16, 1), (32, 2), (64, 2)):
            x = keras.layers.Conv2D(
                filters, 3, stride, padding="same", use_bias=False
            )(x)
            x = keras.layers.BatchNormalization()(x)
            x = keras.layers.Activation("relu")(x)
        x = keras.layers.GlobalMaxPooling2D()(x)
        return keras.Model(inputs, keras.layers.Dense(10)(x))

    def batch(self, step, seed, count=32):
        random = np.random.default_rng((seed, step))
        images = random.normal(0.0, 1.0, (count, 12, 12, 1))
        labels = random.integers(10, size=count)
        places = random.integers(8, size=(count, 2))
        for image, label, (row, column) in zip(
            images, labels, places, strict=True
        ):
            image[row : row + 5, column : column + 5, 0] += self.patterns[label]
        return images.astype("float32"), labels.astype("int32")

    def test(self):
        return self.batch(0, 10**6, 4096)


TASKS = {"text": Text, "images": Images}


def stored(kind):
    """Round as the package does."""

    def rounded(x, key):
        codes, scale = quantize_moments(x, kind, "float8", key)
        return dequantize_moments(codes, scale, kind, "float8")

    return rounded


def root_in_e4m3(x, key):
    return ops.square(stored("first")(ops.sqrt(x), key))


def unbiased(x, key):
    """The square root, rounded so that its square is right on average.

    Between the neighbours n and n + 1, in units of their distance, the root
    n + f is rounded up with a chance of f (2n + f) / (2n + 1).
    """
    root = ops.reshape(ops.sqrt(x), (-1, 256))
    scale = ops.max(root, axis=1, keepdims=True) / 448.0
    scale = ops.where(scale > 0.0, scale, 1.0)
    q = root / scale
    exponent = ops.floor(ops.log2(ops.maximum(q, 2.0**-6)))
    unit = ops.power(2.0, exponent - 4.0)
    n = ops.floor(q / unit)
    f = q / unit - n
    q = (n + f * (2 * n + f) / (2 * n + 1)) * unit
    return stored("second")(ops.reshape(ops.square(q * scale), x.shape), key)


def expanded(at_random):
    """Dynamic range expansion, as COAT's kernels have it (arXiv 2410.19313).

    For 128 numbers, e4m3 codes of (|x| / center)^k: k makes the range of the
    block that of the format, in steps of 1/16, and the center is the geometric
    mean of the least and the largest.
    """

    def rounded(x, key):
        rows = ops.reshape(x, (-1, 128))
        size = ops.abs(rows)
        most = ops.max(size, axis=1, keepdims=True) + 1e-20
        least = ops.min(size, axis=1, keepdims=True) + 1e-20
        center = ops.sqrt(most) * ops.sqrt(least)
        log_range = ops.maximum(ops.log2(most / least), 2.0**-4)
        k = ops.floor(16.0 * math.log2(448.0**2 / 2) / log_range) / 16.0
        largest = ops.power(most / center, k) / 448.0
        q = ops.power(size / center, k) / largest
        bits = ROUND_TO_NEAREST
        if at_random:
            bits = random_bits((1, *rows.shape), key)[0]
        q = round_to_neighbour(ops.minimum(q, 448.0), bits, E4M3)
        size = ops.power(q * largest, 1.0 / k) * center
        size = ops.where(q > 0.0, size, 0.0)
        return ops.reshape(ops.sign(rows) * size, x.shape)

    return rounded


def unrounded(x, key):
    return x


#: How first moments and second ones are rounded, for Adam.
FORMS = {
    "root": (stored("first"), stored("second")),
    "root-unbiased": (stored("first"), unbiased),
    "root-e4m3": (stored("first"), root_in_e4m3),
    "e4m3": (stored("first"), stored("first")),
    "expanded": (stored("first"), expanded(True)),
    "coat": (expanded(False), expanded(False)),
    "first-only": (stored("first"), unrounded),
    "second-only": (unrounded, stored("second")),
}


class RoundedAdam(keras.optimizers.Adam):
    """Adam whose moments are rounded after each step, in float32."""

    def __init__(self, rate, form):
        super().__init__(rate)
        self.form = form

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate)
        if math.prod(variable.shape) < 4096:
            return
        index = self._get_variable_index(variable)
        step = ops.cast(ops.convert_to_tensor(self.iterations), "int32")
        slots = (self._momentums[index], self._velocities[index])
        for number, (slot, rounded) in enumerate(
            zip(slots, FORMS[self.form], strict=True)
        ):
            key = key_of_use(step, 0, 2 * index + number)
            slot.assign(rounded(ops.convert_to_tensor(slot), key))


def main():
    options = _options()
    path = options.results / "optimizer_state.json"
    for name in options.optimizers:
        for state in options.states:
            for run in trained(name, state, options, _read(path)):
                _append(path, run)
                print(json.dumps(run), flush=True)
    print(table(_read(path)))


def _options():
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=TASKS)
    parser.add_argument(
        "--states", nargs="+", default=["float32", "float8", "mx"]
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--optimizers", nargs="+", choices=OPTIMIZERS, default=["adam"]
    )
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    return parser.parse_args()


def trained(name, state, options, known):
    """Yield what is kept of the run of each seed."""
    keys = [
        {
            "task": options.task,
            "optimizer": name,
            "steps": options.steps,
            "state": state,
            "seed": seed,
        }
        for seed in options.seeds
    ]
    keys = [
        k for k in keys if not any(k.items() <= run.items() for run in known)
    ]
    if not keys:
        return
    task = TASKS[options.task]()
    model = task.model()
    optimizer = made(name, state, options.steps)
    model.compile(
        optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    optimizer.build(model.trainable_variables)
    initial = [ops.convert_to_numpy(v) for v in optimizer.variables]
    for key in keys:
        model.set_weights(start(task, key["seed"], state == "nudged"))
        for variable, value in zip(optimizer.variables, initial, strict=True):
            variable.assign(value)
        losses = []
        for step in range(options.steps):
            model.reset_metrics()
            x, y = task.batch(step, key["seed"])
            losses.append(float(model.train_on_batch(x, y)))
        last = losses[-max(options.steps // 10, 1) :]
        test = model.evaluate(*task.test(), batch_size=64, verbose=0)
        yield {
            **key,
            "largest": max(losses),
            "last": np.mean(last),
            "test": test,
        }


def made(name, state, steps):
    """An optimizer whose state is stored in some way."""
    rising = steps // 10
    rate = keras.optimizers.schedules.CosineDecay(
        RATES[name] / 100,
        steps - rising,
        alpha=0.01,
        warmup_target=RATES[name],
        warmup_steps=rising,
    )
    if state in FORMS:
        return RoundedAdam(rate, state)
    optimizer = OPTIMIZERS[name](rate)
    if state in ("float8", "mx"):
        kpe.optimizers.quantize_state(optimizer, state)
    return optimizer


def start(task, seed, nudged):
    """The weights of a new model."""
    keras.utils.set_random_seed(seed)
    weights = task.model().get_weights()
    if nudged:
        random = np.random.default_rng(seed)
        weights = [
            w * random.uniform(1 - 1e-4, 1 + 1e-4, w.shape) for w in weights
        ]
    return weights


def table(runs):
    """The mean losses of each state, and how far they are from float32's."""
    groups = collections.defaultdict(dict)
    for run in runs:
        case = tuple(run[key] for key in ("task", "optimizer", "steps"))
        groups[case, run["state"]][run["seed"]] = run
    lines = ["task optimizer steps | state | seeds | last tenth | test"]
    for (case, state), own in groups.items():
        base = groups.get((case, "float32"), {})
        seeds = [seed for seed in own if seed in base]
        parts = [" ".join(map(str, case)), state, str(len(own))]
        for loss in ("last", "test"):
            mean = np.mean([run[loss] for run in own.values()])
            gaps = [100 * (own[s][loss] / base[s][loss] - 1) for s in seeds]
            error = np.std(gaps, ddof=1) / len(gaps) ** 0.5 if seeds[1:] else 0
            gap = f" {np.mean(gaps):+.2f} ± {error:.2f} %" if seeds else ""
            parts.append(f"{mean:.4f}{gap}")
        lines.append(" | ".join(parts))
    return "\n".join(lines)


def _read(path):
    return json.loads(path.read_text("utf-8")) if path.exists() else []


def _append(path, run):
    """Read and write at once: another process may have appended since."""
    runs = [*_read(path), run]
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.part")
    lines = ",\n".join(json.dumps(each) for each in runs)
    unfinished.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    os.replace(unfinished, path)


if __name__ == "__main__":
    main()
