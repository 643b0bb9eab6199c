"""What `Float8Monitor` adds to `fit`, at the default sampling.

    KERAS_BACKEND=jax python integration/benchmarks/watching.py

One model, trained by `fit` in blocks of steps: without the callback and with
it, in turn. The clock of the monitor stands still in blocks without it. Told
are the time in the callback from the start of one sample to that of another,
as a share of the rest of this time; and how much longer blocks with it take in
which there is no sample. Each is of the clock, and of the time of the
processor, which other programs disturb less.
"""

import argparse
import json
import time

import keras
import measuring
import numpy as np

import keras_policy_ext as kpe
from keras_policy_ext.diagnostics import monitor as diagnostics_monitor


def network(recipe, layers, size):
    """A compiled model in float8; on PyTorch its steps are eager."""
    hidden = [keras.layers.Dense(size, "relu") for _ in range(layers)]
    model = keras.Sequential([keras.Input((size,)), *hidden])
    kpe.convert(model, recipe)
    model.compile("sgd", "mse", run_eagerly=False, jit_compile="auto")
    return model


class Clock:
    """The time of the clock and that of the processor; it can be stopped."""

    def __init__(self):
        self.stopped = np.zeros(2)

    def both(self):
        """Seconds, without those for which it was stopped."""
        return now() - self.stopped

    def perf_counter(self):
        """As `time.perf_counter`, for the monitor."""
        return self.both()[0]


class Timed(kpe.callbacks.Float8Monitor):
    """The callback, with the time that its samples take."""

    def __init__(self, data, clock):
        super().__init__(data)
        self.clock, self.spent, self.at_samples = clock, np.zeros(2), []

    @property
    def taken(self):
        """The number of samples."""
        return 0 if self.watch is None else self.watch.taken

    def on_train_begin(self, logs=None):
        """Begin, and time the samples of the watch."""
        begun = self.watch is not None
        super().on_train_begin(logs)
        if not begun:
            self._take, self.watch._take = self.watch._take, self._timed

    def _timed(self, data):
        so_far = self.spent.copy(), self.clock.both()
        start = now()
        self._take(data)
        self.spent += now() - start
        self.at_samples.append(so_far)


def now():
    """The time of the clock and that of the processor, in seconds."""
    return np.array([time.perf_counter(), time.process_time()])


def measured(asked, recipe):
    """The overhead of the callback while one model trains."""
    keras.utils.set_random_seed(0)
    model = network(recipe, asked.layers, asked.size)
    shape = (asked.batch * asked.steps, asked.size)
    x = np.random.default_rng(0).normal(size=shape).astype("float32")
    diagnostics_monitor.time = clock = Clock()
    monitor = Timed((x[: asked.batch],) * 2, clock)
    callbacks = {"without": [], "with": [monitor]}
    blocks = []
    while monitor.taken < asked.samples + 2:
        order = list(callbacks)[:: 1 if len(blocks) % 2 else -1]
        took, before = {}, monitor.taken
        for name in order:
            begin = now()
            model.fit(
                x,
                x,
                batch_size=asked.batch,
                shuffle=False,
                verbose=0,
                callbacks=callbacks[name],
            )
            took[name] = now() - begin
            if name == "without":
                clock.stopped += took[name]
        if monitor.taken == before > 0:
            blocks.append(took)
    # The first sample compiles: from the start of the second to that of the
    # last, which ends as many waits as there are samples.
    _, (first, start), *_, (last, end) = monitor.at_samples
    spent = last - first
    ratios = [each["with"] / each["without"] for each in blocks]
    steps = [each["without"][0] / asked.steps for each in blocks]
    return {
        "recipe": recipe,
        "step ms": measuring.rounded(1e3 * np.median(steps)),
        "samples": asked.samples,
        "ms of a sample": measuring.rounded(1e3 * spent[0] / asked.samples),
        "blocks": len(blocks),
        "in the callback %": _percents(spent / (end - start - spent)),
        "between samples %": _percents(np.median(ratios, axis=0) - 1),
    }


def _percents(shares):
    return [measuring.rounded(100 * share, 3) for share in shares]


def main():
    """Print a line of JSON for each recipe."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--recipes", nargs="+", default=["delayed"])
    asked = parser.parse_args()
    print(json.dumps(measuring.environment()))
    for recipe in asked.recipes:
        print(json.dumps(measured(asked, recipe)), flush=True)


if __name__ == "__main__":
    main()
