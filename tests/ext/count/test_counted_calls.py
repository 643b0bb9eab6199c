"""Multiplications are those of a call of the model, whoever computes them."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_policy_ext as kpe

WIDTH = 16


class Experts(keras.layers.Layer):
    """Four products with a kernel for each token, of any number of them."""

    def build(self, shape):
        self.kernel = self.add_weight(
            shape=(4, shape[-1], shape[-1]), name="kernel"
        )

    def call(self, x):  # (tokens, width)
        return ops.mean(ops.einsum("th,ehi->tei", x, self.kernel), axis=1)

    def compute_output_shape(self, shape):
        return shape


class Mixture(keras.layers.Layer):
    """Folds the tokens of all samples into one axis."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.project, self.experts = layers.Dense(WIDTH), Experts()

    def call(self, x):
        tokens = ops.reshape(self.project(x), (-1, WIDTH))
        return ops.reshape(self.experts(tokens), ops.shape(x))


class TiedHead(keras.layers.Layer):
    """Multiplies with the table of a layer that is not in it."""

    def __init__(self, embedding, **kwargs):
        super().__init__(**kwargs)
        object.__setattr__(self, "embedding", embedding)

    def call(self, h):
        return ops.matmul(h, ops.transpose(self.embedding.embeddings))


class Merged(keras.layers.Layer):
    """Reads the kernels of two layers, and calls none of them."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.wide = layers.Conv2D(8, 3, use_bias=False)
        self.narrow = layers.Conv2D(8, 1, use_bias=False)

    def build(self, shape):
        self.wide.build(shape)
        self.narrow.build(shape)

    def call(self, x):
        narrow = ops.pad(self.narrow.kernel, ((1, 1), (1, 1), (0, 0), (0, 0)))
        return ops.conv(x, self.wide.kernel + narrow)


class Positions(keras.layers.Layer):
    """Adds a table."""

    def build(self, shape):
        self.positions = self.add_weight(shape=(8, shape[-1]), name="weight")

    def call(self, x):
        return x + self.positions[: ops.shape(x)[1]]


def tokens(length):
    return keras.Input((length, WIDTH))


def mixture(length):
    x = tokens(length)
    return keras.Model(x, Mixture()(x))


def windows():
    x = inputs = keras.Input((8, 8, WIDTH))
    x = layers.DepthwiseConv2D(3, padding="same")(x)
    x = layers.Dense(WIDTH)(ops.reshape(x, (-1, 4, WIDTH)))
    return keras.Model(inputs, ops.reshape(x, (-1, 8, 8, WIDTH)))


def tied():
    ids = keras.Input((8,), dtype="int32")
    embedding = layers.Embedding(100, WIDTH)
    h = layers.Dense(WIDTH)(embedding(ids))
    return keras.Model(ids, TiedHead(embedding, name="head")(h))


def merged():
    return keras.Sequential([keras.Input((8, 8, 4)), Merged(name="merged")])


def positions():
    x = tokens(8)
    return keras.Model(x, layers.Dense(WIDTH)(Positions()(x)))


def in_graph():
    x = tokens(8)
    constant = ops.ones((WIDTH, 4))
    return keras.Model(x, ops.matmul(layers.Dense(WIDTH)(x), constant))


SQUARE = WIDTH * WIDTH

# A model, multiplications of one sample, and those of them in float8.
MODELS = {
    "tokens in the batch": (lambda: mixture(8), *[8 * 5 * SQUARE] * 2),
    "tokens of unknown number": (lambda: mixture(None), *[5 * SQUARE] * 2),
    "windows in the batch": (windows, 64 * (SQUARE + 9 * WIDTH), 64 * SQUARE),
    "tied head": (tied, 8 * (SQUARE + 100 * WIDTH), 8 * SQUARE),
    "kernels that are read": (merged, 36 * 9 * 4 * 8, 0),
    "positions": (positions, 8 * SQUARE, 8 * SQUARE),
    "graph": (in_graph, 8 * (SQUARE + 4 * WIDTH), 8 * SQUARE),
    "separable": (
        lambda: keras.Sequential(
            [keras.Input((6, 6, 4)), layers.SeparableConv2D(8, 3)]
        ),
        *(16 * (9 * 4 + 4 * 8), 16 * 4 * 8),
    ),
}


@pytest.mark.full_except("positions", "tied head")
@pytest.mark.filterwarnings("ignore:.* of the multiplications")
@pytest.mark.parametrize("case", MODELS)
def test_what_is_multiplied_is_counted_where_it_is(case):
    make, total, in_float8 = MODELS[case]
    model = make()
    totals = kpe.convert(model).totals
    found = totals.multiplications, totals.multiplications_in_float8
    assert found == (total, in_float8)
    assert totals.sizes_known == ("unknown" not in case)


@pytest.mark.parametrize("length", [None, 8])
def test_the_warning_of_little_in_float8_says_if_sizes_are_unknown(length):
    with pytest.warns(UserWarning, match="None of the multi") as caught:
        report = kpe.convert(mixture(length), filter=lambda *_: False)
    notes = " ".join(report.totals.notes())
    assert notes.startswith("Some sizes of inputs are not") == (length is None)
    (message,) = (str(each.message) for each in caught)
    assert message.count("Some sizes of inputs") == (length is None)
    assert f". {notes} To have more" in message or not notes


@pytest.mark.filterwarnings("ignore:.* of the multiplications")
@pytest.mark.parametrize("make, name", [(tied, "head"), (merged, "merged")])
def test_a_layer_that_multiplies_with_kernels_of_others_is_named(make, name):
    report = kpe.convert(make())
    (entry,) = (e for e in report.skipped if e.multiplications)
    words = "other layers" if name == "merged" else "is a tied head"
    assert entry.path.endswith(name) and words in entry.reason
    assert not entry.in_float8
    idle = [e.path for e in report.converted if not e.multiplications]
    assert len(idle) == (2 if name == "merged" else 0)
    assert ("no part of the call" in str(report)) == bool(idle)


class Scaled(keras.layers.Layer):
    """A cell of its own, with an operator of Python."""

    state_size = output_size = WIDTH

    def build(self, shape):
        size = (shape[-1], WIDTH)
        self.weight = self.add_weight(shape=size, name="weight")

    def call(self, x, states):
        return x @ self.weight + states[0], [states[0]]


@pytest.mark.filterwarnings("ignore:None of the multiplications")
@pytest.mark.parametrize("wrapped", [False, True])
def test_what_a_loop_calls_counts_for_each_step(wrapped):
    layer = layers.RNN(Scaled())
    if wrapped:
        layer = layers.TimeDistributed(Experts())
    x = keras.Input((5, WIDTH))
    totals = kpe.convert(keras.Model(x, layer(x))).totals
    expected = 5 * SQUARE * (4 if wrapped else 1)
    assert (totals.multiplications, totals.sizes_known) == (expected, True)


class Noted(keras.layers.Layer):
    """Changes whatever a call can change."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed = keras.random.SeedGenerator(1)
        self.dense = layers.Dense(WIDTH)
        self.norm = layers.BatchNormalization()
        self.calls, self.seen = 0, None

    def build(self, shape):
        self.steps = self.add_weight(name="steps", trainable=False)
        self.dense.build(shape)
        self.norm.build(shape)

    def call(self, x):
        self.steps.assign(self.steps + 1)
        self.calls, self.seen = self.calls + 1, x
        noise = keras.random.normal(ops.shape(x), seed=self.seed)
        x = self.norm(self.dense(x + noise), training=True)
        self.add_loss(ops.mean(x))
        return x


@pytest.mark.full
def test_nothing_changes_where_multiplications_are_counted():
    model = keras.Sequential([keras.Input((8, WIDTH)), Noted()])
    layer = model.layers[0]
    model(np.ones((2, 8, WIDTH), "float32"))
    kpe.convert(model, "delayed")
    held = {k: v for k, v in vars(layer).items() if k != "_losses"}
    before = [ops.convert_to_numpy(v) for v in model.variables]
    seed = ops.convert_to_numpy(layer.seed.state)
    choice = layer.dense.kernel_choice
    entries = kpe.inspect(model).layers
    assert sum(e.multiplications for e in entries) == 8 * SQUARE
    assert layer.dense.kernel_choice is choice
    assert all(vars(layer)[k] is v for k, v in held.items())
    after = [ops.convert_to_numpy(v) for v in model.variables]
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(seed, ops.convert_to_numpy(layer.seed.state))


class Refuses(keras.layers.Layer):
    """Cannot be called on shapes, and does not say what it returns."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(WIDTH)

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        np.asarray(ops.convert_to_numpy(x))
        raise RuntimeError("not on shapes")

    def compute_output_shape(self, shape):
        return shape


def test_what_cannot_be_traced_is_said_to_be_unknown():
    model = keras.Sequential(
        [keras.Input((8, WIDTH)), layers.Dense(WIDTH), Refuses()]
    )
    report = kpe.convert(model)
    known = {e.path.count("/"): e.sizes_known for e in report.converted}
    assert sorted(known.values()) == [False, True]
    assert "not known" in str(report)


def test_layers_that_are_alike_count_each():
    x = inputs = tokens(8)
    for _ in range(3):
        x = Mixture()(x)
    report = kpe.convert(keras.Model(inputs, x))
    counted = [(e.class_name, e.multiplications) for e in report.converted]
    each = [("Dense", 8 * SQUARE), ("Experts", 8 * 4 * SQUARE)]
    assert counted == each * 3


def test_a_block_of_another_width_is_not_taken_for_one_like_it():
    class Block(keras.layers.Layer):
        def __init__(self, repeats):
            super().__init__()
            self.repeats = repeats
            self.dense = layers.Dense(WIDTH)

        def build(self, shape):
            self.dense.build(shape)

        def call(self, x):
            for _ in range(self.repeats):
                x = self.dense(x)
            return x

    x = tokens(8)
    model = keras.Model(x, Block(3)(Block(1)(x)))
    found = [e.multiplications for e in kpe.convert(model).converted]
    assert found == [8 * SQUARE, 3 * 8 * SQUARE]


class BitQuantizer:
    """What a library that quantizes puts into its layers."""


class Quantized(layers.Dense):
    """A layer of such a library."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.kernel_quantizer = BitQuantizer()

    def call(self, x):
        return ops.round(x) @ self.kernel


@pytest.mark.any_backend
@pytest.mark.filterwarnings("ignore:None of the multiplications")
def test_a_layer_that_another_library_quantizes_is_said_to_be_so():
    model = keras.Sequential([keras.Input((8,)), Quantized(4)])
    (entry,) = kpe.convert(model).skipped
    library = __name__.partition(".")[0]
    assert entry.reason == f"{library} quantizes it, by its BitQuantizer"


class Branches(keras.layers.Layer):
    """Multiplies in one of two branches, and in what a framework compiles."""

    def build(self, shape):
        size = (shape[-1], WIDTH)
        self.kernel = self.add_weight(shape=size, name="kernel")

    def call(self, x):
        return ops.cond(
            ops.sum(x) > 0,
            lambda: ops.matmul(x, self.kernel),
            lambda: ops.matmul(ops.matmul(x, self.kernel), self.kernel),
        )


@pytest.mark.skipif(
    keras.backend.backend() == "torch", reason="branches are those of Python"
)
@pytest.mark.filterwarnings("ignore:None of the multiplications")
def test_of_two_branches_the_larger_one_counts():
    x = keras.Input((8, WIDTH))
    totals = kpe.convert(keras.Model(x, Branches()(x))).totals
    assert totals.multiplications == 2 * 8 * SQUARE
