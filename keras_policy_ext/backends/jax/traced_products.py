"""JAX: the products of a function, read off its jaxpr."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras

from keras_policy_ext.backends.traced_products import (
    Product,
    Traced,
    convolution,
)


def trace(function: Callable[..., Any], inputs: list[Any]) -> Traced:
    """See `Backend.trace`."""
    returned: list[Any] = []

    def flat(*tensors: Any) -> list[Any]:
        returned.append(function(*tensors))
        leaves = keras.tree.flatten(returned[0])
        return [x for x in leaves if isinstance(x, jax.Array)]

    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs]
    program = jax.make_jaxpr(flat)(*shapes)
    outputs = keras.tree.map_structure(_described, returned[0])
    found = list(_products(program.jaxpr))
    products = [product for product, _ in found]
    return Traced(outputs, products, all(known for _, known in found))


def _described(x: Any) -> Any:
    if not isinstance(x, jax.Array):
        return x
    return keras.KerasTensor(x.shape, keras.backend.standardize_dtype(x.dtype))


def _products(program: Any) -> Iterator[tuple[Product, bool]]:
    """Each product, and whether it is known how often it is computed."""
    for step in program.eqns:
        name = step.primitive.name
        shapes = [getattr(x.aval, "shape", ()) for x in step.invars]
        if name == "dot_general":
            (summed, _), _ = step.params["dimension_numbers"]
            terms = math.prod(shapes[0][axis] for axis in summed)
            number = terms * math.prod(step.outvars[0].aval.shape)
            first, second = map(math.prod, shapes)
            yield Product(number, (first, second)), True
        elif name == "conv_general_dilated":
            yield _convolution(step, *shapes), True
        elif "jaxpr" in step.params and name == "scan":
            repeats = step.params["length"]
            for product, known in _products(_program(step.params["jaxpr"])):
                yield product.times(repeats), known
        elif name == "cond":
            branches = [list(_products(b.jaxpr)) for b in _inner(step)]
            yield from max(branches, key=_total, default=[])
        else:
            for inner in _inner(step):
                for product, known in _products(_program(inner)):
                    yield product, known and name != "while"


def _total(found: list[tuple[Product, bool]]) -> int:
    return sum(product.multiplications for product, _ in found)


def _convolution(step: Any, inputs: Any, kernel: Any) -> Product:
    numbers = step.params["dimension_numbers"]
    outputs = step.outvars[0].aval.shape
    if any(size != 1 for size in step.params["lhs_dilation"]):
        # A transposed one: each input is multiplied with all of the kernel.
        channels = inputs[numbers.lhs_spec[1]]
        return convolution(math.prod(inputs) // channels, inputs, kernel)
    channels = outputs[numbers.out_spec[1]]
    return convolution(math.prod(outputs) // channels, inputs, kernel)


def _inner(step: Any) -> Iterator[Any]:
    """The programs in a step, such as those of a loop or a function."""
    for value in step.params.values():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(_program(each), "eqns"):
                yield each


def _program(program: Any) -> Any:
    return getattr(program, "jaxpr", program)
