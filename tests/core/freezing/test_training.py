"""What trains beside frozen kernels, and what becomes of memory."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from frozen_models import JIT, dequantized, outputs_of
from steps import gradients, normal, numpy

BACKEND = keras.backend.backend()
DELAYED = "float8/4_from_float32"


def tower():
    """Dense, convolution and recurrent layers under one head."""
    inputs = keras.Input((6, 4))
    x = keras.layers.Conv1D(5, 3, padding="same", name="conv")(inputs)
    x = keras.layers.LayerNormalization(name="norm")(x)
    x = keras.layers.GRU(5, name="gru")(x)
    x = keras.layers.Dense(7, activation="tanh", name="wide")(x)
    outputs = keras.layers.Dense(3, name="head")(x)
    return keras.Model(inputs, outputs)


def compiled(model):
    model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=JIT)
    return model


def floats_of_shape(model, shape):
    """Paths of the floating variables of a shape, and of parameters."""
    held = [
        v.path
        for v in model.variables
        if tuple(v.shape) == shape and "float" in v.dtype
    ]
    if BACKEND == "torch":
        held += [
            name
            for name, each in model.named_parameters()
            if tuple(each.shape) == shape and each.is_floating_point()
        ]
    return held


@pytest.mark.full
def test_gradients_are_those_of_the_thawed_model():
    model = tower()
    kpe.freeze(model)
    x, g = normal(5, 6, 4), normal(5, 3, seed=1)

    def loss(y):
        return ops.sum(ops.multiply(y, g))

    names = [v.path for v in model.trainable_variables]
    y, dx, grads = gradients(model, x, loss, compiled=True)
    kpe.thaw(model)
    thawed_y, thawed_dx, thawed = gradients(model, x, loss, compiled=True)
    np.testing.assert_allclose(numpy(y), numpy(thawed_y), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        numpy(dx), numpy(thawed_dx), rtol=1e-4, atol=1e-5
    )
    by_path = {
        v.path: numpy(g)
        for v, g in zip(model.trainable_variables, thawed, strict=True)
    }
    assert set(names) < set(by_path)
    for name, gradient in zip(names, grads, strict=True):
        np.testing.assert_allclose(
            numpy(gradient), by_path[name], rtol=1e-4, atol=1e-5
        )


@pytest.mark.full
@pytest.mark.slow_except()
def test_only_the_rest_trains():
    model = compiled(tower())
    kpe.freeze(model)
    codes = {
        layer.name: numpy(layer._kernel)
        for layer in model.layers
        if layer.name in ("conv", "wide", "head")
    }
    scales = [
        numpy(v) for v in model.variables if v.path.endswith("kernel_scale")
    ]
    assert len(scales) == 5
    trained = [v.path.partition("/")[2] for v in model.trainable_variables]
    assert all(p.endswith(("bias", "gamma", "beta")) for p in trained)
    before = [numpy(v) for v in model.trainable_variables]
    model.fit(normal(16, 6, 4), normal(16, 3), epochs=2, verbose=0)
    after = [numpy(v) for v in model.trainable_variables]
    for one, other in zip(before, after, strict=True):
        assert np.any(one != other)
    for name, value in codes.items():
        np.testing.assert_array_equal(
            numpy(model.get_layer(name)._kernel), value
        )
    again = [
        numpy(v) for v in model.variables if v.path.endswith("kernel_scale")
    ]
    for one, other in zip(scales, again, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_head_trains_over_a_frozen_base():
    model = compiled(tower())
    kpe.freeze(model, exclude="head", activations="dynamic")
    head = model.get_layer("head")
    assert type(head) is keras.layers.Dense
    before = numpy(head._kernel)
    x, y = normal(64, 6, 4), normal(64, 3)
    losses = model.fit(x, y, epochs=5, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    assert np.any(numpy(head._kernel) != before)


def test_no_float_form_of_a_kernel_is_left():
    model = tower()
    shape = (5, 7)
    assert floats_of_shape(model, shape)
    kpe.freeze(model)
    assert floats_of_shape(model, shape) == []
    wide = model.get_layer("wide")
    (codes,) = (v for v in wide.variables if v.dtype == "uint8")
    assert codes.shape == wide._kernel.shape == shape
    kpe.thaw(model)
    assert floats_of_shape(model, shape)


@pytest.mark.full
@pytest.mark.slow_except()
def test_trainable_stays_off_for_codes():
    model = compiled(tower())
    kpe.freeze(model)
    for value in (False, True):
        model.trainable = value
        for layer in model.layers:
            layer.trainable = value
    names = [v.path for v in model.trainable_variables]
    assert names and not any(
        "kernel" in name.rpartition("/")[2] for name in names
    )
    model = compiled(model)
    model.fit(normal(8, 6, 4), normal(8, 3), verbose=0)


@pytest.mark.full
@pytest.mark.slow_except()
def test_the_optimizer_of_a_trained_model_lets_its_slots_go():
    model = compiled(tower())
    x, y = normal(16, 6, 4), normal(16, 3)
    model.fit(x, y, epochs=2, verbose=0)
    optimizer = model.optimizer
    biases = [v for v in model.trainable_variables if "bias" in v.path]
    steps = int(optimizer.iterations)
    kept = {v.path: numpy(v) for v in optimizer.variables if "bias" in v.path}
    assert len(kept) == 2 * len(biases)
    kpe.freeze(model)
    assert model.optimizer is optimizer
    assert int(optimizer.iterations) == steps
    slots = optimizer.variables
    assert not any("kernel" in v.path for v in slots)
    shapes = {tuple(v.shape) for v in slots}
    assert (5, 7) not in shapes and (3, 4, 5) not in shapes
    for variable in slots:
        if "bias" in variable.path:
            np.testing.assert_array_equal(numpy(variable), kept[variable.path])
    model.fit(x, y, verbose=0)
    assert int(optimizer.iterations) == steps + 1
    kpe.thaw(model)
    assert int(optimizer.iterations) == steps + 1
    kernel = model.get_layer("wide")._kernel
    before = numpy(kernel)
    model.fit(x, y, verbose=0)
    assert np.any(numpy(kernel) != before)
    fresh = keras.optimizers.Adam()
    fresh.build(model.trainable_variables)
    paths = [v.path.rpartition("/")[2] for v in optimizer.variables]
    assert paths == [v.path.rpartition("/")[2] for v in fresh.variables]


@pytest.mark.extension("recurrent")
def test_a_thawed_model_trains_again():
    model = compiled(tower())
    kpe.freeze(model, granularity="tensor")
    frozen = outputs_of(model, normal(4, 6, 4))
    report = kpe.thaw(model)
    assert len(report.converted) == 4  # The GRU's cell is one layer.
    np.testing.assert_allclose(
        outputs_of(model, normal(4, 6, 4)), frozen, rtol=1e-4, atol=1e-5
    )
    assert all(
        type(x).__module__.startswith("keras.") for x in model._flatten_layers()
    )
    kernel = numpy(model.get_layer("wide")._kernel)
    model.fit(normal(16, 6, 4), normal(16, 3), verbose=0)
    assert np.any(numpy(model.get_layer("wide")._kernel) != kernel)


def test_a_thawed_kernel_is_the_rounded_one():
    model = tower()
    kernel = numpy(model.get_layer("wide")._kernel)
    kpe.freeze(model, weights="float8_e5m2", granularity="tensor")
    kpe.thaw(model)
    np.testing.assert_array_equal(
        numpy(model.get_layer("wide")._kernel),
        dequantized(kernel, (0,), "tensor", "float8_e5m2"),
    )


@pytest.mark.slow_except()
@pytest.mark.full
def test_a_model_trained_in_float8_is_frozen_with_its_scales():
    model = compiled(tower())
    kpe.convert(model, DELAYED)
    x, y = normal(16, 6, 4), normal(16, 3)
    model.fit(x, y, epochs=3, batch_size=8, verbose=0)
    exact = outputs_of(model, x)
    wide = model.get_layer("wide")
    rows = wide.float8_state.of(wide._kernel).rows()
    scale, amax = rows["kernel"][0], rows["inputs"][1].max()
    kpe.freeze(
        model, granularity="tensor", activations="static", trained_scales=True
    )
    stored = wide._kernel.stored
    np.testing.assert_array_equal(stored.scale, [[scale]])
    assert numpy(wide._kernel.inputs_scale) == amax / np.float32(448)
    found = outputs_of(model, x)
    # Rounding to e4m3fn moves a number by 2.6 % (RMS). Five products of two
    # rounded operands, in both models: 2.6 % · √20 is 12 %.
    assert np.linalg.norm(found - exact) < 0.2 * np.linalg.norm(exact)
    assert not any("amax" in v.path for v in model.variables)


@pytest.mark.full
@pytest.mark.parametrize("rate", [2])
def test_gradient_accumulation_goes_on_over_a_frozen_base(rate):
    model = tower()
    optimizer = keras.optimizers.SGD(0.01, gradient_accumulation_steps=rate)
    model.compile(optimizer, "mse", jit_compile=JIT)
    model.fit(normal(8, 6, 4), normal(8, 3), batch_size=4, verbose=0)
    kpe.freeze(model)
    model.fit(normal(8, 6, 4), normal(8, 3), batch_size=4, verbose=0)


@pytest.mark.full
def test_averages_of_weights_start_at_thawed_kernels():
    model = tower()
    optimizer = keras.optimizers.SGD(0.01, use_ema=True, ema_momentum=0.5)
    model.compile(optimizer, "mse", jit_compile=JIT)
    x, y = normal(8, 6, 4), normal(8, 3)
    model.train_on_batch(x, y)
    kpe.freeze(model)
    model.train_on_batch(x, y)
    kpe.thaw(model)
    for name in ("wide", "conv"):
        kernel = model.get_layer(name)._kernel
        place = [v is kernel for v in optimizer._trainable_variables].index(1)
        average = optimizer._model_variables_moving_average[place]
        np.testing.assert_array_equal(numpy(average), numpy(kernel))
    model.train_on_batch(x, y)


@pytest.mark.full
@pytest.mark.slow_except()
def test_an_optimizer_with_loss_scaling_goes_on_over_a_frozen_base():
    keras.config.set_dtype_policy("mixed_float16")
    model = tower()
    optimizer = kpe.mixed_precision.LossScaleOptimizer(
        keras.optimizers.Adam(0.01)
    )
    model.compile(optimizer, "mse", jit_compile=JIT)
    x, y = normal(8, 6, 4), normal(8, 3)
    model.fit(x, y, verbose=0)
    kpe.freeze(model)
    shapes = {tuple(v.shape) for v in optimizer.variables}
    assert (5, 7) not in shapes
    model.fit(x, y, verbose=0)
    kpe.thaw(model)
    kernel = numpy(model.get_layer("wide")._kernel)
    model.fit(x, y, verbose=0)
    assert np.any(numpy(model.get_layer("wide")._kernel) != kernel)
