"""What float8 gives on this GPU with PyTorch: rows beside bfloat16, in minutes.

First it checks the numbers: codes of the casts, the straight path beside the
general one, and a step of training. Then it times steps as `fit` takes them:
eager, compiled, and compiled with CUDA graphs, which Keras 3.16 can. Those of
all recipes are interleaved with bfloat16, and the profiler adds up the kernels.
A row that fails or takes too long is noted, and the next one runs. The table
comes last.

    KERAS_BACKEND=torch python integration/benchmarks/torch_on_card.py \
        --limit 600 --out card.json

`--small` tries the script, also on a CPU, where nothing runs as a CUDA graph.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import importlib.util
import json
import pathlib
import signal
import statistics
import time

import fit_on_card
import keras
import numpy as np
import torch
import torch._dynamo
from peers import Torchao
from steps_of_layers import sgd
from workloads import Llama, dense, normal

import keras_policy_ext as kpe
from keras_policy_ext import backends, kernels
from keras_policy_ext.backends.both_layouts import ScaleHint, Wanted
from keras_policy_ext.backends.torch import casts
from keras_policy_ext.numerics import casting
from keras_policy_ext.numerics.scale_sources import ScaleRule
from keras_policy_ext.recipes import Quantization

RECIPES = "delayed", "current", "rowwise"
BASE = "bfloat16"
NAMES = (BASE, *RECIPES)
HOWS = EAGER, COMPILED, GRAPHS = "eager", "compiled", "CUDA graphs"
LLAMA = Llama(2, 2048, 4096, 14336, 32, 8)
SMALL_LLAMA = Llama(2, 32, 64, 128, 2, 1)


@dataclasses.dataclass
class Run:
    """What was found so far, and how much time is left."""

    limit: float
    limit_of_row: float
    small: bool
    size: int
    only: list | None = None
    started: float = dataclasses.field(default_factory=time.monotonic)
    checks: dict = dataclasses.field(default_factory=dict)
    rows: dict = dataclasses.field(default_factory=dict)
    notes: list = dataclasses.field(default_factory=list)

    @property
    def seconds(self):
        """Since the start."""
        return time.monotonic() - self.started

    def say(self, text):
        """Print a line with the time."""
        print(f"[{self.seconds:5.0f} s] {text}", flush=True)

    @contextlib.contextmanager
    def guarded(self, name):
        """A block whose error is noted, so that the next one runs.

        It may take so long as a row. One that waits for the GPU or a compiler
        ends once that has answered.
        """

        def stop(*_):
            raise TimeoutError(f"it took over {self.limit_of_row:g} s")

        before = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, self.limit_of_row)
        try:
            yield
        except Exception as error:
            text = f"{name}: {type(error).__name__}: {str(error)[:600]}"
            self.notes.append(text)
            self.say(f"FAILED {text}")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)

    def wants(self, title):
        """Whether a row was asked for."""
        return self.only is None or any(part in title for part in self.only)

    def has(self, seconds):
        """Whether so much time is left."""
        return self.limit - self.seconds > seconds


def wait():
    """Wait for the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# The numbers


def codes_are_those_of_the_reference(run):
    """The codes of the Triton casts, in both layouts."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    both = backends.engine.both_layouts
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    every = bits.to(torch.int16).view(torch.bfloat16).reshape(256, 256)
    odd = torch.randn(145, 71) * 100.0
    found = {}
    for name in ("float8_e4m3fn", "float8_e5m2"):
        for title, x in (("bfloat16", every), ("float32", odd)):
            x = x.to(device)
            scale = torch.tensor(0.37, device=device)
            known = ScaleHint(scale, None, ScaleRule(by_multiplier=True))
            asked = Quantization(format=name)
            cast = both.quantize(x, asked, known, Wanted(amax=True))
            expected = casting.quantize(x, scale, name).view(torch.uint8)
            sign = torch.where(torch.isnan(x), 0x80, 0).to(torch.uint8)
            codes = cast.values.view(torch.uint8)
            same = torch.equal(codes | sign, expected | sign)
            turned = cast.across.view(torch.uint8).t()
            found[f"{name} of {title}"] = same and torch.equal(turned, codes)
    return found


def straight_is_general(run):
    """Whether the straight path has the bits of the general one."""
    found = {}
    engine = backends.engine
    general = dataclasses.replace(engine, straight=lambda bound: None)
    for recipe in RECIPES:
        paths = []
        for each in (engine, general):
            backends.engine = each
            try:
                paths.append(_three_steps(recipe))
            finally:
                backends.engine = engine
        took_it, _ = (path.pop("straight") for path in paths)
        names = tuple(paths[0])
        same = {
            name: all(map(torch.equal, paths[0][name], paths[1][name]))
            for name in names
        }
        if torch.cuda.is_available():
            found[f"{recipe}: took the straight path"] = took_it
        found |= {f"{recipe}: {name}": value for name, value in same.items()}
    return found


def _three_steps(recipe):
    keras.utils.set_random_seed(0)
    layer = kpe.layers.Dense(384, dtype=f"float8/{recipe}_from_mixed_bfloat16")
    layer.build((None, 256))
    found = collections.defaultdict(list)
    for seed in range(3):
        x = normal((512, 256), seed=seed).requires_grad_()
        with kernels.prefer("native"):
            y = layer(x, training=True)
            y.backward(normal((512, 384), seed=seed + 7))
        found["outputs"].append(y.detach().clone())
        found["inputs_grad"].append(x.grad)
        found["kernel_grad"].append(layer.kernel.value.grad.clone())
        found["bias_grad"].append(layer.bias.value.grad.float().clone())
        kpe.loops.settle(layer)
        layer.zero_grad()
        for state in layer.float8_state.matrices:
            found["state"].append(state.value.detach().clone())
    plan = layer.float8_state.last_call.plan
    found["straight"] = plan.bound.straight is not None
    return found


def training_is_finite(run):
    """Whether losses of a few steps are finite and fall."""
    found = {}
    for recipe in RECIPES:
        keras.utils.set_random_seed(0)
        with kpe.policy_scope("mixed_bfloat16"):
            model = keras.Sequential(
                [
                    keras.Input((128,)),
                    keras.layers.Dense(256, "relu"),
                    keras.layers.Dense(128),
                ]
            )
        kpe.convert(model, recipe)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        x = np.random.default_rng(0).normal(size=(64, 128)).astype("float32")
        losses = [float(model.train_on_batch(x, x)) for _ in range(8)]
        fell = bool(np.isfinite(losses).all() and losses[-1] < losses[0])
        found[f"{recipe}: losses are finite and fall"] = fell
    return found


# Steps


class Step:
    """A step as `fit` takes it: forward, loss, backward, SGD.

    Args:
        run: The `Run`.
        make: Makes the model.
        shape: Of its inputs, and of its outputs.
        how: One of `HOWS`.
        name: A recipe, or `BASE`.
    """

    tokens = None

    def __init__(self, run, make, shape, how, name):
        keras.utils.set_random_seed(0)
        with kpe.policy_scope("mixed_bfloat16"):
            self.model = make()
        if name != BASE:
            kpe.convert(self.model, name)
        self.model.compile(sgd(), "mse", jit_compile=how != EAGER)
        batch = normal(shape), normal(shape, seed=1)
        data = torch.utils.data.DataLoader([batch], batch_size=None)
        self.batches = [batch]
        with how_of(run, how, self.model):
            self.model.fit(data, shuffle=False, verbose=0)
            self.model.train()  # `fit` ends it.
            # The first steps make two graphs (keras 3.16): both in the block.
            for _ in range(2):
                self()

    def __call__(self):
        self.model.train_function(self.batches)

    def close(self):
        """Let the memory go."""
        self.model = self.batches = None


class Fit:
    """A `fit` of the Llama of KerasHub; see `fit_on_card.py`.

    Args:
        run: The `Run`.
        how: One of `HOWS`.
        name: A recipe, or `BASE`.
    """

    def __init__(self, run, how, name):
        sizes = {k: v[run.small] for k, v in fit_on_card.SIZES.items()}
        asked = {f"fit_{name}": size for name, size in sizes.items()}
        way = name if name == BASE else f"float8 {name}"
        self.asked = argparse.Namespace(way=way, **asked)
        self.model, _ = fit_on_card.model_of(
            self.asked, jit_compile=how != EAGER
        )
        self.data = fit_on_card.batches_of(self.asked, sizes["steps"])
        self.tokens = sizes["steps"] * sizes["batch"] * sizes["length"]
        with how_of(run, how, self.model):
            self()

    def __call__(self):
        size = self.asked.fit_batch
        self.model.fit(*self.data, batch_size=size, shuffle=False, verbose=0)

    def close(self):
        """Let the memory go."""
        self.model = self.data = None


@contextlib.contextmanager
def how_of(run, how, model):
    """The block in which a model takes its first step.

    Args:
        run: The `Run`; a small one has no code generated.
        how: One of `HOWS`.
        model: Compiled by Keras.
    """
    stock = torch.compile
    if run.small:
        torch.compile = functools.partial(stock, backend="aot_eager")
    graphs = kpe.loops.cuda_graphs(model) if how == GRAPHS else None
    try:
        with graphs or contextlib.nullcontext():
            yield
    finally:
        torch.compile = stock


def timed(run, steps, rounds=7):
    """The median time of each step in µs, interleaved."""
    found = {name: [] for name in steps}
    counts = {}
    for name, step in steps.items():
        wait()
        start = time.perf_counter()
        step()
        wait()
        once = time.perf_counter() - start
        counts[name] = max(1, min(30, int(0.03 / max(once, 1e-6))))
    for _ in range(1 if run.small else rounds):
        for name, step in steps.items():
            wait()
            start = time.perf_counter()
            for _ in range(counts[name]):
                step()
            wait()
            seconds = time.perf_counter() - start
            found[name].append(seconds / counts[name] * 1e6)
    return {name: statistics.median(times) for name, times in found.items()}


def kernels_of(step, repeats=3):
    """The kernels of a step by the profiler: their number, sum and names."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    step()
    wait()
    with profile(activities=activities) as seen:
        for _ in range(repeats):
            step()
        wait()
    sums = collections.defaultdict(lambda: [0, 0.0])
    for event in seen.events():
        if event.device_type.name == "CUDA":
            sums[event.name][0] += 1
            sums[event.name][1] += event.time_range.elapsed_us()
    rows = sorted(sums.items(), key=lambda pair: -pair[1][1])
    return {
        "gpu_us": round(sum(us for _, (_, us) in rows) / repeats, 1),
        "kernels": round(sum(n for _, (n, _) in rows) / repeats, 1),
        "largest": [
            [name[:70], round(n / repeats, 1), round(us / repeats, 1)]
            for name, (n, us) in rows[:14]
        ],
    }


def compare(run, title, make, need=12):
    """Time the steps that `make` makes of names, in one block.

    A row has the graphs of PyTorch's compiler, and the CUDA graphs that it
    left out (`cudagraph_skips`).
    """
    steps, counted = {}, {}
    for name in NAMES:
        row = f"{title}, {name}"
        if not run.has(need):
            run.notes.append(f"{row}: out of time")
            continue
        with run.guarded(row):
            torch._dynamo.reset()
            counters = torch._dynamo.utils.counters
            counters.clear()
            start = run.seconds
            step = make(name)
            for _ in range(3):  # The third replays a CUDA graph.
                step()
            wait()
            counted[name] = {
                "graphs": counters["stats"].get("unique_graphs", 0),
                "skips": counters["inductor"].get("cudagraph_skips", 0),
            }
            steps[name] = step
            run.say(f"{row}: ready after {run.seconds - start:.0f} s")
    if not steps:
        return
    with run.guarded(f"{title}, times"):
        times = timed(run, steps)
        for name, us in times.items():
            row = {"us": round(us, 1), **counted[name]}
            if BASE in times:
                row["times_as_fast"] = round(times[BASE] / us, 3)
            if steps[name].tokens is not None:
                row["tokens_per_s"] = round(steps[name].tokens / us * 1e6)
            run.rows[f"{title}, {name}"] = row
            run.say(f"{title}, {name}: {row}")
    for name, step in steps.items():
        if not run.has(6):
            break
        with run.guarded(f"{title}, {name}, profiler"):
            found = kernels_of(step)
            run.rows.setdefault(f"{title}, {name}", {}).update(found)
    for step in steps.values():
        step.close()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def of_torchao(run, size):
    """Time torchao's layer, eager and compiled."""
    if importlib.util.find_spec("torchao") is None:
        run.notes.append("torchao is not installed: its rows are left out")
        return
    w = np.random.default_rng(0).standard_normal((size, size), dtype="f4")
    for compiled in (True, False):
        if not run.has(15):
            return
        how = "compiled" if compiled else "eager"
        with run.guarded(f"torchao, {how}"):
            torch._dynamo.reset()
            operands = normal((size, size)), normal((size, size), seed=1)
            layer = Torchao(w / size**0.5, *operands, compiled)
            title = f"Dense {size}, {how}, torchao tensorwise"
            us = timed(run, {title: layer.step})[title]
            run.rows[title] = {"us": round(us, 1), **kernels_of(layer.step)}
            run.say(f"{title}: {us:.0f} µs")


def of_casts(run, size):
    """Time the casts of one operand, with their bandwidth."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    both = backends.engine.both_layouts
    x = torch.randn(size, size, device=device)
    scale = torch.tensor(0.01, device=device)
    known = ScaleHint(scale, None, ScaleRule(by_multiplier=True))
    for dtype in (torch.bfloat16, torch.float32):
        for name in ("float8_e4m3fn", "float8_e5m2"):
            operand, asked = x.to(dtype), Quantization(format=name)
            cast = functools.partial(
                both.quantize, operand, asked, known, Wanted(amax=True)
            )
            found = kernels_of(cast) if torch.cuda.is_available() else {}
            us = found.get("gpu_us") or 1.0
            moved = size * size * (operand.element_size() + 2)
            title = f"cast of {str(dtype)[6:]} to {name}, {size}"
            run.rows[title] = {"us": us, "TB/s": round(moved / us / 1e6, 2)}
            run.say(f"{title}: {run.rows[title]}")


def cases(run):
    """Titles of what is compared, and what makes a step of a name.

    The most important ones come first.
    """
    llama = SMALL_LLAMA if run.small else LLAMA

    def square(how, size):
        make = functools.partial(dense, size)
        return f"Dense {size}, {how}", functools.partial(
            Step, run, make, (size, size), how
        )

    def block(how):
        return f"Llama block, {how}", functools.partial(
            Step, run, llama.model, llama.shape, how
        )

    def fit(how):
        title = f"fit of the Llama of KerasHub, {how}"
        return title, functools.partial(Fit, run, how)

    size = run.size
    for how in (GRAPHS, COMPILED):
        yield square(how, size)
        yield fit(how)
        yield block(how)
    yield square(EAGER, size)
    for how in HOWS:
        yield square(how, 2 * size)
    yield block(EAGER)
    yield fit(EAGER)


def measure(run):
    """All rows, the most important ones first."""
    # Keras asks for flash attention by what breaks graphs. PyTorch chooses it.
    keras.config.disable_flash_attention()
    for title, make in cases(run):
        if run.wants(title):
            compare(run, title, make)
    if run.wants("torchao"):
        of_torchao(run, run.size)
    if run.wants("casts"):
        with run.guarded("casts"):
            of_casts(run, run.size)


def table(run):
    """All that was found, in lines."""
    widths = {
        "us": ("µs", 11),
        "times_as_fast": ("× bf16", 8),
        "gpu_us": ("GPU µs", 10),
        "tokens_per_s": ("tokens/s", 10),
        "graphs": ("graphs", 7),
        "skips": ("skips", 6),
    }
    head = "".join(f"{word:>{width}}" for word, width in widths.values())
    lines = ["", f"{'':52}{head}"]
    for name, row in run.rows.items():
        cells = [row.get(key, "") for key in widths]
        pairs = zip(cells, (w for _, w in widths.values()), strict=True)
        line = "".join(f"{cell!s:>{width}}" for cell, width in pairs)
        lines.append(f"{name[:52]:52}{line}")
    lines.append("")
    for name, row in run.rows.items():
        if "largest" in row:
            parts = (f"{n[:44]} x{k:g} {us:g}" for n, k, us in row["largest"])
            lines.append(f"{name}: {'; '.join(parts)}")
    lines += ["", *(f"noted: {note}" for note in run.notes)]
    wrong = [name for name, same in run.checks.items() if not same]
    lines.append(f"checks: {len(run.checks)}, wrong: {wrong or 'none'}")
    return "\n".join(lines)


def main(arguments=None):
    """Run the checks and the rows, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=float, default=600.0)
    parser.add_argument("--limit-of-row", type=float, default=60.0)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--size", type=int)
    parser.add_argument("--small", action="store_true")
    parser.add_argument(
        "--only", nargs="+", metavar="WORDS", help="rows with these in a title"
    )
    options = parser.parse_args(arguments)
    if not (options.small or torch.cuda.is_available()):
        parser.error("no GPU is visible to PyTorch; --small tries the script")
    run = Run(
        options.limit,
        options.limit_of_row,
        options.small,
        options.size or (32 if options.small else 4096),
        options.only,
    )
    on_gpu = torch.cuda.is_available()
    where = torch.cuda.get_device_name() if on_gpu else "a CPU"
    run.say(f"torch {torch.__version__}, keras {keras.__version__}, {where}")
    run.say(f"casts by Triton: {casts.lacking() or 'yes'}")
    checks = [straight_is_general, training_is_finite]
    if casts.lacking() is None:
        checks.insert(0, codes_are_those_of_the_reference)
    for check in checks:
        with run.guarded(check.__name__):
            found = check(run)
            run.checks |= found
            wrong = [name for name, same in found.items() if not same]
            run.say(f"{check.__name__}: {len(found)} checks, wrong: {wrong}")
    measure(run)
    print(table(run), flush=True)
    if options.out:
        found = {"device": where, "torch": torch.__version__}
        found |= {"checks": run.checks, "rows": run.rows, "notes": run.notes}
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
