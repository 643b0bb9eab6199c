"""Twelve faults, planted in the training of small models, and what shows them.

Each one says which layer and operand has to be named, and from which step on.
The models are trained on a target with noise, so that losses end at a floor.
"""

import dataclasses
import itertools
import math
import pathlib
import tempfile
import warnings

import keras
import numpy as np
from keras import layers, ops

import keras_policy_ext as kpe

START = 30
HIDDEN, FEATURES, TARGETS = 32, 16, 8


def batch_of(step, seed=0, size=128):
    rng = np.random.default_rng((seed, step))
    x = rng.normal(size=(size, FEATURES)).astype("float32")
    noise = rng.normal(size=(size, TARGETS)).astype("float32")
    mixed = np.random.default_rng(7).normal(size=(FEATURES, TARGETS))
    target = np.tanh(x @ mixed / 2).astype("float32")
    return x, target + 1.5 * noise


def compiled(inputs, outputs, loss_scale=None):
    model = keras.Model(inputs, outputs)
    optimizer = keras.optimizers.Adam()
    if loss_scale:
        optimizer = keras.optimizers.LossScaleOptimizer(
            optimizer, initial_scale=loss_scale
        )
    model.compile(optimizer, "mse")
    return model


def gated(loss_scale=None):
    """A stem, a SwiGLU block and a head."""
    inputs = keras.Input((FEATURES,))
    x = layers.Dense(HIDDEN, name="stem")(inputs)
    gate = layers.Dense(HIDDEN, activation="silu", name="gate")(x)
    up = layers.Dense(HIDDEN, name="up")(x)
    x = layers.Dense(HIDDEN, name="down")(gate * up)
    outputs = layers.Dense(TARGETS, name="head", dtype="float32")(x)
    return compiled(inputs, outputs, loss_scale=loss_scale)


class ChosenBy(layers.Layer):
    """Masks of the examples, one for each expert, by four of the features."""

    def build(self, shape):
        self.bias = self.add_weight(
            shape=(4,), initializer="zeros", trainable=False, name="bias"
        )

    def call(self, x):
        chosen = ops.argmax(
            ops.cast(x[:, :4], "float32") + ops.cast(self.bias, "float32"),
            axis=-1,
        )
        masks = ops.one_hot(chosen, 4, dtype=x.dtype)
        return [masks[:, i : i + 1] for i in range(4)]


def experts():
    inputs = keras.Input((FEATURES,))
    masks = ChosenBy(name="router")(inputs)
    x = layers.Dense(HIDDEN, activation="relu", name="stem")(inputs)
    x = sum(
        layers.Dense(HIDDEN, use_bias=False, name=f"expert_{i}")(x * mask)
        for i, mask in enumerate(masks)
    )
    outputs = layers.Dense(TARGETS, name="head", dtype="float32")(x)
    return compiled(inputs, outputs)


def attending():
    inputs = keras.Input((FEATURES,))
    x = layers.Reshape((4, FEATURES // 4))(inputs)
    x = layers.Dense(HIDDEN, name="stem")(x)
    x = layers.MultiHeadAttention(2, 16, name="attention")(x, x)
    x = layers.Flatten()(x)
    outputs = layers.Dense(TARGETS, name="head", dtype="float32")(x)
    return compiled(inputs, outputs)


def twice():
    """A layer that gets half of the features as they are, and half tiny."""
    inputs = keras.Input((FEATURES,))
    half = FEATURES // 2
    shared = layers.Dense(HIDDEN, use_bias=False, name="shared")
    first = shared(inputs[:, :half])
    second = shared(inputs[:, half:] * 1e-6) * 1e6
    x = layers.Concatenate()([first, second])
    x = layers.Activation("relu")(x)
    outputs = layers.Dense(TARGETS, name="head", dtype="float32")(x)
    return compiled(inputs, outputs)


@dataclasses.dataclass
class Fault:
    """What is planted, and what has to be named.

    Attributes:
        name: Its name.
        layer: The last part of the path of the layer.
        operand: The operand.
        start: The step at which it begins.
        slow: Whether the loss shows it much later.
        steps: How many steps the runs take.
        recipe: The recipe of the run.
        model: Makes the model.
        source: The policy that the model is made under.
        seed: Of weights and batches.
    """

    name: str
    layer: str
    operand: str
    start: int = START
    slow: bool = False
    steps: int = 70
    recipe: object = "delayed"
    model: object = gated
    source: str = "mixed_bfloat16"
    seed: int = 0

    def batch(self, step):
        return batch_of(step, self.seed)

    def rate(self, step):
        """It falls to zero, so that runs end near the same floor."""
        return 0.02 * max(0.0, 1 - step / self.steps)

    def plant(self, step, model):
        """Change the model before a step."""


class Channel(Fault):
    def plant(self, step, model):
        if step < self.start:
            return
        up, down = (model.get_layer(x).kernel for x in ("up", "down"))
        values = [np.array(ops.convert_to_numpy(v)) for v in (up, down)]
        if step == self.start:
            self.first = values[0][:, 0].copy(), values[1][0].copy()
        factor = 1.25 ** (step - self.start)
        values[0][:, 0] = self.first[0] * factor
        values[1][0] = self.first[1] / factor
        up.assign(values[0])
        down.assign(values[1])


class Weighted(Fault):
    def batch(self, step):
        x, y = batch_of(step, self.seed)
        weight = 1000.0 if step >= self.start and step % 2 else 1.0
        return x, y, np.full(len(x), weight, "float32")


class Unequal(Fault):
    """One target is a million times as large as the others."""

    def batch(self, step):
        x, y = batch_of(step, self.seed)
        return x, y * self.factors

    factors = np.array([1e6, *[1.0] * (TARGETS - 1)], "float32")


def unequal():
    model = gated()
    model.compile(keras.optimizers.Adam(), weighted_by_target)
    return model


def weighted_by_target(y, outputs):
    weights = ops.convert_to_tensor([1e7, *[1.0] * (TARGETS - 1)], "float32")
    error = ops.square(ops.cast(outputs, "float32") - y)
    return ops.mean(error * weights, axis=-1)


class NotANumber(Fault):
    def batch(self, step):
        x, y = batch_of(step, self.seed)
        if step == self.start:
            x[3, 2] = np.nan
        return x, y


class Restored(Fault):
    def plant(self, step, model):
        state = getattr(model.get_layer("down"), "float8_state", None)
        if step != self.start or state is None:
            return
        (variable,) = state.matrices
        kept = np.array(ops.convert_to_numpy(variable.value))
        newest = variable.newest("inputs")
        variable.observe("inputs", newest * 1e6)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "other.weights.h5"
            model.save_weights(path)
            variable.assign(kept)
            model.load_weights(path)


class Dead(Fault):
    def plant(self, step, model):
        if step == self.start:
            model.get_layer("router").bias.assign([0.0, 0.0, -1e9, 0.0])


class Rate(Fault):
    def rate(self, step):
        return super().rate(step) * (30 if step >= self.start else 1)


class Logit(Fault):
    def plant(self, step, model):
        if step >= self.start:
            attention = model.get_layer("attention")
            kernel = attention._query_dense.kernel
            kernel.assign(ops.convert_to_numpy(kernel) * 1.15)


class Constant(Fault):
    def batch(self, step):
        x, y = batch_of(step, self.seed)
        return (np.full_like(x, 0.5) if step >= self.start else x), y


class Assigned(Fault):
    def plant(self, step, model):
        if step == self.start:
            kernel = model.get_layer("up").kernel
            kernel.assign(ops.convert_to_numpy(kernel) * 20)


FAULTS = {
    fault.name: fault
    for fault in (
        Channel("swiglu_channel", "down", "inputs", slow=True, steps=110),
        Weighted(
            "saturated_gradient",
            "head",
            "outputs_grad",
            recipe=kpe.recipes.DelayedScaling(amax_history_length=1),
        ),
        Fault(
            "underflowing_gradient",
            "head",
            "outputs_grad",
            start=1,
            recipe=kpe.recipes.CurrentScaling(fp8_format="e4m3"),
            model=unequal,
        ),
        NotANumber(
            "nan_batch",
            "stem",
            "inputs",
            model=lambda: gated(2.0**10),
        ),
        Restored("restored_scale", "down", "inputs"),
        Dead("dead_expert", "expert_2", "inputs", model=experts),
        Rate("learning_rate", "", "kernel"),
        Logit(
            "exploding_logit",
            "query",
            "kernel",
            slow=True,
            steps=110,
            model=attending,
        ),
        Constant("constant_input", "stem", "inputs"),
        Assigned("assigned_kernel", "up", "kernel"),
        Fault("shared_layer", "shared", "inputs", start=1, model=twice),
        Fault(
            "loss_scale",
            "down",
            "outputs_grad",
            start=1,
            model=lambda: gated(2.0**34),
            source="mixed_float16",
        ),
    )
}


@dataclasses.dataclass
class Run:
    """What a run left.

    Attributes:
        losses: The loss of each step.
        final: The loss on other examples after the last step.
        warnings: Of the watch; empty without one.
        decisions: Of the autopilot; empty without one.
    """

    losses: list
    final: float
    warnings: list
    decisions: list


def run(
    fault, way, planted=True, every=1, seed=0, until_named=False, **options
):
    """Train.

    Args:
        fault: The fault.
        way: `"16 bits"`, `"plain"`, `"watched"` or `"autopilot"`.
        planted: Whether the fault is planted.
        every: As for `kpe.autopilot`.
        seed: Of weights and batches.
        until_named: Whether to look from ten steps before the fault on, and to
            end as soon as it is named.
        **options: As for `kpe.autopilot`.
    """
    fault = dataclasses.replace(fault, seed=seed)
    keras.utils.set_random_seed(seed)
    with kpe.policy_scope(fault.source):
        model = fault.model()
    if way != "16 bits":
        kpe.convert(model, fault.recipe, filter="all")
    judge = None
    if way == "watched":
        judge = kpe.watch(model, every=every)
    elif way == "autopilot":
        judge = kpe.autopilot(model, every=every, **options)
    watch = getattr(judge, "watch", judge)
    first = fault.start - 10 if until_named else 1
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(1, fault.steps + 1):
            sound = Fault.rate(fault, step)
            rate = fault.rate(step) if planted else sound
            model.optimizer.learning_rate = rate
            if planted:
                fault.plant(step, model)
            batch = fault.batch(step) if planted else batch_of(step, seed)
            if judge is not None and step >= first:
                judge.step(batch, step - watch.steps)
            if until_named and named(fault, judge.warnings):
                return Run(losses, math.nan, judge.warnings, [])
            losses.append(float(model.train_on_batch(*batch)))
    if planted:
        fault.plant(fault.steps + 1, model)
    x, y = batch_of(10**6, size=2048)
    final = float(
        np.mean((model.predict(x, verbose=0, batch_size=2048) - y) ** 2)
    )
    found = [] if watch is None else watch.warnings
    return Run(losses, final, found, getattr(judge, "decisions", []))


def named(fault, found):
    """The warning that names the fault, or None."""
    for each in found:
        if each.step < fault.start:
            continue
        is_it = each.layer.endswith(fault.layer)
        if is_it and each.operand == fault.operand:
            return each
    return None


def _perceptron():
    inputs = keras.Input((FEATURES,))
    x = layers.Dense(HIDDEN, activation="relu")(inputs)
    x = layers.Dense(HIDDEN, activation="gelu")(x)
    return inputs, layers.Dense(TARGETS)(x)


def _convolutional():
    inputs = keras.Input((FEATURES,))
    x = layers.Reshape((4, 4, 1))(inputs)
    x = layers.Conv2D(8, 3, padding="same", activation="relu")(x)
    x = layers.BatchNormalization()(x)
    x = layers.Conv2D(HIDDEN, 3, 2, padding="same", activation="relu")(x)
    return inputs, layers.Dense(TARGETS)(layers.Flatten()(x))


def _transformer():
    inputs = keras.Input((FEATURES,))
    x = layers.Dense(HIDDEN)(layers.Reshape((4, FEATURES // 4))(inputs))
    y = layers.LayerNormalization()(x)
    x = x + layers.MultiHeadAttention(2, HIDDEN // 2)(y, y)
    y = layers.Dense(64, activation="gelu")(layers.LayerNormalization()(x))
    x = x + layers.Dense(HIDDEN)(y)
    x = layers.Flatten()(layers.LayerNormalization()(x))
    return inputs, layers.Dense(TARGETS)(x)


def _recurrent():
    inputs = keras.Input((FEATURES,))
    x = layers.LSTM(HIDDEN)(layers.Reshape((4, FEATURES // 4))(inputs))
    return inputs, layers.Dense(TARGETS)(x)


def _rate(highest, kind, steps):
    """A learning rate: constant, or it rises from 0, or from a tenth."""
    if kind == "constant":
        return highest
    return keras.optimizers.schedules.CosineDecay(
        0.0 if kind == "warmed up" else highest / 10,
        steps - steps // 5,
        warmup_target=highest,
        warmup_steps=steps // 5,
    )


_MODELS = {
    "perceptron": _perceptron,
    "convolutional": _convolutional,
    "transformer": _transformer,
    "recurrent": _recurrent,
}
_OPTIMIZERS = {
    "adam": lambda rate, steps: keras.optimizers.Adam(_rate(0.01, rate, steps)),
    "sgd": lambda rate, steps: keras.optimizers.SGD(
        _rate(0.1, rate, steps), momentum=0.9
    ),
}
_RATES = ("constant", "warmed up", "from a tenth")
_EVERY = (1, 10)
SOUND = list(itertools.product(_MODELS, _OPTIMIZERS, _RATES, _EVERY))
"""Sound training: model, optimizer, learning rate, steps between samples."""


def sound_warnings(case, seed=0):
    """Train without a fault; return the warnings, of which none is right."""
    model, optimizer, rate, every = case
    steps = 60 if every == 1 else 200
    keras.utils.set_random_seed(seed)
    with kpe.policy_scope("mixed_bfloat16"):
        model = keras.Model(*_MODELS[model]())
    model.compile(_OPTIMIZERS[optimizer](rate, steps), "mse")
    kpe.convert(model, "delayed", filter="all")
    watch = kpe.watch(model, every=every)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(1, steps + 1):
            batch = batch_of(step, seed)
            watch.step(batch)
            model.train_on_batch(*batch)
    return watch.warnings
