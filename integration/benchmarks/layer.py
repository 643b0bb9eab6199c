"""A matmul of float8 operands, and a training step of a Dense layer.

    KERAS_BACKEND=jax python integration/benchmarks/layer.py

Square ones of each size; a step is forward, backward and SGD. Beside a time
stands the ratio to bfloat16, of rounds in which all were called in turn, and
the signal-to-noise ratio of what was computed, against float64 on the first
rows. Where torchao or Flax is installed, its float8 layer is measured too. On
PyTorch layers run eagerly, and once more compiled with `--compiled 1`.
"""

import functools

import measuring
import numpy as np
import peers
from keras import ops
from steps_of_layers import (
    COMPILED,
    compiled_function,
    forward_backward,
    numpy,
    sqnr_db,
    training_step,
)
from variants import VARIANTS, kernels_of, made
from workloads import dense, normal

from keras_policy_ext import backends
from keras_policy_ext.backends.matmuls import Request
from keras_policy_ext.numerics.quantized import Quantized
from keras_policy_ext.recipes import Quantization

ROWS = 64
"""So many rows of each result are compared with float64."""

LAYERS = [*VARIANTS, "float32"] if not measuring.on_gpu() else [*VARIANTS]
"""float32 too on a CPU, where it may be the fastest."""

OTHERS = {"kernel": None, "reason": None}
"""What a row says of kernels that are not this package's."""


def matmul_functions(size):
    """The product of two square matrices, in bfloat16 and of float8 ones.

    Returns:
        Functions by name, what is known of their kernels, and the operands as
        NumPy arrays.
    """
    x, w = normal((size, size)), normal((size, size), seed=1)
    kernel, choice = backends.engine.select(_request())
    scale = ops.convert_to_tensor(np.float32(0.01))
    engine = backends.engine
    cast = engine.narrow_cast if choice.native else engine.cast
    a, b = (cast(each, scale, "float8_e4m3fn") for each in (x, w))

    def float8(a, b):
        a, b = (_quantized(each, scale) for each in (a, b))
        return kernel.multiply(a, b, "bfloat16", True)

    plain = compiled_function(lambda x, w: ops.matmul(x, ops.transpose(w)))
    float8 = compiled_function(float8)
    functions = {
        "bfloat16": functools.partial(plain, x, w),
        "float8": functools.partial(float8, a, b),
    }
    kinds = {"float8": {"kernel": choice.kind, "reason": choice.reason}}
    return functions, kinds, (numpy(x), numpy(w))


def _request():
    whole = Quantization(format="float8_e4m3fn")
    return Request("forward", whole, whole, False, "auto", COMPILED)


def _quantized(values, scale):
    values, scale = values[None], ops.reshape(scale, (1, 1, 1))
    whole = Quantization(format="float8_e4m3fn")
    return Quantized(values, scale, whole)


def matmul_rows(size, rounds):
    """The rows of the results for one size."""
    functions, kinds, (x, w) = matmul_functions(size)
    exact = x[:ROWS].astype("float64") @ w.T.astype("float64")
    found = measuring.times(measuring.interleaved(functions, rounds))
    for name, function in functions.items():
        result = numpy(function()).reshape(size, size)[:ROWS]
        row = {"case": f"matmul {size}", "size": size, "variant": name}
        kind = kinds.get(name, OTHERS)
        quality = {"outputs": sqnr_db(exact, result)}
        yield {**row, **kind, **found[name], "sqnr_db": quality}


def layer_rows(size, rounds, compiled):
    """The same for a Dense layer, forward and backward."""
    x, g = normal((size, size)), normal((size, size), seed=1)
    layers = made(functools.partial(dense, size), LAYERS)
    kernel = numpy(layers["bfloat16"].layers[0].kernel)
    exact = exact_products(numpy(x), numpy(g), kernel)
    others = peers.layers(kernel, x, g, bool(compiled))
    quality = {
        name: quality_of(exact, forward_backward(layer)(x, g))
        for name, layer in layers.items()
    }
    for name, each in others.items():
        quality[name] = quality_of(exact, each.gradients())
    functions = {
        **{k: functools.partial(f, x, g) for k, f in _steps(layers, compiled)},
        **{name: each.step for name, each in others.items()},
    }
    found = measuring.times(measuring.interleaved(functions, rounds))
    for name in functions:
        row = {"case": f"layer {size}", "size": size, "variant": name}
        same = name.removesuffix(", compiled")
        kind = kernels_of(layers[same]) if same in layers else OTHERS
        seen = quality.get(name, quality[same])
        yield {**row, **kind, **found[name], "sqnr_db": seen}


def _steps(layers, compiled):
    """Names and steps of layers, compiled on PyTorch too if so asked."""
    for name, each in layers.items():
        yield name, training_step(each)
    if compiled and not COMPILED:
        for name, each in layers.items():
            yield f"{name}, compiled", training_step(each, compiled=True)


def exact_products(x, g, w):
    """The first rows of outputs and gradients, in float64."""
    x, g, w = (each.astype("float64") for each in (x, g, w))
    return {
        "outputs": x[:ROWS] @ w,
        "inputs_grad": g[:ROWS] @ w.T,
        "kernel_grad": x[:, :ROWS].T @ g,
    }


def quality_of(exact, results):
    y, x_grad, (kernel_grad, *_) = results
    found = {"outputs": y, "inputs_grad": x_grad, "kernel_grad": kernel_grad}
    return {
        name: sqnr_db(exact[name], numpy(value[:ROWS]))
        for name, value in found.items()
    }


def main():
    asked = measuring.arguments(
        __doc__,
        sizes=([256, 512, 1024], [1024, 2048, 4096, 8192, 16384]),
        rounds=(15, 20),
        compiled=(0, 1),
    )
    rows = []
    for size in asked.sizes:
        rows += matmul_rows(size, asked.rounds)
        rows += layer_rows(size, asked.rounds, asked.compiled)
    measuring.write("layer", asked, rows, asked.out)


if __name__ == "__main__":
    main()
