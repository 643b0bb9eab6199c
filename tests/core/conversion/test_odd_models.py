"""Conversion of models that are put together in unusual ways."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from keras_policy_ext._keras.optimizer_variables import known_to_optimizer
from keras_policy_ext._keras.walking import layers_within
from keras_policy_ext.conversion import training
from steps import normal, numpy, observe_inputs, state_of

POLICY = "float8/4_from_float32"
BACKEND = keras.backend.backend()
JIT = BACKEND == "jax"


X, Y = normal(8, 6), normal(8, 6, seed=1)


def stack(*layers):
    return keras.Sequential([keras.Input((6,)), *layers])


def fit(model, **options):
    history = model.fit(X, Y, batch_size=8, verbose=0, **options)
    return history.history["loss"]


# Layers that compute something else


class Standardized(keras.layers.Conv1D):
    def convolution_op(self, inputs, kernel):
        return super().convolution_op(inputs, ops.tanh(kernel))


class Squashed(keras.layers.Dense):
    @property
    def kernel(self):
        return ops.tanh(super().kernel)


@pytest.mark.parametrize(
    ("layer", "shape", "name"),
    [
        (lambda: Standardized(3, 2), (4, 6), "convolution_op"),
        (lambda: Squashed(3), (6,), "kernel"),
    ],
)
def test_what_a_float8_call_does_without_is_not_lost(layer, shape, name):
    """Also where it goes on to the stock one."""
    model = keras.Sequential([keras.Input(shape), layer()])
    inputs = normal(2, *shape)
    before = numpy(model(inputs))
    report = kpe.convert(model, POLICY)
    assert not report.converted
    assert f"a `{name}` of its own" in report.skipped[0].reason
    np.testing.assert_array_equal(numpy(model(inputs)), before)


class OtherName(keras.layers.Dense):
    def build(self, input_shape):
        self.w = self.add_weight(name="w", shape=(6, 6))
        self._kernel, self.bias = self.w, None
        self.built = True


def test_a_kernel_of_another_name_stays_and_is_reported():
    model = stack(OtherName(6))
    report = kpe.convert(model, POLICY)
    assert not report.converted
    assert "none of its own weights is called kernel" in (
        report.skipped[0].reason
    )
    assert type(model.layers[0]) is OtherName


def test_a_call_that_was_set_in_the_layer_stays():
    model = stack(keras.layers.Dense(6))
    model.layers[0].call = lambda inputs: 2 * inputs
    report = kpe.convert(model, POLICY)
    assert not report.converted
    assert "`call` was replaced on this instance" in report.skipped[0].reason


# Order


@pytest.mark.extension("gain")
def test_the_first_and_the_last_layer_are_so_in_nested_models_too():
    names = ["one", "two", "three", "four", "five"]
    one, two, three, four, five = (
        keras.layers.Dense(6, name=name) for name in names
    )
    inner = keras.Sequential([four, five])
    model = stack(keras.Sequential([one, two]), three, inner)
    everything = kpe.filters.Auto(multiple=1, smallest=1)
    report = kpe.convert(model, POLICY, filter=everything)
    found = [entry.path.rpartition("/")[2] for entry in report.converted]
    assert found == names
    kpe.revert(model)
    ends = kpe.filters.Auto(multiple=1, smallest=1, first=False, last=False)
    report = kpe.convert(model, POLICY, filter=ends)
    found = [entry.path.rpartition("/")[2] for entry in report.converted]
    assert found == names[1:-1]


# Arguments


@pytest.mark.full
@pytest.mark.extension("calibrate")
def test_numpy_bools_and_ints_are_bools_and_ints():
    model = stack(keras.layers.Dense(6))
    report = kpe.convert(
        model,
        POLICY,
        filter=lambda layer: np.prod(layer.kernel.shape) > 3,
        min_size=np.int64(2),
    )
    assert report.converted
    kpe.calibrate(model, X, steps=np.int64(1))


def test_a_class_or_an_array_is_no_filter():
    model = stack(keras.layers.Dense(6))
    for wrong in (kpe.filters.Safe, np.zeros(3)):
        with pytest.raises(TypeError, match=r"Auto\(\.\.\.\)"):
            kpe.convert(model, POLICY, filter=wrong)
    assert type(model.layers[0]) is keras.layers.Dense


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("inspect", marks=pytest.mark.extension("inspect")),
        pytest.param("calibrate", marks=pytest.mark.extension("calibrate")),
        "revert",
    ],
)
def test_only_keras_layers_are_looked_at(name):
    function = getattr(kpe, name)
    arguments = (X,) if name == "calibrate" else ()
    with pytest.raises(TypeError, match=r"keras\.Model or keras\.Layer"):
        function("model.keras", *arguments)


@pytest.mark.extension("loops")
def test_a_library_may_put_a_class_of_its_own_for_keras_layer(monkeypatch):
    own = type("Layer", (keras.layers.Layer,), {})
    model = stack(keras.layers.Dense(2))
    monkeypatch.setattr(keras, "Layer", own)
    assert len(kpe.convert(model, POLICY).converted) == 1
    assert len(kpe.loops.parameters(model)) == 2
    assert len(kpe.revert(model).converted) == 1


@pytest.mark.extension("calibrate")
def test_a_tuple_of_arrays_is_the_inputs_of_one_model():
    first, second = keras.Input((6,)), keras.Input((6,))
    one, two = keras.layers.Dense(2), keras.layers.Dense(2)
    model = keras.Model([first, second], [one(first), two(second)])
    kpe.convert(model, POLICY)
    kpe.calibrate(model, (X, 3 * Y))
    assert state_of(one)["inputs"][1][0] == np.abs(X).max()
    assert state_of(two)["inputs"][1][0] == np.abs(3 * Y).max()


class Twins(kpe.layers.Float8Mixin, keras.layers.Layer):
    """Two kernels of one name, which float8 refuses."""

    def build(self, input_shape):
        self.first = self.add_weight(name="twin", shape=(6, 6))
        self.second = self.add_weight(name="twin", shape=(6, 6))

    def call(self, inputs):
        return ops.matmul(ops.matmul(inputs, self.first), self.second)


def test_a_conversion_that_fails_changes_nothing():
    policies = keras.dtype_policies.DTypePolicyMap(default_policy="float32")
    mapped = keras.layers.Dense(6, dtype=policies)
    made = kpe.layers.Dense(6, dtype="float8/2_from_float32")
    model = stack(mapped, made, keras.layers.Dense(6))
    observe_inputs(model, X)
    weights = [numpy(v) for v in model.variables]
    outer = stack(model, Twins(), keras.layers.Dense(6))
    outputs = numpy(outer(X))
    with pytest.raises(ValueError, match="the same name"):
        kpe.convert(outer, POLICY)
    assert type(mapped) is keras.layers.Dense
    assert mapped.dtype_policy is policies
    assert made.float8_policy.full_name == "float8/2_from_float32"
    for variable, value in zip(model.variables, weights, strict=True):
        np.testing.assert_array_equal(numpy(variable), value)
    np.testing.assert_array_equal(numpy(outer(X)), outputs)


# What stays behind


@pytest.mark.full
def test_reverted_layers_keep_no_attribute_of_their_forms():
    inputs = keras.Input((4, 6))
    x = keras.layers.MultiHeadAttention(2, 3)(inputs, inputs)
    x = keras.layers.LSTM(3, return_sequences=True)(x)
    model = keras.Model(inputs, keras.layers.Dense(2)(x))
    kpe.convert(model, POLICY)
    model(normal(2, 4, 6))
    kpe.revert(model)
    for layer in layers_within(model):
        left = [n for n in vars(layer) if "float8" in n or "_plan" in n]
        assert not left, (layer.path, left)


@pytest.mark.extension("inspect")
def test_layers_of_a_policy_map_are_shown_with_their_own_policy():
    policies = keras.dtype_policies.DTypePolicyMap(
        default_policy="mixed_bfloat16"
    )
    model = stack(keras.layers.Dense(6, dtype=policies))
    assert kpe.inspect(model).layers[0].policy == "mixed_bfloat16"


# Optimizers of several models, and several of one


def test_models_that_share_an_optimizer_keep_its_states():
    first, second = (stack(keras.layers.Dense(6)) for _ in range(2))
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    optimizer.build(first.trainable_variables + second.trainable_variables)
    for model in (first, second):
        model.compile(optimizer, "mse", jit_compile=False)
    for model in (first, second):
        kpe.convert(model, POLICY)
    known = {id(v) for v in known_to_optimizer(optimizer)}
    for model in (first, second):
        assert known.issuperset(id(v) for v in model.trainable_variables)
        if BACKEND != "jax":  # whose trainer wants an optimizer for itself
            fit(model)
            _, history = state_of(model.layers[0])["inputs"]
            assert history[0] == np.abs(X).max()
    kpe.revert(first)
    known = {id(v) for v in known_to_optimizer(optimizer)}
    assert len(known) == 5
    assert known.issuperset(id(v) for v in second.trainable_variables)


@pytest.mark.full
def test_a_model_may_share_its_optimizer_with_one_inside_it():
    inner = stack(keras.layers.Dense(6))
    model = stack(inner, keras.layers.Dense(6))
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    for each in (model, inner):
        each.compile(optimizer, "mse", jit_compile=JIT)
    fit(model)
    kpe.convert(model, POLICY)
    fit(model)
    for layer in (inner.layers[0], model.layers[1]):
        assert state_of(layer)["outputs_grad"][0] == 0  # one step
        assert state_of(layer)["outputs_grad"][1][0] > 0


class Pair(keras.Model):
    """Two networks, each with an optimizer of its own."""

    def __init__(self):
        super().__init__()
        self.one, self.two = (stack(keras.layers.Dense(6)) for _ in range(2))

    def call(self, inputs):
        return self.two(self.one(inputs))


def test_optimizers_in_attributes_know_the_states_of_their_layers():
    model = Pair()
    model(X)
    model.one_optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    model.two_optimizer = keras.optimizers.Adam(0.01)
    networks = {model.one_optimizer: model.one, model.two_optimizer: model.two}
    for optimizer, network in networks.items():
        optimizer.build(network.trainable_variables)
    kpe.convert(model, POLICY)
    for optimizer, network in networks.items():
        variables = network.trainable_variables
        assert any("amax" in v.path for v in variables)
        optimizer.apply([ops.zeros(v.shape) for v in variables], variables)
        assert [id(v) for v in known_to_optimizer(optimizer)] == [
            id(v) for v in variables
        ]


# While it trains


class Converting(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            kpe.convert(self.model, POLICY)


def test_a_callback_converts_between_epochs():
    model = stack(keras.layers.Dense(6))
    model.compile("sgd", "mse", jit_compile=JIT)
    losses = fit(model, epochs=3, callbacks=[Converting()])
    assert losses[0] > losses[1] > losses[2]
    _, history = state_of(model.layers[0])["inputs"]
    np.testing.assert_array_equal(
        history, [np.abs(X).max(), 0, 0, np.abs(X).max()]
    )


@pytest.mark.skipif(
    BACKEND != "jax", reason="only JAX takes the weights out of the variables"
)
def test_a_model_whose_training_ended_in_an_error_is_refused():
    shared, own = keras.layers.Dense(6), keras.layers.Dense(6)
    model = stack(shared, own)
    model.compile("adam", "mse", jit_compile=JIT)
    fit(model)
    kpe.convert(stack(shared), POLICY)
    with pytest.raises(ValueError, match="optimizer"):
        fit(model)
    with pytest.raises(ValueError, match="not in its variables"):
        kpe.convert(model, POLICY)
    assert type(own) is keras.layers.Dense


def sparse(x):
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.sparse.from_dense(x)
    from jax.experimental import sparse as jax_sparse

    return jax_sparse.BCOO.fromdense(x)


@pytest.mark.full_except("True")
@pytest.mark.skipif(BACKEND == "torch", reason="Keras has no sparse tensors")
@pytest.mark.parametrize("adapters", [False, True])
def test_sparse_inputs_are_multiplied_as_dense_ones(adapters):
    """Those of a Dense layer on words that are counted, or categories."""
    inputs = keras.Input((6,), sparse=True)
    model = keras.Model(inputs, keras.layers.Dense(3)(inputs))
    kpe.convert(model, POLICY)
    if adapters:
        model.layers[1].enable_lora(2)
    model.compile("sgd", "mse", jit_compile=JIT)
    x = np.where(X > 0.5, X, 0).astype("float32")
    found = numpy(model(sparse(x)))
    np.testing.assert_array_equal(found, numpy(model.layers[1](x)))
    assert model.predict(sparse(x), verbose=0).shape == (8, 3)
    history = model.fit(sparse(x), Y[:, :3], batch_size=8, verbose=0)
    assert np.isfinite(history.history["loss"]).all()


def test_a_container_that_contains_itself_is_looked_through_once():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
    own = {"optimizer": keras.optimizers.SGD(0.1)}
    own["own"] = own
    object.__setattr__(model, "own_containers", own)
    assert training.optimizers(model) == [own["optimizer"]]
