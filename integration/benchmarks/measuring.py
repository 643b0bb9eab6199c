"""What the benchmarks share: rounds of calls, the machine, a JSON file.

Functions are always called in turn within one process, so that a machine that
slows down slows all, and what is told is the median of the ratios of single
rounds.
"""

import argparse
import datetime
import functools
import importlib.metadata
import json
import os
import pathlib
import re
import time

import keras
import numpy as np

import keras_policy_ext as kpe

BACKEND = keras.backend.backend()
RESULTS = pathlib.Path(__file__).parent / "results"
BASELINE = "bfloat16"
SAMPLE_SECONDS = 0.02
"""A sample repeats a call until it takes so long."""


def finish(value=None):
    """Wait until what was asked for is computed."""
    if BACKEND == "jax":
        import jax

        jax.block_until_ready(value)
    elif BACKEND == "torch":
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
    elif on_gpu():
        import tensorflow as tf

        tf.test.experimental.sync_devices()


def seconds(function, repeats=1, clock=time.perf_counter):
    """How long one call takes, of some that follow one another."""
    start = clock()
    for _ in range(repeats):
        value = function()
    finish(value)
    return (clock() - start) / repeats


def interleaved(functions, rounds, clock=time.perf_counter):
    """Call each function in every round, in turning order.

    Args:
        functions: By name. Each is called twice before, and the second time
            says how often it has to be repeated to be measured.
        rounds: How many.
        clock: Tells seconds; `time.process_time` those of all processors.

    Returns:
        For each name the seconds that a call took in each round.
    """
    repeats = {}
    for name, function in functions.items():
        seconds(function)
        once = seconds(function, clock=clock)
        repeats[name] = int(np.clip(SAMPLE_SECONDS / once, 1, 1000))
    took = {name: np.empty(rounds) for name in functions}
    names = list(functions)
    for number in range(rounds):
        for step in range(len(names)):
            name = names[(number + step) % len(names)]
            took[name][number] = seconds(functions[name], repeats[name], clock)
    return took


def times(took, baseline=BASELINE):
    """What a row of the results says of the seconds of all rounds.

    Returns:
        For each name `median_ms` and `speedup_over_<baseline>`, the median
        of the ratios of the rounds, with its quartiles.
    """
    rows = {}
    for name, each in took.items():
        ratios = took[baseline] / each
        low, middle, high = np.percentile(ratios, [25, 50, 75])
        rows[name] = {
            "median_ms": rounded(1e3 * np.median(each)),
            f"speedup_over_{baseline}": rounded(middle),
            "quartiles": [rounded(low), rounded(high)],
        }
    return rows


def spread(took, name, baseline=BASELINE):
    """What a row says of the seconds of all rounds, without quartiles.

    Args:
        took: Seconds of a call in each round, by name.
        name: Of the row.
        baseline: What its speed is compared with, if it was measured.

    Returns:
        A dict: `median_us`, `lowest_us`, `highest_us`, and
        `against_<baseline>`, the median, the lowest and the highest ratio of
        the speeds in one round.
    """
    functions, mine = (np.median, np.min, np.max), np.asarray(took[name])
    kinds = ("median_us", "lowest_us", "highest_us")
    found = {
        kind: rounded(1e6 * function(mine))
        for kind, function in zip(kinds, functions, strict=True)
    }
    if baseline in took:
        ratios = np.asarray(took[baseline]) / mine
        found[f"against_{baseline}"] = [rounded(f(ratios)) for f in functions]
    return found


def rounded(x, digits=4):
    """A number with so many digits."""
    return float(f"{x:.{digits}g}")


def on_gpu():
    """Whether Keras's backend computes on a GPU."""
    return "cpu" not in device().lower()


@functools.cache
def device():
    """The name of the device that the backend computes on."""
    if BACKEND == "torch":
        import torch

        if torch.cuda.is_available():
            return torch.cuda.get_device_name()
    elif BACKEND == "jax":
        import jax

        if jax.default_backend() != "cpu":
            return jax.devices()[0].device_kind
    else:
        import tensorflow as tf

        for gpu in tf.config.list_physical_devices("GPU"):
            found = tf.config.experimental.get_device_details(gpu)
            return found.get("device_name", gpu.name)
    return f"CPU ({_processor()}, {os.cpu_count()} cores)"


def _processor():
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        (name, *_) = re.findall(r"model name\s*: (.*)", info.read_text())
        return name
    return "unknown"


def environment():
    """The device, and what is installed of which version."""
    peers = {"torch": ["torchao"], "jax": ["flax"]}.get(BACKEND, [])
    names = (BACKEND, *peers, "numpy", "ml_dtypes")
    versions = {"keras-policy-ext": kpe.__version__, "keras": keras.__version__}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "backend": BACKEND,
        "device": device(),
        "versions": versions,
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "date": datetime.date.today().isoformat(),
    }


def arguments(description, **settings):
    """The command line of a benchmark.

    Args:
        description: The docstring of the script; its first line is told.
        settings: Names of integer options, or lists of them, with defaults
            as a pair: on a CPU, and on a GPU.

    Returns:
        The parsed arguments, `out` among them.
    """
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    place = on_gpu()
    for name, defaults in settings.items():
        default = defaults[place]
        several = isinstance(default, list)
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=int,
            nargs="+" if several else None,
            default=default,
            help=f"here: {default}",
        )
    parser.add_argument(
        "--out", type=pathlib.Path, default=RESULTS, help="folder of the JSON"
    )
    return parser.parse_args()


def write(benchmark, settings, rows, folder=RESULTS):
    """Write results as JSON, and print them.

    Args:
        benchmark: Its name.
        settings: A namespace or dict of what was asked for.
        rows: Dicts: `case`, `variant` and what was measured.
        folder: Where the file goes.

    Returns:
        The path: `<benchmark>_<backend>_<device>.json`.
    """
    where = environment()
    kind = re.sub(r"[^a-z0-9]+", "-", where["device"].lower()).strip("-")
    kind = kind if on_gpu() else "cpu"
    settings = settings if isinstance(settings, dict) else vars(settings)
    settings = {k: v for k, v in settings.items() if k != "out"}
    found = {
        "benchmark": benchmark,
        "environment": where,
        "settings": settings,
        "rows": rows,
    }
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{benchmark}_{BACKEND}_{kind}.json"
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print(" | ".join(f"{key}: {value}" for key, value in row.items()))
    print(f"written: {path}")
    return path
