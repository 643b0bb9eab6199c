"""Layers that decide, such as routers of experts, and those at the ends."""

import importlib

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_policy_ext as kpe
from keras_policy_ext.conversion.work import work_of

POLICY = "float8/current_from_float32"
EXPERTS, WIDTH, STEPS = 4, 16, 8


def one_hot_of_top_k(logits):
    weights, chosen = ops.top_k(ops.softmax(logits), 2)
    hot = ops.one_hot(chosen, EXPERTS)
    return ops.sum(hot * weights[..., None], axis=-2)


def in_groups(logits):
    """As in DeepSeek: the best group by its two best, then in that group."""
    scores = ops.reshape(ops.sigmoid(logits), (-1, STEPS, 2, EXPERTS // 2))
    best = ops.top_k(ops.cast(scores, "float32"), 2)[0]
    group = ops.top_k(ops.sum(best, axis=-1), 1)[1][..., 0]
    mask = ops.one_hot(group, 2)[..., None]
    return ops.reshape(scores * mask, (-1, STEPS, EXPERTS))


def above_the_second(logits):
    second = ops.top_k(logits, 2)[0][..., -1:]
    return ops.where(logits >= second, ops.sigmoid(logits), 0.0)


def in_a_loop(logits):
    def step(_, total):
        return total + ops.one_hot(ops.argmax(logits, axis=-1), EXPERTS)

    return ops.fori_loop(0, 2, step, ops.zeros_like(logits))


DECIDES = {
    "top-k of probabilities": one_hot_of_top_k,
    "top-k in groups": in_groups,
    "a threshold": above_the_second,
    "argmax": lambda x: ops.one_hot(ops.argmax(x, axis=-1), EXPERTS),
    "argmin": lambda x: ops.one_hot(ops.argmin(-x, axis=-1), EXPERTS),
    "argsort": lambda x: ops.one_hot(ops.argsort(x)[..., -1], EXPERTS),
    "a recomputed program": keras.remat(one_hot_of_top_k),
    "a choice in a loop": in_a_loop,
    "a choice for each sample": lambda x: ops.vectorized_map(
        one_hot_of_top_k, x
    ),
}
COMPUTES = {
    "softmax": ops.softmax,
    "entries without their positions": lambda x: ops.top_k(x, EXPERTS)[0],
    "a mask by sign": lambda x: ops.where(x > 0, x, 0.0),
    "a product in between": lambda x: one_hot_of_top_k(
        ops.matmul(x, ops.eye(EXPERTS))
    ),
}
WEIGH = {**DECIDES, **COMPUTES}
ROUTED = "top-k of probabilities"


@keras.saving.register_keras_serializable(package="roles")
class Experts(keras.layers.Layer):
    """A mixture; a plain `Dense` is its router."""

    def __init__(self, weigh, **kwargs):
        super().__init__(**kwargs)
        self.weigh = weigh
        self.one = layers.Dense(EXPERTS, name="one")
        self.up = layers.Dense(EXPERTS * WIDTH, name="up")

    def build(self, shape):
        self.one.build(shape)
        self.up.build(shape)
        self.built = True

    def logits(self, x):
        return self.one(x)

    def call(self, x):
        weights = WEIGH[self.weigh](self.logits(x))
        found = ops.reshape(self.up(x), (-1, STEPS, EXPERTS, WIDTH))
        return x + ops.sum(found * weights[..., None], axis=-2)

    def get_config(self):
        return {**super().get_config(), "weigh": self.weigh}


class Noisy(Experts):
    def __init__(self, weigh, **kwargs):
        super().__init__(weigh, **kwargs)
        self.other = layers.Dense(EXPERTS, name="other")

    def build(self, shape):
        self.other.build(shape)
        super().build(shape)

    def logits(self, x):
        return self.one(x) + ops.softplus(self.other(x))


class Drawing(Experts):
    """Its router draws numbers, and updates their seed."""

    def __init__(self, weigh, **kwargs):
        super().__init__(weigh, **kwargs)
        self.seed = keras.random.SeedGenerator(0)

    def logits(self, x):
        logits = self.one(x)
        noise = keras.random.uniform(ops.shape(logits), seed=self.seed)
        return logits + noise


def model_of(*blocks):
    inputs = keras.Input((STEPS, WIDTH))
    x = layers.Dense(WIDTH, name="first")(inputs)
    for block in blocks:
        x = block(x)
    return keras.Model(inputs, layers.Dense(32, name="last")(x))


def converted(report):
    return {entry.path for entry in report.converted}


def left(report):
    return {entry.path: entry.reason for entry in report.skipped}


def mixture(weigh=ROUTED):
    return model_of(Experts(weigh, name="a"), Experts(weigh, name="b"))


@pytest.mark.parametrize("name", DECIDES)
def test_what_a_choice_is_made_from_stays_and_the_report_says_so(name):
    model = mixture(name)
    report = kpe.convert(model, POLICY)
    assert converted(report) == {"first", "a/up", "b/up", "last"}
    assert set(left(report)) == {"a/one", "b/one"}
    for reason in left(report).values():
        assert reason.startswith("it decides instead of computing: a top-k")
    printed = " ".join(str(report).split())
    assert "what is chosen: 2 layers, such as 'a/one'" in printed
    assert "`filter='all'` converts such layers too" in printed
    assert type(model.get_layer("a").one) is layers.Dense


@pytest.mark.full_except("top-k of probabilities")
@pytest.mark.parametrize("name", DECIDES)
def test_freeze_leaves_out_what_a_choice_is_made_from(name):
    model = mixture(name)
    report = kpe.freeze(model)
    assert converted(report) == {"first", "a/up", "b/up", "last"}
    assert set(left(report)) == {"a/one", "b/one"}
    printed = " ".join(str(report).split())
    assert "Not frozen, since rounding could change what is chosen" in printed
    assert "`filter='all'` freezes such layers too" in printed
    assert type(model.get_layer("a").one) is layers.Dense
    assert converted(kpe.freeze(model, include="one", filter="all")) == {
        "a/one",
        "b/one",
    }


@pytest.mark.extension("export")
def test_export_writes_what_a_choice_is_made_from_in_floats(tmp_path):
    model = mixture()
    path = tmp_path / "model.safetensors"
    report = kpe.export(model, path, format="safetensors")
    floats = {w.name: w.reason for w in report.weights if w.dtype == "float32"}
    assert {"a/one/kernel", "b/one/kernel"} <= set(floats)
    assert floats["a/one/kernel"].startswith("it decides instead of computing")
    kpe.freeze(model, filter="all")
    report = kpe.export(model, path, format="safetensors", overwrite=True)
    assert {w.dtype for w in report.weights if "kernel" in w.name} == {
        "float8_e4m3fn"
    }


@pytest.mark.full_except("function")
@pytest.mark.parametrize("how", ["function", "all", "in float8 before"])
def test_freeze_takes_a_layer_that_decides_if_asked_to(how):
    model, options = mixture(), {"filter": "all"}
    if how == "function":
        options = {"filter": lambda layer: layer.name == "one"}
    if how == "in float8 before":
        kpe.convert(model, POLICY, filter="all")
        options = {}
    report = kpe.freeze(model, **options)
    assert {"a/one", "b/one"} <= converted(report)
    assert len(report.converted) == (2 if how == "function" else 6)


@pytest.mark.parametrize(
    "name",
    [pytest.param("auto", marks=pytest.mark.extension("gain")), "safe"],
)
def test_freeze_refuses_filters_of_training(name):
    with pytest.raises(ValueError, match="not about stored kernels"):
        kpe.freeze(mixture(), filter=name)


@pytest.mark.parametrize("name", COMPUTES)
def test_what_computes_is_converted(name):
    report = kpe.convert(mixture(name), POLICY)
    assert len(report.converted) == 6


def test_two_layers_decide_together():
    report = kpe.convert(model_of(Noisy(ROUTED, name="a")), POLICY)
    assert set(left(report)) == {"a/one", "a/other"}


def test_a_layer_that_draws_numbers_decides():
    block = Drawing(ROUTED, name="a")
    model = model_of(block)
    before = ops.convert_to_numpy(block.seed.state)
    assert set(left(kpe.convert(model, POLICY))) == {"a/one"}
    np.testing.assert_array_equal(block.seed.state, before)


def compiled(function):
    """Compiled by the framework itself, if it keeps what it compiles."""
    if keras.backend.backend() == "jax":
        return importlib.import_module("jax").jit(function)
    if keras.backend.backend() == "tensorflow":
        return importlib.import_module("tensorflow").function(function)
    return function


@pytest.mark.parametrize("kept", [keras.remat, compiled])
def test_a_function_whose_program_is_kept_hides_no_layer(kept):
    """And what `convert` traces is not in the program that is kept."""
    block = Experts(ROUTED, name="a")
    call = block.call
    block.call = kept(call)
    model = model_of(block)
    for _ in range(2):
        report = kpe.convert(model, POLICY)
        assert set(left(report)) == {"a/one"}
        kpe.revert(model)
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(n, STEPS, WIDTH)) for n in (2, 3, 4)]
    got = [ops.convert_to_numpy(model(x)) for x in xs]
    block.call = call
    expected = [ops.convert_to_numpy(model(x)) for x in xs]
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_recomputed_layers_hide_no_layer():
    with keras.RematScope(mode="full"):
        block = Experts(ROUTED, name="a")
    assert set(left(kpe.convert(model_of(block), POLICY))) == {"a/one"}


class Carried(keras.layers.Layer):
    """Chooses among what a step before has computed."""

    state_size = EXPERTS

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.one = layers.Dense(EXPERTS, name="one")

    def build(self, shape):
        self.one.build(shape)
        self.built = True

    def call(self, x, states):
        chosen = ops.argmax(states[0], axis=-1)
        return x * ops.cast(chosen, x.dtype)[:, None], [self.one(x)]


def test_a_choice_is_followed_from_step_to_step():
    cell = Carried(name="cell")
    model = model_of(layers.RNN(cell, return_sequences=True, name="rnn"))
    assert set(left(kpe.convert(model, POLICY))) == {"rnn/cell/one"}


class Scoring(Carried):
    """Computes the scores, among which what is behind the loop chooses."""

    output_size = EXPERTS

    def call(self, x, states):
        return self.one(x), states


def test_a_choice_is_followed_out_of_a_loop():
    loop = layers.RNN(Scoring(name="cell"), return_sequences=True, name="rnn")
    choice = layers.Lambda(DECIDES["argmax"])
    assert set(left(kpe.convert(model_of(loop, choice), POLICY))) == {
        "rnn/cell/one"
    }


def test_a_layer_decides_whose_call_keras_does_not_see():
    gate = layers.Dense(EXPERTS, name="gate")
    each = layers.TimeDistributed(gate, name="each")
    choice = layers.Lambda(DECIDES["argmax"])
    assert set(left(kpe.convert(model_of(each, choice), POLICY))) == {
        "each/gate"
    }


BEHIND = (
    layers.MaxPooling2D(2, padding="same"),
    layers.UpSampling2D(2, interpolation="bilinear"),
    layers.Resizing(4, 4),
    layers.BatchNormalization(),
    layers.PReLU(),
    layers.ZeroPadding2D(1),
)


@pytest.mark.parametrize("layer", BEHIND, ids=lambda x: type(x).__name__)
def test_a_choice_is_followed_through_layers_of_keras(layer):
    inputs = keras.Input((8, 8, 3))
    scores = layer(layers.Conv2D(EXPERTS, 1, name="gate")(inputs))
    chosen = ops.one_hot(ops.argmax(scores, axis=-1), EXPERTS)
    outputs = layers.Conv2D(2, 1, name="last")(chosen)
    report = kpe.convert(keras.Model(inputs, outputs), POLICY)
    assert converted(report) == {"last"}


@pytest.mark.parametrize("in_dense", [True, False])
def test_a_choice_by_a_function_given_to_a_layer_of_keras_counts(in_dense):
    chooses = DECIDES["argmax"]
    gate = layers.Dense(
        EXPERTS, activation=chooses if in_dense else None, name="gate"
    )
    behind = [] if in_dense else [layers.Activation(chooses)]
    last = layers.Dense(2, name="last")
    inputs = keras.Input((STEPS, WIDTH))
    model = keras.Sequential([inputs, gate, *behind, last], name="model")
    assert converted(kpe.convert(model, POLICY)) == {"model/last"}


class Reading(keras.layers.Layer):
    """Its call reads values; what says its outputs takes no `training`."""

    def call(self, x, training=None):
        return x * float(ops.max(x))

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)


def test_a_layer_that_cannot_be_traced_hides_no_other():
    gate, last = layers.Dense(EXPERTS, name="gate"), layers.Dense(2)
    inputs = keras.Input((STEPS, WIDTH))
    chosen = DECIDES["argmax"](gate(Reading()(inputs)))
    report = kpe.convert(keras.Model(inputs, last(chosen)), POLICY)
    assert set(left(report)) == {"gate"}


class Router(keras.layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.gate = layers.Dense(EXPERTS, name="gate")

    def build(self, shape):
        self.gate.build(shape)
        self.built = True

    def call(self, x):
        return ops.sigmoid(self.gate(x))


class Chooser(keras.layers.Layer):
    def call(self, scores):
        return ops.top_k(scores, 2)[1]


class InParts(keras.layers.Layer):
    """The router is a layer with a layer, and another layer chooses."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.router = Router(name="router")
        self.norm = layers.LayerNormalization(name="norm")
        self.chooser = Chooser(name="chooser")
        self.mix = layers.Dense(WIDTH, name="mix")

    def build(self, shape):
        self.router.build(shape)
        self.norm.build((*shape[:-1], EXPERTS))
        self.mix.build((*shape[:-1], EXPERTS))
        self.built = True

    def call(self, x):
        chosen = self.chooser(self.norm(self.router(x)))
        return self.mix(ops.sum(ops.one_hot(chosen, EXPERTS), axis=-2))


def test_a_choice_is_followed_through_layers():
    report = kpe.convert(model_of(InParts(name="a")), POLICY)
    reasons = left(report)
    assert reasons.pop("a/norm") == (
        "it has no kernel of its own to multiply with"
    )
    assert set(reasons) == {"a/router/gate"}


def test_a_choice_in_the_graph_of_a_model_counts():
    inputs = keras.Input((WIDTH,))
    gate = layers.Dense(EXPERTS, name="gate")
    scores = keras.Sequential(
        [keras.Input((WIDTH,)), gate, layers.Softmax()], name="scores"
    )(inputs)
    hot = ops.one_hot(ops.argmax(scores, axis=-1), EXPERTS)
    up = layers.Dense(EXPERTS, name="up")(inputs)
    model = keras.Model(inputs, layers.Dense(2, name="last")(hot * up))
    report = kpe.convert(model, POLICY)
    assert set(left(report)) == {gate.path}


def test_what_is_chosen_outside_of_the_call_does_not_count():
    model = model_of()
    model.compile(loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    x = np.ones((2, STEPS, WIDTH), "float32")
    model.fit(x, np.zeros((2, STEPS)), verbose=0)
    np.argmax(model.predict(x, verbose=0), axis=-1)
    assert not kpe.convert(model, POLICY).skipped


class Attention(keras.layers.Layer):
    """Attends to the two keys of the highest scores."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        names = ("query", "key", "value")
        self.parts = [layers.Dense(WIDTH, name=name) for name in names]

    def build(self, shape):
        for part in self.parts:
            part.build(shape)
        self.built = True

    def call(self, x):
        query, key, value = (part(x) for part in self.parts)
        scores = ops.matmul(query, ops.transpose(key, (0, 2, 1)))
        return ops.matmul(above_the_second(scores), value)


def test_the_projections_of_an_attention_that_chooses_keys_compute():
    """Its scores decide: a product of its own, behind the projections."""
    report = kpe.convert(model_of(Attention(name="a")), POLICY)
    assert not left(report)


class Codebook(keras.layers.Layer):
    """The nearest vector."""

    def build(self, shape):
        self.codes = self.add_weight(shape=(6, WIDTH), name="codes")

    def call(self, x):
        distances = (
            ops.sum(x**2, axis=-1, keepdims=True)
            - 2 * ops.matmul(x, ops.transpose(self.codes))
            + ops.sum(self.codes**2, axis=-1)
        )
        return ops.take(self.codes, ops.argmin(distances, axis=-1), axis=0)


class Residual(keras.layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(WIDTH, name="dense")

    def build(self, shape):
        self.dense.build(shape)
        self.built = True

    def call(self, x):
        return x + self.dense(x)


def test_the_projection_to_a_codebook_decides():
    report = kpe.convert(model_of(Codebook(name="codes")), POLICY)
    assert "first" in left(report)


def test_a_sum_of_many_layers_is_what_a_model_computes():
    blocks = [Residual(name=f"block_{n}") for n in range(6)]
    report = kpe.convert(model_of(*blocks, Codebook(name="codes")), POLICY)
    assert len(report.converted) == 8
    assert left(report)["codes"].startswith("it decides")


def test_all_converts_routers_too():
    model = mixture()
    report = kpe.convert(model, POLICY, filter="all")
    assert not report.skipped
    assert len(report.converted) == 6
    assert isinstance(model.get_layer("a").one, kpe.layers.Dense)


def test_a_function_says_alone_what_is_converted():
    report = kpe.convert(mixture(), POLICY, filter=lambda x: x.name != "up")
    assert converted(report) == {"first", "a/one", "b/one", "last"}


@pytest.mark.filterwarnings("ignore:None of the multiplications")
def test_a_pattern_includes_routers_with_all_alone():
    model = mixture()
    report = kpe.convert(model, POLICY, include="one")
    assert not report.converted
    assert left(report)["a/one"].startswith("it decides")
    assert left(report)["a/up"] == "`include` does not match its path"
    report = kpe.convert(model, POLICY, include="one", filter="all")
    assert converted(report) == {"a/one", "b/one"}


def test_a_router_in_float8_stays_so():
    model = mixture()
    kpe.convert(model, POLICY, filter="all")
    report = kpe.convert(model, "float8/rowwise_from_float32")
    assert len(report.converted) == 4
    kept = {entry.path: entry.policy for entry in report.skipped}
    assert kept == {"a/one": POLICY, "b/one": POLICY}


def test_a_file_keeps_what_is_in_float8(tmp_path):
    model = mixture()
    kpe.convert(model, POLICY, filter="all")
    model.save(tmp_path / "model.keras")
    loaded = kpe.load_model(tmp_path / "model.keras")
    assert loaded.get_layer("a").one.float8_policy.full_name == POLICY


@pytest.mark.extension("count")
def test_counts_from_before_are_those_from_after():
    model = mixture()
    report = kpe.convert(model, POLICY)
    works = work_of(model)
    paths = {layer.path: layer for layer in model._flatten_layers()}
    for entry in (*report.converted, *report.skipped):
        counted = works.of(paths[entry.path])
        assert entry.multiplications == counted.multiplications
        assert entry.plain_multiplications == counted.plain_multiplications


class Doubled(keras.layers.Dense):
    float8_calls_super = True

    def call(self, inputs):
        return super().call(2 * inputs)


@pytest.mark.parametrize(
    "layer", [Doubled(8), layers.SeparableConv1D(8, 2)], ids=["own", "stock"]
)
@pytest.mark.extension("count")
def test_a_layer_whose_form_multiplies_otherwise_is_counted_anew(layer):
    model = model_of(layer)
    report = kpe.convert(model, POLICY)
    works = work_of(model)
    (entry,) = (e for e in report.converted if e.path == layer.path)
    assert entry.multiplications == works.of(layer).multiplications
    plain = works.of(layer).plain_multiplications
    assert entry.plain_multiplications == plain
    assert (plain == 0) == isinstance(layer, Doubled)


def test_safe_leaves_out_the_ends_and_odd_sizes_too():
    odd = layers.Dense(24, name="odd")
    even = layers.Dense(WIDTH, name="even")
    report = kpe.convert(
        model_of(Experts(ROUTED, name="a"), odd, even),
        POLICY,
        filter="safe",
    )
    assert converted(report) == {"a/up"}
    reasons = left(report)
    assert reasons["first"] == "it is the first layer"
    assert reasons["last"].startswith("it is a head: its outputs are")
    assert reasons["a/one"].startswith("it decides")
    assert "yields 24, not both multiples of 16" in reasons["odd"]
    assert "sums over 24 and" in reasons["even"]


def test_safe_leaves_out_every_head_and_a_tied_one():
    inputs = keras.Input((STEPS,), dtype="int32")
    table = layers.ReversibleEmbedding(32, WIDTH, name="table")
    x = table(inputs)
    for name in ("one", "two", "three"):
        x = layers.Dense(WIDTH, name=name, activation="relu")(x)
    value = layers.Activation("tanh")(layers.Dense(16, name="value")(x))
    model = keras.Model(inputs, [table(x, reverse=True), value])
    report = kpe.convert(model, POLICY, filter="safe")
    assert converted(report) == {"two", "three"}
    reasons = left(report)
    assert "shares its table" in reasons["table"]
    assert reasons["value"].startswith("it is a head")
    assert reasons["one"] == "it is the first layer"


@pytest.mark.parametrize("wrong", ["saef", "everything"])
def test_an_unknown_name_of_a_filter_is_refused(wrong):
    with pytest.raises(ValueError, match="name of a filter") as error:
        kpe.convert(mixture(), POLICY, filter=wrong)
    assert "'all', 'auto', 'safe'" in str(error.value)
    assert ("Did you mean 'safe'?" in str(error.value)) == (wrong == "saef")
