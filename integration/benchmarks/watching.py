"""What a callback adds to `fit`, at its defaults.

    KERAS_BACKEND=jax python integration/benchmarks/watching.py \\
        [--callback monitor recorder]

One model, trained by `fit` in blocks of steps: without the callback and with
it, in turn. The clock of the callback stands still in blocks without it. Told
are the time in the callback from the start of one sample to that of another,
as a share of the rest of this time; and how much longer blocks with it take in
which there is no sample. Each is of the clock, and of the time of the
processor, which other programs disturb less. A sample of `FlightRecorder` is a
save of the model.
"""

import argparse
import contextlib
import itertools
import json
import pathlib
import tempfile
import time

import keras
import measuring
import numpy as np

import keras_policy_ext as kpe
from keras_policy_ext.ext.replay import flight_recorder
from keras_policy_ext.ext.watch import monitor


def network(recipe, layers, size):
    """A compiled model in float8; on PyTorch its steps are eager."""
    hidden = [keras.layers.Dense(size, "relu") for _ in range(layers)]
    model = keras.Sequential([keras.Input((size,)), *hidden])
    kpe.convert(model, recipe)
    model.compile("sgd", "mse", run_eagerly=False, jit_compile="auto")
    return model


class Clock:
    """The time of the clock and that of the processor; it can be stopped."""

    def __init__(self, of_processor):
        self.stopped, self.number = np.zeros(2), int(of_processor)

    def both(self):
        """Seconds, without those for which it was stopped."""
        return now() - self.stopped

    def perf_counter(self):
        """As `time.perf_counter`, for the callback."""
        return self.both()[self.number]


class Timed:
    """A callback, with the time that its own functions take."""

    def __init__(self, clock, *args):
        super().__init__(*args)
        self.clock, self.spent, self.at_samples = clock, np.zeros(2), []

    @contextlib.contextmanager
    def _timed(self):
        so_far = self.spent.copy(), self.clock.both()
        start, before = now(), self.taken
        yield
        self.spent += now() - start
        if self.taken > before:
            self.at_samples.append(so_far)


class Monitor(Timed, kpe.callbacks.Float8Monitor):
    """`Float8Monitor`."""

    def __init__(self, x, asked, clock):
        monitor.time = clock
        super().__init__(clock, (x[: asked.batch],) * 2)
        self.size = asked.batch

    @property
    def taken(self):
        """The number of samples."""
        return 0 if self.watch is None else self.watch.taken

    def fit(self, model, x, callbacks):
        """Take a block of steps."""
        size = self.size
        options = {"batch_size": size, "shuffle": False, "verbose": 0}
        model.fit(x, x, callbacks=callbacks, **options)

    def on_train_begin(self, logs=None):
        """Begin, and time the samples of the watch."""
        begun = self.watch is not None
        super().on_train_begin(logs)
        if not begun:
            self._take, self.watch._take = self.watch._take, self._sample

    def _sample(self, data):
        with self._timed():
            self._take(data)


class Recorder(Timed, kpe.callbacks.FlightRecorder):
    """`FlightRecorder`."""

    def __init__(self, x, asked, clock):
        flight_recorder.time = clock
        self.folder = tempfile.TemporaryDirectory()
        path = pathlib.Path(self.folder.name, "crash.zip")
        super().__init__(clock, path)
        self.steps = asked.steps

    @property
    def taken(self):
        """The number of saves."""
        return 0 if self.recorder is None else self.recorder._saves

    def fit(self, model, x, callbacks):
        """Take a block of steps."""
        batches = [(each, each) for each in np.split(x, self.steps)]
        data = (each for each in itertools.cycle(batches))
        model.fit(
            self.watching(batches) if callbacks else data,
            steps_per_epoch=self.steps,
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
        )

    def on_train_begin(self, logs=None):
        """Save the model before the first block alone."""
        if self.recorder is None:
            super().on_train_begin(logs)

    def on_train_batch_end(self, batch, logs=None):
        """Keep the step; save the model if it is time."""
        with self._timed():
            super().on_train_batch_end(batch, logs)


CALLBACKS = {"monitor": Monitor, "recorder": Recorder}


def now():
    """The time of the clock and that of the processor, in seconds."""
    return np.array([time.perf_counter(), time.process_time()])


def measured(asked, name, recipe):
    """The overhead of a callback while one model trains."""
    keras.utils.set_random_seed(0)
    model = network(recipe, asked.layers, asked.size)
    shape = (asked.batch * asked.steps, asked.size)
    x = np.random.default_rng(0).normal(size=shape).astype("float32")
    clock = Clock(asked.processor)
    callback = CALLBACKS[name](x, asked, clock)
    callbacks = {"without": [], "with": [callback]}
    blocks = []
    while callback.taken < asked.samples + 2:
        order = list(callbacks)[:: 1 if len(blocks) % 2 else -1]
        took, before = {}, callback.taken
        for kind in order:
            begin = now()
            callback.fit(model, x, callbacks[kind])
            took[kind] = now() - begin
            if kind == "without":
                clock.stopped += took[kind]
        if callback.taken == before > 0:
            blocks.append(took)
    # The first sample compiles: from the start of the second to that of the
    # last.
    _, (first, start), *_, (last, end) = callback.at_samples
    spent, samples = last - first, len(callback.at_samples) - 2
    ratios = [each["with"] / each["without"] for each in blocks]
    steps = [each["without"][0] / asked.steps for each in blocks]
    return {
        "callback": name,
        "recipe": recipe,
        "step ms": measuring.rounded(1e3 * np.median(steps)),
        "samples": samples,
        "ms of a sample": measuring.rounded(1e3 * spent[0] / samples),
        "blocks": len(blocks),
        "in the callback %": _percents(spent / (end - start - spent)),
        "between samples %": _percents(np.median(ratios, axis=0) - 1),
    }


def _percents(shares):
    return [measuring.rounded(100 * share, 3) for share in shares]


def main():
    """Print a line of JSON for each recipe."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    names = list(CALLBACKS)
    parser.add_argument("--callback", nargs="+", default=names, choices=names)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument(
        "--processor",
        action="store_true",
        help="the callback goes by the time of the processor",
    )
    parser.add_argument("--recipes", nargs="+", default=["delayed"])
    asked = parser.parse_args()
    print(json.dumps(measuring.environment()))
    for name, recipe in itertools.product(asked.callback, asked.recipes):
        print(json.dumps(measured(asked, name, recipe)), flush=True)


if __name__ == "__main__":
    main()
