"""How much the report says is in float8, and what a real call multiplies."""

import math

import keras
import pytest
import zoo_models as zoo
from keras.src import backend

import keras_policy_ext as kpe


def einsum_terms(equation, first, second):
    terms = equation.partition("->")[0].replace("...", "").split(",")
    sizes = {}
    for term, operand in zip(terms, (first, second), strict=True):
        shape = operand.shape[len(operand.shape) - len(term) :]
        sizes.update(zip(term, shape, strict=True))
    within = math.prod(sizes.values())
    before = math.prod(first.shape[: len(first.shape) - len(terms[0])])
    return within * (before if "..." in equation else 1)


PRODUCTS = {
    (backend.numpy, "matmul"): lambda args, result: (
        math.prod(result.shape) * args[0].shape[-1]
    ),
    (backend.numpy, "einsum"): lambda args, result: einsum_terms(*args),
    (backend.nn, "conv"): lambda args, result: (
        math.prod(result.shape) * math.prod(args[1].shape[:-1])
    ),
    (backend.nn, "depthwise_conv"): lambda args, result: (
        math.prod(result.shape) * math.prod(args[1].shape[:-2])
    ),
}


def products_of_a_call(model, inputs, monkeypatch):
    """Each product: its layer, multiplications and sizes of operands."""
    found, layers, running = [], [model], []
    call = keras.Layer.__call__

    def called(layer, *args, **kwargs):
        layers.append(layer)
        try:
            return call(layer, *args, **kwargs)
        finally:
            layers.pop()

    def counted(function, multiplications):
        def multiply(*args, **kwargs):
            running.append(function)
            result = function(*args, **kwargs)
            running.pop()
            if not running:  # Some call one another.
                sizes = [math.prod(x.shape) for x in args if is_tensor(x)]
                number = multiplications(args, result)
                found.append((layers[-1], number, sizes[:2]))
            return result

        return multiply

    with monkeypatch.context() as patch:
        patch.setattr(keras.Layer, "__call__", called)
        for (module, name), multiplications in PRODUCTS.items():
            function = getattr(module, name)
            patch.setattr(module, name, counted(function, multiplications))
        model(inputs, training=False)
    return found


def is_tensor(x):
    return hasattr(x, "shape") and not isinstance(x, str)


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_share_in_float8_is_that_of_a_real_call(family, monkeypatch):
    model = zoo.model_of(family)
    # Texts as long as sound is: the report takes one length for all that is
    # left open, and says so.
    texts = {"texts": 1024} if family == "moonshine" else {}
    two, three = (
        products_of_a_call(model, zoo.data(model, batch, **texts), monkeypatch)
        for batch in (2, 3)
    )

    report = kpe.convert(model)

    paths = {entry.path for entry in report.converted}
    in_float8 = total = 0
    for (layer, _, small), (_, number, large) in zip(two, three, strict=True):
        # An operand of the same size for any batch is a kernel.
        if (small[0] == large[0]) != (small[1] == large[1]):
            total += number
            in_float8 += number if layer.path in paths else 0
    totals = report.totals
    said = totals.multiplications_in_float8 / totals.multiplications
    assert abs(said - in_float8 / total) < 0.02
