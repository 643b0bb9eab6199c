"""JAX: find the matmuls of a function."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras

from keras_policy_ext._types import Tensor
from keras_policy_ext.backends.flows import Flow
from keras_policy_ext.backends.traced_programs import (
    MatmulSizes,
    TracedProgram,
    convolution,
    layer_of,
    scope_name,
)

_CHOICES = frozenset(("approx_top_k", "argmax", "argmin", "sort", "top_k"))
"""Primitives that look for the largest or smallest entries."""


def trace(
    function: Callable[..., Any], inputs: list[Any], flow: Flow | None = None
) -> TracedProgram:
    """Trace a function with JAX; see `Backend.trace`."""
    returned: list[Any] = []

    def flat(*tensors: Any) -> list[Any]:
        returned.append(function(*tensors))
        leaves = keras.tree.flatten(returned[0])
        return [x for x in leaves if isinstance(x, jax.Array)]

    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs]
    program = jax.make_jaxpr(flat)(*shapes)
    outputs = keras.tree.map_structure(_described, returned[0])
    names: set[str] = set()
    found = list(_products(program.jaxpr, names))
    products = [product for product, _ in found]
    is_complete = all(known for _, known in found)
    if flow is not None:
        flow.start(map(id, program.jaxpr.invars))
        _follow(program.jaxpr, flow)
        flow.finish(map(id, program.jaxpr.outvars))
    return TracedProgram(
        outputs, products, is_complete, not _CHOICES.isdisjoint(names)
    )


def mark_call(
    flow: Flow, number: int, operands: list[Any], results: list[Any]
) -> list[Any]:
    """Mark a call in a program; see `Backend.mark_call`."""
    with jax.named_scope(scope_name(number)):
        _, marked = jax.lax.optimization_barrier((operands, results))
    return list(marked)


def _follow(program: Any, flow: Flow) -> None:
    """Follow the tensors of a program, one equation after the other."""
    for step in program.eqns:
        name = step.primitive.name
        operands = [id(x) for x in step.invars]
        call, number = None, None
        if name == "optimization_barrier":
            call = layer_of(str(step.source_info.name_stack))
            number = flow.results_of(call)
        if call is not None and number is not None:
            given = len(operands) - number
            results = [id(x) for x in step.outvars[given:]]
            flow.called(call, operands[:given], results)
            continue
        kind: Any = "choice" if name in _CHOICES else "other"
        if name in ("dot_general", "conv_general_dilated"):
            kind = "product"
        made = [(id(x), getattr(x.aval, "dtype", "")) for x in step.outvars]
        inner = [_program(each) for each in _inner(step)]
        if not inner:
            flow.computed(kind, operands, made)
        for each in inner:
            # A branch has no operand for the condition, a loop has operands
            # of its condition first.
            given_to = operands[len(operands) - len(each.invars) :]
            for old, new in zip(given_to, each.invars, strict=False):
                flow.same(old, id(new))
            _follow(each, flow)
            if len(each.outvars) == len(step.outvars):
                for inside, outside in zip(
                    each.outvars, step.outvars, strict=True
                ):
                    flow.same(id(inside), id(outside))


def _described(x: Tensor) -> Any:
    if not isinstance(x, jax.Array):
        return x
    return keras.KerasTensor(x.shape, keras.backend.standardize_dtype(x.dtype))


def _products(
    program: Any, names: set[str]
) -> Iterator[tuple[MatmulSizes, bool]]:
    """Yield each matmul of a program, and whether its count is known.

    The names of its primitives are added to `names`.
    """
    for step in program.eqns:
        name = step.primitive.name
        names.add(name)
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
            for product, known in _products(
                _program(step.params["jaxpr"]), names
            ):
                yield product.times(repeats), known
        elif name == "cond":
            branches = [list(_products(b.jaxpr, names)) for b in _inner(step)]
            yield from max(branches, key=_total, default=[])
        else:
            for inner in _inner(step):
                for product, known in _products(_program(inner), names):
                    yield product, known and name != "while"


def _total(found: list[tuple[MatmulSizes, bool]]) -> int:
    return sum(product.multiplications for product, _ in found)


def _convolution(step: Any, inputs: Tensor, kernel: Any) -> MatmulSizes:
    numbers = step.params["dimension_numbers"]
    outputs = step.outvars[0].aval.shape
    if any(size != 1 for size in step.params["lhs_dilation"]):
        # A transposed one: each input is multiplied with all of the kernel.
        channels = inputs[numbers.lhs_spec[1]]
        return convolution(math.prod(inputs) // channels, inputs, kernel)
    channels = outputs[numbers.out_spec[1]]
    return convolution(math.prod(outputs) // channels, inputs, kernel)


def _inner(step: Any) -> Iterator[Any]:
    """Yield the programs inside of an equation, such as the body of a loop."""
    for value in step.params.values():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(_program(each), "eqns"):
                yield each


def _program(program: Any) -> Any:
    return getattr(program, "jaxpr", program)
