"""`memory`: what a training step keeps, before anything is trained."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import keras

from keras_policy_ext import _user_code, backends, policies, recipes
from keras_policy_ext._keras import global_policy, walking
from keras_policy_ext.backends.tracing import Measured
from keras_policy_ext.conversion import candidates, in_place
from keras_policy_ext.conversion.candidates import path_of
from keras_policy_ext.conversion.requested import (
    LayerFilter,
    PathPatterns,
    PolicyLike,
)
from keras_policy_ext.diagnostics import batches, optimizer_memory
from keras_policy_ext.diagnostics.forward_pass import (
    step_of,
    unchanged_counters,
)
from keras_policy_ext.diagnostics.memory_report import (
    AS_IT_IS,
    WITHOUT,
    LayerMemory,
    MemoryReport,
    ModelMemory,
)
from keras_policy_ext.layers.class_swap import to_stock_class
from keras_policy_ext.layers.state import Float8State
from keras_policy_ext.layers.stored_weights import held, is_state
from keras_policy_ext.layers.transaction import undone
from keras_policy_ext.policies import Float8DTypePolicy
from keras_policy_ext.policies.of_layers import (
    float8_policy_of,
    is_frozen,
    layers_in_float8,
    stock_policy_of,
)


@_user_code.once
def memory(
    model: keras.Layer,
    batch: Any,
    policy: PolicyLike | Sequence[PolicyLike] | None = None,
    *,
    compile: bool = False,
    include: PathPatterns | None = None,
    exclude: PathPatterns | None = None,
    filter: LayerFilter | None = None,
    min_size: int | None = None,
    attention: Literal["float8"] | None = None,
) -> MemoryReport:
    """What a training step of a model keeps in memory, by layer.

    Weights, optimizer, float8 state, and what the forward pass keeps for the
    backward pass; for the model as it is and as it would be in other
    policies. Nothing is trained, and the model stays as it is.

    ```python
    print(kpe.memory(model, 256))
    ```

    Args:
        model: A built Keras model, or a layer.
        batch: What the model is called on: arrays, also nested; or only their
            shapes, as tuples of sizes, `keras.KerasTensor` or
            `keras.InputSpec`; or the size of a batch, for Functional and
            Sequential models.
        policy: A policy, a recipe, or the name of one; several in a list. A
            recipe and a float8 policy: as `convert` would make the model. A
            plain policy, such as `"mixed_bfloat16"`: with it in all layers.
            None: as `convert(model)` would make it; and where layers are in
            float8 already, as it would be without, in their source policies.
            An empty list: only as it is.
        compile: Whether XLA is asked too what it plans for both passes. That
            takes as long as compiling a training step, and JAX only.
        include: As for `convert`, and so are the other arguments.
        exclude: Likewise.
        filter: Likewise.
        min_size: Likewise.
        attention: Likewise.

    Returns:
        Rows of bytes; `print` it for a table.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the model is not built or has no `call`, a size of the
            batch is not known, a policy means none, or `compile` is asked of
            a framework that does not say. The model is unchanged in any case.

    Examples:
        >>> layer = keras.layers.Dense(8)
        >>> model = keras.Sequential([keras.Input((32,)), layer])
        >>> report = kpe.memory(model, 64, "current")
        >>> report["current"].weights  # bytes
        1056
        >>> [form.name for form in report.forms]
        ['as it is', 'current']
    """
    _check(model)
    options = {
        "include": include,
        "exclude": exclude,
        "filter": filter,
        "min_size": min_size,
        "attention": attention,
    }
    wanted = _asked(model, policy)
    tensors = batches.read(model, batch)
    counted = [_counted(model, AS_IT_IS, tensors, compile)]
    if policy is None and _trains_in_float8(model):
        with in_place.reverted(model):
            counted.append(_counted(model, WITHOUT, tensors, compile))
    for name, each in wanted.items():
        with _under(model, each, options):
            counted.append(_counted(model, name, tensors, compile))
    return MemoryReport(
        model=model.name,
        forms=tuple(counted),
        batch=batches.size_of(tensors),
        optimizer=optimizer_memory.bytes_of(model),
    )


def _check(model: Any) -> None:
    """Raise if a model cannot be called."""
    candidates.check_is_layer(
        model, "have a training step", "; a file goes to `load_model` first"
    )
    candidates.check(model)
    if not candidates.has_call(model):
        raise ValueError(
            f"{type(model).__name__} {model.name!r} has no `call`, and what a "
            "step of it computes is not known. Received: a model that has "
            "parts only. Allowed: models and layers that can be called. Ask "
            "for the memory of each part."
        )


def _asked(model: keras.Layer, policy: Any) -> dict[str, Any]:
    """Policies and recipes that are asked for, by the names of the forms."""
    if policy is None:
        is_converted = bool(layers_in_float8(model))
        return {} if is_converted else {"converted": None}
    several = policy if isinstance(policy, (list, tuple)) else [policy]
    return {_name(each): _read(each) for each in several}


def _trains_in_float8(model: keras.Layer) -> bool:
    """Return True if a layer is in float8 and has a form without it."""
    return not all(map(is_frozen, layers_in_float8(model)))


def _read(policy: Any) -> Any:
    named = isinstance(policy, str) and policy.partition("(")[0]
    if isinstance(policy, recipes.Recipe) or named in recipes.names():
        return recipes.get(policy)
    return policies.get(policy)


def _name(policy: Any) -> str:
    if isinstance(policy, str):
        return policy
    policy = _read(policy)
    if isinstance(policy, recipes.Recipe):
        return str(policy.spec or policy.name)
    return str(getattr(policy, "full_name", policy.name))


def _under(
    model: keras.Layer, policy: Any, options: dict[str, Any]
) -> AbstractContextManager[Any]:
    if policy is None or isinstance(
        policy, (recipes.Recipe, Float8DTypePolicy)
    ):
        return in_place.converted(model, policy, **options)
    return _in_plain(model, policy)


@contextlib.contextmanager
def _in_plain(model: keras.Layer, policy: Any) -> Iterator[None]:
    """A model under a plain policy in all layers, for a block."""
    layers = walking.layers_within(model)
    dtypes = {
        keras.backend.standardize_dtype(v.dtype)
        for v in model.trainable_variables
    }
    if dtypes - {policy.variable_dtype}:
        raise ValueError(
            f"Cannot compare with {policy.name!r}: it stores weights in "
            f"another dtype. Received: {policy.name!r}, for a model with "
            f"weights in {', '.join(sorted(dtypes))}. Allowed: a policy that "
            "stores weights in the same dtype. Make the model under that "
            "policy, and ask for its memory."
        )
    with undone(layers):
        for layer in layers:
            if isinstance(layer, Float8State):
                continue
            to_stock_class(layer)
            if keras.backend.is_float_dtype(layer.compute_dtype or "int32"):
                # Not by its setter, which would write into a map of Keras.
                global_policy.replace_layer_policy(layer, policy)
        yield


def _counted(
    model: keras.Layer, name: str, batch: Any, compile: bool
) -> ModelMemory:
    """The memory of a model as it is now."""
    layers = [
        layer
        for layer in walking.layers_within(model)
        if not isinstance(layer, Float8State)
    ]
    # Loaded here, and not while tensors have no numbers.
    backends.engine()
    framework = backends.current()
    with undone(layers), unchanged_counters(layers):
        step = step_of(model, layers, batch)
        planned = framework.planned_bytes(step) if compile else None
        measured = framework.kept(step)
    rows = tuple(_rows(layers, measured))
    return ModelMemory(name, rows, measured.by, planned)


def _rows(layers: list[Any], measured: Measured) -> Iterator[LayerMemory]:
    """A row for each layer that has something; the model itself if nobody."""
    counted: set[int] = set()
    for number, layer in enumerate(layers):
        variables = [
            *walking.own_weights(layer),
            *getattr(getattr(layer, "float8_state", None), "weights", ()),
        ]
        own = [v for v in map(held, variables) if id(v) not in counted]
        counted |= {id(v) for v in own}
        kept = [k for k in measured.kept if (k.layer or 0) == number]
        policy = float8_policy_of(layer)
        row = LayerMemory(
            path=path_of(layer),
            class_name=type(layer).__name__,
            policy=policy.full_name if policy else stock_policy_of(layer).name,
            weights=_bytes(v for v in own if not is_state(v)),
            state=_bytes(v for v in own if is_state(v)),
            activations=sum(k.bytes for k in kept if not k.of_weights),
            weight_copies=sum(k.bytes for k in kept if k.of_weights),
        )
        if row.total:
            yield row


def _bytes(variables: Iterator[Any]) -> int:
    return sum(batches.size_of(v) for v in variables)
