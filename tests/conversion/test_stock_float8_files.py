"""Files of models that Keras's own `quantize("float8")` has made.

What Keras writes into them was read in its source: see `layers.stock_state`.
"""

import zipfile

import h5py
import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from converted_models import float8_layers, states_of
from keras_policy_ext.recipes import OPERANDS
from steps import normal, numpy, state_of

FLOAT8 = "float8_from_float32"
LENGTH = 6
KINDS = ("scale", "amax_history")
NAMES = [f"{operand}_{kind}" for operand in OPERANDS for kind in KINDS]

pytestmark = pytest.mark.filterwarnings(
    "ignore:Skipping variable loading for optimizer"
)


def short(length=LENGTH):
    cls = keras.dtype_policies.QuantizedFloat8DTypePolicy
    return cls("float8", "float32", length)


def dense(layers, policy, **kwargs):
    layer = layers.Dense(5, dtype=policy, **kwargs)
    return keras.Sequential([keras.Input((4,)), layer])


def einsum_dense(layers, policy, **kwargs):
    layer = layers.EinsumDense(
        "abc,cde->abde", (3, 2, 2), dtype=policy, **kwargs
    )
    return keras.Sequential([keras.Input((3, 4)), layer])


def inputs_for(model, seed=0):
    return normal(8, *model.input_shape[1:], seed=seed)


def trained(model, batches=(0, 1, 2), rate=0.01):
    """A model after some steps; with a rate of 0 its weights stay."""
    model.compile(keras.optimizers.SGD(rate), "mse")
    for seed in batches:
        y = normal(8, *model.output_shape[1:], seed=100 + seed)
        model.train_on_batch(inputs_for(model, seed), y)
    return model


def stock_numbers(layer):
    return {name: numpy(getattr(layer, name)) for name in NAMES}


def own_numbers(layer):
    state = state_of(layer)
    return {
        f"{operand}_{kind}": value
        for operand in OPERANDS
        for kind, value in zip(KINDS, state[operand], strict=True)
    }


def assert_same_numbers(found, expected):
    assert found.keys() == expected.keys()
    for name in found:
        np.testing.assert_array_equal(found[name], expected[name], name)


# Numbered stores, as `load_own_variables` of Keras's layers takes them


def store_of(kernel, bias, length=1024, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [kernel] + [bias] * bool(bias) + [(), (length,)] * 3
    values = [rng.uniform(0.1, 1, size=s).astype("float32") for s in shapes]
    return {str(number): value for number, value in enumerate(values)}


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("make", [dense, einsum_dense])
def test_a_numbered_store_loads_by_itself(make, use_bias):
    bias = {} if make is einsum_dense else {"use_bias": use_bias}
    if make is einsum_dense and use_bias:
        bias = {"bias_axes": "e"}
    (layer,) = make(kpe.layers, FLOAT8, **bias).layers
    own = 1 + use_bias
    shapes = [tuple(v.shape) for v in layer.weights[:own]]
    store = store_of(shapes[0], shapes[1] if use_bias else None)
    layer.load_own_variables(store)
    np.testing.assert_array_equal(numpy(layer.kernel), store["0"])
    if use_bias:
        np.testing.assert_array_equal(numpy(layer.bias), store["1"])
    numbered = [store[str(number)] for number in range(own, own + 6)]
    expected = dict(zip(NAMES, numbered, strict=True))
    assert_same_numbers(own_numbers(layer), expected)
    assert_same_numbers(stock_numbers(layer), expected)


@pytest.mark.parametrize("mode", ["int8", None])
def test_other_numbered_stores_load_as_into_stock_layers(mode):
    policy = f"{mode}_from_float32" if mode else None
    stock = dense(keras.layers, policy).layers[0]
    ours = dense(kpe.layers, policy).layers[0]
    for layer in (stock, ours):
        store = {}
        stock.save_own_variables(store)
        layer.load_own_variables(store)
    for expected, found in zip(stock.weights, ours.weights, strict=True):
        np.testing.assert_array_equal(numpy(expected), numpy(found))
    assert hasattr(ours, "kernel_scale") == (mode == "int8")
    assert not hasattr(ours, "inputs_scale")


# Files of weights


@pytest.fixture(params=["weights.h5", "keras"])
def suffix(request):
    return request.param


def saved(model, folder, suffix="weights.h5"):
    path = folder / f"stock.{suffix}"
    model.save(path) if suffix == "keras" else model.save_weights(path)
    return path


@pytest.mark.parametrize("make", [dense, einsum_dense])
def test_scales_and_histories_are_taken_over(make, suffix, tmp_path):
    stock = trained(make(keras.layers, short()))
    model = make(kpe.layers, short())
    model.load_weights(saved(stock, tmp_path, suffix))
    (theirs,), (ours,) = stock.layers, model.layers
    np.testing.assert_array_equal(numpy(ours.kernel), numpy(theirs.kernel))
    numbers = stock_numbers(theirs)
    assert_same_numbers(own_numbers(ours), numbers)
    amaxes = [np.abs(inputs_for(stock, seed)).max() for seed in (2, 1, 0)]
    history = numbers["inputs_amax_history"]
    newest_first = [history[0], history[-1], history[-2]]
    np.testing.assert_array_equal(newest_first, amaxes)


@pytest.mark.parametrize("make", [dense, einsum_dense])
def test_a_loaded_layer_predicts_and_trains_on_as_the_stock_one(make, tmp_path):
    """Where the newest amax changes no maximum, both have the same scales."""
    options = {"use_bias": False} if make is dense else {}
    stock = trained(make(keras.layers, short(), **options), (0, 0, 0), rate=0.0)
    model = make(kpe.layers, short(), **options)
    model.load_weights(saved(stock, tmp_path))
    x = inputs_for(stock)
    expected, found = numpy(stock(x)), numpy(model(x))
    # The same products of 8-bit numbers. Stock multiplies each by the scales
    # before the sum of 4 terms, this package the sum: 3 roundings a term.
    atol = 4 * 3 * 2.0**-24 * np.abs(expected).max() * 4
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol)
    for each in (stock, model):
        trained(each, (5, 6), rate=0.0)
    (theirs,), (ours,) = stock.layers, model.layers
    expected, found = stock_numbers(theirs), own_numbers(ours)
    for name in ("inputs_scale", "inputs_amax_history", "kernel_scale"):
        np.testing.assert_array_equal(found[name], expected[name], name)


def test_an_operand_that_was_never_observed_starts_anew(tmp_path):
    stock = dense(keras.layers, short())
    model = trained(dense(kpe.layers, short()))
    model.load_weights(saved(stock, tmp_path))
    numbers = own_numbers(model.layers[0])
    assert not any(np.any(value) for value in numbers.values())
    # Keras's name for it reads what Keras's layer says: 1.
    assert_same_numbers(
        stock_numbers(model.layers[0]), stock_numbers(stock.layers[0])
    )


@pytest.mark.parametrize("length", [2, 3, 16])
def test_a_stock_history_of_another_length_keeps_the_newest(length, tmp_path):
    stock = trained(dense(keras.layers, short()))
    model = dense(kpe.layers, short(length))
    model.load_weights(saved(stock, tmp_path))
    _, history = state_of(model.layers[0])["inputs"]
    amaxes = [np.abs(inputs_for(stock, seed)).max() for seed in (2, 1, 0)]
    aged = np.concatenate([history[:1], history[:0:-1]])
    kept = min(3, length)
    np.testing.assert_array_equal(aged[:kept], amaxes[:kept])
    assert not aged[kept:].any()


@pytest.mark.parametrize("policy", ["float32", "float8/current_from_float32"])
def test_a_layer_without_state_takes_the_weights_alone(policy, tmp_path):
    stock = trained(dense(keras.layers, short()))
    path = saved(stock, tmp_path)
    with h5py.File(path, "a") as file:
        file["layers/dense/vars/2"][()] = np.nan
    model = dense(kpe.layers, policy)
    model.load_weights(path)
    (theirs,), (ours,) = stock.layers, model.layers
    np.testing.assert_array_equal(numpy(ours.kernel), numpy(theirs.kernel))
    np.testing.assert_array_equal(numpy(ours.bias), numpy(theirs.bias))


def test_a_layer_with_adapters_takes_the_kernel(tmp_path):
    stock = trained(dense(keras.layers, short()))
    model = dense(kpe.layers, short())
    (layer,) = model.layers
    layer.enable_lora(2)
    layer.lora_kernel_b.assign(np.ones((2, 5)))
    model.load_weights(saved(stock, tmp_path))
    assert not numpy(layer.lora_kernel_b).any()
    np.testing.assert_array_equal(
        numpy(layer.kernel), numpy(stock.layers[0].kernel)
    )
    numbers = stock_numbers(stock.layers[0])
    assert_same_numbers(own_numbers(layer), numbers)


# Damaged numbers


def replaced(number, value):
    def damage(group):
        del group[number]
        group[number] = value

    return damage


DAMAGES = {
    "NaN scale": replaced("2", np.float32(np.nan)),
    "infinite scale": replaced("4", np.float32(np.inf)),
    "negative scale": replaced("6", np.float32(-1)),
    "NaN in a history": replaced("3", np.full(LENGTH, np.nan, "float32")),
    "negative history": replaced("5", np.full(LENGTH, -1, "float32")),
    "too large for float32": replaced("7", np.full(LENGTH, 1e300)),
    "vector scale": replaced("2", np.ones(3, "float32")),
    "scalar history": replaced("3", np.float32(1)),
    "history of two axes": replaced("3", np.ones((2, 2), "float32")),
    "empty history": replaced("3", np.ones(0, "float32")),
    "integers": replaced("5", np.ones(LENGTH, "int32")),
    "text": replaced("2", "one"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_stock_state_is_refused_and_nothing_loaded(damage, tmp_path):
    path = saved(trained(dense(keras.layers, short())), tmp_path)
    with h5py.File(path, "a") as file:
        DAMAGES[damage](file["layers/dense/vars"])
    model = trained(dense(kpe.layers, short()), (3, 4))
    before = model.get_weights()
    with pytest.raises(ValueError, match="is damaged") as caught:
        model.load_weights(path)
    assert "Allowed" in str(caught.value)
    with pytest.raises(ValueError, match="is damaged"):
        kpe.load_weights(model, path)
    with pytest.warns(UserWarning, match="could not be loaded"):
        model.load_weights(path, skip_mismatch=True)
    for value, variable in zip(before, model.weights, strict=True):
        np.testing.assert_array_equal(value, numpy(variable))


# Whole models


@keras.saving.register_keras_serializable("test_stock_float8_files")
class Block(keras.layers.Layer):
    """Makes its layer itself, in the source policy."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = keras.layers.Dense(4, "tanh", name="inner")

    def build(self, input_shape):
        self.inner.build(input_shape)

    def call(self, x):
        return x + self.inner(x)


@keras.saving.register_keras_serializable("test_stock_float8_files")
class EightWeights(keras.layers.Layer):
    """As many variables as a layer in float8, of other shapes."""

    def build(self, input_shape):
        shapes = [(4, 4), (4,), (), (4,), (), (4,), (), (3,)]
        self.parts = [
            self.add_weight(shape=s, initializer="ones", trainable=False)
            for s in shapes
        ]

    def call(self, x):
        return x @ self.parts[0]


def plain_model(policy=None):
    """A model before it is quantized; one layer may be made in float8."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6, 4))
    x = keras.layers.MultiHeadAttention(2, 2, name="attention")(inputs, inputs)
    x = EightWeights()(Block(name="block")(x))
    x = keras.layers.EinsumDense("abc,cd->abd", (6, 3), name="einsum")(x)
    x = keras.layers.Dense(3, name="short", dtype=policy)(x)
    return keras.Model(inputs, keras.layers.Dense(2, name="plain")(x))


def stock_model():
    model = plain_model(short())
    for name in ("attention", "block", "einsum"):
        for layer in model.get_layer(name)._flatten_layers():
            if type(layer) in (keras.layers.Dense, keras.layers.EinsumDense):
                layer.quantize("float8")
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def steps(model, seeds):
    for seed in seeds:
        y = normal(8, 6, 2, seed=100 + seed)
        model.train_on_batch(inputs_for(model, seed), y)


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """A trained model in stock float8, and its files."""
    model = stock_model()
    steps(model, range(3))
    folder = tmp_path_factory.mktemp("stock")
    model.save(folder / "model.keras")
    model.save(folder / "model", zipped=False)
    model.save_weights(folder / "model.weights.h5")
    with (
        zipfile.ZipFile(folder / "model.keras") as archive,
        zipfile.ZipFile(
            folder / "packed.keras", "w", zipfile.ZIP_DEFLATED
        ) as packed,
    ):
        for name in archive.namelist():
            packed.writestr(name, archive.read(name))
    return model, folder


def stock_layers(model):
    return [x for x in model._flatten_layers() if hasattr(x, "inputs_scale")]


def assert_taken_over(stock_model, model):
    """Each layer in float8 has the numbers of the stock one of its path."""
    by_name = {layer.name: layer for layer in stock_layers(stock_model)}
    found = float8_layers(model)
    assert {layer.name for layer in found} == by_name.keys()
    for layer in found:
        theirs = by_name[layer.name]
        np.testing.assert_array_equal(numpy(layer.kernel), numpy(theirs.kernel))
        assert_same_numbers(own_numbers(layer), stock_numbers(theirs))
        length = LENGTH if layer.name == "short" else 1024
        assert layer.float8_policy.amax_history_length == length


@pytest.mark.parametrize("name", ["model.keras", "model", "packed.keras"])
def test_a_stock_model_comes_back_in_this_float8(name, stock, tmp_path):
    theirs, folder = stock
    model = kpe.load_model(folder / name)
    assert len(stock_layers(theirs)) == 7
    assert_taken_over(theirs, model)
    for layer in float8_layers(model):
        assert type(layer).__module__.startswith("keras_policy_ext")
    for a, b in zip(
        theirs.optimizer.variables, model.optimizer.variables, strict=True
    ):
        np.testing.assert_array_equal(numpy(a), numpy(b))
    attention = model.get_layer("attention")
    assert type(attention) is kpe.layers.MultiHeadAttention
    assert attention.dtype_policy.full_name == "float8_from_float32"
    model.save(tmp_path / "again.keras")
    assert_taken_over(theirs, kpe.load_model(tmp_path / "again.keras"))


def test_a_stock_model_trains_on_and_is_reverted(stock):
    model = kpe.load_model(stock[1] / "model.keras")
    x, y = inputs_for(model), normal(8, 6, 2)
    losses = model.fit(x, y, epochs=5, batch_size=8, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    kpe.revert(model)
    assert not float8_layers(model)
    assert not stock_layers(model)


def test_keras_loads_no_composite_of_its_own_float8(stock):
    """Expires with Keras's repair: `rewritten_model` can then go."""
    _, folder = stock
    with pytest.raises(ValueError, match="could not be loaded"):
        keras.saving.load_model(folder / "model.keras")


@pytest.mark.parametrize("name", ["model.keras", "model.weights.h5"])
def test_weights_load_as_saved_into_a_plain_model(name, stock):
    theirs, folder = stock
    model = plain_model()
    kpe.load_weights(model, folder / name, as_saved=True)
    assert_taken_over(theirs, model)


def test_weights_load_into_a_model_converted_in_part(stock):
    theirs, folder = stock
    model = plain_model()
    kpe.convert(model, "float8/4_from_float32", include="attention|short")
    kpe.load_weights(model, folder / "model.weights.h5")
    by_name = {layer.name: layer for layer in stock_layers(theirs)}
    assert len(float8_layers(model)) == 5
    for layer in float8_layers(model):
        for operand, (scale, _) in state_of(layer).items():
            expected = getattr(by_name[layer.name], f"{operand}_scale")
            assert scale == numpy(expected)
    np.testing.assert_array_equal(
        numpy(model.get_layer("einsum").kernel), numpy(by_name["einsum"].kernel)
    )


def test_a_stock_file_that_does_not_fit_changes_nothing(stock, tmp_path):
    _, folder = stock
    path = tmp_path / "damaged.weights.h5"
    path.write_bytes((folder / "model.weights.h5").read_bytes())
    with h5py.File(path, "a") as file:
        file["layers/dense/vars/7"][()] = -1
    model = plain_model()
    before = model.get_weights()
    with pytest.raises(ValueError, match="is damaged"):
        kpe.load_weights(model, path, as_saved=True)
    assert not states_of(model)
    for value, variable in zip(before, model.weights, strict=True):
        np.testing.assert_array_equal(value, numpy(variable))


@pytest.mark.parametrize("as_saved", [False, True])
def test_a_model_in_the_float8_of_keras_reads_its_own_file(as_saved, tmp_path):
    def quantized():
        layers = [keras.layers.Dense(8, "relu"), keras.layers.Dense(4)]
        model = keras.Sequential([keras.Input((6,)), *layers])
        model.quantize("float8")
        return model

    theirs, model = quantized(), quantized()
    theirs.save_weights(tmp_path / "model.weights.h5")
    path = tmp_path / "model.weights.h5"
    kpe.load_weights(model, path, as_saved=as_saved)
    for found, expected in zip(model.weights, theirs.weights, strict=True):
        np.testing.assert_array_equal(numpy(found), numpy(expected))
