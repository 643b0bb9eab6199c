"""JAX: trace a function, and read its program."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax
import keras

from keras_policy_ext._types import Tensor
from keras_policy_ext.backends.traced_programs import (
    Kind,
    Step,
    TracedProgram,
    scope_number,
)

_CHOICES = frozenset(("approx_top_k", "argmax", "argmin", "sort", "top_k"))
"""Primitives that look for the largest or smallest entries."""

PRODUCTS = ("dot_general", "conv_general_dilated")
"""Primitives that multiply."""


def trace(function: Callable[..., Any], inputs: list[Any]) -> TracedProgram:
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
    # JAX keeps the programs of functions that are compiled or recomputed, for
    # each set of named axes (jax 0.10). With a new axis it traces them now, and
    # never uses these programs, in which layers may be replaced, in a step.
    axis = f"kpe_trace_{next(_TRACES)}"
    program = jax.make_jaxpr(flat, axis_env=[(axis, 1)])(*shapes).jaxpr
    outputs = keras.tree.map_structure(_described, returned)
    return TracedProgram(outputs, program, list(map(id, program.outvars)))


_TRACES = itertools.count()


def steps(program: Any, scope: int | None = None) -> Iterator[Step]:
    """Yield the equations of a program; see `Backend.steps`.

    `scope` is that of a program that an equation of another one runs.
    """
    for equation in program.eqns:
        name = equation.primitive.name
        inner = scope_number(str(equation.source_info.name_stack))
        inner = scope if inner is None else inner
        operands: list[Hashable] = [id(x) for x in equation.invars]
        results = [_result(x) for x in equation.outvars]
        condition = program_in(equation.params.get("cond_jaxpr"))
        bodies = [program_in(each) for each in programs_in(equation)]
        made: list[list[Any]] = []  # The outputs of each body.
        for body in bodies:
            # A body reads the last operands: those of the condition are first.
            given = operands[len(operands) - len(body.invars) :]
            read = [_result(x) for x in body.invars[: len(given)]]
            yield Step("same", given, read, inner)
            yield from steps(body, inner)
            old, new = _carried(equation, body)
            if old:  # A loop: what a step has made, the next one reads.
                yield Step("same", list(map(id, old)), new, inner)
                yield from steps(body, inner)
            if len(body.outvars) == len(results) and body is not condition:
                made.append(body.outvars)
        for number, result in enumerate(results if made else ()):
            of_bodies: list[Hashable] = [id(each[number]) for each in made]
            kind: Kind = "other" if len(made) > 1 else "same"
            yield Step(kind, of_bodies, [result], inner)
        if not made:
            kind = "choice" if name in _CHOICES else "other"
            kind = "product" if name in PRODUCTS else kind
            yield Step(kind, operands, results, inner)


def _carried(
    equation: Any, body: Any
) -> tuple[list[Any], list[tuple[Hashable, str]]]:
    """Return the outputs that a step of a loop hands to the inputs of the next.

    The outputs as variables, the inputs as results of a `Step`.

    Both lists are empty for what is no loop, and for a `while`'s condition.
    """
    name, params = equation.primitive.name, equation.params
    first = count = 0
    if name == "scan":
        first, count = params["num_consts"], params["num_carry"]
    elif name == "while" and body is program_in(params["body_jaxpr"]):
        first, count = params["body_nconsts"], len(body.outvars)
    carried = body.invars[first : first + count]
    return body.outvars[:count], list(map(_result, carried))


def _result(variable: Any) -> tuple[Hashable, str]:
    return id(variable), str(getattr(variable.aval, "dtype", ""))


def _described(x: Tensor) -> Any:
    """Return a `keras.KerasTensor` like a tensor; what is none unchanged."""
    if not isinstance(x, jax.Array):
        return x
    return keras.KerasTensor(x.shape, keras.backend.standardize_dtype(x.dtype))


def programs_in(step: Any) -> Iterator[Any]:
    """Yield the programs inside of an equation, such as the body of a loop."""
    for value in step.params.values():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(program_in(each), "eqns"):
                yield each


def program_in(program: Any) -> Any:
    """Return the jaxpr itself, also of one that is closed over constants."""
    return getattr(program, "jaxpr", program)
