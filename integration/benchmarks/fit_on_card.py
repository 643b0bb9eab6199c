"""`fit` of a Llama of KerasHub with Adam, for `jax_on_card.py`.

Each way to compute has a process of its own, since the peak of JAX's allocator
cannot be forgotten. The processes make their models, of random weights, at the
same time. Then one after the other takes its first step, and rounds of steps in
turn with the process of bfloat16: only one of them computes at a time.
`torch_on_card.py` has the same model and data.
"""

import argparse
import contextlib
import functools
import json
import os
import queue
import subprocess
import sys
import threading
import time
import warnings

import measuring
import numpy as np
import xla_programs

BASELINE = measuring.BASELINE
WAYS = (BASELINE, "float8 delayed", "float8 rowwise", "stock float8")
SIZES = {  # on a GPU, and to try the script
    "blocks": (2, 1),
    "batch": (8, 2),
    "length": (2048, 8),
    "width": (4096, 32),
    "wide": (14336, 48),
    "heads": (32, 4),
    "groups": (8, 2),
    "vocabulary": (8192, 64),
    "steps": (6, 2),
}
ROUNDS = 5
WARM_UP = 3
SECONDS_TO_ANSWER = 180
MARK = "@"
"""Begins a line that answers."""


def add_arguments(parser, small):
    """Add the options of this row."""
    for name, defaults in SIZES.items():
        parser.add_argument(
            f"--fit-{name}",
            type=int,
            default=defaults[small],
            help=f"of the Llama of KerasHub; here: {defaults[small]}",
        )
    parser.add_argument(
        "--fit-ways",
        type=lambda text: text.split(","),
        default=list(WAYS),
        help=f"separated by commas: {','.join(WAYS)}",
    )


# The process that asks


def rows(asked, say, left):
    """Rows of each way, and last the row of bfloat16.

    Args:
        asked: The parsed command line.
        say: Prints words.
        left: Returns the seconds until the limit.

    Yields:
        Dicts; see `_row`.
    """
    case = (
        f"KerasHub Llama in fit: {asked.fit_blocks} blocks of "
        f"{asked.fit_width}, {asked.fit_wide} in the middle, "
        f"{asked.fit_batch} × {asked.fit_length} tokens"
    )
    ways = [BASELINE, *(w for w in asked.fit_ways if w != BASELINE)]
    failures = RuntimeError, queue.Empty
    with contextlib.ExitStack() as stack:
        processes = {
            way: stack.enter_context(_Process(way, asked)) for way in ways
        }
        for process in processes.values():
            process.tell("make")
        made, first, every = {}, {}, []
        for way, process in processes.items():
            if left() < 0 and first:
                say(f"left out, as the time is over: {case}, {way}")
                continue
            try:
                made[way] = process.answer()
                first[way] = made[way] | process.ask("first")
                say(f"{case}, {way}: {first[way]}")
                if way == BASELINE:
                    continue
                took = {name: [] for name in (BASELINE, way)}
                for _ in range(ROUNDS):
                    for name in took:
                        took[name].append(processes[name].ask("round"))
                every += took[BASELINE]
                end = process.end(asked.kernels and left() > 0)
                yield _row(case, way, asked, took, first[way] | end)
            except failures as error:
                # The ways that follow say something without this one.
                say(f"FAILED {case}, {way}: {type(error).__name__} {error}")
            if way != BASELINE:
                process.stop()
        plain = processes[BASELINE]
        if BASELINE in first:
            every = every or [plain.ask("round") for _ in range(ROUNDS)]
            took = {BASELINE: every}
            end = plain.end(asked.kernels and left() > 0)
            yield _row(case, BASELINE, asked, took, first[BASELINE] | end)


def _row(case, way, asked, took, said):
    """The row of a way.

    Args:
        case: The words for the model.
        way: To compute.
        asked: The parsed command line.
        took: Seconds of a step in each round, by way.
        said: What its process said at the beginning and the end.
    """
    tokens = asked.fit_batch * asked.fit_length
    median = np.median(took[way])
    return {
        "case": case,
        "variant": way,
        **measuring.spread(took, way),
        "tokens_per_s": round(tokens / median),
        **said,
    }


class _Process:
    """A process that trains one model; a context in which it lives."""

    def __init__(self, way, asked):
        sizes = (f"--fit-{n}={getattr(asked, f'fit_{n}')}" for n in SIZES)
        self.process = subprocess.Popen(
            [
                *(sys.executable, __file__, "--way", way, *sizes),
                f"--kernels={asked.kernels}",
            ],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.answers = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            if line.startswith(MARK):
                self.answers.put(json.loads(line[len(MARK) :]))
        self.answers.put({"error": "the process has ended"})

    def ask(self, command):
        """Give a command, and return the answer."""
        self.tell(command)
        return self.answer()

    def tell(self, command):
        """Give a command."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{command}\n")
            self.process.stdin.flush()

    def answer(self):
        """The answer to a command.

        Raises:
            RuntimeError: If there was an error in the process.
            queue.Empty: If there is no answer in time.
        """
        answer = self.answers.get(timeout=SECONDS_TO_ANSWER)
        if isinstance(answer, dict) and "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def end(self, traced):
        """What it says of memory, and of kernels if they are to be traced."""
        return self.ask("end") | (self.ask("trace") if traced else {})

    def stop(self):
        """End the process, and give its memory back."""
        self.process.kill()
        self.process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()


# The process that trains


def model_of(asked, **options):
    """The compiled model of a way, and what became of its layers.

    Args:
        asked: The parsed command line.
        **options: Of `Model.compile`.
    """
    import keras
    import keras_hub

    import keras_policy_ext as kpe

    keras.utils.set_random_seed(0)
    with kpe.policy_scope("mixed_bfloat16"):
        backbone = keras_hub.models.Llama3Backbone(
            vocabulary_size=asked.fit_vocabulary,
            num_layers=asked.fit_blocks,
            num_query_heads=asked.fit_heads,
            num_key_value_heads=asked.fit_groups,
            hidden_dim=asked.fit_width,
            intermediate_dim=asked.fit_wide,
        )
        # Without a task of KerasHub, whose `fit` asks for TensorFlow.
        logits = backbone.token_embedding(backbone.output, reverse=True)
        model = keras.Model(backbone.input, logits)
    found = {}
    if asked.way == "stock float8":
        with warnings.catch_warnings(action="ignore"):  # of each other layer
            model.quantize("float8")
    elif asked.way != BASELINE:
        report = kpe.convert(model, asked.way.removeprefix("float8 "))
        found["converted"] = len(report.converted)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-4), loss, **options)
    if asked.way == "stock float8":
        modes = [
            getattr(each, "quantization_mode", None)
            for each in model._flatten_layers()
        ]
        found["converted"] = modes.count("float8")
    return model, found


def batches_of(asked, steps):
    """Inputs and targets of `fit`, for so many batches."""
    shape = steps * asked.fit_batch, asked.fit_length
    tokens = np.random.default_rng(0).integers(
        asked.fit_vocabulary, size=shape, dtype="int32"
    )
    x = {"token_ids": tokens, "padding_mask": np.ones(shape, "int32")}
    return x, np.roll(tokens, -1, axis=1)


class _Training:
    """A model and its data.

    Args:
        asked: The parsed command line.
    """

    def __init__(self, asked):
        import jax

        self.asked, self.compiles = asked, 0
        self.device = jax.devices()[0]
        self.model = None
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event, _, **__):
        self.compiles += event.endswith("backend_compile_duration")

    def fit(self, steps):
        """Seconds of `fit` over so many batches, of one step."""
        asked = self.asked
        x, y = batches_of(asked, steps)
        start = time.perf_counter()
        self.model.fit(
            x, y, batch_size=asked.fit_batch, shuffle=False, verbose=0
        )
        return (time.perf_counter() - start) / steps

    def make(self):
        """Make the model; the seconds that it took, and what it became."""
        start = time.perf_counter()
        self.model, found = model_of(self.asked)
        return {"making_s": round(time.perf_counter() - start, 1), **found}

    def first(self):
        """Take a first step, and steps to warm up."""
        first = self.fit(1)
        self.fit(WARM_UP)
        self.compiles = 0
        return {"first_step_s": round(first, 2)}

    def round(self):
        """Seconds of a step of a round."""
        return self.fit(self.asked.fit_steps)

    def trace(self):
        """The kernels of a step; see `xla_programs.kernels`."""
        steps, top = self.asked.fit_steps, self.asked.kernels
        run = functools.partial(self.fit, steps)
        return xla_programs.kernels(run, repeats=1, top=top, steps=steps) or {}

    def end(self):
        """What the device says of memory, and how often it was compiled."""
        stats = self.device.memory_stats() or {}

        def mib(key):
            return round(stats[key] / 2**20) if key in stats else None

        return {
            "peak_mib": mib("peak_bytes_in_use"),
            "held_mib": mib("bytes_in_use"),
            "compiled_while_timed": self.compiles,
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--way", choices=WAYS, required=True)
    parser.add_argument("--kernels", type=int, required=True)
    add_arguments(parser, small=False)
    training = _Training(parser.parse_args())
    commands = {
        name: getattr(training, name)
        for name in ("make", "first", "round", "end", "trace")
    }
    for line in sys.stdin:
        try:
            answer = commands[line.strip()]()
        except Exception as error:
            message = str(error).strip()[:2000]
            answer = {"error": f"{type(error).__name__}: {message}"}
        print(MARK + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
