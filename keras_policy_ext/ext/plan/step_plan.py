"""`plan`: what each recipe would bring on a GPU that is not there."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras

from keras_policy_ext import user_code
from keras_policy_ext.backends.devices import pretend
from keras_policy_ext.contractions.plan import make_plan
from keras_policy_ext.conversion.candidates import check as check_convertible
from keras_policy_ext.conversion.candidates import check_is_layer, path_of
from keras_policy_ext.conversion.in_place import converted, reverted
from keras_policy_ext.conversion.requested import LayerFilter, PathPatterns
from keras_policy_ext.conversion.work import scalars
from keras_policy_ext.ext.count import counter, traced_calls
from keras_policy_ext.ext.gain.auto import contraction_of
from keras_policy_ext.ext.gain.estimate import (
    HOST,
    Estimator,
    Matmuls,
    estimator_of,
    product_named,
)
from keras_policy_ext.ext.gain.products import device_named
from keras_policy_ext.ext.memory import step_memory as memory
from keras_policy_ext.ext.sampling import symbolic_batches
from keras_policy_ext.ext.sampling.recipes_compared import (
    RecipesReport,
    read_recipes,
)
from keras_policy_ext.ext.sampling.symbolic_batches import map_arrays
from keras_policy_ext.ext.what_if.what_if import what_if
from keras_policy_ext.policies import Float8DTypePolicy
from keras_policy_ext.policies.of_layers import (
    layers_in_float8,
    multiplies_in_float8,
)
from keras_policy_ext.policies.plain import for_this_device
from keras_policy_ext.recipes import DEFAULT, MATMULS, Recipe
from keras_policy_ext.reports import (
    Column,
    Table,
    counted,
    readable_bytes,
)


@dataclasses.dataclass(frozen=True)
class RecipePlan:
    """The estimates for one recipe on the device.

    Attributes:
        recipe: The recipe, as in the names of policies.
        seconds: The estimated time of a training step.
        speedup: The estimated speed against bfloat16; 2 is twice as fast.
        memory: Bytes that a step holds, as `memory` counts them here.
        bytes_cast: Bytes that casts and amaxes read and write in a step.
        native: The matmuls that run in float8, of layers that could.
        reason: Why others are emulated; "" if none is.
        slower: Paths of layers that are estimated to be slower in float8.
        sqnr_db: The lowest SQNR that `what_if` finds, in dB; None without
            data.
    """

    recipe: str
    seconds: float
    speedup: float
    memory: int
    bytes_cast: int
    native: tuple[str, ...]
    reason: str
    slower: tuple[str, ...]
    sqnr_db: float | None = None


@dataclasses.dataclass(frozen=True, repr=False)
class PlanReport(RecipesReport[RecipePlan]):
    """The report of `plan`: a row for each recipe.

    Attributes:
        device: The device, in words.
        source: The policy that the recipes are compared with.
        seconds: The estimated time of a step without float8.
        memory: Bytes that such a step holds; in the model's own dtypes if it
            does not work under `source`, which a note then says.
        share: The part of this time that its float8 layers take, 0 to 1.
        layers: The number of layers in float8.
        recipes: An entry for each recipe.
        notes: Sentences on what the estimate assumes.
    """

    device: str
    source: str
    seconds: float
    memory: int
    share: float
    layers: int
    recipes: tuple[RecipePlan, ...]
    notes: tuple[str, ...]

    def _parts(self, full: bool, number: int) -> Iterator[str | Table]:
        """Yield a table of recipes, notes, and reasons."""
        yield (
            f"A training step on {self.device}, estimated: "
            f"{_time(self.seconds)} in {self.source}, of which "
            f"{self.share * 100:.0f} % are matmuls of "
            f"{counted(self.layers, 'layer')} that can be in float8."
        )
        yield self._table()
        for entry in self.recipes:
            if entry.reason:
                yield f"{entry.recipe}, emulated: {entry.reason}."
            if entry.slower and entry.speedup < 1:
                continue
            if entry.slower:
                shown = entry.slower[: None if full else 3]
                rest = len(entry.slower) - len(shown)
                more = f" and {rest} more" if rest else ""
                yield (
                    f"{entry.recipe}: slower than in {self.source} are "
                    f"{', '.join(shown)}{more}. Leave them out by `exclude`."
                )
        yield from self.notes

    def _table(self) -> Table:
        numbers = ["step", "speed", "memory", "cast"]
        has_data = any(e.sqnr_db is not None for e in self.recipes)
        columns = [
            Column("recipe"),
            *(Column(heading, right=True) for heading in numbers),
            *([Column("lowest SQNR", right=True)] if has_data else []),
            Column("native", wraps=True),
        ]
        none = ["–"] * has_data
        rows = [
            [
                self.source,
                _time(self.seconds),
                "1.00×",
                readable_bytes(self.memory),
                "–",
                *none,
                "",
            ]
        ]
        for e in self.recipes:
            every = len(e.native) == len(MATMULS)
            sqnr = "–" if e.sqnr_db is None else f"{e.sqnr_db:.1f} dB"
            rows.append(
                [
                    e.recipe,
                    _time(e.seconds),
                    f"{e.speedup:.2f}×",
                    readable_bytes(e.memory),
                    readable_bytes(e.bytes_cast),
                    *([sqnr] * has_data),
                    "all" if every else ", ".join(e.native) or "none",
                ]
            )
        return Table(columns, rows)


def _time(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


_SEVERAL = re.compile(r"\s*\d+\s*x\s*[a-z]", re.IGNORECASE)
"""What begins as the name of several devices, such as "8xh100"."""


def _is_one(device: object) -> bool:
    return isinstance(device, str) and not _SEVERAL.match(device)


@user_code.once
def plan(
    model: keras.Layer,
    batch: Any,
    device: str,
    recipes: Sequence[Recipe | str] | Recipe | str | None = None,
    *,
    data: Any = None,
    compiled: bool | None = None,
    include: PathPatterns | None = None,
    exclude: PathPatterns | None = None,
    filter: LayerFilter | None = None,
    min_size: int | None = None,
) -> PlanReport:
    """Estimate what each recipe would bring on a GPU that is not there.

    The time of a step is estimated from the multiplications and bytes that it
    needs, and the speeds of the device. Memory is counted by `kpe.memory` on
    this machine. Nothing is trained, and the model is unchanged.

    ```python
    print(kpe.plan(model, 256, device="h200"))
    ```

    Args:
        model: A built Keras model, or a layer.
        batch: As for `memory`.
        device: The name of a device, as `keras-policy-ext doctor --device`
            takes it; one whose speed is known.
        recipes: Recipes, or their names; None for all names.
        data: A batch with values, as for `what_if`; None for no SQNR.
        compiled: Whether steps are compiled. None: they are, except with
            PyTorch, whose host then takes most of the time of small layers.
        include: As for `convert`.
        exclude: As for `convert`.
        filter: As for `convert`.
        min_size: As for `convert`.

    Returns:
        A row for each recipe; `print` it for a table.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the device or its speed is not known, or the model is
            not built, cannot be traced, or has no layer for float8. The model
            is then unchanged.

    Examples:
        >>> layer = keras.layers.Dense(64)
        >>> model = keras.Sequential([keras.Input((64,)), layer])
        >>> report = kpe.plan(model, 256, "h200", "current", compiled=True)
        >>> report["current"].speedup < 1  # the layer is too small
        True
    """
    if not _is_one(device):
        raise ValueError(
            f"`device` is not one device. Received: {device!r}. Allowed: the "
            "name of one, such as 'h200': a plan is for one device, without "
            "communication. On several, pass the batch of one of them."
        )
    there = device_named(device)
    product = product_named(there, device)
    check_is_layer(model, "have a training step", "")
    check_convertible(model)
    wanted = read_recipes(recipes)
    options: dict[str, Any] = {
        "include": include,
        "exclude": exclude,
        "filter": filter,
        "min_size": min_size,
    }
    trained = list(model.trainable_variables)
    narrow = bool(trained) and all(v.dtype == "bfloat16" for v in trained)
    source = "bfloat16" if narrow else "mixed_bfloat16"
    tensors = symbolic_batches.read(model, batch)
    with pretend(there):
        used = [for_this_device(each) for each in wanted]
        work = _work(model, source, tensors, 2 if narrow else 4, options)
        natives = [_native(work, each) for each in used]
    # `filter` was asked there; memory is counted with the kernels of here.
    options["filter"] = lambda layer: id(layer) in work.in_float8
    policies = [Float8DTypePolicy(source, recipe=each) for each in wanted]
    plain, held, unfit = _memory(model, tensors, source, policies, options)
    backend = keras.backend.backend()
    estimator = estimator_of(backend, product, there)
    if compiled is None:
        compiled = backend != "torch"
    step = _Step(estimator, work, plain.activations, compiled)
    sqnr = _lowest(model, data, wanted)
    names = [str(recipe.spec or recipe.name) for recipe in wanted]
    return PlanReport(
        device=there.title,
        source=source,
        seconds=step.seconds,
        memory=plain.together,
        share=min(1.0, sum(step.plain) / step.seconds),
        layers=step.layers,
        recipes=tuple(
            step.under(
                name,
                recipe,
                native,
                memory=held[policy.full_name].together,
                sqnr_db=sqnr.get(name),
            )
            for name, recipe, policy, native in zip(
                names, used, policies, natives, strict=True
            )
        ),
        notes=tuple(_notes(compiled, unfit, backend)),
    )


@dataclasses.dataclass(frozen=True)
class _Step:
    """A training step on the device.

    Attributes:
        estimator: Estimates times there.
        work: What the step computes.
        kept: Bytes that the forward pass keeps without float8.
        compiled: Whether the step is compiled; if not, the host takes a time
            for each layer.
    """

    estimator: Estimator
    work: _Work
    kept: int
    compiled: bool

    @functools.cached_property
    def plain(self) -> list[float]:
        """Seconds without float8, of each use of a layer that can have it."""
        return [self.estimator.plain(m, which) for _, m, which in self.work.low]

    @functools.cached_property
    def same(self) -> float:
        """Seconds of what no recipe changes."""
        seconds = self.estimator.other(
            self.work.attention, self.kept, self.work.weights
        )
        others = (self.estimator.plain(*each) for each in self.work.plain)
        return seconds + sum(others)

    @property
    def layers(self) -> int:
        """The number of layers that can be in float8."""
        return len({id(layer) for layer, *_ in self.work.low})

    @property
    def seconds(self) -> float:
        """Seconds of the step without float8."""
        return self._with_host(sum(self.plain) + self.same, "plain")

    def _with_host(self, seconds: float, kind: str) -> float:
        """Return at least the seconds that the host takes, a key of `HOST`."""
        if self.compiled:
            return seconds
        return max(seconds, self.layers * HOST[kind])

    def under(
        self,
        name: str,
        recipe: Recipe,
        native: dict[int, tuple[tuple[str, ...], str]],
        **counted: Any,
    ) -> RecipePlan:
        """Return the estimates for a recipe.

        Args:
            name: Its name.
            recipe: The recipe as the device computes it.
            native: As `_native` returns it.
            **counted: The fields that are not estimated.
        """
        times = [
            self.estimator.quantized(m, recipe, native[id(layer)][0], which)
            for layer, m, which in self.work.low
        ]
        seconds = self._with_host(
            sum(times) + self.same,
            "history" if hasattr(recipe, "amax_history_length") else "float8",
        )
        every = set(MATMULS).intersection(*(n for n, _ in native.values()))
        reasons = dict.fromkeys(r for _, r in native.values() if r)
        uses = zip(self.work.low, times, self.plain, strict=True)
        slower = [path_of(use[0]) for use, one, plain in uses if one > plain]
        cast = sum(
            self.estimator.cast_bytes(m, recipe, which)[0]
            for _, m, which in self.work.low
        )
        return RecipePlan(
            recipe=name,
            seconds=seconds,
            speedup=self.seconds / seconds,
            bytes_cast=round(cast),
            native=tuple(m for m in MATMULS if m in every),
            reason="; ".join(reasons),
            slower=tuple(dict.fromkeys(slower)),
            **counted,
        )


def _memory(
    model: keras.Layer,
    tensors: Any,
    source: str,
    policies: list[Float8DTypePolicy],
    options: dict[str, Any],
) -> tuple[memory.ModelMemory, memory.MemoryReport, str]:
    """Return the memory without float8, that under each policy, and a note."""
    try:
        held = memory.memory(model, tensors, [source, *policies], **options)
        return held[source], held, ""
    except memory.UnfitPolicyError:  # Then in the model's own dtypes.
        held = memory.memory(model, tensors, policies, **options)
    with reverted(model):
        plain = memory.memory(model, tensors, [])
    note = (
        "Memory, and the time of what is no matmul, are counted in the model's "
        f"own dtypes, as the model does not work under {source}. "
        f"`kpe.memory(model, batch, {source!r})` raises the error."
    )
    return plain[memory.AS_IT_IS], held, note


def _notes(compiled: bool, unfit: str, backend: str) -> Iterator[str]:
    if unfit:
        yield unfit
    yield (
        "Estimated from bytes and multiplications, for one device, without "
        "communication: the page internals/plan of the documentation has the "
        "errors on published measurements."
    )
    if not compiled:
        yield (
            "Steps are taken to be eager: the host takes "
            f"{_time(HOST['float8'])} for each float8 layer and "
            f"{_time(HOST['plain'])} for another. Pass compiled=True for "
            "compiled steps."
        )
    elif backend == "torch":
        yield (
            "The host's time for compiled steps is not counted. On an H200 a "
            "step of one Dense layer took the host 1.4 ms in bfloat16, and "
            "2.4 ms under delayed: small models are slower than estimated."
        )


class _Work(NamedTuple):
    """The matmuls of a step, of float8 layers, other layers and attention."""

    low: list[tuple[keras.Layer, Matmuls, tuple[str, ...]]]
    plain: list[tuple[Matmuls, tuple[str, ...]]]
    attention: float
    weights: int
    in_float8: frozenset[int]


def _work(
    model: keras.Layer,
    source: str,
    tensors: Any,
    kernel_bytes: float,
    options: dict[str, Any],
) -> _Work:
    """Return the matmuls of a step, traced in float8; raise if none is."""
    has_mode = "training" in inspect.signature(model.call).parameters
    kwargs = {"training": False} if has_mode else {}

    def longer(x: Any) -> Any:
        return keras.KerasTensor((x.shape[0] + 1, *x.shape[1:]), x.dtype)

    more = map_arrays(longer, tensors)
    weights = scalars(model.trainable_variables)
    found = _Work([], [], 0, weights, frozenset())
    attention = 0.0
    policy = Float8DTypePolicy(source, recipe=DEFAULT)
    with converted(model, policy, **options):
        in_float8 = frozenset(map(id, layers_in_float8(model)))
        try:
            calls = traced_calls.trace(
                model,
                [((tensors,), kwargs), ((more,), kwargs)],
                counter.CountingTracer(),
            )
        except Exception as error:
            raise ValueError(
                f"{type(model).__name__} {model.name!r} cannot be traced with "
                f"shapes only. Received: {error}. Allowed: models whose call "
                "accepts a `keras.KerasTensor`. Call `kpe.plan` for its parts."
            ) from error
        matmuls_of_both, loops = counter.paired(*calls)
        attention += sum(
            each.product.multiplications
            for each in counter.of_call(calls[0])
            if each.layer in loops
        )
        for one, other in matmuls_of_both:
            pairs = zip(one.product.sizes, other.product.sizes, strict=True)
            kernels = [before for before, after in pairs if before == after]
            number = one.product.multiplications
            entries = None
            if one.entries is not None and not kernels:  # They are gathered.
                kernels, entries = [max(one.product.sizes)], one.entries
            if len(kernels) != 1 or not number:
                attention += number if not kernels else 0
                continue
            (kernel,) = kernels
            inputs = sum(one.product.sizes) - kernel
            outputs = number**2 / (inputs * (entries or kernel))
            matmuls = Matmuls(inputs, kernel, outputs, number, kernel_bytes)
            which = tuple(
                m for m in MATMULS if m != "kernel_grad" or one.layer.trainable
            )
            is_low = multiplies_in_float8(one.layer)
            if is_low and one.has_float8_form:
                found.low.append((one.layer, matmuls, which))
            else:
                found.plain.append((matmuls, which))
    if not found.low:
        raise ValueError(
            "No layer of the model would be in float8. Received: "
            f"{type(model).__name__} {model.name!r}. Allowed: a model of "
            "which `kpe.convert` converts at least one layer. Check `include`, "
            "`exclude` and `filter`."
        )
    return found._replace(attention=attention, in_float8=in_float8)


def _native(
    work: _Work, recipe: Recipe
) -> dict[int, tuple[tuple[str, ...], str]]:
    """Return, by the `id` of a layer, its native matmuls, and why not all."""
    known: dict[Any, tuple[tuple[str, ...], str]] = {}
    found = {}
    for layer, *_ in work.low:
        contraction = contraction_of(layer)
        if contraction not in known:
            # A step on a GPU with TensorFlow is compiled by XLA.
            made = make_plan(contraction, recipe, "bfloat16", "float32")
            made = dataclasses.replace(made, for_xla=True)
            choices = {m: made.choose(m)[1] for m in MATMULS}
            native = tuple(m for m in MATMULS if choices[m].native)
            others = [c.reason for c in choices.values() if not c.native]
            known[contraction] = native, (others[0] if others else "")
        found[id(layer)] = known[contraction]
    return found


def _lowest(
    model: keras.Layer, data: Any, recipes: list[Recipe]
) -> dict[str, float]:
    """Return the lowest SQNR of each recipe; nothing without data."""
    if data is None:
        return {}
    found: dict[str, float] = {}
    for entry in what_if(model, data, recipes).entries:
        if entry.sqnr_db is not None:
            known = found.get(entry.recipe, entry.sqnr_db)
            found[entry.recipe] = min(known, entry.sqnr_db)
    return found
