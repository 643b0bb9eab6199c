"""A training step of PyTorch is as many graphs in float8 as in stock Keras."""

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe

if keras.backend.backend() != "torch":
    pytest.skip(
        f"graphs of PyTorch; the backend is {keras.backend.backend()}",
        allow_module_level=True,
    )

from cases import FROM_3_16
from graphs_of_steps import batches, fitted, recording

layers, ops = keras.layers, keras.ops

pytestmark = [
    pytest.mark.extension(
        "delayed", "recurrent", "mixed", "moments", "nvfp4", "qat"
    ),
    pytest.mark.skipif(
        not hasattr(keras.Variable, "overwrite_with_gradient"),
        reason="this Keras assigns no gradients",
    ),
]


@pytest.fixture(scope="module")
def recorded():
    with recording() as found:
        yield found


class Product(layers.Layer):
    """A class without a float8 form: converted by its operation."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 16), name="kernel")

    def call(self, x):
        return ops.matmul(x, self.kernel)


class Transposed(Product):
    """A class that moves its weight before the product."""

    def call(self, x):
        return ops.matmul(x, ops.transpose(self.kernel))


class Attention(layers.Layer):
    """Attention by operations: both products have one equation."""

    def __init__(self):
        super().__init__()
        self.projections = [layers.Dense(16) for _ in range(3)]

    def build(self, shape):
        for each in self.projections:
            each.build(shape)

    def call(self, x):
        query, key, value = (each(x) for each in self.projections)
        scores = ops.matmul(query, ops.transpose(key, (0, 2, 1)))
        return ops.matmul(ops.softmax(scores / 4), value)


class Experts(layers.Layer):
    """All experts of all tokens, weighted by a router."""

    def build(self, shape):
        size = shape[-1]
        self.router = self.add_weight(shape=(size, 3), name="router")
        self.bank = self.add_weight(shape=(3, size, size), name="bank")

    def call(self, x):
        gates = ops.softmax(ops.matmul(x, self.router))
        of_all = ops.einsum("bi,eio->beo", x, self.bank)
        return ops.einsum("be,beo->bo", gates, of_all)


def chain(*parts, shape=(16,), dtype=None):
    """A model of layers that are called one after the other."""
    return keras.Sequential([keras.Input(shape, dtype=dtype), *parts])


def dense():
    return chain(layers.Dense(16, "gelu"), layers.Dense(16, "relu"))


def by_operation():
    return chain(Product(), Product())


def moved():
    return chain(Transposed(), Transposed())


def attention_by_operation():
    return chain(Attention(), shape=(5, 16))


def attention():
    x = keras.Input((5, 16))
    y = layers.MultiHeadAttention(2, 8)(x, x, use_causal_mask=True)
    return keras.Model(x, layers.Dense(4)(layers.LayerNormalization()(x + y)))


def grouped_attention():
    x = keras.Input((5, 16))
    return keras.Model(x, layers.GroupQueryAttention(8, 2, 1)(x, x))


def convolution():
    parts = layers.Conv2D(8, 3, padding="same"), layers.Flatten()
    return chain(*parts, layers.Dense(4), shape=(6, 6, 4))


def recurrent():
    return chain(layers.LSTM(4), shape=(3, 16))


def unrolled():
    return chain(layers.LSTM(4, unroll=True), shape=(3, 16))


def experts():
    return chain(Experts(), layers.Dense(4))


def tied():
    embedding = layers.ReversibleEmbedding(8, 16)
    x = keras.Input((5,), dtype="int32")
    y = layers.Dense(16)(embedding(x))
    return keras.Model(x, embedding(y, reverse=True))


def twice():
    shared, x = layers.Dense(16, "gelu"), keras.Input((16,))
    return keras.Model(x, shared(shared(x)))


def lora():
    model = dense()
    for layer in model.layers:
        layer.enable_lora(2)
    return model


def frozen_base():
    model = dense()
    model.layers[0].trainable = False
    return model


KINDS = (
    dense,
    by_operation,
    moved,
    attention_by_operation,
    attention,
    grouped_attention,
    convolution,
    recurrent,
    experts,
    tied,
    twice,
    lora,
    frozen_base,
)

RECIPES = ("current", "delayed", "rowwise", "block", "mxfp8", "nvfp4", "int4")


def adam(**kwargs):
    return keras.optimizers.AdamW(1e-3, **kwargs)


FEATURES = {
    "clipnorm": lambda: adam(clipnorm=0.1),
    "averages": lambda: adam(use_ema=True),
    "loss scale of Keras": lambda: keras.optimizers.LossScaleOptimizer(adam()),
}
"""Optimizers of Keras by what they do besides."""

OURS = {
    "loss scale": lambda: kpe.mixed_precision.LossScaleOptimizer(adam()),
    "one-byte moments": lambda: kpe.optimizers.quantize_state(adam()),
    "random": lambda: kpe.mixed_precision.StochasticRounding(adam()),
}
"""Those of this package; the stock is one that does none of it."""


def made(kind, recipe=None, optimizer=adam, **kwargs):
    """A compiled model, with the same weights each time."""
    keras.utils.set_random_seed(0)
    model = kind()
    if recipe == "frozen":
        kpe.freeze(model)
    elif recipe is not None:
        attention = "float8" if kind is attention_by_operation else None
        report = kpe.convert(model, recipe, min_size=0, attention=attention)
        assert report.converted
    model.compile(optimizer(), "mse", **kwargs)
    return model


def graphs(recorded, model):
    """The counts of `fit`, and its losses; a CUDA graph could replay them."""
    recorded.clear()
    losses = fitted(model)
    for figure in ("not static", "symbolic"):
        # Before 3.16 gradients lie between graphs.
        assert recorded.total(figure) == 0 or not FROM_3_16, figure
    assert all(each["devices"] <= 1 for each in recorded.graphs)
    return recorded.counts, losses


def check(recorded, kind, recipe, optimizer=adam, more=0, stock=None, **kwargs):
    """Fail unless `fit` makes the stock's graphs, and eager's losses."""
    plain = made(kind, None, stock or optimizer, **kwargs)
    allowed, _ = graphs(recorded, plain)
    waits = recorded.total("waits")
    found, losses = graphs(recorded, made(kind, recipe, optimizer, **kwargs))
    if not FROM_3_16:  # Keras ends the graph at `backward`, before the update.
        more += 2
    assert found[0] <= allowed[0] + more
    assert found[1] <= allowed[1] + more
    assert recorded.total("waits") <= waits
    # A compiled loop is unrolled, and rounds at random by the number of a use.
    same = unrolled if kind is recurrent else kind
    eager = made(same, recipe, optimizer, **kwargs)
    assert losses == fitted(eager, compiled=False)


@pytest.mark.full_except("delayed-dense")
@pytest.mark.nightly_except(
    *(f"{recipe}-dense" for recipe in RECIPES),
    *(f"delayed-{kind.__name__}" for kind in KINDS),
)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_has_the_graphs_of_stock_and_the_losses_of_eager(
    recorded, kind, recipe
):
    check(recorded, kind, recipe)


@pytest.mark.nightly
@pytest.mark.parametrize("feature", [*FEATURES, *OURS])
def test_so_has_a_step_whose_optimizer_does_more(recorded, feature):
    stock = FEATURES.get(feature, adam)
    optimizer = OURS.get(feature, stock)
    check(recorded, dense, "delayed", optimizer, stock=stock)


@pytest.mark.nightly
def test_so_have_adapters_of_a_frozen_model(recorded):
    check(recorded, lora, "frozen")


@pytest.mark.nightly
def test_so_have_several_steps_of_an_execution(recorded):
    check(recorded, dense, "delayed", steps_per_execution=3)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("more", "options"),
    [
        (2, {"gradient_accumulation_steps": 2}),
        (1, {"use_ema": True, "ema_overwrite_frequency": 2}),
    ],
)
def test_a_branch_of_keras_adds_few_however_many_layers(
    recorded, more, options
):
    """Keras branches on the count, and what it calls is compiled alone."""
    check(recorded, dense, "delayed", lambda: adam(**options), more=more)


@pytest.mark.full
def test_a_second_fit_makes_none_and_another_batch_size_one(recorded):
    counts = []
    for recipe in (None, "delayed"):
        model = made(dense, recipe)
        recorded.clear()
        fitted(model)
        first, _ = recorded.counts
        x, y, size = batches(model)
        model.fit(x, y, size, verbose=0)
        second, _ = recorded.counts
        model.fit(x, y, size // 2, verbose=0)
        third, _ = recorded.counts
        model.evaluate(x, y, size, verbose=0)
        model.predict(x, size, verbose=0)
        last, _ = recorded.counts
        counts.append((second - first, third - second, last - third))
    stock, found = counts
    assert found[0] == 0
    assert found == stock


@pytest.mark.full
def test_a_graph_whose_gradients_are_not_finite_changes_no_weights():
    scaler = kpe.mixed_precision.LossScaleOptimizer(adam(), initial_scale=8.0)
    model = made(dense, "current", lambda: scaler)
    model.jit_compile = True
    x, y, size = batches(model)
    model.fit(x, y, size, verbose=0)
    optimizer = model.optimizer.inner_optimizer
    watched = [*model.trainable_variables, *optimizer.variables]
    before = [keras.ops.convert_to_numpy(v).copy() for v in watched]
    assert float(scaler.dynamic_scale.value) == 8.0
    model.fit(x, np.full_like(y, np.inf), size, verbose=0)
    assert float(scaler.dynamic_scale.value) == 1.0  # Three steps, each halves.
    for variable, value in zip(watched, before, strict=True):
        np.testing.assert_array_equal(
            keras.ops.convert_to_numpy(variable), value
        )
    model.fit(x, y, size, verbose=0)
    changed = keras.ops.convert_to_numpy(watched[0])
    assert np.any(changed != before[0]) and np.all(np.isfinite(changed))


@pytest.mark.full
def test_a_disabled_function_is_noticed(recorded, monkeypatch):
    import torch

    from keras_policy_ext.ext.delayed.torch import TorchStates

    settle = torch.compiler.disable(TorchStates.settle_here)
    monkeypatch.setattr(TorchStates, "settle_here", settle)
    with pytest.raises(AssertionError):
        check(recorded, dense, "delayed")


@pytest.mark.full
def test_a_number_that_changes_is_noticed(recorded, monkeypatch):
    from keras_policy_ext.ext.delayed.variable import StateVariable

    def next_slot(state):
        state.changing = getattr(state, "changing", 0) + 1
        return state.changing % 8

    monkeypatch.setattr(StateVariable, "next_slot", next_slot)
    with pytest.raises(AssertionError):
        check(recorded, dense, "delayed")
