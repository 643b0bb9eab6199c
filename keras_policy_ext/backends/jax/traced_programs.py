"""JAX: trace a function, and follow the values in its program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras

from keras_policy_ext._types import Tensor
from keras_policy_ext.backends.traced_programs import (
    Flow,
    TracedProgram,
    layer_of,
)

_CHOICES = frozenset(("approx_top_k", "argmax", "argmin", "sort", "top_k"))
"""Primitives that look for the largest or smallest entries."""

PRODUCTS = ("dot_general", "conv_general_dilated")
"""Primitives that multiply."""


def trace(
    function: Callable[..., Any], inputs: list[Any], flow: Flow | None = None
) -> TracedProgram:
    """Trace a function with JAX; see `Backend.trace`."""
    returned: Any = None

    def flat(*tensors: Any) -> list[Any]:
        """Call the function; return its tensors as a flat list."""
        # A program returns tensors alone; what else there is, is kept here.
        nonlocal returned
        returned = function(*tensors)
        leaves = keras.tree.flatten(returned)
        return [x for x in leaves if isinstance(x, jax.Array)]

    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs]
    program = jax.make_jaxpr(flat)(*shapes)
    outputs = keras.tree.map_structure(_described, returned)
    if flow is not None:
        flow.start(map(id, program.jaxpr.invars))
        _follow(program.jaxpr, flow)
        flow.finish(map(id, program.jaxpr.outvars))
    return TracedProgram(outputs, program.jaxpr, _chooses(program.jaxpr))


def _follow(program: Any, flow: Flow) -> None:
    """Tell a flow each equation of a program, in order, and of those inside."""
    for step in program.eqns:
        name = step.primitive.name
        operands = [id(x) for x in step.invars]
        call, result_count = None, None
        # `mark_call` passes a call's operands, then its results, through one.
        if name == "optimization_barrier":
            call = layer_of(str(step.source_info.name_stack))
            result_count = flow.results_of(call)
        if call is not None and result_count is not None:
            first = len(operands) - result_count
            results = [id(x) for x in step.outvars[first:]]
            flow.called(call, operands[:first], results)
            continue
        kind: Any = "choice" if name in _CHOICES else "other"
        if name in PRODUCTS:
            kind = "product"
        bodies = [program_in(each) for each in programs_in(step)]
        if not bodies:
            made = [(id(x), getattr(x.aval, "dtype", "")) for x in step.outvars]
            flow.computed(kind, operands, made)
        for body in bodies:
            # A body reads the last operands: those of the condition are first.
            given = operands[len(operands) - len(body.invars) :]
            for old, new in zip(given, body.invars, strict=False):
                flow.same(old, id(new))
            _follow(body, flow)
            # The condition of a loop returns no results of the loop.
            if len(body.outvars) == len(step.outvars):
                pairs = zip(body.outvars, step.outvars, strict=True)
                for inside, outside in pairs:
                    flow.same(id(inside), id(outside))


def _described(x: Tensor) -> Any:
    """Return a `keras.KerasTensor` like a tensor; what is none unchanged."""
    if not isinstance(x, jax.Array):
        return x
    return keras.KerasTensor(x.shape, keras.backend.standardize_dtype(x.dtype))


def _chooses(program: Any) -> bool:
    """Return True if a program, or one in it, chooses among values."""
    return any(
        step.primitive.name in _CHOICES
        or any(map(_chooses, map(program_in, programs_in(step))))
        for step in program.eqns
    )


def programs_in(step: Any) -> Iterator[Any]:
    """Yield the programs inside of an equation, such as the body of a loop."""
    for value in step.params.values():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(program_in(each), "eqns"):
                yield each


def program_in(program: Any) -> Any:
    """Return the jaxpr itself, also of one that is closed over constants."""
    return getattr(program, "jaxpr", program)
