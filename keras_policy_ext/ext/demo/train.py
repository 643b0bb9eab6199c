"""Train the demo's model, and estimate how long it takes."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_policy_ext import layers, policies, recipes
from keras_policy_ext._types import Tensor
from keras_policy_ext.ext.demo.settings import Settings, Size
from keras_policy_ext.ext.demo.text import Corpus
from keras_policy_ext.ext.sampling import machine
from keras_policy_ext.layers.state_variable import StateVariable

register = keras.saving.register_keras_serializable("keras_policy_ext.demo")


@register
class PositionEmbedding(keras.layers.Layer):
    """A layer that adds a learned vector for each position."""

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Create one vector for each position of `(batch, time, width)`."""
        self.embeddings = self.add_weight(
            shape=input_shape[1:], initializer="uniform", name="embeddings"
        )

    def call(self, inputs: Tensor) -> Tensor:
        """Return `inputs + embeddings`, both (batch, time, width)."""
        return inputs + ops.convert_to_tensor(self.embeddings)


@register
class CausalAttention(keras.layers.Layer):
    """Causal softmax attention, without weights."""

    def call(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Compute attention; all tensors are (batch, time, heads, width)."""
        return ops.nn.dot_product_attention(query, key, value, is_causal=True)

    def compute_output_shape(self, query_shape: Any, *_: Any) -> Any:
        """Return the shape of the outputs, which is that of the query."""
        return query_shape


def decoder(tokens: int, size: Size, policy: object) -> keras.Model:
    """Build the demo's decoder model: character tokens to next-token logits.

    Layers with a kernel come from this package and follow a float8 policy. All
    others follow its source policy.

    Returns:
        A model from (batch, context) int32 to (batch, context, tokens)
        float32.
    """
    with policies.policy_scope(policy):
        inputs = keras.Input((size.context,), dtype="int32", name="characters")
        x = layers.Embedding(tokens, size.width, name="embedding")(inputs)
        x = PositionEmbedding(name="position")(x)
        for number in range(size.blocks):
            x = _attend(x, size, f"block_{number}")
            x = _feed_forward(x, size, f"block_{number}")
        x = layers.LayerNormalization(name="norm")(x)
        logits = layers.Dense(tokens, name="logits")(x)
        outputs = layers.Activation("linear", dtype="float32")(logits)
    return keras.Model(inputs, outputs, name="decoder")


def _attend(x: Tensor, size: Size, block: str) -> Tensor:
    head = size.width // size.heads
    normed = layers.LayerNormalization(name=f"{block}_attention_norm")(x)
    projected = [
        layers.EinsumDense(
            "btd,dhk->bthk", (None, size.heads, head), name=f"{block}_{role}"
        )(normed)
        for role in ("query", "key", "value")
    ]
    attended = CausalAttention(name=f"{block}_attention")(*projected)
    outputs = layers.EinsumDense(
        "bthk,hkd->btd", (None, size.width), name=f"{block}_attention_outputs"
    )(attended)
    return layers.Add(name=f"{block}_attention_add")([x, outputs])


def _feed_forward(x: Tensor, size: Size, block: str) -> Tensor:
    normed = layers.LayerNormalization(name=f"{block}_feed_forward_norm")(x)
    hidden = layers.Dense(size.hidden, "gelu", name=f"{block}_feed_forward_up")(
        normed
    )
    outputs = layers.Dense(size.width, name=f"{block}_feed_forward_down")(
        hidden
    )
    return layers.Add(name=f"{block}_feed_forward_add")([x, outputs])


MANY = 4.0
"""A run is slow if it takes this many times as long as in float32."""

PATIENCE = 150.0
"""The target duration of the demo in seconds when it reduces the steps."""

FEWEST = 20
"""The fewest steps; with fewer the model learns nothing."""


class Forecast(NamedTuple):
    """The measured seconds per training step, by precision."""

    seconds: dict[str, float]

    @property
    def slowest(self) -> str:
        """The name of the precision with the longest steps."""
        return max(self.seconds, key=lambda name: self.seconds[name])

    @property
    def times(self) -> float:
        """The slowest precision's step time, divided by that of float32."""
        return self.seconds[self.slowest] / self.seconds["float32"]

    def total(self, settings: Settings) -> float:
        """Return the estimated seconds of all training runs together."""
        runs = len(settings.seeds)
        return settings.steps * runs * sum(self.seconds.values())

    def steps(self, settings: Settings) -> int:
        """Return how many steps per run fit into `PATIENCE` seconds."""
        share = PATIENCE / self.total(settings)
        return min(settings.steps, max(FEWEST, int(settings.steps * share)))


def forecast(
    compared: dict[str, keras.DTypePolicy],
    corpus: Corpus,
    settings: Settings,
    start: Start,
) -> Forecast | None:
    """Time the first steps of each precision; None if none of them is slow.

    This compiles each of them once more, so it is done only where a bfloat16
    matmul is slow.

    Returns:
        None if no precision is slow.
    """
    if machine.slowdown() < machine.SLOW:
        return None
    found = Forecast(
        {
            name: seconds_per_step(policy, corpus, settings, start)
            for name, policy in compared.items()
        }
    )
    return found if found.times >= MANY else None


def told(found: Forecast, settings: Settings, steps: int) -> str:
    """Return the message that training is slow, with the steps to be taken."""
    slow = (
        f"A step in {found.slowest} takes {found.times:.0f} times as long as "
        f"in float32 on this machine: {settings.steps} steps in every "
        f"precision would take about {minutes(found.total(settings))}."
    )
    if steps == settings.steps:
        return f"{slow} `--steps` takes fewer."
    return (
        f"{slow} Taking {steps} steps instead; `--steps {settings.steps}` "
        "takes all."
    )


def minutes(seconds: float) -> str:
    """Return a duration as text, such as "50 seconds" or "3 minutes"."""
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes"


BASELINE = "mixed_bfloat16"
"""The precision that the others are compared with."""

COMPILATION_STEPS = 2
"""The first steps compile; they are left out of steps/s."""

TIMED_STEPS = 2
"""The steps after these that are timed where a run may take long."""


@dataclasses.dataclass(frozen=True)
class Matmul:
    """A matmul of the demo's model, and whether it ran natively.

    Attributes:
        layer: Name of the layer.
        equation: Its einsum equation, with the inputs first.
        kind: `"native"` or `"emulated"`.
        reason: Why it is native or emulated.
    """

    layer: str
    equation: str
    kind: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Run:
    """The losses, times and matmuls of one training run.

    Attributes:
        precision: Short name.
        policy: Full name of the dtype policy.
        losses: Training loss of each step, in nats per character.
        validation: Validation loss by number of steps, in nats per character.
        seconds: Duration of each step.
        matmuls: The matmuls that ran in float8.
        seed: The random seed of the weights and the batches.
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
        """The validation loss after the last step of the run."""
        return self.validation[len(self.losses)]

    @property
    def steps_per_second(self) -> float | None:
        """Steps per second, from the median step after compilation, or None."""
        timed = self.seconds[COMPILATION_STEPS:]
        return 1.0 / statistics.median(timed) if timed else None

    def gap_percent(self, baseline: Run) -> float:
        """Return by how many percent this run's loss exceeds the baseline's."""
        return 100.0 * (self.validation_loss / baseline.validation_loss - 1.0)


def policies_compared(*specs: str) -> dict[str, keras.DTypePolicy]:
    """Return the policies that the demo compares, by short name.

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
    """Return the demo's float8 policy for a recipe string.

    The last layer stays in the source policy, as is common in float8 training:
    its output gradient comes directly from the loss.
    """
    recipe = recipes.parse(spec)
    return policies.Float8DTypePolicy(
        BASELINE, recipe=recipe, rules=[(r"(.*/)?logits", None)]
    )


class Start(NamedTuple):
    """A random seed, and the initial weights of the model by path."""

    seed: int
    weights: dict[str, np.ndarray]


def draw(corpus: Corpus, settings: Settings, seed: int) -> Start:
    """Return the random initial weights for a seed, equal on all backends.

    Matrices are drawn from a normal distribution by NumPy, so that all
    frameworks start with the same weights.
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
    """Train the demo's model from `start`; return the losses as a `Run`."""
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
    """Time the first training steps; return the seconds of the fastest."""
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
    """Return a learning rate schedule: linear warm-up, then cosine decay.

    The warm-up takes a tenth of the steps.
    """
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
    """Run one training step; return the loss and the seconds that it took."""
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
