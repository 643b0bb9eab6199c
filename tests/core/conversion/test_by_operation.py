"""Layers without a float8 form whose products are recognised by operation."""

import gc
import weakref

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from steps import (
    gradients,
    mean_square,
    normal,
    numpy,
    relative_rms,
    weights_of,
)

WIDTH = 16
SOURCE = "float8/current_from_float32"

PRODUCTS = {
    "matmul": ((WIDTH, 8), lambda x, w: ops.matmul(x, w)),
    "kernel first": ((8, WIDTH), lambda x, w: ops.einsum("ok,bk->bo", w, x)),
    "dot": ((WIDTH, 8), lambda x, w: ops.dot(x, w)),
    "tensordot": ((WIDTH, 8), lambda x, w: ops.tensordot(x, w, 1)),
    "axes": ((8, WIDTH), lambda x, w: ops.tensordot(x, w, [[1], [1]])),
    "named": ((WIDTH, 8), lambda x, w: ops.matmul(x1=x, x2=w)),
    "transposed": (
        (8, WIDTH),
        lambda x, w: ops.matmul(x, ops.transpose(w)),
    ),
    "cast": (
        (WIDTH, 8),
        lambda x, w: ops.matmul(x, ops.cast(w, x.dtype)),
    ),
    "reshaped": (
        (2, 8, 8),
        lambda x, w: ops.matmul(x, ops.reshape(w, (WIDTH, 8))),
    ),
    "some experts": (
        (4, WIDTH, 8),
        lambda x, w: ops.einsum(
            "bi,eio->beo", x, ops.take(w, np.array([2, 0]), axis=0)
        ),
    ),
    "bank": ((3, WIDTH, 8), lambda x, w: ops.einsum("bi,eio->beo", x, w)),
    "broadcast": (
        (3, WIDTH, 8),
        lambda x, w: ops.matmul(x[:, None, None], w)[:, :, 0],
    ),
    "outputs first": (
        (3, 8, WIDTH),
        lambda x, w: ops.einsum("bi,eoi->beo", x, w),
    ),
}

PRODUCTS["convolution"] = (
    (3, WIDTH, 8),
    lambda x, w: ops.conv(
        ops.expand_dims(x, 1), w, padding="same", data_format="channels_last"
    )[:, 0],
)

NOT_RECOGNISED = {
    "computed": ((WIDTH, 8), lambda x, w: ops.matmul(x, ops.tanh(w))),
    "added": ((1, WIDTH), lambda x, w: x + w),
    "squared": ((8, 8), lambda x, w: ops.matmul(w, w) + ops.sum(x)),
    "branch": (
        (WIDTH, 8),
        lambda x, w: ops.cond(
            ops.max(x) > 0, lambda: ops.matmul(x, w), lambda: 0 * x[:, :8]
        ),
    ),
}


@keras.saving.register_keras_serializable("by_operation")
class Own(keras.layers.Layer):
    """One product with a weight."""

    def __init__(self, name_of_product, **kwargs):
        super().__init__(**kwargs)
        self.name_of_product = name_of_product

    def build(self, shape):
        size, _ = {**PRODUCTS, **NOT_RECOGNISED}[self.name_of_product]
        self.weight = self.add_weight(shape=size, name="weight")
        self.scales = self.add_weight(shape=(1, 2), name="scales")

    def call(self, x):
        _, multiply = {**PRODUCTS, **NOT_RECOGNISED}[self.name_of_product]
        return multiply(x, self.weight) * ops.sum(self.scales * 0 + 0.25)

    def get_config(self):
        config = super().get_config()
        return {**config, "name_of_product": self.name_of_product}


class WithMixin(kpe.layers.Float8Mixin, keras.layers.Layer):
    """The same product as `Own`, by the mixin."""

    float8_kernels = ("weight",)

    def build(self, shape):
        self.weight = self.add_weight(shape=(WIDTH, 8), name="weight")

    def call(self, x, training=None):
        return self.float8_matmul(x, self.weight) * 0.5


def model_of(name, **kwargs):
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((WIDTH,)), Own(name, **kwargs)])


X = normal(6, WIDTH)


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_with_a_weight_is_in_float8(name):
    model = model_of(name)
    expected = numpy(model(X))
    report = kpe.convert(model, SOURCE)
    assert [e.class_name for e in report.converted] == ["Own"]
    assert report.converted[0].multiplications != 0
    found = numpy(model(X))
    assert found.shape == expected.shape
    assert 1e-4 < relative_rms(found, expected) < 0.08
    layer = model.layers[0]
    assert [v.name for v in layer.float8_contracted] == ["weight"]


def test_it_is_the_product_of_the_mixin():
    model = model_of("matmul")
    other = WithMixin(dtype=SOURCE)
    other.build((None, WIDTH))
    other.weight.assign(model.layers[0].weight)
    kpe.convert(model, SOURCE)
    for mine, theirs in zip(
        gradients(model, X, mean_square)[:2],
        gradients(other, X, mean_square)[:2],
        strict=True,
    ):
        np.testing.assert_array_equal(numpy(mine), numpy(theirs))


@keras.saving.register_keras_serializable("by_operation")
class Convolves(keras.layers.Layer):
    """A convolution in its call."""

    def __init__(self, how, **kwargs):
        super().__init__(**kwargs)
        self.how = how

    def build(self, shape):
        window = (3,) * (len(shape) - 2)
        shape = (*window, shape[-1] // self.how.get("groups", 1), 4)
        self.weight = self.add_weight(shape=shape, name="weight")

    def call(self, x):
        options = {k: v for k, v in self.how.items() if k != "groups"}
        return ops.conv(x, self.weight, **options)

    def get_config(self):
        return {**super().get_config(), "how": self.how}


CONVOLUTIONS = {
    "one axis": ((7, 8), {"strides": 2}),
    "two axes": ((6, 5, 8), {"padding": "same", "strides": [2, 1]}),
    "dilated": ((9, 8), {"dilation_rate": 2}),
    "groups": ((7, 8), {"groups": 2, "padding": "same"}),
}


@pytest.mark.full_except("two axes-delayed")
@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_is_that_of_a_layer_of_keras(tmp_path, name, recipe):
    shape, how = CONVOLUTIONS[name]
    how = {**how, "data_format": "channels_last"}
    model = keras.Sequential([keras.Input(shape), Convolves(how)])
    conv = {2: keras.layers.Conv1D, 3: keras.layers.Conv2D}[len(shape)]
    stock = conv(4, 3, use_bias=False, **how)
    stock = keras.Sequential([keras.Input(shape), stock])
    stock.layers[0].kernel.assign(model.layers[0].weight)
    x = normal(5, *shape)
    for each in (model, stock):
        kpe.convert(each, f"float8/{recipe}_from_float32")
    for _ in range(2):
        for mine, theirs in zip(
            gradients(model, x, mean_square)[:2],
            gradients(stock, x, mean_square)[:2],
            strict=True,
        ):
            np.testing.assert_array_equal(numpy(mine), numpy(theirs))
    model.save(tmp_path / "model.keras")
    loaded = kpe.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(numpy(loaded(x)), numpy(model(x)))
    kpe.freeze(model)
    kpe.freeze(stock)
    np.testing.assert_array_equal(numpy(model(x)), numpy(stock(x)))
    kpe.revert(loaded)
    assert type(loaded.layers[0]) is Convolves


@pytest.mark.parametrize(
    "name", ["transposed", "some experts", "cast", "broadcast"]
)
def test_gradients_reach_a_weight_through_what_moved_it(name):
    model = model_of(name)
    *_, expected = gradients(model, X, mean_square)
    kpe.convert(model, SOURCE)
    *_, found = gradients(model, X, mean_square)
    assert 1e-4 < relative_rms(numpy(found[0]), numpy(expected[0])) < 0.1


@pytest.mark.parametrize("name", NOT_RECOGNISED)
def test_what_is_not_such_a_product_stays_and_is_reported(name):
    model = model_of(name)
    expected = numpy(model(X))
    report = kpe.convert(model, SOURCE)
    assert not report.converted
    (left,) = report.skipped
    words = "keras.ops.cond" if name == "branch" else "was recognised"
    assert words in left.reason
    np.testing.assert_array_equal(numpy(model(X)), expected)


@pytest.mark.parametrize("name", ["matmul", "transposed", "bank"])
def test_it_trains_observes_and_comes_back(name, tmp_path):
    model = model_of(name)
    kpe.convert(model, "delayed")
    model.compile("sgd", "mse")
    shape = model.compute_output_shape((6, WIDTH))
    losses = [model.train_on_batch(X, np.ones(shape)) for _ in range(3)]
    assert losses[-1] < losses[0]
    state = numpy(model.layers[0].float8_state.matrices[0])
    assert np.all(state[:, -1] > 0) or np.all(state.max(axis=1) > 0)

    model.save(tmp_path / "model.keras")
    loaded = kpe.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(numpy(loaded(X)), numpy(model(X)))
    for one, other in zip(loaded.variables, model.variables, strict=True):
        np.testing.assert_array_equal(numpy(one), numpy(other))
    kept = [numpy(v) for v in weights_of(model)]
    kpe.revert(model)
    assert type(model.layers[0]) is Own
    for one, other in zip(model.weights, kept, strict=True):
        np.testing.assert_array_equal(numpy(one), other)


@pytest.mark.parametrize("name", ["matmul", "outputs first", "transposed"])
def test_it_is_frozen_saved_and_thawed(name, tmp_path):
    model = model_of(name)
    expected = numpy(model(X))
    report = kpe.freeze(model)
    if name == "transposed":
        assert "moves its kernel" in report.skipped[0].reason
        return
    found = numpy(model(X))
    assert 1e-4 < relative_rms(found, expected) < 0.05
    model.save(tmp_path / "model.keras")
    loaded = kpe.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(numpy(loaded(X)), found)
    kpe.thaw(model)
    assert type(model.layers[0]) is Own
    np.testing.assert_allclose(numpy(model(X)), found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["matmul", "cast", "transposed"])
def test_it_is_rounded_from_float32_in_mixed_precision(name):
    """Not from the bfloat16 copy that the layer's call sees."""
    model = model_of(name, dtype="mixed_bfloat16")
    layer = model.layers[0]
    kernel = np.full(layer.weight.shape, 1.0, "float32")
    # In float8 1.0625 and below are 1, 1.0626 is 1.125; in bfloat16 it is
    # 1.0625. The amax makes the scale 1.
    kernel[0, 0], kernel[1, 1] = 1.0626, 448.0
    layer.weight.assign(kernel)
    kpe.convert(model, "float8/current_from_mixed_bfloat16")
    ones = np.zeros((1, WIDTH), "float32")
    ones[0, 0] = 448.0
    outputs = numpy(ops.cast(model(ones), "float32"))
    assert outputs[0, 0] == 448.0 * 1.125 * 0.5


@pytest.mark.parametrize("recipe", ["rowwise", "block", "mxfp8"])
def test_no_tile_is_of_two_matrices_of_a_bank(recipe):
    model = model_of("bank")
    kpe.convert(model, recipe)
    before = numpy(model(X))
    weight = model.layers[0].weight
    values = numpy(weight).copy()
    values[1] *= 1000
    weight.assign(values)
    after = numpy(model(X))
    np.testing.assert_array_equal(after[:, [0, 2]], before[:, [0, 2]])
    assert not np.array_equal(after[:, 1], before[:, 1])


@pytest.mark.parametrize("recipe", ["rowwise", "block", "mxfp8"])
def test_part_of_a_bank_is_multiplied_too(recipe):
    model = model_of("some experts")
    expected = numpy(model(X))
    kpe.convert(model, recipe)
    assert 1e-4 < relative_rms(numpy(model(X)), expected) < 0.08


def test_layers_that_are_alike_are_all_converted():
    keras.utils.set_random_seed(0)
    blocks = [Own("matmul"), keras.layers.Dense(WIDTH), Own("matmul")]
    model = keras.Sequential([keras.Input((WIDTH,)), *blocks])
    report = kpe.convert(model, SOURCE)
    assert len(report.converted) == 3
    assert all(layer.float8_contracted for layer in blocks)


@pytest.mark.skipif(
    keras.backend.backend() == "tensorflow",
    reason="Keras on TensorFlow fails in `fit` under a RematScope",
)
def test_a_call_that_is_computed_again_for_gradients_is_in_float8():
    with keras.RematScope("full"):
        inputs = keras.Input((WIDTH,))
        layer = Own("matmul")
        outer = keras.Model(inputs, layer(inputs))
    kpe.convert(outer, "delayed")
    outer.compile("sgd", "mse")
    outer.train_on_batch(X, np.ones((6, 8)))
    state = numpy(layer.float8_state.matrices[0])
    assert np.all(state.max(axis=1) > 0)


def test_another_layer_that_multiplies_the_weight_stays():
    """Only the layer that has the weight is converted."""

    class Tied(keras.layers.Layer):
        def __init__(self, other):
            super().__init__()
            object.__setattr__(self, "other", other)

        def call(self, x):
            return ops.matmul(x, ops.transpose(self.other.weight))

    first = Own("matmul")
    inputs = keras.Input((WIDTH,))
    model = keras.Model(inputs, Tied(first)(first(inputs)))
    report = kpe.convert(model, SOURCE)
    assert [e.class_name for e in report.converted] == ["Own"]


class MixtureOfOwnExperts(keras.layers.Layer):
    """A router that is a layer, a top-k, and experts, in one call."""

    def build(self, shape):
        self.router = keras.layers.Dense(4, name="router")
        self.router.build(shape)
        self.up = self.add_weight(shape=(4, WIDTH, 8), name="up")

    def call(self, x):
        weights, chosen = ops.top_k(ops.softmax(self.router(x)), 2)
        asked = ops.one_hot(chosen, 4) * ops.expand_dims(weights, -1)
        each = ops.einsum("bi,eio->beo", x, self.up)
        return ops.sum(each * ops.expand_dims(ops.sum(asked, 1), -1), axis=1)


def test_experts_beside_a_top_k_are_in_float8_and_their_router_is_not():
    keras.utils.set_random_seed(0)
    layer = MixtureOfOwnExperts()
    model = keras.Sequential([keras.Input((WIDTH,)), layer])
    report = kpe.convert(model, SOURCE)
    assert [e.path for e in report.converted] == [layer.path]
    (router,) = report.skipped
    assert router.reason.startswith("it decides")


def test_a_clone_is_converted_anew():
    model = model_of("matmul")
    kpe.convert(model, SOURCE)
    clone = keras.models.clone_model(model)
    assert type(clone.layers[0]) is Own
    assert [e.class_name for e in kpe.convert(clone, SOURCE).converted] == [
        "Own"
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_dtype_of_the_outputs_is_that_of_the_operands(dtype):
    class Casts(keras.layers.Layer):
        def build(self, shape):
            self.weight = self.add_weight(shape=(WIDTH, 8), name="weight")

        def call(self, x):
            return ops.matmul(ops.cast(x, dtype), ops.cast(self.weight, dtype))

    other = "mixed_bfloat16" if dtype == "float32" else "float32"
    layer = Casts(dtype=other)
    model = keras.Sequential([keras.Input((WIDTH,)), layer])
    expected = numpy(ops.cast(layer(X), "float32"))
    kpe.convert(model, f"float8/current_from_{other}")
    found = layer(X)
    assert keras.backend.standardize_dtype(found.dtype) == dtype
    found = numpy(ops.cast(found, "float32"))
    assert 1e-4 < relative_rms(found, expected) < 0.08


def test_a_model_that_multiplies_its_own_weight_is_loaded(tmp_path):
    @keras.saving.register_keras_serializable("by_operation")
    class Whole(keras.Model):
        def build(self, shape):
            self.weight = self.add_weight(shape=(shape[-1], 8), name="weight")

        def call(self, x):
            return ops.matmul(x, self.weight)

    model = Whole()
    model(X)
    assert kpe.convert(model, SOURCE).converted
    model.save(tmp_path / "model.keras")
    loaded = kpe.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(numpy(loaded(X)), numpy(model(X)))


def test_a_layer_that_was_not_called_is_looked_at_again():
    class Optional(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner, self.calls_it = Own("matmul"), False

        def build(self, shape):
            self.inner.build(shape)

        def call(self, x):
            return self.inner(x) if self.calls_it else x

    layer = Optional()
    model = keras.Sequential([keras.Input((WIDTH,)), layer])
    assert not kpe.convert(model, SOURCE).converted
    layer.calls_it = True
    model = keras.Sequential([keras.Input((WIDTH,)), layer])
    assert [e.class_name for e in kpe.convert(model, SOURCE).converted] == [
        "Own"
    ]


def test_what_is_followed_keeps_no_weight():
    for name in ("cast", "transposed"):
        model = model_of(name)
        kpe.convert(model, SOURCE)
        model(X)
    alive = weakref.ref(model.layers[0].weight)
    del model
    keras.utils.clear_session()
    gc.collect()
    assert alive() is None
