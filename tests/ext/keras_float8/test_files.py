"""Files of models that Keras's own `quantize("float8")` has made.

What Keras writes into them was read in its source: see `files.KerasWeights`.
"""

import h5py
import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from damages import change, of_amaxes, unchanged
from keras_policy_ext.ext.keras_float8.files import KERAS
from keras_policy_ext.files.entries import Group
from saving_models import in_shards
from steps import numpy, state_of
from stock_float8 import (
    LENGTH,
    NAMES,
    assert_same_numbers,
    dense,
    einsum_dense,
    inputs_for,
    own_numbers,
    short,
    stock_numbers,
    trained,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:Skipping variable loading for optimizer"
)

FLOAT8 = "float8_from_float32"


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


@pytest.fixture(params=["weights.h5", "keras", "weights.json"])
def suffix(request):
    return request.param


def saved(model, folder, suffix="weights.h5"):
    path = folder / f"stock.{suffix}"
    if suffix == "weights.json":
        return in_shards(model, folder)
    model.save(path) if suffix == "keras" else model.save_weights(path)
    return path


@pytest.mark.full_except("keras-einsum_dense", "weights.h5-einsum_dense")
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


@pytest.mark.full
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


def test_an_error_has_all_parts():
    damaged = str(Group(KERAS, "model/dense", {}).damaged("it lacks 'x'"))
    parts = ("'model/dense'", "not changed. Received: it lacks 'x'. Allowed: ")
    assert all(part in damaged for part in (*parts, f". {KERAS.advice}"))


# Keras numbers the entries: scales and histories take turns.
DAMAGES = of_amaxes("246", "357", LENGTH)


@pytest.mark.any_backend_except("integers")
@pytest.mark.full_except("integers")
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_stock_state_is_refused_and_nothing_loaded(damage, tmp_path):
    path = saved(trained(dense(keras.layers, short())), tmp_path)
    change(path, "layers/dense/vars", DAMAGES[damage])
    model = trained(dense(kpe.layers, short()), (3, 4))
    with unchanged(model.weights):
        with pytest.raises(ValueError, match=r"is damaged.*Allowed"):
            model.load_weights(path)
        with pytest.raises(ValueError, match="is damaged"):
            kpe.load_weights(model, path)
        with pytest.warns(UserWarning, match="could not be loaded"):
            model.load_weights(path, skip_mismatch=True)
