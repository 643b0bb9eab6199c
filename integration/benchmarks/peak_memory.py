"""The peak resident memory of a training step, beside what `kpe.memory` says.

    KERAS_BACKEND=torch python integration/benchmarks/peak_memory.py

Each variant of a transformer of twelve blocks trains in a process of its own,
on a CPU under Linux or on a GPU. The process first trains one of one block, so
that what the framework loads is not counted. Then it notes its resident memory,
makes the model, takes two steps of `train_on_batch`, and resets the peak
(`VmHWM`). What is told is the peak of the next two steps above what was noted.
The C library is told to give freed memory back. On a GPU the framework's
allocator is asked instead; JAX's does not forget a peak, so that it is the
process's.
"""

import argparse
import ctypes
import dataclasses
import gc
import json
import os
import pathlib
import subprocess
import sys

import keras
import measuring
from steps_of_layers import COMPILED, numpy
from workloads import Llama, normal

import keras_policy_ext as kpe

SIZES = ("batch", "length", "width", "wide", "heads", "groups", "blocks")
ON_A_CPU = (4, 128, 512, 1408, 8, 2, 12)
ON_A_GPU = (4, 1024, 2048, 5632, 16, 4, 12)
GIVES_BACK = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
}


def _mixed(llama):
    with kpe.policy_scope("mixed_bfloat16"):
        model = llama.model()
    model.compile(keras.optimizers.Adam(1e-4), "mse", jit_compile=COMPILED)
    return model


def _float8(llama):
    model = _mixed(llama)
    kpe.convert(model, "delayed")
    return model


def _one_byte(llama):
    model = _mixed(llama)
    kpe.convert(model, "delayed", optimizer="float8")
    return model


def _bfloat16(llama):
    with kpe.policy_scope("bfloat16"):
        model = llama.model()
    optimizer = kpe.mixed_precision.StochasticRounding(
        keras.optimizers.Adam(1e-4), seed=1
    )
    model.compile(optimizer, "mse", jit_compile=COMPILED)
    kpe.convert(model, "delayed", optimizer="float8")
    return model


VARIANTS = {
    "mixed_bfloat16": _mixed,
    "float8 layers": _float8,
    "one-byte moments": _one_byte,
    "bfloat16 weights": _bfloat16,
}


def status(name):
    """A number of bytes that Linux says of this process, such as `VmRSS`."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    (found,) = (line for line in lines if line.startswith(name))
    return 1024 * int(found.split()[1])


def held(peak=False):
    """The bytes held now, or at most since `forget_peak`."""
    if not measuring.on_gpu():
        return status("VmHWM" if peak else "VmRSS")
    if measuring.BACKEND == "torch":
        import torch

        most, now = torch.cuda.max_memory_allocated, torch.cuda.memory_allocated
        return most() if peak else now()
    import jax

    stats = jax.devices()[0].memory_stats()
    return stats["peak_bytes_in_use" if peak else "bytes_in_use"]


def forget_peak():
    """Have `held` tell the peak from now on."""
    if not measuring.on_gpu():
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    elif measuring.BACKEND == "torch":
        import torch

        torch.cuda.reset_peak_memory_stats()


def measured(name, llama):
    """What `kpe.memory` says and what Linux does, in this process."""
    small = dataclasses.replace(llama, blocks=1)
    trained(VARIANTS[name](small), small)
    give_back()
    before = held()
    model = VARIANTS[name](llama)
    step = trained(model, llama)
    give_back()
    between = held() - before
    forget_peak()
    step()
    step()
    peak = held(peak=True) - before
    compiled = keras.backend.backend() == "jax"
    (form,) = kpe.memory(model, llama.shape, (), compile=compiled).forms
    return {
        **({} if form.peak is None else {"counted_peak": form.peak}),
        "between_steps": between,
        "peak": peak,
        "weights": form.weights,
        "gradients": form.gradients,
        "optimizer": form.optimizer,
        "state": form.state,
        "kept": form.kept,
        "together": form.together,
    }


def give_back():
    """Have the C library give back the memory that it holds unused."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def trained(model, llama):
    """Take two steps, and return a function that takes one."""
    x, y = (numpy(normal(llama.shape, seed=seed)) for seed in (0, 1))

    def step():
        return float(model.train_on_batch(x, y))

    step()
    step()
    return step


def rows(llama, sizes):
    """The rows of the results, each of a process of its own."""
    for name in VARIANTS:
        command = [sys.executable, __file__, "--variant", name, *sizes]
        output = subprocess.run(
            command,
            env={**os.environ, **GIVES_BACK},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout
        found = json.loads(output.splitlines()[-1])
        mib = {
            f"{k}_mib": measuring.rounded(v / 2**20) for k, v in found.items()
        }
        ratios = {
            f"{part}_over_peak": measuring.rounded(found[part] / found["peak"])
            for part in ("together", "counted_peak")
            if part in found
        }
        row = {"case": f"peak of a step: {llama}", "variant": name}
        yield {**row, **mib, **ratios}


def main():
    if "--variant" in sys.argv:
        parser = argparse.ArgumentParser()
        parser.add_argument("--variant", choices=VARIANTS)
        parser.add_argument("sizes", type=int, nargs=len(SIZES))
        asked = parser.parse_args()
        print(json.dumps(measured(asked.variant, Llama(*asked.sizes))))
        return
    asked = measuring.arguments(
        __doc__,
        **dict(zip(SIZES, zip(ON_A_CPU, ON_A_GPU, strict=True), strict=True)),
    )
    sizes = [getattr(asked, name) for name in SIZES]
    found = list(rows(Llama(*sizes), list(map(str, sizes))))
    measuring.write("peak_memory", asked, found, asked.out)


if __name__ == "__main__":
    main()
