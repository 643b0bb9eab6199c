"""Attention in layers without a float8 class: two activations multiplied."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from keras_policy_ext._keras.products import modules
from keras_policy_ext.layers import attention_products
from keras_policy_ext.layers.by_operation import record_of
from steps import no_grad, normal, numpy, relative_rms
from ways import FASTEST, compiled

STEPS, PAST, HEADS, SIZE = 40, 35, 2, 8
X = normal(2, STEPS, HEADS * SIZE)


def causal():
    allowed = np.tri(STEPS, dtype=bool)
    return ops.convert_to_tensor(np.where(allowed, 0.0, -1e9), "float32")


def einsums(layer, q, k, v):
    scores = ops.einsum("bqhd,bkhd->bhqk", q, k) / SIZE**0.5 + causal()
    weights = ops.cast(ops.softmax(scores), v.dtype)
    return ops.einsum("bhqk,bkhd->bqhd", layer.dropout(weights), v)


def values_first(layer, q, k, v):
    scores = ops.einsum("bqhd,bkhd->bhqk", q, k) * SIZE**-0.5
    weights = layer.softmax(scores, mask=causal() == 0)
    return ops.einsum("bkhd,bhqk->bqhd", v, weights)


def matmuls(layer, q, k, v):
    """Both products have one equation."""
    q, k, v = (ops.transpose(x, (0, 2, 1, 3)) for x in (q, k, v))
    scores = ops.matmul(q, ops.swapaxes(k, 2, 3)) / SIZE**0.5
    weights = layer.softmax(scores + causal())
    y = ops.matmul(layer.dropout(weights), v)
    return ops.transpose(y, (0, 2, 1, 3))


def fused(layer, q, k, v):
    return ops.dot_product_attention(q, k, v, is_causal=True)


def fused_with_mask(layer, q, k, v):
    mask = ops.equal(causal(), 0.0)[None, None]
    return ops.dot_product_attention(q, k, v, mask=mask, scale=0.5)


RECOGNISED = {
    f.__name__: f
    for f in (einsums, values_first, matmuls, fused, fused_with_mask)
}


def linear(layer, q, k, v):
    """No softmax."""
    moments = ops.einsum("bkhd,bkhe->bhde", k, v)
    return ops.einsum("bqhd,bhde->bqhe", q, moments)


def sliced(layer, q, k, v):
    """Indexing the weights is no operation of Keras."""
    scores = ops.einsum("bqhd,bkhd->bhqk", q, k) + causal()
    weights = ops.softmax(scores)[:, :, :, :STEPS] * 1.0
    return ops.einsum("bhqk,bkhd->bqhd", weights, v)


def flash(layer, q, k, v):
    return ops.dot_product_attention(q, k, v, flash_attention=True)


FUNCTIONS = {
    **RECOGNISED,
    **{f.__name__: f for f in (linear, sliced, flash)},
}


@keras.saving.register_keras_serializable("attention_by_operation")
class Attention(keras.layers.Layer):
    """Projections, and attention of its own."""

    def __init__(self, how, **kwargs):
        super().__init__(**kwargs)
        self.how = how
        width = HEADS * SIZE
        self.projections = [keras.layers.Dense(width) for _ in range(4)]
        self.softmax = keras.layers.Softmax(dtype="float32")
        self.dropout = keras.layers.Dropout(0.5)

    def build(self, shape):
        for each in self.projections:
            each.build(shape)

    def call(self, x):
        shape = (-1, STEPS, HEADS, SIZE)
        q, k, v = (ops.reshape(p(x), shape) for p in self.projections[:3])
        y = FUNCTIONS[self.how](self, q, k, v)
        return self.projections[3](ops.reshape(y, (-1, STEPS, HEADS * SIZE)))

    def compute_output_shape(self, shape):
        return shape

    def get_config(self):
        return {**super().get_config(), "how": self.how}


def model_of(how, **kwargs):
    keras.utils.set_random_seed(1)
    layer = Attention(how, **kwargs)
    return keras.Sequential([keras.Input((STEPS, HEADS * SIZE)), layer])


def outputs_of(model, x):
    with no_grad():
        return numpy(model(ops.convert_to_tensor(x), training=False))


@pytest.fixture
def products():
    """The equations of two activations that are multiplied in float8."""
    found = []

    def note(call):
        if call.weight is None:
            found.append(call.contraction.equation)
        return call.run()

    with kpe.seams.on_contraction(note):
        yield found


@pytest.mark.slow_except("mxfp8-matmuls")
@pytest.mark.full_except("rowwise-einsums")
@pytest.mark.parametrize("how", RECOGNISED)
@pytest.mark.parametrize("recipe", ["rowwise", "block", "mxfp8"])
def test_both_products_see_no_later_token_and_no_other_example(
    recipe, how, products
):
    model = model_of(how)
    stock = outputs_of(model, X)
    report = kpe.convert(model, recipe, attention="float8")
    assert [x.class_name for x in report.converted][-1] == "Attention"
    assert not report.without_effect
    y = outputs_of(model, X)
    assert len(products) == 2
    assert 1e-3 < relative_rms(y, stock) < 6 * 2.0**-4
    future, mates = X.copy(), X.copy()
    future[:, PAST:] *= 50.0
    mates[1] *= 50.0
    moved = outputs_of(model, future) - y
    assert np.abs(moved[:, :PAST]).max() == 0.0
    assert np.abs(moved[:, PAST:]).max() > 0.0
    assert np.abs(outputs_of(model, mates)[0] - y[0]).max() == 0.0


@pytest.mark.full_except("linear-0")
@pytest.mark.parametrize(("how", "known"), [("linear", 0), ("sliced", 1)])
def test_what_is_not_recognised_stays_and_is_reported(how, known, products):
    model = model_of(how)
    stock = outputs_of(model, X)
    with pytest.warns(UserWarning, match="had no effect on"):
        report = kpe.convert(model, "rowwise", attention="float8")
    reasons = [x.reason for x in report.skipped if x.class_name == "Attention"]
    said = [*reasons, *report.without_effect]
    assert any("neither recognised as scores" in each for each in said)
    y = outputs_of(model, X)
    assert len(products) == known
    assert relative_rms(y, stock) < 6 * 2.0**-4


@pytest.mark.full
def test_flash_attention_stays_and_is_reported(monkeypatch, products):
    """Without a device that has it."""
    (home,) = [x for x in modules() if hasattr(x, "dot_product_attention")][-1:]
    stock = home.dot_product_attention

    def attend(*args, flash_attention=None, **kwargs):
        return stock(*args, **kwargs)

    monkeypatch.setattr(home, "dot_product_attention", attend)
    model = model_of("flash")
    with pytest.warns(UserWarning, match="had no effect on"):
        report = kpe.convert(model, "rowwise", attention="float8")
    (left,) = [x for x in report.skipped if x.class_name == "Attention"]
    assert "flash_attention=True" in left.reason
    outputs_of(model, X)
    assert not products


@pytest.mark.full
@pytest.mark.parametrize("how", ["einsums", "matmuls"])
def test_dropout_of_weights_is_followed_in_training(how, products):
    model = model_of(how)
    kpe.convert(model, "rowwise", attention="float8")
    model.compile("sgd", "mse", run_eagerly=True)
    products.clear()
    model(X, training=True)
    assert len(products) == 2


@pytest.mark.full
@pytest.mark.parametrize("how", ["matmuls", "fused"])
@pytest.mark.slow_except("fused")
def test_it_is_saved_trained_on_and_reverted(how, tmp_path, products):
    model = model_of(how)
    kpe.convert(model, attention="float8")
    model.compile("sgd", "mse")
    for _ in range(3):
        model.train_on_batch(X, 0 * X)
    model.save(tmp_path / "model.keras")
    loaded = kpe.load_model(tmp_path / "model.keras")
    y = outputs_of(model, X)
    products.clear()
    np.testing.assert_array_equal(outputs_of(loaded, X), y)
    assert len(products) == 2
    again = kpe.convert(loaded)  # Attention stays as it is.
    assert not again.without_effect
    products.clear()
    outputs_of(loaded, X)
    assert len(products) == 2
    kpe.revert(model)
    assert type(model.layers[0]) is Attention
    products.clear()
    outputs_of(model, X)
    assert not products


@pytest.mark.full
@pytest.mark.parametrize("how", ["einsums", "matmuls", "fused"])
def test_compiled_and_stateless_calls_compute_it(how, products):
    model = model_of(how)
    kpe.convert(model, "rowwise", attention="float8")
    y = outputs_of(model, X)
    call = compiled(lambda x: model(x, training=False), FASTEST)
    products.clear()
    found = numpy(call(ops.convert_to_tensor(X)))
    np.testing.assert_allclose(found, y, atol=1e-5)
    assert len(products) in (0, 2)
    values = model.trainable_variables, model.non_trainable_variables
    found, _ = model.stateless_call(*values, X, training=False)
    np.testing.assert_allclose(numpy(found), y, atol=1e-5)


@pytest.mark.full
def test_without_attention_it_stays_a_stock_layer(products):
    model = model_of("einsums")
    report = kpe.convert(model, "rowwise")
    assert type(model.layers[0]) is Attention
    assert [x.class_name for x in report.converted] == ["Dense"] * 4
    outputs_of(model, X)
    assert not products
    assert record_of(model.layers[0]) is None
    kpe.convert(model, "rowwise", attention="float8")
    outputs_of(model, X)
    assert len(products) == 2


@pytest.mark.full
def test_it_needs_all_its_projections_in_float8():
    model = model_of("einsums")
    with pytest.warns(UserWarning, match="had no effect"):
        report = kpe.convert(
            model,
            "rowwise",
            attention="float8",
            exclude=model.layers[0].projections[0].name + "$",
        )
    (left,) = [x for x in report.skipped if x.class_name == "Attention"]
    assert "all converted, to one policy" in left.reason
    assert type(model.layers[0]) is Attention


@pytest.mark.full_except("bias")
@pytest.mark.parametrize("how", ["bias", "mask", "causal", "groups"])
def test_fused_attention_is_that_of_keras(how):
    q, k, v = (normal(2, 6, 4, 8, seed=n) for n in range(3))
    mask = np.random.default_rng(5).random((2, 1, 6, 6)) < 0.7
    mask[..., 0] = True
    options = {
        "bias": {"bias": normal(2, 4, 6, 6, seed=4), "scale": 0.3},
        "mask": {"mask": mask},
        "causal": {"is_causal": True},
        "groups": {},
    }[how]
    if how == "groups":
        k, v = k[:, :, :2], v[:, :, :2]
    expected = numpy(ops.dot_product_attention(q, k, v, **options))
    layer = kpe.layers.Dense(1, dtype="float32")  # Multiplies as Keras does.
    with no_grad():
        y = numpy(attention_products.dot_product(layer, q, k, v, **options))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


class OwnKernels(keras.layers.Layer):
    """Its projections are its own weights."""

    def build(self, shape):
        size = (3, shape[-1], SIZE)
        self.kernel = self.add_weight(name="kernel", shape=size)

    def call(self, x):
        q, k, v = ops.unstack(ops.einsum("bti,ciu->cbtu", x, self.kernel), 3)
        scores = ops.matmul(q, ops.transpose(k, (0, 2, 1))) + causal()
        return ops.matmul(ops.softmax(scores), v)


@pytest.mark.full
@pytest.mark.parametrize("frozen", [False, True])
def test_a_layer_with_kernels_of_its_own_has_both(frozen, products):
    model = keras.Sequential([keras.Input((STEPS, 8)), OwnKernels()])
    kpe.convert(model, "rowwise", attention="float8")
    if frozen:
        kpe.freeze(model, activations="dynamic")
    x = normal(2, STEPS, 8)
    future = x.copy()
    future[:, PAST:] *= 50.0
    y = outputs_of(model, x)
    assert len(products) == 2
    np.testing.assert_array_equal(
        outputs_of(model, future)[:, :PAST], y[:, :PAST]
    )
