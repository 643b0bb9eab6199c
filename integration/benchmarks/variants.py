"""The ways to compute that the benchmarks compare.

Every one makes the same Keras model under `mixed_bfloat16`, from the same
random numbers, and then makes something else of it.
"""

import keras

import keras_policy_ext as kpe

SOURCE = "mixed_bfloat16"


def _same(model):
    return model


def _delayed(model):
    kpe.convert(model, "delayed")
    return model


def _current(model):
    kpe.convert(model, "current")
    return model


def _stock(model):
    model.quantize("float8")
    return model


VARIANTS = {
    "bfloat16": _same,
    "float8 delayed": _delayed,
    "float8 current": _current,
    "stock float8": _stock,
}
OURS = ("float8 delayed", "float8 current")


def made(build, names=VARIANTS):
    """A model for each variant, with the same weights.

    Args:
        build: Returns a built model under the global policy.
        names: Which variants; `"float32"` may be one.

    Returns:
        Models by the name of the variant.
    """
    models = {}
    for name in names:
        keras.utils.set_random_seed(0)
        plain = name == "float32"
        with kpe.policy_scope(name if plain else SOURCE):
            model = build()
        models[name] = model if plain else VARIANTS[name](model)
    return models


def kernels_of(model):
    """Which kinds of kernels the products of a model had, and why.

    Args:
        model: That was called.

    Returns:
        `kernel` and `reason` of a row; None for a model that is not ours.
    """
    layers = [e for e in kpe.inspect(model).layers if e.kernel is not None]
    kinds, reasons = ({e.kernel for e in layers}, {e.reason for e in layers})
    return {
        "kernel": " and ".join(sorted(kinds, reverse=True)) or None,
        "reason": "; ".join(sorted(reasons)) or None,
    }
