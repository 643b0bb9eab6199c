"""Models that are trained in floats for kernels in few bits."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from keras_policy_ext import stored_kernels
from steps import normal, numpy

JIT = keras.backend.backend() == "jax"


def model_of():
    inputs = keras.Input((12, 32))
    x = keras.layers.Dense(64, activation="relu", name="first")(inputs)
    x = keras.layers.EinsumDense("btd,dnh->btnh", (None, 4, 8), name="heads")(x)
    x = keras.layers.EinsumDense("btnh,nhd->btd", (None, 32), name="joined")(x)
    x = x + keras.layers.Conv1D(32, 3, padding="same", name="conv")(x)
    x = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, keras.layers.Dense(3, name="last")(x))


def seeded(optimizer="adam"):
    keras.utils.set_random_seed(0)
    model = model_of()
    model.compile(optimizer, "mse", jit_compile=JIT)
    return model


X, Y = normal(8, 12, 32), normal(8, 3, seed=1)


def fit(model, epochs=1):
    history = model.fit(
        X, Y, batch_size=4, epochs=epochs, shuffle=False, verbose=0
    )
    return history.history["loss"]


@pytest.mark.full_except("int8")
@pytest.mark.parametrize(
    "spec",
    [
        "int4(group=32,clip=0.8)",
        "int8",
        "int4(inputs='int8')",
        "float4_e2m1fn",
    ],
)
def test_what_is_trained_is_what_is_frozen(spec):
    model = seeded()
    report = kpe.convert(model, spec)
    assert len(report.converted) == 5
    assert not report.skipped
    losses = fit(model, 3)
    assert losses[-1] < losses[0]
    trained = numpy(model(X))
    frozen = kpe.freeze(model)
    recipe = kpe.recipes.get(spec)
    for layer in model.layers:
        if hasattr(layer, "float8_policy"):
            stored = layer.float8_policy.recipe
            assert (stored.weights, stored.per) == recipe.grid[:2]
            rounds = recipe.inputs is not None
            assert (stored.activations is not None) == rounds
    # Equal operands; sums are in another order. A value of an input may round
    # the other way then.
    error = np.abs(numpy(model(X)) - trained).max() / np.abs(trained).max()
    assert error < (2e-3 if recipe.inputs else 1e-5)
    assert all(each.sqnr_db > 15 for each in frozen.stored)


def test_a_converted_step_differs_from_a_float_step():
    plain, model = seeded(), seeded()
    kpe.convert(model, "int3")
    assert np.abs(numpy(plain(X)) - numpy(model(X))).max() > 1e-3


def test_a_layer_says_what_it_is_trained_for():
    model = seeded()
    report = kpe.convert(model, "int4", exclude="last")
    layer = model.get_layer("first")
    assert layer.quantization_mode == "qat"
    assert layer.float8_policy.full_name == "qat/int4_from_float32"
    assert model.get_layer("last").quantization_mode is None
    assert "Kernels are rounded in each step" in str(report)
    numpy(model(X))
    text = str(kpe.inspect(model))
    assert "qat/int4_from_float32" in text
    assert "Kernels are rounded in each step" in text
    assert "emulated" not in text
    reason = "a step rounds kernels to int4 per channel, and multiplies in"
    assert layer.kernel_choice == ("rounded", f"{reason} float32")
    kpe.freeze(model, exclude="last")
    numpy(model(X))
    name = "integers/frozen(weights='int4')_from_float32"
    assert layer.float8_policy.full_name == name
    assert layer.quantization_mode == "integers"
    text = str(kpe.inspect(model))
    assert "integers/" in text
    assert "float8/" not in text


def test_rules_give_layers_other_grids_and_freeze_keeps_them():
    model = seeded()
    rules = [(".*last", "qat/int8_from_float32"), (".*conv", None)]
    policy = kpe.Float8DTypePolicy(
        "float32", recipe="int4(group=32)", rules=rules
    )
    kpe.convert(model, policy)
    fit(model)
    kpe.freeze(model, exclude="conv")
    recipes = {
        layer.name: layer.float8_policy.recipe
        for layer in model.layers
        if getattr(layer, "float8_policy", None)
    }
    assert recipes.keys() == {"first", "heads", "joined", "last"}
    assert recipes["last"].weights == "int8"
    assert recipes["first"].per == "group32"


def test_freeze_may_be_asked_for_another_grid():
    model = seeded()
    kpe.convert(model, "int4(group=64)")
    kpe.freeze(model, weights="int4", granularity="group", include="first")
    kpe.freeze(model, weights="int8", granularity="group", include="last")
    per = {
        name: model.get_layer(name).float8_policy.recipe.per
        for name in ("first", "last")
    }
    assert per == {"first": "group64", "last": "group32"}


def test_revert_gives_the_float_kernels_back():
    model = seeded()
    before = [numpy(each) for each in model.weights]
    kpe.convert(model, "int4")
    numpy(model(X))
    kpe.revert(model)
    assert type(model.get_layer("first")) is keras.layers.Dense
    for one, other in zip(before, model.weights, strict=True):
        np.testing.assert_array_equal(one, numpy(other))


@pytest.mark.full_except("int4(group=32)")
@pytest.mark.parametrize("spec", ["int4(group=32)", "int4(delay=3)"])
def test_a_run_that_is_resumed_is_the_run(spec, tmp_path):
    whole, killed = seeded(), seeded()
    for model in (whole, killed):
        kpe.convert(model, spec)
        fit(model)
    killed.save(tmp_path / "model.keras")
    resumed = kpe.load_model(tmp_path / "model.keras")
    assert resumed.get_layer("first").float8_policy.recipe.spec == spec
    fit(whole), fit(resumed)
    for one, other in zip(whole.weights, resumed.weights, strict=True):
        np.testing.assert_array_equal(numpy(one), numpy(other))


def test_a_delay_counts_steps_and_then_rounds():
    plain, model = seeded("sgd"), seeded("sgd")
    kpe.convert(model, "int4(delay=2)")
    # Equal but for the order of sums, whose terms are at most 1.
    unrounded = numpy(model(X)), numpy(plain(X))
    np.testing.assert_allclose(*unrounded, rtol=1e-5, atol=1e-6)
    fit(plain), fit(model)  # Two steps.
    one, other = (each.get_layer("first").kernel for each in (plain, model))
    np.testing.assert_allclose(numpy(other), numpy(one), rtol=1e-5, atol=1e-6)
    rounded = numpy(model(X))
    kpe.revert(model)
    assert np.abs(rounded - numpy(model(X))).max() > 1e-3


def test_adapters_train_beside_a_rounded_kernel(tmp_path):
    model = seeded()
    kpe.convert(model, "int4(group=32)")
    model.get_layer("first").enable_lora(2)
    model.compile("adam", "mse", jit_compile=JIT)
    kernel = numpy(model.get_layer("first").lora_kernel_b)
    fit(model, 2)
    assert np.any(numpy(model.get_layer("first").lora_kernel_b) != kernel)
    outputs = numpy(model(X))
    kpe.freeze(model)
    np.testing.assert_allclose(numpy(model(X)), outputs, rtol=1e-4, atol=1e-5)
    model.save(tmp_path / "model.keras")
    loaded = kpe.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(numpy(loaded(X)), numpy(model(X)))


@pytest.mark.parametrize("weights, share", [("int4", 8), ("int2", 16)])
def test_files_have_several_numbers_in_a_byte(weights, share, tmp_path):
    model = keras.Sequential([keras.Input((512,)), keras.layers.Dense(513)])
    before = tmp_path / "before.weights.h5"
    model.save_weights(before)
    report = kpe.freeze(model, weights=weights)
    path = tmp_path / "after.weights.h5"
    model.save_weights(path)
    size, smaller = before.stat().st_size, path.stat().st_size
    assert smaller < size / share + 4 * 513 * 2 + 20_000
    assert report.bytes_after == -(-512 * 513 * 4 // share) + 4 * 513


def test_least_squares_is_no_worse_than_amax():
    def errors(scales):
        model = seeded()
        stored = kpe.freeze(model, weights="int3", scales=scales).stored
        return np.array([each.sqnr_db for each in stored])

    assert np.all(errors("least_squares") > errors("amax"))


@pytest.mark.parametrize("source", ["mixed_bfloat16", "bfloat16"])
def test_in_16_bits_what_is_trained_is_what_is_frozen(source):
    keras.utils.set_random_seed(0)
    with kpe.policy_scope(source):
        model = model_of()
    kpe.convert(model, "int4(group=32)")
    trained = numpy(ops.cast(model(X), "float32"))
    kpe.freeze(model)
    frozen = numpy(ops.cast(model(X), "float32"))
    assert np.abs(frozen - trained).max() < 2e-2 * np.abs(trained).max()


@pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="its optimizers are of PyTorch"
)
def test_a_loop_with_an_optimizer_of_torch_trains():
    import torch

    model = seeded()
    kpe.convert(model, "int4(group=32)")
    x, y = (ops.convert_to_tensor(each) for each in (X, Y))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    trained = numpy(model(X))
    kpe.freeze(model)
    np.testing.assert_allclose(numpy(model(X)), trained, rtol=1e-4, atol=1e-5)


def test_layers_of_this_package_follow_the_policy_by_name():
    name = "qat/int4(group=32)_from_float32"
    layer = kpe.layers.Dense(8, dtype=name)
    layer(np.ones((2, 64), "float32"))
    kernel = numpy(layer.kernel)
    axes = stored_kernels.Axes((0,), (1,))
    stored = stored_kernels.quantize(kernel, axes, "group32", "int4")
    x = normal(3, 64)
    np.testing.assert_allclose(
        numpy(layer(x)), x @ stored.dequantized(), rtol=1e-4, atol=1e-5
    )


@pytest.mark.full
def test_attention_and_recurrent_layers_are_trained_for_it_too():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6, 32))
    x = keras.layers.MultiHeadAttention(2, 16, name="attention")(inputs, inputs)
    x = keras.layers.GRU(12, name="gru")(x)
    model = keras.Model(inputs, x)
    report = kpe.convert(model, "int4")
    names = {each.class_name for each in report.converted}
    assert names >= {"EinsumDense", "GRUCell"}
    trained = numpy(model(X[:, :6]))
    kpe.freeze(model)
    frozen = numpy(model(X[:, :6]))
    assert np.abs(frozen - trained).max() < 1e-5 * np.abs(trained).max()
