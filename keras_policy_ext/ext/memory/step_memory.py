"""`memory`: what a training step and its optimizer hold, before training."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import keras

from keras_policy_ext import policies, recipes, user_code
from keras_policy_ext._keras import global_policy
from keras_policy_ext._keras.walking import layers_within, own_weights
from keras_policy_ext.conversion.candidates import check as check_convertible
from keras_policy_ext.conversion.candidates import check_is_layer, path_of
from keras_policy_ext.conversion.in_place import converted, reverted
from keras_policy_ext.conversion.requested import (
    LayerFilter,
    PathPatterns,
    PolicyLike,
)
from keras_policy_ext.ext.memory import optimizer_memory, saved_tensors
from keras_policy_ext.ext.memory._keras import dtypes_replaced
from keras_policy_ext.ext.memory.measured_step import step_of
from keras_policy_ext.ext.memory.optimizer_memory import Owned
from keras_policy_ext.ext.memory.saved_tensors import Measured
from keras_policy_ext.ext.sampling import symbolic_batches
from keras_policy_ext.ext.sampling.captured import calls_undone
from keras_policy_ext.layers.class_swap import to_stock_class
from keras_policy_ext.layers.state import Float8State
from keras_policy_ext.layers.state_of import is_state
from keras_policy_ext.layers.stored_weights import held
from keras_policy_ext.layers.transaction import undone
from keras_policy_ext.numerics import ROUNDABLE
from keras_policy_ext.policies import Float8DTypePolicy
from keras_policy_ext.policies.of_layers import (
    float8_policy_of,
    is_frozen,
    layers_in_float8,
    stock_policy_of,
)
from keras_policy_ext.recipes import is_spec
from keras_policy_ext.reports import (
    EVERY,
    BaseReport,
    Column,
    Table,
    readable_bytes,
)

AS_IT_IS = "as it is"
WITHOUT = "without float8"
CHANGED = "new optimizer"


class UnfitPolicyError(ValueError):
    """A model cannot be counted under a plain policy that is not its own."""


@dataclasses.dataclass(frozen=True)
class LayerMemory:
    """The bytes of one layer: weights, state, and tensors saved for backward.

    Attributes:
        path: Its path.
        class_name: The name of its class.
        policy: The full name of the policy that it follows.
        weights: Its own weights, without those of layers in it.
        gradients: The gradients of its trained weights, in their dtypes.
        state: Its float8 state.
        activations: What it saves for the backward pass from the batch.
        weight_copies: What it saves for the backward pass from its weights
            alone: casts and float8 copies, for any batch size.
    """

    path: str
    class_name: str
    policy: str
    weights: int = 0
    state: int = 0
    activations: int = 0
    weight_copies: int = 0
    gradients: int = 0

    @property
    def kept(self) -> int:
        """All bytes that the layer saves for the backward pass."""
        return self.activations + self.weight_copies

    @property
    def total(self) -> int:
        """The sum of all bytes of the layer."""
        return self.weights + self.state + self.kept


@dataclasses.dataclass(frozen=True)
class ModelMemory:
    """The bytes of each layer of a model under one policy.

    Attributes:
        name: `"as it is"`, `"without float8"`, or the policy or recipe.
        layers: One entry for each layer that has or keeps something.
        counted_by: How the saved bytes were determined.
        planned: What XLA plans for both passes, without weights, batch,
            outputs and gradients; None if it was not requested.
        optimizer: Bytes of the optimizer; None if unknown. float8 states have
            no slots.
        peak: The most bytes that a step of `fit` takes at one time; None if
            unknown.
    """

    name: str
    layers: tuple[LayerMemory, ...]
    counted_by: str
    planned: int | None = None
    optimizer: int | None = None
    peak: int | None = None

    @property
    def weights(self) -> int:
        """The total bytes of the weights of all layers."""
        return sum(layer.weights for layer in self.layers)

    @property
    def state(self) -> int:
        """The total bytes of the float8 state of all layers."""
        return sum(layer.state for layer in self.layers)

    @property
    def activations(self) -> int:
        """Bytes that all layers save for the backward pass, from the batch."""
        return sum(layer.activations for layer in self.layers)

    @property
    def weight_copies(self) -> int:
        """Bytes that all layers save for the backward pass, from weights."""
        return sum(layer.weight_copies for layer in self.layers)

    @property
    def kept(self) -> int:
        """All bytes that the layers save for the backward pass."""
        return self.activations + self.weight_copies

    @property
    def gradients(self) -> int:
        """The total bytes of the gradients of all trained weights."""
        return sum(layer.gradients for layer in self.layers)

    @property
    def together(self) -> int:
        """The sum of all bytes; an unknown optimizer counts 0."""
        held = self.weights + self.gradients + self.state + self.kept
        return held + (self.optimizer or 0)


@dataclasses.dataclass(frozen=True, repr=False)
class MemoryReport(BaseReport):
    """The report of `memory`: bytes in a training step, by layer and policy.

    `str` has the totals, with what each part saves if there are two forms, and
    a row for each class of layers. It fits on a screen of 24 lines.
    `table(full=True)` has a row for each layer.

    Attributes:
        model: The name of the model.
        forms: The model as it is, and under each requested policy. If the model
            is converted and no policy was requested, as it is and without
            float8.
        batch: Bytes of the batch.
    """

    model: str
    forms: tuple[ModelMemory, ...]
    batch: int

    _every = EVERY

    @property
    def optimizer(self) -> int | None:
        """Bytes of the optimizer of the model as it is; None if unknown."""
        return self.forms[0].optimizer

    def __getitem__(self, name: str) -> ModelMemory:
        """Return the `ModelMemory` of the policy with this name.

        Raises:
            KeyError: If no form has this name.
        """
        for form in self.forms:
            if form.name == name:
                return form
        raise KeyError(f"{name!r}; there are {[f.name for f in self.forms]}")

    def _count(self) -> int:
        return len(self._short_rows())

    def _parts(self, full: bool, number: int) -> Iterator[str | Table]:
        """Yield the totals, and a table with a row for each class or layer."""
        yield (
            f"A training step of {self.model!r}, on a batch of "
            f"{readable_bytes(self.batch)}"
        )
        yield self._totals()
        rows = self._full_rows() if full else self._short_rows()
        if not rows:
            has = "keeps anything" if self.forms[0].weights else "has weights"
            yield f"No layer {has}"
            return
        first = (
            Column("layer", apart=True)
            if full
            else Column("layers", right=True)
        )
        columns = [first, Column("class"), *self._of_forms()]
        yield Table(columns, rows if full else rows[:number])
        if not full and (left := len(rows) - number):
            yield f"and {left:,} more"
        ways = dict.fromkeys(form.counted_by for form in self.forms)
        yield f"Kept: {' or '.join(ways)}. Loss and metrics not counted."

    @property
    def _shown(self) -> list[ModelMemory]:
        """The forms in the order of columns: without float8 comes first."""
        return sorted(self.forms, key=lambda form: form.name != WITHOUT)

    def _totals(self) -> Table:
        forms = self._shown
        rows: list[tuple[str, list[int | None]]] = [
            ("weights", [form.weights for form in forms]),
            ("gradients", [form.gradients for form in forms]),
            ("optimizer", [form.optimizer for form in forms]),
            ("float8 state", [form.state for form in forms]),
            ("kept for the backward pass", [form.kept for form in forms]),
            ("of which copies of weights", [f.weight_copies for f in forms]),
            ("together", [form.together for form in forms]),
            ("peak of a step", [form.peak for form in forms]),
            ("both passes, by XLA", [form.planned for form in forms]),
        ]
        shown = [row for row in rows if any(row[1])]
        columns = [Column(""), *self._of_forms()]
        cells = [[name, *_compared(numbers)] for name, numbers in shown]
        if len(forms) == 2:
            columns.append(Column("saves", right=True))
            for each, (_, numbers) in zip(cells, shown, strict=True):
                each.append(_saved(*numbers))
        return Table(columns, cells)

    def _of_forms(self) -> list[Column]:
        return [Column(form.name, right=True) for form in self._shown]

    def _short_rows(self) -> list[list[str]]:
        """Return a table row for each layer class, the largest first."""
        groups: dict[str, list[tuple[LayerMemory, ...]]] = {}
        for entries in self._layers():
            if any(entry.kept for entry in entries):
                groups.setdefault(entries[0].class_name, []).append(entries)
        found = [
            (name, len(group), _sums(group)) for name, group in groups.items()
        ]
        found.sort(key=lambda each: -max(each[2]))
        return [
            [f"{count:,}", name, *_compared(sums)]
            for name, count, sums in found
        ]

    def _full_rows(self) -> list[list[str]]:
        return [
            [
                entries[0].path,
                entries[0].class_name,
                *_compared([entry.kept for entry in entries]),
            ]
            for entries in self._layers()
        ]

    def _layers(self) -> list[tuple[LayerMemory, ...]]:
        """Return for each layer a tuple of its `LayerMemory` in each column."""
        known = [{x.path: x for x in form.layers} for form in self._shown]
        paths = dict.fromkeys(path for form in known for path in form)
        found = []
        for path in paths:
            some = next(form[path] for form in known if path in form)
            none = LayerMemory(path, some.class_name, some.policy)
            found.append(tuple(form.get(path, none) for form in known))
        return found


@user_code.once
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
    optimizer: Any = None,
) -> MemoryReport:
    """Return the bytes that a training step of a model holds, by layer.

    This is the weights, their gradients, the optimizer, the float8 state, and
    what the forward pass saves for the backward pass, for the model as it is
    and under other policies. On PyTorch, and on JAX with `compile=True`, there
    is also the peak of a step. Nothing is trained, and the model is unchanged.

    ```python
    print(kpe.memory(model, 256))
    ```

    Args:
        model: A built Keras model, or a layer.
        batch: What the model is called with: arrays, also nested; or only their
            shapes, as tuples of sizes, `keras.KerasTensor` or
            `keras.InputSpec`; or the size of a batch, for Functional and
            Sequential models.
        policy: A policy, a recipe, or the name of one; or a list of several.
            With a recipe or a float8 policy, the model is measured as
            `convert` would make it. With a plain policy, such as
            `"mixed_bfloat16"`, all layers get that policy. None: the model as
            `convert(model)` would make it; or, if layers are in float8
            already, with their source policies. An empty list: only as it is.
            Of a model in float8, or whose optimizer has moments in one byte
            or rounds weights at random, None also measures the form without:
            layers with their source policies, moments and weights in float32.
        compile: Whether XLA also reports what it plans, for both passes and,
            as the peak, for a whole step with its update. That takes twice as
            long as compiling a training step, and needs JAX.
        include: As for `convert`.
        exclude: As for `convert`.
        filter: As for `convert`.
        min_size: As for `convert`.
        attention: As for `convert`.
        optimizer: The optimizer of the other forms: `"float8"` or `"mx"`, for
            the model's own with moments in one byte; or a Keras optimizer.
            With a `StochasticRounding`, weights of layers that compute in
            bfloat16 or float16 count in that dtype. None: the model's own.

    Returns:
        Rows of bytes; `print` it for a table.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the model is not built or has no `call`, a size of the
            batch is not known, `policy` names no policy, or one under which
            the model cannot be called, or the framework does not support
            `compile`. The model is then unchanged.

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
    own = optimizer_memory.of_model(model)
    asked = optimizer_memory.asked(model, optimizer)
    wanted = _asked(model, policy)
    if optimizer is not None and not wanted:
        wanted = {CHANGED: ()}
    tensors = symbolic_batches.read(model, batch)

    def count(name: str, optimizers: list[Owned]) -> ModelMemory:
        return _counted(model, name, tensors, compile, optimizers)

    forms = [count(AS_IT_IS, own)]
    if policy is None and _is_changed(model, own):
        with reverted(model), _float32_weights(model, own):
            forms.append(count(WITHOUT, optimizer_memory.stock(own)))
    for name, each in wanted.items():
        with _under(model, each, options), _narrow_weights(model, asked):
            try:
                forms.append(count(name, asked))
            # The code is the user's, and may raise anything.
            except Exception as error:
                if not _is_plain(each):
                    raise
                raise UnfitPolicyError(
                    _cannot_call(model, name, error)
                ) from error
    return MemoryReport(
        model=model.name,
        forms=tuple(forms),
        batch=symbolic_batches.size_of(tensors),
    )


def _check(model: keras.Layer) -> None:
    """Raise if a model is not built or has no `call`."""
    check_is_layer(
        model, "have a training step", "; a file goes to `load_model` first"
    )
    check_convertible(model)
    if type(model).call in (keras.Model.call, keras.Layer.call):
        raise ValueError(
            f"{type(model).__name__} {model.name!r} has no `call`, so the "
            "computation of its step is not known. Received: a model that "
            "consists of parts only. Allowed: models and layers that can be "
            "called. Call `kpe.memory` for each part."
        )


def _peak(
    form: ModelMemory, forward: int | None, optimizers: list[Owned]
) -> int | None:
    """Return the most bytes of an eager step of `fit`; None if unknown."""
    if forward is None or form.optimizer is None:
        return None
    # Gradients of a step last until the next forward pass has ended. What the
    # backward pass needs is gone when the optimizer updates.
    update = optimizer_memory.update_bytes(optimizers)
    if update is None:
        return None
    return form.together - form.kept + max(forward, update)


def _asked(model: keras.Layer, policy: Any) -> dict[str, Any]:
    """Return the policies and recipes to measure, by the name in the report."""
    if policy is None:
        is_converted = bool(layers_in_float8(model))
        return {} if is_converted else {"converted": None}
    several = policy if isinstance(policy, (list, tuple)) else [policy]
    return {_name(each): _read(each) for each in several}


def _is_changed(model: keras.Layer, optimizers: list[Owned]) -> bool:
    """Return True if a step holds less than that of a stock model."""
    return (
        not all(map(is_frozen, layers_in_float8(model)))
        or optimizer_memory.are_quantized(optimizers)
        or optimizer_memory.round_at_random(optimizers)
    )


@contextlib.contextmanager
def _narrow_weights(
    model: keras.Layer, optimizers: list[Owned]
) -> Iterator[None]:
    """In the block, weights rounded at random say they have compute dtypes."""
    found = []
    if optimizer_memory.round_at_random(optimizers):
        found = [
            (weight, layer.compute_dtype)
            for layer in layers_within(model)
            if layer.compute_dtype in ROUNDABLE
            for weight in _weights_of(layer, ["float32"])
        ]
    with dtypes_replaced(found):
        yield


@contextlib.contextmanager
def _float32_weights(
    model: keras.Layer, optimizers: list[Owned]
) -> Iterator[None]:
    """In the block, no float8; weights rounded at random are in float32."""
    layers = layers_within(model)
    found: list[Any] = []
    with undone(layers):
        if optimizer_memory.round_at_random(optimizers):
            for layer in layers:
                weights = _weights_of(layer, ROUNDABLE)
                found += [(weight, "float32") for weight in weights]
                policy = stock_policy_of(layer)
                if policy.variable_dtype in ROUNDABLE:
                    mixed = keras.DTypePolicy(f"mixed_{policy.compute_dtype}")
                    global_policy.replace_layer_policy(layer, mixed)
        with dtypes_replaced(found):
            yield


def _weights_of(layer: keras.Layer, dtypes: Iterable[str]) -> list[Any]:
    """Return a layer's own weights in some dtypes, without float8 state."""
    return [
        weight
        for weight in map(held, own_weights(layer))
        if not is_state(weight)
        and keras.backend.standardize_dtype(weight.dtype) in dtypes
    ]


def _read(policy: Any) -> Any:
    if isinstance(policy, recipes.Recipe) or is_spec(policy):
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
    if policy == ():
        return contextlib.nullcontext()
    if _is_plain(policy):
        return _in_plain(model, policy)
    return converted(model, policy, **options)


def _is_plain(policy: Any) -> bool:
    """Return True for a plain policy, which all layers of a model get."""
    own = policy is None or policy == ()
    return not own and not isinstance(
        policy, (recipes.Recipe, Float8DTypePolicy)
    )


def _cannot_call(model: keras.Layer, name: str, error: Exception) -> str:
    return (
        f"{type(model).__name__} {model.name!r} cannot be called under "
        f"{name!r}. Received: {error}. Allowed: a policy under which all "
        "layers compute. If a `call` makes tensors of a fixed dtype, such as "
        "by `ops.one_hot`, cast them to `self.compute_dtype`."
    )


@contextlib.contextmanager
def _in_plain(model: keras.Layer, policy: Any) -> Iterator[None]:
    """In the block, all layers of a model follow a plain dtype policy."""
    layers = layers_within(model)
    dtypes = {
        keras.backend.standardize_dtype(v.dtype)
        for v in model.trainable_variables
    }
    if dtypes - {policy.variable_dtype}:
        raise UnfitPolicyError(
            f"Cannot compare with {policy.name!r}: it stores weights in "
            f"another dtype. Received: {policy.name!r}, for a model with "
            f"weights in {', '.join(sorted(dtypes))}. Allowed: a policy that "
            "stores weights in the same dtype. To measure that policy, make "
            "the model under it and call `kpe.memory`."
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
    model: keras.Layer,
    name: str,
    batch: Any,
    compile: bool,
    optimizers: list[Owned],
) -> ModelMemory:
    """Return the measured memory of a model under its present policies."""
    # Loaded here, and not while tensors have no numbers.
    framework = saved_tensors.of_backend()
    with calls_undone(model) as layers:
        step = step_of(model, layers, batch)
        planned = framework.planned_bytes(step) if compile else None
        peak = None
        if compile:
            update = optimizer_memory.update_of(optimizers, model)
            peak = framework.planned_step(step, update)
        measured = framework.kept(step)
    trained = {id(v) for v in model.trainable_variables}
    rows = tuple(_rows(layers, measured, trained))
    held = optimizer_memory.bytes_of(optimizers)
    form = ModelMemory(name, rows, measured.by, planned, held, peak)
    if peak is None:
        peak = _peak(form, measured.forward, optimizers)
    return dataclasses.replace(form, peak=peak)


def _rows(
    layers: list[keras.Layer], measured: Measured, trained: set[int]
) -> Iterator[LayerMemory]:
    """Yield a `LayerMemory` for each layer that uses memory."""
    counted: set[int] = set()
    for number, layer in enumerate(layers):
        variables = [
            *own_weights(layer),
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
            gradients=_bytes(
                v for v in own if id(v) in trained and not is_state(v)
            ),
        )
        if row.total:
            yield row


def _bytes(variables: Iterator[Any]) -> int:
    return sum(symbolic_batches.size_of(v) for v in variables)


def _saved(before: int | None, after: int | None) -> str:
    """Return a table cell of how many bytes fewer there are after a change."""
    if before is None or after is None:
        return "–"
    if before == after:
        return ""
    number = readable_bytes(abs(before - after))
    return number if before > after else f"−{number}"


def _sums(group: Sequence[tuple[LayerMemory, ...]]) -> list[int]:
    return [sum(e.kept for e in column) for column in zip(*group, strict=True)]


def _compared(numbers: Sequence[int | None]) -> list[str]:
    """Return table cells of bytes, with each ratio to the first number."""
    first, *rest = numbers
    cells = ["–" if first is None else readable_bytes(first)]
    for number in rest:
        cell = "–" if number is None else readable_bytes(number)
        if first and number not in (None, first):
            cell += f" ({number / first:.2f}×)"
        cells.append(cell)
    return cells
