"""Training one model in one precision, and what was seen of it."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np

from keras_policy_ext import policies, recipes
from keras_policy_ext.diagnostics.demo.model import decoder
from keras_policy_ext.diagnostics.demo.settings import Settings
from keras_policy_ext.diagnostics.demo.text import Corpus
from keras_policy_ext.layers.state_variable import StateVariable

BASELINE = "mixed_bfloat16"
"""The precision that the others are compared with."""

COMPILATION_STEPS = 2
"""The first steps compile; they are left out of steps/s."""

TIMED_STEPS = 2
"""So many more are timed where a run may take long."""


@dataclasses.dataclass(frozen=True)
class Matmul:
    """A matmul of the model, as it ran in float8.

    Attributes:
        layer: Name of the layer.
        equation: What it contracts, inputs first and kernel second.
        kind: `"native"` or `"emulated"`.
        reason: Why.
    """

    layer: str
    equation: str
    kind: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Run:
    """What was seen of one training.

    Attributes:
        precision: Short name.
        policy: Full name of the dtype policy.
        losses: Training loss of each step, in nats per character.
        validation: Validation loss after so many steps, likewise.
        seconds: Duration of each step.
        matmuls: Those that ran in float8.
        seed: Of the weights and the batches.
        state_bytes: Size of the float8 state.
    """

    precision: str
    policy: str
    losses: tuple[float, ...]
    validation: dict[int, float]
    seconds: tuple[float, ...]
    matmuls: tuple[Matmul, ...]
    seed: int = 0
    state_bytes: int = 0

    @property
    def validation_loss(self) -> float:
        """After the last step."""
        return self.validation[len(self.losses)]

    @property
    def steps_per_second(self) -> float | None:
        """From the median step; None if there was nothing but compilation."""
        timed = self.seconds[COMPILATION_STEPS:]
        return 1.0 / statistics.median(timed) if timed else None

    def gap_percent(self, baseline: Run) -> float:
        """How much higher the validation loss is than that of another run."""
        return 100.0 * (self.validation_loss / baseline.validation_loss - 1.0)


def policies_compared(*specs: str) -> dict[str, keras.DTypePolicy]:
    """The policies that are compared, by short name.

    Args:
        specs: Recipes, as `recipes.parse` reads them. One alone is called
            `"float8"`; several have their own names.
    """
    names = ("float8",) if len(specs) == 1 else specs
    return {
        "float32": policies.get("float32"),
        BASELINE: policies.get(BASELINE),
        **dict(zip(names, map(float8_policy, specs), strict=True)),
    }


def float8_policy(spec: str) -> policies.Float8DTypePolicy:
    """The policy of a recipe, from its compact string.

    The last layer stays in the source policy, as is common in float8
    training: its gradient is the loss's own.
    """
    recipe = recipes.parse(spec)
    return policies.Float8DTypePolicy(
        BASELINE, recipe=recipe, rules=[(r"(.*/)?logits", None)]
    )


class Start(NamedTuple):
    """What the runs of one seed begin with: the seed, and arrays by path."""

    seed: int
    weights: dict[str, np.ndarray]


def draw(corpus: Corpus, settings: Settings, seed: int) -> Start:
    """Draw all weights of the model.

    Matrices are normal, drawn by NumPy: all frameworks start alike.
    """
    model = decoder(corpus.tokens, settings.size, "float32")
    random = np.random.default_rng(seed)
    deviation = settings.size.width**-0.5
    weights = {}
    for variable in model.weights:
        array = keras.ops.convert_to_numpy(variable)
        if array.ndim > 1 and not variable.path.endswith("bias"):
            array = random.normal(0.0, deviation, array.shape)
        weights[variable.path] = array.astype("float32")
    return Start(seed, weights)


def train(
    precision: str,
    policy: keras.DTypePolicy,
    corpus: Corpus,
    settings: Settings,
    start: Start,
    on_step: Callable[[float], None],
) -> Run:
    """Train a model from given weights; `on_step` gets each training loss."""
    keras.utils.set_random_seed(start.seed)
    model = _compiled(corpus, settings, policy, start.weights)
    evaluated = _evaluated_after(settings)
    losses, seconds = [], []
    validation = {0: _validation_loss(model, corpus, settings)}
    for step in range(settings.steps):
        loss, duration = _step(model, corpus, settings, start.seed, step)
        losses.append(loss)
        seconds.append(duration)
        if step + 1 in evaluated:
            validation[step + 1] = _validation_loss(model, corpus, settings)
        on_step(loss)
    return Run(
        precision,
        getattr(policy, "full_name", policy.name),
        tuple(losses),
        validation,
        tuple(seconds),
        tuple(_matmuls(model)),
        start.seed,
        _state_bytes(model),
    )


def seconds_per_step(
    policy: keras.DTypePolicy, corpus: Corpus, settings: Settings, start: Start
) -> float:
    """The time of a training step, from the first steps of a run."""
    model = _compiled(corpus, settings, policy, start.weights)
    steps = range(COMPILATION_STEPS + TIMED_STEPS)
    timed = [_step(model, corpus, settings, start.seed, n)[1] for n in steps]
    return min(timed[COMPILATION_STEPS:])


def _compiled(
    corpus: Corpus,
    settings: Settings,
    policy: keras.DTypePolicy,
    weights: dict[str, np.ndarray],
) -> keras.Model:
    model = decoder(corpus.tokens, settings.size, policy)
    for variable in model.weights:
        if variable.path in weights:  # the rest is float8 state
            variable.assign(weights[variable.path])
    model.compile(
        keras.optimizers.Adam(_learning_rate(settings), beta_2=0.99),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def _learning_rate(
    settings: Settings,
) -> keras.optimizers.schedules.LearningRateSchedule:
    """A tenth of the steps up to the highest rate, then down by a cosine."""
    rising = settings.steps // 10
    return keras.optimizers.schedules.CosineDecay(
        initial_learning_rate=settings.learning_rate / 100,
        decay_steps=max(settings.steps - rising, 1),
        alpha=0.01,
        warmup_target=settings.learning_rate,
        warmup_steps=rising,
    )


def _evaluated_after(settings: Settings) -> set[int]:
    steps = np.linspace(0, settings.steps, settings.validations + 1)
    return {int(step) for step in steps[1:]}


def _step(
    model: keras.Model,
    corpus: Corpus,
    settings: Settings,
    seed: int,
    step: int,
) -> tuple[float, float]:
    """The loss of a training step and its duration in seconds."""
    batch = corpus.batch(step, seed, settings.windows, settings.size.context)
    began = time.perf_counter()
    model.reset_metrics()
    # The result is a number on the host: the step is over when it is there.
    loss = float(model.train_on_batch(batch.inputs, batch.targets))
    return loss, time.perf_counter() - began


def _validation_loss(
    model: keras.Model, corpus: Corpus, settings: Settings
) -> float:
    batch = corpus.validation_batch(
        settings.validation_windows, settings.size.context
    )
    loss = model.evaluate(
        batch.inputs, batch.targets, batch_size=settings.windows, verbose=0
    )
    return float(loss)


def _matmuls(model: keras.Model) -> list[Matmul]:
    return [
        Matmul(
            layer.name,
            getattr(layer, "equation", "...x,xy->...y"),
            *layer.kernel_choice,
        )
        for layer in model.layers
        if getattr(layer, "kernel_choice", None) is not None
    ]


def _state_bytes(model: keras.Model) -> int:
    states = [v for v in model.weights if isinstance(v, StateVariable)]
    return sum(4 * math.prod(state.shape) for state in states)
