"""Kernels that are held widened: the same numbers, and no work per call."""

import copy

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from frozen_models import JIT, frozen_layers, outputs_of
from keras_policy_ext import backends
from steps import normal, numpy, observe_inputs, weights_of

LAYERS = keras.layers


def dense():
    layers = [LAYERS.Dense(32, "relu"), LAYERS.Dense(3)]
    return keras.Sequential([keras.Input((24,)), *layers])


def einsum():
    layers = [LAYERS.EinsumDense("abc,cde->abde", (8, 2, 5))]
    return keras.Sequential([keras.Input((8, 24)), *layers])


def convolution():
    return keras.Sequential([keras.Input((8, 24)), LAYERS.Conv1D(7, 3)])


def recurrent():
    layers = [LAYERS.LSTM(6, return_sequences=True), LAYERS.GRU(5)]
    return keras.Sequential([keras.Input((3, 24)), *layers])


def attention():
    inputs = keras.Input((4, 24))
    x = LAYERS.MultiHeadAttention(2, 6)(inputs, inputs)
    return keras.Model(inputs, x)


MODELS = [dense, einsum, convolution, recurrent, attention]


def frozen(build, **options):
    keras.utils.set_random_seed(0)
    model = build()
    if options.get("activations") == "static":
        kpe.convert(model, "delayed")
        observe_inputs(model, batch(model, 5))
    kpe.freeze(model, **options)
    return model


def batch(model, rows):
    return normal(rows, *model.input_shape[1:])


@pytest.mark.slow_except("dense-dynamic", "convolution-static")
@pytest.mark.full_except("convolution-None", "dense-None", "einsum-None")
@pytest.mark.parametrize("activations", [None, "dynamic", "static"])
@pytest.mark.parametrize("build", MODELS)
def test_outputs_are_the_same_to_the_bit(build, activations):
    model = frozen(build, activations=activations)
    model.compile(jit_compile=JIT)
    xs = [batch(model, rows) for rows in (1, 4)]
    before = [outputs_of(model, x) for x in xs]
    predicted = model.predict(xs[1], verbose=0)
    widened = kpe.widen(model)
    assert len(widened) == len(frozen_layers(model))
    for x, wanted in zip(xs, before, strict=True):
        np.testing.assert_array_equal(outputs_of(model, x), wanted)
    found = model.predict(xs[1], verbose=0)
    np.testing.assert_array_equal(found, predicted)


@pytest.mark.parametrize("granularity", ["tensor", "block"])
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_under_other_policies_too(policy, granularity):
    with kpe.policy_scope(policy):
        model = frozen(dense, granularity=granularity)
    before = outputs_of(model, batch(model, 4))
    kpe.widen(model)
    np.testing.assert_array_equal(outputs_of(model, batch(model, 4)), before)


@pytest.mark.full_except("convolution-None", "dense-None", "einsum-None")
@pytest.mark.parametrize("activations", [None, "dynamic"])
@pytest.mark.parametrize("build", MODELS)
def test_no_call_widens_codes(build, activations, monkeypatch):
    model = frozen(build, activations=activations)

    def numbers(codes, name):
        raise AssertionError("codes are widened")

    framework = backends.current
    monkeypatch.setattr(type(framework), "numbers", lambda _, *x: numbers(*x))
    with pytest.raises(AssertionError, match="codes are widened"):
        model(batch(model, 7))
    kpe.widen(model)
    model(batch(model, 7))


@pytest.mark.full
def test_gradients_and_adapters_are_those_of_the_frozen_model():
    models = [frozen(dense) for _ in range(2)]
    kpe.widen(models[1])
    x, y = batch(models[0], 8), normal(8, 3)
    for model in models:
        keras.utils.set_random_seed(1)
        for layer in model.layers:
            layer.enable_lora(2)
        model.compile("adam", "mse", jit_compile=JIT)
        model.fit(x, y, epochs=2, verbose=0)
    one, other = (
        [numpy(v) for v in model.trainable_variables] for model in models
    )
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


def test_files_have_the_codes_alone(tmp_path):
    model = frozen(dense)
    sizes = []
    for name in ("frozen.keras", "widened.keras"):
        model.save(tmp_path / name)
        sizes.append((tmp_path / name).stat().st_size)
        kpe.widen(model)
    assert sizes[0] == sizes[1]
    x = batch(model, 4)
    for other in (kpe.load_model(tmp_path / name), copy.deepcopy(model)):
        np.testing.assert_array_equal(
            outputs_of(other, x), outputs_of(model, x)
        )
        assert len(other.weights) == len(model.weights) - 2


def test_what_is_widened_follows_the_codes(tmp_path):
    model, other = frozen(dense), frozen(dense)
    for layer in other.layers:
        layer._kernel.assign(numpy(layer._kernel.codes)[::-1])
    other.save_weights(tmp_path / "other.weights.h5")
    kpe.widen(model)
    model.load_weights(tmp_path / "other.weights.h5")
    x = batch(model, 4)
    np.testing.assert_array_equal(outputs_of(model, x), outputs_of(other, x))
    count = len(model.weights)
    assert len(kpe.widen(model)) == 2 and len(model.weights) == count


def test_it_is_no_weight_and_gone_after_thaw():
    model = frozen(dense)
    weights = weights_of(model)
    sizes = [layer.count_params() for layer in model.layers]
    kpe.widen(model)
    assert [v.path for v in weights_of(model)] == [v.path for v in weights]
    assert [layer.count_params() for layer in model.layers] == sizes
    codes = [each._kernel.stored.dequantized() for each in model.layers]
    kpe.thaw(model)
    assert len(model.weights) == 4
    for layer, wanted in zip(model.layers, codes, strict=True):
        np.testing.assert_array_equal(numpy(layer.kernel), wanted)


def test_layers_that_look_up_rows_are_left_out():
    layers = [LAYERS.Embedding(7, 5), LAYERS.Flatten(), LAYERS.Dense(3)]
    model = keras.Sequential([keras.Input((4,), dtype="int32"), *layers])
    kpe.freeze(model)
    (widened,) = kpe.widen(model)
    assert "dense" in widened


def two_sizes():
    layers = [LAYERS.Dense(500, name="large"), LAYERS.Dense(2, name="small")]
    return keras.Sequential([keras.Input((300,)), *layers])


def test_xla_goes_on_reading_the_codes_of_large_kernels():
    """It decodes them in less time than it widens float16."""
    model = frozen(two_sizes)
    x = batch(model, 3)
    before = outputs_of(model, x)
    names = [path.rpartition("/")[2] for path in kpe.widen(model)]
    is_torch = keras.backend.backend() == "torch"
    assert names == (["large", "small"] if is_torch else ["small"])
    found = outputs_of(model, x)
    if is_torch:  # The product is FBGEMM's, where this PyTorch has it.
        atol = 2e-6 * np.abs(before).max()
        np.testing.assert_allclose(found, before, rtol=0, atol=atol)
    else:
        np.testing.assert_array_equal(found, before)


@pytest.mark.skipif(
    keras.backend.backend() != "torch",
    reason="only PyTorch has a form of float16 that products read",
)
@pytest.mark.parametrize("rows", [1, 128, 200])
def test_a_packed_kernel_is_that_of_the_codes(rows):
    """Also after other codes are assigned, and in a copy."""
    model = frozen(two_sizes)
    kpe.widen(model)
    kernel = model.layers[0]._kernel
    if kernel.widened is not None:
        pytest.skip("this build of PyTorch has no FBGEMM")
    x = batch(model, rows)
    for _ in range(2):
        for each in (model, copy.deepcopy(model)):
            thawed = copy.deepcopy(each)
            kpe.thaw(thawed)
            wanted, found = outputs_of(thawed, x), outputs_of(each, x)
            atol = 2e-6 * np.abs(wanted).max()
            np.testing.assert_allclose(found, wanted, rtol=0, atol=atol)
        kernel.assign(numpy(kernel.codes)[::-1].copy())


def test_what_is_kept_takes_two_bytes_a_number():
    model = frozen(convolution)
    kpe.widen(model)
    (kept,) = [v for v in model.weights if v.name.endswith("_widened")]
    assert kept.dtype == "float16"
    assert tuple(kept.shape) == tuple(model.layers[0].kernel.shape)


def test_a_distributed_model_is_refused(monkeypatch):
    model = frozen(dense)
    distribution = keras.distribution
    monkeypatch.setattr(distribution, "distribution", lambda: distribution)
    with pytest.raises(ValueError, match=r"Received.*distribution.*thaw"):
        kpe.widen(model)


def test_a_model_that_is_not_frozen_is_refused():
    with pytest.raises(ValueError, match=r"Received.*keras_policy_ext\.freeze"):
        kpe.widen(dense())
    with pytest.raises(TypeError, match="Received"):
        kpe.widen("model.keras")
