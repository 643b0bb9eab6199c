"""A Dense layer forward and backward under each recipe.

    KERAS_BACKEND=jax python integration/benchmarks/recipes.py

Square ones of each size, compiled where the backend compiles. Beside the time
against bfloat16 stands the time of current scaling's, the median of the
ratios of rounds in which all were called in turn.
"""

import functools

import keras
import measuring
import numpy as np
from layer import exact_products, quality_of
from steps_of_layers import forward_backward, numpy
from variants import SOURCE, kernels_of
from workloads import dense, normal

import keras_policy_ext as kpe

BASELINE = "current"


def made(size):
    """A layer for each recipe, and one in bfloat16, with the same weights."""
    models = {}
    for name in (measuring.BASELINE, *kpe.recipes.names()):
        keras.utils.set_random_seed(0)
        with kpe.policy_scope(SOURCE):
            models[name] = dense(size)
        if name != measuring.BASELINE:
            kpe.convert(models[name], name)
    return models


def rows(size, rounds):
    """The rows of the results for one size."""
    x, g = normal((size, size)), normal((size, size), seed=1)
    models = made(size)
    kernel = numpy(models[measuring.BASELINE].layers[0].kernel)
    exact = exact_products(numpy(x), numpy(g), kernel)
    functions = {
        name: functools.partial(forward_backward(model), x, g)
        for name, model in models.items()
    }
    took = measuring.interleaved(functions, rounds)
    found = measuring.times(took)
    for name, model in models.items():
        ratio = np.median(took[name] / took[BASELINE])
        case = {"case": f"layer {size}", "size": size, "variant": name}
        ours = {"kernel": None, "reason": None}
        if name != measuring.BASELINE:
            ours = kernels_of(model)
        quality = quality_of(exact, functions[name]())
        more = {"of_current": measuring.rounded(ratio), "sqnr_db": quality}
        yield {**case, **ours, **found[name], **more}


def main():
    asked = measuring.arguments(
        __doc__, sizes=([1024], [4096, 8192]), rounds=(15, 20)
    )
    found = [row for size in asked.sizes for row in rows(size, asked.rounds)]
    measuring.write("recipes", asked, found, asked.out)


if __name__ == "__main__":
    main()
