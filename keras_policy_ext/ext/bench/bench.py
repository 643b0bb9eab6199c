"""`bench`: the time of a training step under each recipe, measured here."""

from __future__ import annotations

import copy
import dataclasses
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from keras_policy_ext import backends, conversion, user_code
from keras_policy_ext.conversion.candidates import check as check_convertible
from keras_policy_ext.conversion.requested import LayerFilter, PathPatterns
from keras_policy_ext.ext.sampling import machine
from keras_policy_ext.ext.sampling.captured import Batch, lacks_targets
from keras_policy_ext.ext.sampling.recipes_compared import (
    RecipesReport,
    read_recipes,
)
from keras_policy_ext.policies.of_layers import (
    layers_in_float8,
    source_policy_of,
)
from keras_policy_ext.recipes import Recipe
from keras_policy_ext.reports import Column, Table

_SAMPLE_SECONDS = 0.1
"""A sample repeats a step until it takes so long."""


@dataclasses.dataclass(frozen=True)
class RecipeTime:
    """The measured time of a training step under one recipe.

    A round times the plain model and the float8 model one after the other.

    Attributes:
        recipe: The recipe, as in the names of policies.
        seconds: The median time of a step in float8.
        plain_seconds: The median time of a step of the plain model, in the
            same rounds.
        speedup: The median of the ratios of the rounds; 2 is twice as fast.
        quartiles: The lower and upper quartile of these ratios.
        layers: The number of layers in float8.
        emulated: Why matmuls of some of them are emulated; "" if none is.
        graphs: The graphs of a step, and those of a plain one, if PyTorch
            compiles it (`jit_compile=True`); else None.
        breaks: How often such a graph ended before the step, likewise.
        broken: Why it ended for the first time, where a plain one does not;
            "" if it did not.
    """

    recipe: str
    seconds: float
    plain_seconds: float
    speedup: float
    quartiles: tuple[float, float]
    layers: int
    emulated: str
    graphs: tuple[int, int] | None = None
    breaks: tuple[int, int] | None = None
    broken: str = ""


@dataclasses.dataclass(frozen=True, repr=False)
class BenchReport(RecipesReport[RecipeTime]):
    """The report of `bench`: a row for each recipe.

    Attributes:
        policies: The names of the policies of the plain model.
        recipes: An entry for each recipe.
    """

    policies: tuple[str, ...]
    recipes: tuple[RecipeTime, ...]

    def _parts(self, full: bool, number: int) -> Iterator[str | Table]:
        """Yield a table of recipes, and the reasons of emulated matmuls."""
        headings = ("step", "plain", "speed", "quartiles", "layers")
        columns = [Column("recipe"), *(Column(h, right=True) for h in headings)]
        yield Table(
            columns,
            [
                [
                    e.recipe,
                    f"{1e3 * e.seconds:.2f} ms",
                    f"{1e3 * e.plain_seconds:.2f} ms",
                    f"{e.speedup:.2f}×",
                    "{:.2f}–{:.2f}×".format(*e.quartiles),
                    str(e.layers),
                ]
                for e in self.recipes
            ],
            f"Training steps here, against {' and '.join(self.policies)}",
        )
        for entry in self.recipes:
            if entry.graphs and entry.breaks:
                counts = zip(entry.graphs, entry.breaks, strict=True)
                low, plain = (f"{n} and {broken}" for n, broken in counts)
                reason = entry.broken and f" The first: {entry.broken}."
                yield (
                    f"Graphs of a compiled step, and breaks: {low} under "
                    f"{entry.recipe}, {plain} in the plain model.{reason}"
                )
        by_reason: dict[str, list[str]] = {}
        for entry in self.recipes:
            by_reason.setdefault(entry.emulated, []).append(entry.recipe)
        for reason, names in by_reason.items():
            if reason:
                yield f"Emulated under {', '.join(names)}: {reason}."


@user_code.once
def bench(
    model: keras.Model,
    data: Any,
    recipes: Sequence[Recipe | str] | Recipe | str | None = None,
    *,
    rounds: int = 20,
    include: PathPatterns | None = None,
    exclude: PathPatterns | None = None,
    filter: LayerFilter | None = None,
    min_size: int | None = None,
) -> BenchReport:
    """Measure here how fast training steps of a model are in float8.

    Copies of the model, one plain and one under the recipe, take steps of
    `train_on_batch` in turn. The model itself does not change. Both copies are
    in memory at once, with their optimizers.

    ```python
    print(kpe.bench(model, (x, y), ["current", "delayed"]))
    ```

    Args:
        model: A built and compiled model that `copy.deepcopy` can copy. Layers
            in float8 are plain in the plain copy.
        data: A batch: `x`, `(x, y)` or `(x, y, sample_weight)`, as arrays; or
            what has such batches, of which it takes the first.
        recipes: Recipes, or their names; None for all names.
        rounds: The number of times that both copies are timed. In each they
            take as many steps as fit into 0.1 seconds.
        include: As for `convert`.
        exclude: As for `convert`.
        filter: As for `convert`.
        min_size: As for `convert`.

    Returns:
        A row for each recipe; `print` it for a table.

    Raises:
        TypeError: If `model` is not a Keras model, or `data` not a batch.
        ValueError: If the model is not compiled or not built, `data` has no
            targets, no layer can be in float8, or `rounds` is less than 1.

    Examples:
        >>> layer = keras.layers.Dense(16)
        >>> model = keras.Sequential([keras.Input((16,)), layer])
        >>> model.compile("sgd", "mse")
        >>> batch = np.zeros((8, 16)), np.zeros((8, 16))
        >>> report = kpe.bench(model, batch, "current", rounds=1)
        >>> report["current"].layers
        1
    """
    _check(model, rounds)
    wanted = read_recipes(recipes)
    batch = Batch.read(data)
    if lacks_targets(model, batch):
        raise ValueError(
            f"{model.name!r} is compiled with a loss, and `data` has no "
            "targets. Received: inputs alone. Allowed: a tuple (x, y) or "
            "(x, y, sample_weight)."
        )
    plain = _copy_of(model)
    if layers_in_float8(plain):
        conversion.revert(plain)
    take_plain_step, plain_graphs = _counted_step(plain, batch)
    entries = []
    for recipe in wanted:
        twin = _copy_of(plain)
        conversion.convert(
            twin,
            recipe,
            include=include,
            exclude=exclude,
            filter=filter,
            min_size=min_size,
        )
        low = layers_in_float8(twin)
        if not low:
            raise ValueError(
                f"No layer of {model.name!r} can be in float8. Received: "
                f"`recipes` with {recipe.name!r}. `print(kpe.convert(model))` "
                "says why of each layer."
            )
        take_step, graphs = _counted_step(twin, batch)
        seconds = _in_turn(take_plain_step, take_step, rounds)
        choices = [layer.kernel_choice for layer in low]
        reasons = (c.reason for c in choices if c and c.kind == "emulated")
        plain_seconds, float8_seconds = np.median(seconds, axis=0)
        ratios = seconds[:, 0] / seconds[:, 1]
        low_quartile, middle, high_quartile = np.percentile(
            ratios, [25, 50, 75]
        )
        entries.append(
            RecipeTime(
                recipe=str(recipe.spec or recipe.name),
                seconds=float(float8_seconds),
                plain_seconds=float(plain_seconds),
                speedup=float(middle),
                quartiles=(float(low_quartile), float(high_quartile)),
                layers=len(low),
                emulated="; ".join(dict.fromkeys(reasons)),
                **_compared(graphs, plain_graphs),
            )
        )
    policies = dict.fromkeys(source_policy_of(x).name for x in low)
    return BenchReport(tuple(policies), tuple(entries))


def bench_dense(
    size: int,
    rows: int,
    recipes: Sequence[str],
    rounds: int,
    compiled: bool = False,
) -> BenchReport:
    """Return `bench` of a Dense layer of `size` inputs and outputs.

    It is in mixed_bfloat16; in float32 where a bfloat16 matmul is much slower.
    `compiled` is for PyTorch, where Keras compiles a step only if it is told.
    """
    slow = machine.slowdown() >= machine.SLOW
    policy = "float32" if slow else "mixed_bfloat16"
    layer = keras.layers.Dense(size, dtype=policy)
    model = keras.Sequential([keras.Input((size,)), layer])
    model.compile("sgd", "mse", jit_compile=compiled or "auto")
    x = keras.random.normal((rows, size), seed=0)
    return bench(model, (x, x), recipes, rounds=rounds)


def usual_sizes() -> tuple[int, ...]:
    """Return the sizes of layers that the command measures on this device."""
    return (1024,) if backends.engine.device().maker == "cpu" else (4096, 8192)


def _check(model: object, rounds: object) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(
            "This is not a Keras model, and no step can be measured. Received: "
            f"{model!r} (of type {type(model).__name__}). Allowed: a "
            "keras.Model. Pass the model itself."
        )
    check_convertible(model)
    if not model.compiled:
        raise ValueError(
            f"{model.name!r} is not compiled. Allowed: a model with an "
            "optimizer and a loss. Call `model.compile` first."
        )
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
        raise ValueError(
            f"`rounds` is not a number of rounds. Received: {rounds!r}. "
            "Allowed: an integer of 1 or more."
        )


def _copy_of(model: keras.Model) -> keras.Model:
    with warnings.catch_warnings():
        # Keras warns if the optimizer has no slots yet: the copy makes its own.
        warnings.filterwarnings("ignore", "Skipping variable loading for opt")
        return copy.deepcopy(model)


def _step_of(model: keras.Model, batch: Batch) -> Callable[[], object]:
    """Return a function that takes a step, after it was compiled."""

    def step() -> object:
        # Its logs are NumPy's: it returns when the step is computed.
        return model.train_on_batch(batch.x, batch.y, batch.sample_weight)

    step()
    return step


_Graphs = tuple[int, Counter[str]] | None
"""The graphs of a step, and how often each reason ended one."""


def _counted_step(
    model: keras.Model, batch: Batch
) -> tuple[Callable[[], object], _Graphs]:
    """Return `_step_of`, and the graphs that PyTorch made of two steps."""
    is_compiled = model.jit_compile and not model.run_eagerly
    if backends.current.name != "torch" or not is_compiled:
        return _step_of(model, batch), None
    from keras_policy_ext.ext.bench.torch import graphs_so_far

    before, ended_before = graphs_so_far()
    step = _step_of(model, batch)
    step()  # A number that changes would make another graph.
    after, ended = graphs_so_far()
    return step, (after - before, ended - ended_before)


def _compared(low: _Graphs, plain: _Graphs) -> dict[str, Any]:
    """Return the fields of a `RecipeTime` that are about graphs."""
    if low is None or plain is None:
        return {}
    others = [reason for reason in low[1] if reason not in plain[1]]
    return {
        "graphs": (low[0], plain[0]),
        "breaks": (low[1].total(), plain[1].total()),
        "broken": others[0].partition("\n")[0] if others else "",
    }


def _in_turn(
    first: Callable[[], object], second: Callable[[], object], rounds: int
) -> np.ndarray[Any, Any]:
    """Return the seconds of a step of each in each round: (rounds, 2)."""
    steps = (first, second)
    repeats = [max(1, int(_SAMPLE_SECONDS / _seconds(x, 2))) for x in steps]
    took = np.empty((rounds, 2))
    for number in range(rounds):
        # The order turns, so that none is always the one that comes second.
        for which in (0, 1) if number % 2 else (1, 0):
            took[number, which] = _seconds(steps[which], repeats[which])
    return took


def _seconds(step: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    return (time.perf_counter() - start) / repeats
