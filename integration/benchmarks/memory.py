"""The most memory that a step of a Llama or of an MLP holds at a time.

    KERAS_BACKEND=torch python integration/benchmarks/memory.py

Beyond the weights and what else is there before the step: forward, backward
and SGD. On JAX it is what XLA plans for its program. On PyTorch it is what
the allocator of the GPU saw, or on a CPU what PyTorch's profiler did. On
TensorFlow there must be a GPU, whose allocator is asked.
"""

import gc
import sys

import measuring
import numpy as np
from steps_of_layers import training_step
from variants import kernels_of, made
from workloads import MLP, Llama, normal

SIZES = ("batch", "length", "width", "wide", "heads", "groups", "blocks")
ON_A_CPU = (2, 64, 256, 896, 4, 2, 2)
BLOCKS = (2048, 256, 1024, 12)
ACTIVATIONS = ("relu", "gelu", "swiglu")
IN_TURN = (*ACTIVATIONS, "swiglu again")
ON_A_GPU = (2, 2048, 4096, 14336, 32, 8, 2)


def peak(step, x, g):
    """Bytes that a step holds at a time, and who says so; None if nobody."""
    ways = {"jax": _of_jax, "tensorflow": _of_tensorflow, "torch": _of_torch}
    return ways[measuring.BACKEND](step, x, g)


def _of_jax(step, x, g):
    memory = step.compiled(x, g).memory_analysis()
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.temp_size_in_bytes + outputs, "memory_analysis of XLA"


def _of_tensorflow(step, x, g):
    if not measuring.on_gpu():
        return None
    import tensorflow as tf

    step(x, g)
    measuring.finish()
    before = tf.config.experimental.get_memory_info("GPU:0")["current"]
    tf.config.experimental.reset_memory_stats("GPU:0")
    step(x, g)
    measuring.finish()
    after = tf.config.experimental.get_memory_info("GPU:0")["peak"]
    return after - before, "get_memory_info of TensorFlow"


def _of_torch(step, x, g):
    import torch

    step(x, g)
    if not torch.cuda.is_available():
        return _of_profiler(step, x, g), "profiler of PyTorch"
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(x, g)
    torch.cuda.synchronize()
    after = torch.cuda.max_memory_allocated()
    return after - before, "max_memory_allocated of PyTorch"


def _of_profiler(step, x, g):
    from torch.profiler import ProfilerActivity, profile

    gc.collect()  # what an earlier step left would count as given back
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        step(x, g)
    # `profiler.events()` hides what an operation allocates in its own event.
    events = profiler.profiler.kineto_results.events()
    events = [e for e in events if e.name() == "[memory]"]
    events.sort(key=lambda e: e.start_ns())
    return int(max(np.cumsum([e.nbytes() for e in events])))


def rows(workload):
    """The rows of the results."""
    x, g = normal(workload.shape), normal(workload.shape, seed=1)
    baseline = None
    for name, model in made(workload.model).items():
        found = peak(training_step(model), x, g)
        if found is None:
            return
        held, source = found
        baseline = baseline or held
        yield {
            "case": f"memory of a step: {workload}",
            "variant": name,
            **kernels_of(model),
            "peak_mib": measuring.rounded(held / 2**20),
            "of_bfloat16": measuring.rounded(held / baseline),
            "measured_by": source,
        }


def main():
    sizes = dict(zip(SIZES, zip(ON_A_CPU, ON_A_GPU, strict=True), strict=True))
    asked = measuring.arguments(__doc__, **sizes)
    workloads = [Llama(*(getattr(asked, name) for name in SIZES))]
    workloads += [MLP(*BLOCKS, activation) for activation in ACTIVATIONS]
    workloads += [MLP(*BLOCKS, activation, True) for activation in IN_TURN]
    found = [row for workload in workloads for row in rows(workload)]
    if not found:
        sys.exit("TensorFlow does not say what a step holds on a CPU.")
    measuring.write("memory", asked, found, asked.out)


if __name__ == "__main__":
    main()
