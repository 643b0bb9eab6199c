"""JAX: the tensors that are saved for gradients, and what XLA plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import keras

from keras_policy_ext._types import override
from keras_policy_ext.backends.traced_programs import scope_name, scope_number
from keras_policy_ext.ext.memory.saved_tensors import (
    Kept,
    Measured,
    MeasuredStep,
    Memory,
    Origin,
    Update,
    kept_of,
    source_of_variable,
)

Jaxpr = Any

_VIEWS = frozenset(
    [
        "broadcast_in_dim",
        "copy",
        "copy_p",
        "name",
        "reshape",
        "squeeze",
        "transpose",
    ]
)
"""Primitives whose result shares memory with their operand in XLA."""

_CALLS = frozenset(
    [
        "checkpoint",
        "closed_call",
        "core_call",
        "custom_jvp_call",
        "custom_vjp_call",
        "custom_vjp_call_jaxpr",
        "jit",
        "pjit",
        "remat",
        "remat2",
    ]
)
"""Primitives that compute one program with their operands as its inputs."""


def kept(step: MeasuredStep) -> Measured:
    """List each forward tensor that the compiled backward pass reads, once."""
    # XLA may save less: it recomputes what is cheap.
    forward, backward, outputs = _programs(step)
    origins = _origins(forward.jaxpr, _inputs(step, forward.jaxpr))[outputs:]
    users = _users(backward.jaxpr, [True] * len(backward.jaxpr.outvars))
    # In the order of the backward pass, so that the first that keeps a tensor
    # comes last.
    reads = [
        (*user, number)
        for number in range(len(origins))
        for user in users[number]
    ]
    found: dict[int, Kept] = {}
    for _, layer, number in sorted(reads, key=lambda read: read[0]):
        kept = kept_of(origins[number], layer)
        if kept is not None:
            found[id(origins[number])] = kept
    return Measured(list(found.values()), "residuals of jax.vjp, not run")


def planned(step: MeasuredStep) -> int:
    """Return the bytes that XLA plans for the temporary tensors of a step."""

    def gradients(values: Any, batch: Any, outputs_grad: Any) -> Any:
        outputs, backward = _vjp(step, values, batch)
        return outputs, backward(outputs_grad)

    values, batch = _shapes(step)
    outputs_grad = jax.eval_shape(
        lambda values, batch: step.call(values, batch, _inside), values, batch
    )
    compiled = jax.jit(gradients).lower(values, batch, outputs_grad).compile()
    return int(compiled.memory_analysis().temp_size_in_bytes)


def planned_step(step: MeasuredStep, update: Update | None) -> int:
    """Return the bytes that XLA plans for a step and its update, all in all.

    These are weights, optimizer, batch and temporary tensors. Gradients are
    such tensors. The new weights take the place of the old ones.
    """
    trained = [
        v for v, one in zip(step.variables, step.trained, strict=True) if one
    ]
    places = {id(v): place for place, v in enumerate(trained)}
    of_update = [places[id(v)] for v in update.weights] if update else []

    def whole(values: Any, slots: Any, batch: Any) -> Any:
        outputs, backward = _vjp(step, values, batch)
        (new,) = backward([jax.numpy.ones_like(x) for x in outputs])
        if update is not None:
            pairs = zip(values, step.trained, strict=True)
            old = [value for value, one in pairs if one]
            updated, slots = update.call(
                slots, [new[n] for n in of_update], [old[n] for n in of_update]
            )
            for place, value in zip(of_update, updated, strict=True):
                new[place] = value
        found = iter(new)
        pairs = zip(values, step.trained, strict=True)
        return [next(found) if one else value for value, one in pairs], slots

    values, batch = _shapes(step)
    slots = list(map(_shape, update.slots)) if update else []
    program = jax.jit(whole, donate_argnums=(0, 1)).lower(values, slots, batch)
    plan = program.compile().memory_analysis()
    return int(
        plan.argument_size_in_bytes
        + plan.output_size_in_bytes
        - plan.alias_size_in_bytes
        + plan.temp_size_in_bytes
    )


def _programs(step: MeasuredStep) -> tuple[Jaxpr, Jaxpr, int]:
    """Return the forward program, the backward one, and the output count."""
    structures = []

    def forward(values: Any, batch: Any) -> Any:
        outputs, backward = _vjp(step, values, batch)
        leaves, structure = jax.tree_util.tree_flatten(backward)
        structures.append(structure)
        return outputs, leaves

    def backward(leaves: Any, outputs_grad: Any) -> Any:
        return jax.tree_util.tree_unflatten(structures[0], leaves)(outputs_grad)

    traced, shapes = jax.make_jaxpr(forward, return_shape=True)(*_shapes(step))
    outputs, leaves = shapes
    return traced, jax.make_jaxpr(backward)(leaves, outputs), len(outputs)


def _vjp(step: MeasuredStep, values: Any, batch: Any) -> Any:
    def outputs(trained: Any) -> Any:
        found = iter(trained)
        every = [
            next(found) if is_trained else value
            for value, is_trained in zip(values, step.trained, strict=True)
        ]
        return step.call(every, batch, _inside)

    pairs = zip(values, step.trained, strict=True)
    return jax.vjp(outputs, [value for value, trained in pairs if trained])


def _inside(number: int) -> Any:
    return jax.named_scope(scope_name(number))


def _shapes(step: MeasuredStep) -> tuple[Any, Any]:
    values = list(map(_shape, step.variables))
    return values, keras.tree.map_structure(_shape, step.batch)


def _shape(x: Any) -> Any:
    dtype = keras.backend.standardize_dtype(x.dtype)
    return jax.ShapeDtypeStruct(tuple(x.shape), dtype)


def _inputs(step: MeasuredStep, jaxpr: Jaxpr) -> list[Origin]:
    sources = [source_of_variable(is_weight) for is_weight in step.weights]
    sources += ["batch"] * (len(jaxpr.invars) - len(sources))
    return [
        Origin(_bytes(variable), {source}, is_given=True)
        for variable, source in zip(jaxpr.invars, sources, strict=True)
    ]


def _origins(jaxpr: Jaxpr, inputs: Sequence[Origin]) -> list[Origin]:
    """Return, for each result of a program, the tensor that owns its memory."""
    known = {id(v): Origin(_bytes(v), (), True) for v in jaxpr.constvars}
    known.update(zip(map(id, jaxpr.invars), inputs, strict=True))

    def origin(variable: keras.Variable) -> Origin:
        # A number that is written in the program is none of its variables.
        return known.get(id(variable)) or Origin(0, ())

    for equation in jaxpr.eqns:
        operands = [origin(variable) for variable in equation.invars]
        results = _results(equation, operands)
        known.update(zip(map(id, equation.outvars), results, strict=True))
    return [origin(variable) for variable in jaxpr.outvars]


def _results(equation: Any, operands: list[Origin]) -> list[Origin]:
    within = _within(equation)
    if within is not None:
        return _origins(within, operands)
    if equation.primitive.name in _VIEWS:
        return operands[:1]
    if equation.primitive.name == "optimization_barrier":
        return operands
    sources = frozenset[str]().union(*(each.sources for each in operands))
    return [Origin(_bytes(each), sources) for each in equation.outvars]


def _users(
    jaxpr: Jaxpr, wanted: Sequence[bool]
) -> list[list[tuple[int, int | None]]]:
    """List for each input of a program (place, layer) of its readers."""
    needed = {
        id(variable)
        for variable, is_wanted in zip(jaxpr.outvars, wanted, strict=True)
        if is_wanted
    }
    users: dict[int, list[tuple[int, int | None]]] = {}
    for place, equation in reversed(list(enumerate(jaxpr.eqns))):
        results = [id(variable) in needed for variable in equation.outvars]
        if not any(results):  # XLA leaves it out too.
            continue
        layer = scope_number(str(equation.source_info.name_stack))
        for variable in _read(equation, results):
            needed.add(id(variable))
            users.setdefault(id(variable), []).append((place, layer))
    return [users.get(id(variable), []) for variable in jaxpr.invars]


def _read(equation: Any, results: list[bool]) -> list[Any]:
    """Return the operands that the wanted results of an equation depend on."""
    if equation.primitive.name == "while":
        return _read_by_loop(equation, results)
    within = _within(equation)
    if within is None:
        return list(equation.invars)
    users = _users(within, results)
    return [v for v, used in zip(equation.invars, users, strict=True) if used]


def _read_by_loop(equation: Any, results: list[bool]) -> list[Any]:
    """Return the operands that the wanted results of a loop depend on."""
    params = equation.params
    condition, body = params["cond_jaxpr"].jaxpr, params["body_jaxpr"].jaxpr
    asked = [bool(users) for users in _users(condition, [True])]
    of_condition, of_body = params["cond_nconsts"], params["body_nconsts"]
    carried = [
        a or b for a, b in zip(asked[of_condition:], results, strict=True)
    ]
    before: list[bool] = []
    while carried != before:
        before = carried
        read = [bool(users) for users in _users(body, carried)]
        carried = [a or b for a, b in zip(read[of_body:], carried, strict=True)]
    used = [*asked[:of_condition], *read[:of_body], *carried]
    return [
        v for v, is_used in zip(equation.invars, used, strict=True) if is_used
    ]


def _within(equation: Any) -> Jaxpr | None:
    """Return the program that a call equation runs; None for others."""
    if equation.primitive.name not in _CALLS:
        return None
    params = equation.params
    called = params.get("jaxpr") or params.get("call_jaxpr")
    return getattr(called, "jaxpr", called)


def _bytes(variable: keras.Variable) -> int:
    aval = variable.aval
    itemsize = getattr(aval.dtype, "itemsize", 0)
    return int(getattr(aval, "size", 0)) * int(itemsize)


class JaxMemory(Memory):
    """Read from programs that JAX traces and XLA compiles."""

    name = "jax"

    @override
    def kept(self, step: MeasuredStep) -> Measured:
        return kept(step)

    @override
    def planned_bytes(self, step: MeasuredStep) -> int:
        return planned(step)

    @override
    def planned_step(
        self, step: MeasuredStep, update: Update | None
    ) -> int | None:
        return planned_step(step, update)


MEMORY = JaxMemory()
