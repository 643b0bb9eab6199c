"""The demo's model, and how it is trained."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from typing import NamedTuple

import keras
import numpy as np
from keras import ops

from keras_policy_ext import layers, policies, recipes
from keras_policy_ext._types import Tensor
from keras_policy_ext.ext.demo.text import Corpus

BASELINE = "mixed_bfloat16"  # what the other precisions are compared with


class Settings(NamedTuple):
    """The settings of the demo; the defaults are those of the command."""

    steps: int = 300  # in each precision
    seed: int = 0  # of the weights and the batches
    recipes: tuple[str, ...] = ("current",)  # as `recipes.parse` reads them
    text: str | None = None  # a UTF-8 file; None: the topics of `pydoc`
    out: str = "keras-policy-ext-demo"  # the folder of the plot
    context: int = 64  # characters of an input
    width: int = 128
    heads: int = 4
    hidden: int = 512  # the width of the feed-forward parts
    blocks: int = 2
    windows: int = 32  # in a batch
    validations: int = 10  # in a run
    held_out: int = 256  # windows of validation text


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


def decoder(tokens: int, sizes: Settings, policy: object) -> keras.Model:
    """Build a model from (batch, context) int32 to (…, tokens) float32."""
    with policies.policy_scope(policy):
        inputs = keras.Input((sizes.context,), dtype="int32", name="characters")
        x = layers.Embedding(tokens, sizes.width, name="embedding")(inputs)
        x = PositionEmbedding(name="position")(x)
        for number in range(sizes.blocks):
            x = _block(x, sizes, f"block_{number}")
        x = layers.LayerNormalization(name="norm")(x)
        logits = layers.Dense(tokens, name="logits")(x)
        outputs = layers.Activation("linear", dtype="float32")(logits)
    return keras.Model(inputs, outputs, name="decoder")


def _block(x: Tensor, sizes: Settings, name: str) -> Tensor:
    head = (None, sizes.heads, sizes.width // sizes.heads)
    normed = layers.LayerNormalization(name=f"{name}_attention_norm")(x)
    query, key, value = (
        layers.EinsumDense("btd,dhk->bthk", head, name=f"{name}_{role}")(normed)
        for role in ("query", "key", "value")
    )
    y = ops.nn.dot_product_attention(query, key, value, is_causal=True)
    y = layers.EinsumDense(
        "bthk,hkd->btd", (None, sizes.width), name=f"{name}_attention_outputs"
    )(y)
    x = layers.Add(name=f"{name}_attention_add")([x, y])
    y = layers.LayerNormalization(name=f"{name}_feed_forward_norm")(x)
    y = layers.Dense(sizes.hidden, "gelu", name=f"{name}_feed_forward_up")(y)
    y = layers.Dense(sizes.width, name=f"{name}_feed_forward_down")(y)
    return layers.Add(name=f"{name}_feed_forward_add")([x, y])


class Run(NamedTuple):
    """A training run; losses are in nats per character."""

    losses: tuple[float, ...]  # of each step
    validation: dict[int, float]  # by number of steps
    seconds: tuple[float, ...]  # of each step
    model: keras.Model

    @property
    def validation_loss(self) -> float:
        """The validation loss after the last step."""
        return self.validation[len(self.losses)]

    @property
    def steps_per_second(self) -> float | None:
        """Steps per second, by the median step; None for one or two steps."""
        timed = self.seconds[2:]  # the first two compile
        return 1.0 / statistics.median(timed) if timed else None

    @property
    def kernels(self) -> str:
        """The number of float8 matmuls by kind, such as `"12 emulated"`."""
        found = (getattr(x, "kernel_choice", None) for x in self.model.layers)
        counts = Counter(kind for kind, _ in filter(None, found))
        return ", ".join(f"{n} {kind}" for kind, n in counts.items())


def policies_compared(*specs: str) -> dict[str, keras.DTypePolicy]:
    """Return policies by name; a recipe alone is called `"float8"`."""
    names = ("float8",) if len(specs) == 1 else specs
    plain = {name: policies.get(name) for name in ("float32", BASELINE)}
    return plain | dict(zip(names, map(float8_policy, specs), strict=True))


def float8_policy(spec: str) -> policies.Float8DTypePolicy:
    """Return the float8 policy for a recipe, as `recipes.parse` reads it."""
    # The last layer stays in bfloat16, as is common in float8 training: its
    # outputs gradient comes directly from the loss.
    recipe, rules = recipes.parse(spec), [(r"(.*/)?logits", None)]
    return policies.Float8DTypePolicy(BASELINE, recipe=recipe, rules=rules)


def draw(corpus: Corpus, settings: Settings) -> dict[str, np.ndarray]:
    """Return initial weights by path, drawn by NumPy for all backends alike."""
    model = decoder(corpus.tokens, settings, "float32")
    random = np.random.default_rng(settings.seed)
    weights = {}
    for variable in model.weights:
        array = ops.convert_to_numpy(variable)
        if array.ndim > 1 and not variable.path.endswith("bias"):
            array = random.normal(0.0, settings.width**-0.5, array.shape)
        weights[variable.path] = array.astype("float32")
    return weights


def train(
    policy: keras.DTypePolicy,
    corpus: Corpus,
    settings: Settings,
    weights: dict[str, np.ndarray],
    name: str | None = None,
) -> Run:
    """Train from given weights; with a name, print a line now and then."""
    steps, seed, windows = settings.steps, settings.seed, settings.windows
    keras.utils.set_random_seed(seed)
    model = decoder(corpus.tokens, settings, policy)
    for variable in model.weights:
        if variable.path in weights:  # the rest is float8 state
            variable.assign(weights[variable.path])
    rising = steps // 10
    rate = keras.optimizers.schedules.CosineDecay(
        *(3e-5, max(steps - rising, 1), 0.01),
        warmup_target=3e-3,
        warmup_steps=rising,
    )
    model.compile(
        keras.optimizers.Adam(rate, beta_2=0.99),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    held_out = corpus.validation_batch(settings.held_out, settings.context)

    def validation_loss() -> float:
        return float(model.evaluate(*held_out, batch_size=windows, verbose=0))

    evaluated = {*np.linspace(0, steps, settings.validations + 1).astype(int)}
    validation, losses, seconds = {0: validation_loss()}, [], []
    for step in range(1, steps + 1):
        batch = corpus.batch(step - 1, seed, windows, settings.context)
        began = time.perf_counter()
        model.reset_metrics()
        # The result is a number on the host: the step is over when it is there.
        losses.append(float(model.train_on_batch(*batch)))
        seconds.append(time.perf_counter() - began)
        if step in evaluated:
            validation[step] = validation_loss()
        if name and step * 10 // steps > (step - 1) * 10 // steps:
            passed = f"loss {losses[-1]:.3f}, {sum(seconds):.0f} s"
            print(f"{name}: step {step} of {steps}, {passed}", flush=True)
    return Run(tuple(losses), validation, tuple(seconds), model)
