"""Products with weights of another layer, recognised by operation."""

import gc
import pickle
import weakref

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from keras_policy_ext.conversion import in_place
from steps import numpy, relative_rms, weights_of

WIDTH, TOKENS, LENGTH = 16, 32, 4
SOURCE = "float8/current_from_float32"


def projection(width, name):
    return keras.layers.EinsumDense("btd,df->btf", (None, width), name=name)


@keras.saving.register_keras_serializable("weights_of_others")
class Block(keras.layers.Layer):
    """Multiplies with the kernels of its layers, which it never calls."""

    def __init__(self, calls=False, **kwargs):
        super().__init__(**kwargs)
        self.calls = calls
        self.up = projection(32, "up")
        self.gate = projection(32, "gate")
        self.down = projection(WIDTH, "down")

    def build(self, shape):
        self.up.build(shape)
        self.gate.build(shape)
        self.down.build((*shape[:-1], 32))

    def call(self, x):
        up = ops.matmul(x, self.up.kernel)
        if self.calls:
            up = up + self.up(x)
        up = up * ops.matmul(x, self.gate.kernel)
        return x + ops.matmul(up, self.down.kernel)

    def get_config(self):
        return {**super().get_config(), "calls": self.calls}


@keras.saving.register_keras_serializable("weights_of_others")
class TiedHead(keras.layers.Layer):
    """As in ZeroModels: Keras does not track the embedding."""

    def __init__(self, embedding, **kwargs):
        super().__init__(**kwargs)
        object.__setattr__(self, "embedding", embedding)

    def call(self, x):
        table = ops.cast(self.embedding.embeddings, x.dtype)
        return ops.matmul(x, ops.transpose(table))

    def compute_output_spec(self, x):
        return keras.KerasTensor((*x.shape[:-1], TOKENS), dtype=x.dtype)


@keras.saving.register_keras_serializable("weights_of_others")
class Decoder(keras.Model):
    """Tied, with two blocks that are alike."""

    def __init__(self, calls=False, **kwargs):
        ids = keras.Input((LENGTH,), dtype="int32")
        embedding = keras.layers.Embedding(TOKENS, WIDTH, name="embedding")
        x = embedding(ids)
        x = Block(calls, name="first")(x)
        x = Block(calls, name="second")(x)
        head = TiedHead(embedding, name="head")
        super().__init__(ids, head(x), **kwargs)
        self.calls = calls

    def get_config(self):
        return {"calls": self.calls, "name": self.name}


IDS = np.random.default_rng(0).integers(0, TOKENS, (6, LENGTH))


def decoder(**kwargs):
    keras.utils.set_random_seed(0)
    model = Decoder(**kwargs)
    model.get_layer("embedding").embeddings.assign(
        np.random.default_rng(1).normal(size=(TOKENS, WIDTH))
    )
    return model


def in_float8(report):
    return sorted(entry.path for entry in report.converted)


def reason(report, path):
    (found,) = (x.reason for x in report.skipped if x.path == path)
    return found


def states(model):
    """The arrays of all float8 states, by path."""
    found = (v for v in model.variables if "float8_state" in v.path)
    return {v.path: numpy(v) for v in found}


def train(model, steps=3):
    model.compile("sgd", "mse")
    targets = np.ones((len(IDS), LENGTH, TOKENS))
    return [model.train_on_batch(IDS, targets) for _ in range(steps)]


@pytest.mark.extension("count")
def test_kernels_of_layers_that_are_never_called_are_in_float8():
    model = decoder()
    expected = numpy(model(IDS))
    report = kpe.convert(model, SOURCE)
    assert in_float8(report) == ["first", "second"]
    for entry in report.converted:
        assert entry.multiplications and not entry.plain_multiplications
    assert "'first' multiplies with its kernel" in reason(report, "first/up")
    assert 1e-3 < relative_rms(numpy(model(IDS)), expected) < 0.1
    block = model.get_layer("second")
    paths = {kernel.path for kernel in block.float8_contracted}
    assert paths == {f"second/{x}/kernel" for x in ("up", "gate", "down")}


def test_it_computes_what_the_called_layers_compute():
    """The numbers are those of layers in float8."""

    class Calling(Block):
        def call(self, x):
            return x + self.down(self.up(x) * self.gate(x))

    keras.utils.set_random_seed(0)
    ids = keras.Input((LENGTH,), dtype="int32")
    embedding = keras.layers.Embedding(TOKENS, WIDTH)
    mine, theirs = Block(), Calling()
    model = keras.Model(ids, mine(embedding(ids)))
    other = keras.Model(ids, theirs(embedding(ids)))
    theirs.set_weights(mine.get_weights())
    kpe.convert(model, SOURCE)
    kpe.convert(other, SOURCE)
    np.testing.assert_array_equal(numpy(model(IDS)), numpy(other(IDS)))


def test_a_tied_head_is_in_float8_where_asked():
    model = decoder()
    expected = numpy(model(IDS))
    report = kpe.convert(model, SOURCE)
    assert "`include` that matches" in reason(report, "head")
    report = kpe.convert(model, SOURCE, include="head")
    assert in_float8(report) == ["head"]
    found = numpy(model(IDS))
    assert 1e-3 < relative_rms(found, expected) < 0.1
    head = model.get_layer("head")
    (kernel,) = head.float8_contracted
    assert kernel is model.get_layer("embedding").embeddings
    # It follows another policy then without being asked again.
    assert "head" in in_float8(kpe.convert(model, "delayed"))
    kpe.revert(model)
    assert type(head) is TiedHead
    np.testing.assert_array_equal(numpy(model(IDS)), expected)


@pytest.mark.parametrize("include", [None, "head|first|second"])
def test_it_trains_observes_and_comes_back(include, tmp_path):
    model = decoder()
    before = [numpy(v) for v in model.weights]
    kpe.convert(model, "delayed", include=include)
    losses = train(model)
    assert losses[-1] < losses[0]
    found = states(model)
    assert len(found) == (6 if include is None else 7)
    for state in found.values():
        assert np.all(state.max(axis=1) > 0)

    model.save(tmp_path / "model.keras")
    loaded = kpe.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(numpy(loaded(IDS)), numpy(model(IDS)))
    for one, other in zip(loaded.variables, model.variables, strict=True):
        assert one.path == other.path
        np.testing.assert_array_equal(numpy(one), numpy(other))
    targets = np.ones((len(IDS), LENGTH, TOKENS))
    for each in (loaded, model):
        each.train_on_batch(IDS, targets)
    for one, other in zip(loaded.variables, model.variables, strict=True):
        np.testing.assert_array_equal(numpy(one), numpy(other))

    kept = [numpy(v) for v in weights_of(model)]
    kpe.revert(model)
    assert type(model.get_layer("first")) is Block
    assert not states(model) and len(model.weights) == len(before)
    for one, other in zip(model.weights, kept, strict=True):
        np.testing.assert_array_equal(numpy(one), other)


@pytest.mark.parametrize("policy", ["delayed", "current"])
def test_a_copy_in_memory_is_in_float8(policy):
    model = decoder()
    kpe.convert(model, policy, include="head|first|second")
    copied = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(numpy(copied(IDS)), numpy(model(IDS)))


def test_states_go_with_their_kernels_where_the_policy_changes():
    model = decoder()
    kpe.convert(model, "delayed", include="first")
    train(model)

    def scales():
        matrices = model.get_layer("first").float8_state.matrices
        return {v.path: float(v.rows()["outputs_grad"][0]) for v in matrices}

    before = scales()
    assert len(set(before.values())) == 3
    shorter = kpe.recipes.DelayedScaling(amax_history_length=8)
    kpe.convert(model, shorter, include="first")
    assert scales() == before


def test_weights_of_a_plain_model_load(tmp_path):
    plain, model = decoder(), decoder()
    kpe.convert(model, "delayed", include="head|first|second")
    train(plain, steps=1)
    plain.save_weights(tmp_path / "plain.weights.h5")
    model.load_weights(tmp_path / "plain.weights.h5")
    for one, other in zip(weights_of(model), plain.weights, strict=True):
        np.testing.assert_array_equal(numpy(one), numpy(other))


def test_freezing_stores_the_kernels_where_they_are(tmp_path):
    model = decoder()
    expected = numpy(model(IDS))
    plain = kpe.freeze(decoder())
    kpe.convert(model, "delayed", include="head|first|second")
    train(model, steps=1)
    kernel = weakref.ref(model.get_layer("first").up.kernel)
    report = kpe.freeze(model)
    assert in_float8(report) == in_float8(plain)
    assert "first/up" in in_float8(report)
    assert type(model.get_layer("first")) is Block
    gc.collect()
    assert kernel() is None
    found = numpy(model(IDS))
    assert found.shape == expected.shape
    model.save(tmp_path / "model.keras")
    loaded = kpe.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(numpy(loaded(IDS)), found)
    kpe.thaw(model)
    assert type(model.get_layer("first").up) is keras.layers.EinsumDense
    np.testing.assert_allclose(numpy(model(IDS)), found, rtol=1e-5, atol=1e-5)
    assert "first" in in_float8(kpe.convert(model, SOURCE))


def test_a_kernel_whose_layer_is_called_too_stays_its_own():
    model = decoder(calls=True)
    report = kpe.convert(model, SOURCE)
    assert "first/up" in in_float8(report)
    assert "first" in in_float8(report)
    block = model.get_layer("first")
    kernels = [id(v) for v in block.float8_contracted]
    assert id(block.up.kernel) not in kernels
    assert id(block.down.kernel) in kernels


def test_the_head_of_a_table_that_computes_logits_too_is_refused():
    ids = keras.Input((LENGTH,), dtype="int32")
    embedding = keras.layers.ReversibleEmbedding(TOKENS, WIDTH, name="table")
    x = embedding(ids)
    outputs = [TiedHead(embedding, name="head")(x), embedding(x, reverse=True)]
    model = keras.Model(ids, outputs)
    report = kpe.convert(model, SOURCE)
    assert in_float8(report) == ["table"]
    assert "kernel of layer 'table'" in reason(report, "head")


def test_of_two_heads_of_a_table_one_is_in_float8():
    ids = keras.Input((LENGTH,), dtype="int32")
    embedding = keras.layers.Embedding(TOKENS, WIDTH)
    x = embedding(ids)
    heads = [TiedHead(embedding, name=f"head{i}")(x) for i in range(2)]
    model = keras.Model(ids, heads)
    report = kpe.convert(model, "delayed", include="head")
    assert in_float8(report) == ["head0"]
    assert "'head0' multiplies with its kernel" in reason(report, "head1")
    assert not kpe.convert(model, "delayed", include="head1").converted


def test_heads_that_are_alike_have_their_own_tables():
    ids = keras.Input((LENGTH,), dtype="int32")
    tables = [keras.layers.Embedding(TOKENS, WIDTH) for _ in range(2)]
    heads = [
        TiedHead(table, name=f"head{i}")(table(ids))
        for i, table in enumerate(tables)
    ]
    model = keras.Model(ids, heads)
    assert len(kpe.convert(model, "delayed", include="head").converted) == 2
    for i, table in enumerate(tables):
        (kernel,) = model.get_layer(f"head{i}").float8_contracted
        assert kernel is table.embeddings


def test_a_block_of_conversion_changes_nothing():
    model = decoder()
    expected = numpy(model(IDS))
    with in_place.converted(model, SOURCE, include="head|first"):
        assert not np.array_equal(numpy(model(IDS)), expected)
    assert type(model.get_layer("head")) is TiedHead
    np.testing.assert_array_equal(numpy(model(IDS)), expected)
    assert not states(model)


@pytest.mark.skipif(
    keras.backend.backend() != "jax", reason="of the stateless API of JAX"
)
def test_a_stateless_call_reads_the_weights_that_it_is_given():
    import jax

    model = decoder()
    kpe.convert(model, "delayed", include="head|first|second")
    expected = numpy(model(IDS))
    weights = [v.value for v in model.trainable_variables]
    fixed = [v.value for v in model.non_trainable_variables]
    call = jax.jit(lambda *args: model.stateless_call(*args, IDS)[0])
    np.testing.assert_allclose(call(weights, fixed), expected, rtol=1e-5)
    zeros = [ops.zeros_like(v) for v in weights]
    assert not np.any(call(zeros, fixed))


@pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="of torch.compile"
)
def test_torch_compile_takes_the_whole_call():
    import torch

    model = decoder()
    kpe.convert(model, "delayed", include="head|first|second")
    ids = torch.tensor(IDS)
    with torch.no_grad():
        expected = model(ids)
        compiled = torch.compile(model, backend="eager")
        np.testing.assert_array_equal(numpy(compiled(ids)), numpy(expected))


@pytest.mark.extension("inspect")
def test_inspect_tells_kernels_of_one_name_apart():
    model = decoder()
    kpe.convert(model, "delayed", include="first")
    table = str(kpe.inspect(model).table(full=True))
    assert "up/kernel: inputs" in table and "down/kernel: inputs" in table


class TiedModel(keras.Model):
    """Multiplies with the table of its embedding in its own `call`."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.embedding = keras.layers.Embedding(TOKENS, WIDTH)
        self.dense = keras.layers.Dense(WIDTH, name="dense")

    def call(self, ids):
        x = self.dense(self.embedding(ids))
        return ops.matmul(x, ops.transpose(self.embedding.embeddings))


@pytest.mark.extension("count")
@pytest.mark.parametrize(
    ("options", "warns"),
    [
        ({"include": "tied"}, True),
        ({"include": "dense"}, False),
        ({"filter": "all"}, False),
    ],
    ids=["include", "another include", "all"],
)
def test_a_model_that_multiplies_itself_is_told_to_use_a_layer(
    options, warns, recwarn
):
    model = TiedModel(name="tied")
    model(np.zeros((2, LENGTH), "int32"))
    report = kpe.convert(model, "delayed", **options)
    assert [each.path for each in report.converted] == ["tied/dense"]
    [reason] = [each.reason for each in report.skipped if each.path == "tied"]
    assert reason.startswith("it is a model")
    assert "move the product into a `keras.layers.Layer`" in reason
    told = [str(each.message) for each in recwarn]
    assert (
        any(each.startswith("'tied' stays in floats") for each in told) == warns
    )
