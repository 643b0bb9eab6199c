"""How long the host takes for a training step of a Dense layer on a GPU.

No GPU is needed: the layer takes the path of an H100, with launches of kernels
that do nothing. Triton must be installed, as any build of PyTorch for CUDA
brings it along. All rows run in turn, in one thread, 16 x 16 numbers: Keras's
own products, which are not left out, then take next to no time.

    KERAS_BACKEND=torch python integration/benchmarks/host_time.py --compiled
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import pathlib
import statistics
import time
import unittest.mock

import keras
import torch
from workloads import dense

import keras_policy_ext as kpe
from keras_policy_ext import backends
from keras_policy_ext.backends import devices
from keras_policy_ext.backends.torch import backend as torch_backend
from keras_policy_ext.backends.torch import casts, triton_casts
from keras_policy_ext.ext.delayed import frameworks
from keras_policy_ext.ext.delayed.torch import observations, triton_states
from keras_policy_ext.ext.delayed.torch.kernels import TritonStates

SIZE = 16
BASE = "Keras, bfloat16"
RECIPES = "delayed", "current", "rowwise"


class Compiled:
    """What Triton returns of a launch; it starts nothing."""

    function = packed_metadata = None

    def run(self, *args):
        """Start nothing."""


class Stub:
    """A kernel of Triton that starts nothing."""

    compiled = Compiled()

    def __init__(self, kernel):
        self.arg_names = kernel.arg_names

    def __getitem__(self, grid):
        return self._launch

    def _launch(self, *args, **kwargs):
        return self.compiled


def _product(a, b, *scales, out_dtype, **options):
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


@functools.cache
def engine_of_a_gpu(straight):
    """The same object for each block: plans are bound to it."""
    changes = {"both_layouts": casts.TritonCasts(interpreted=True)}
    if not straight:
        changes["straight"] = lambda bound: None
    return dataclasses.replace(backends.engine, **changes)


@contextlib.contextmanager
def on_a_gpu(straight=True):
    """The path of an H100, whose kernels are not started.

    Args:
        straight: Whether plans have their straight path.
    """
    h100 = devices.of_nvidia((9, 0), "compute capability (9, 0)")
    engine = engine_of_a_gpu(straight)
    told = observations.host_flags

    def seen(parameter):
        """As after some steps: all operands were observed."""
        flags = told(parameter)
        if flags is not None:
            flags.numpy()[:] = False
        return flags

    patches = [
        (torch_backend, "_found", lambda: h100),
        (backends, "engine", engine),
        (frameworks.current, "kernels", (TritonStates(interpreted=True),)),
        (torch, "_scaled_mm", _product),
        (observations, "host_flags", seen),
        # Nobody reads a state on a GPU.
        (observations, "changed_value", lambda variable: None),
    ]
    for module in (triton_casts, triton_states):
        for name, kernel in vars(module).items():
            if name.endswith("_kernel"):
                patches.append((module, name, Stub(kernel)))
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(unittest.mock.patch.object(*patch))
        yield


class Row:
    """A model and how its step runs.

    Args:
        policy: A recipe; None for bfloat16.
        context: Returns the context of its steps.
        updates: Whether a step ends with an update by SGD.
        compiled: Whether torch.compile compiles the forward pass.
    """

    def __init__(
        self,
        policy,
        context=contextlib.nullcontext,
        updates=False,
        compiled=False,
    ):
        with kpe.policy_scope("mixed_bfloat16"):
            self.model = dense(SIZE)
        if policy:
            kpe.convert(self.model, policy)
        self.context, self.updates = context, updates
        self.call = functools.partial(self.model, training=True)
        if compiled:
            model = self.model
            self.call = torch.compile(lambda x: model(x, training=True))
        self.variables = self.model.trainable_variables
        self.sgd = keras.optimizers.SGD(1e-9)
        self.sgd.build(self.variables)
        self.x = torch.randn(SIZE, SIZE).bfloat16()
        self.outputs_grad = torch.randn(SIZE, SIZE).bfloat16()

    def step(self):
        """Run a step; return the times of its three parts, in ns."""
        x = self.x.detach().requires_grad_()
        times = [time.perf_counter_ns()]
        y = self.call(x)
        times.append(time.perf_counter_ns())
        y.backward(self.outputs_grad)
        times.append(time.perf_counter_ns())
        if self.updates:
            with torch.no_grad():
                grads = [v.value.grad for v in self.variables]
                self.sgd.apply(grads, self.variables)
        times.append(time.perf_counter_ns())
        self.model.zero_grad(set_to_none=True)
        for state in filter(kpe.loops.is_state, self.variables):
            state.uses = 0
        return [b - a for a, b in itertools.pairwise(times)]


def rows(compiled=False):
    """All rows by their names; those of compiled steps if asked."""
    general = functools.partial(on_a_gpu, False)
    found = {BASE: Row(None)}
    for recipe in RECIPES:
        found[recipe] = Row(recipe, on_a_gpu)
        found[f"{recipe}, general path"] = Row(recipe, general)
    for recipe in (None, *RECIPES):
        name = f"{recipe or BASE}, with SGD"
        found[name] = Row(recipe, on_a_gpu, updates=True)
        if compiled:
            how = {"updates": True, "compiled": True}
            found[f"{name}, compiled"] = Row(recipe, on_a_gpu, **how)
    return found


def measure(rounds, compiled=False, inner=5):
    """The medians of all rows, in µs: forward, backward, update."""
    made = rows(compiled)
    found = {name: [] for name in made}
    for number in range(rounds + 3):
        for name, row in made.items():
            with row.context():
                times = [row.step() for _ in range(inner)]
            if number >= 3:
                found[name] += times
    medians = {}
    for name, times in found.items():
        parts = zip(*times, strict=True)
        medians[name] = [statistics.median(part) / 1e3 for part in parts]
    return medians


def main():
    """Print a table, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(options.rounds, options.compiled)
    base = sum(found[BASE][:2])
    print(f"torch {torch.__version__}, keras {keras.__version__}; µs")
    print(f"{'':38}forward backward   both  ratio update")
    for name, (forward, backward, update) in found.items():
        both = forward + backward
        print(
            f"{name:38}{forward:7.0f} {backward:8.0f} {both:6.0f} "
            f"{both / base:6.2f} {update:6.0f}"
        )
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
