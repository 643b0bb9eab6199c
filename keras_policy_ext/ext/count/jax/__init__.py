"""The matmuls in a program of JAX."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from keras_policy_ext.backends.jax import traced_programs
from keras_policy_ext.ext.count.matmul_sizes import (
    MatmulSizes,
    largest,
    of_convolution,
)


def products(program: Any) -> Iterator[tuple[MatmulSizes, bool]]:
    """Yield each matmul of a program, and whether its count is known.

    Args:
        program: A jaxpr.
    """
    for step in program.eqns:
        name = step.primitive.name
        shapes = [getattr(x.aval, "shape", ()) for x in step.invars]
        if name == "dot_general":
            (summed, _), _ = step.params["dimension_numbers"]
            terms = math.prod(shapes[0][axis] for axis in summed)
            number = terms * math.prod(step.outvars[0].aval.shape)
            first, second = map(math.prod, shapes)
            yield MatmulSizes(number, (first, second)), True
        elif name == "conv_general_dilated":
            yield _convolution(step, *shapes), True
        elif "jaxpr" in step.params and name == "scan":
            repeats = step.params["length"]
            for product, known in products(
                traced_programs.program_in(step.params["jaxpr"])
            ):
                yield product.times(repeats), known
        elif name == "cond":
            inner = [
                list(products(b.jaxpr))
                for b in traced_programs.programs_in(step)
            ]
            yield from largest(inner)
        else:
            for each in traced_programs.programs_in(step):
                for product, known in products(
                    traced_programs.program_in(each)
                ):
                    yield product, known and name != "while"


def _convolution(step: Any, inputs: Any, kernel: Any) -> MatmulSizes:
    numbers = step.params["dimension_numbers"]
    outputs = step.outvars[0].aval.shape
    if any(size != 1 for size in step.params["lhs_dilation"]):
        # A transposed one: each input is multiplied with all of the kernel.
        channels = inputs[numbers.lhs_spec[1]]
        return of_convolution(math.prod(inputs) // channels, inputs, kernel)
    channels = outputs[numbers.out_spec[1]]
    return of_convolution(math.prod(outputs) // channels, inputs, kernel)
