"""Every way of training that Keras offers, with float8 state in it."""

import copy
import pickle
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from cases import mostly
from keras_policy_ext import reference
from keras_policy_ext.recipes import OPERANDS
from steps import gradients, mean_square, normal, numpy, state_of, step

BACKEND = keras.backend.backend()


def policy(source="mixed_bfloat16", **kwargs):
    return kpe.Float8DTypePolicy(source, amax_history_length=8, **kwargs)


def network(dtype=None, names=("first", "last")):
    dtype = dtype or policy()
    first = kpe.layers.Dense(16, "relu", dtype=dtype, name=names[0])
    last = kpe.layers.Dense(8, dtype=dtype, name=names[1])
    return keras.Sequential([keras.Input((8,)), first, last])


def fit(model, epochs=4, **kwargs):
    x, y = normal(16, 8), normal(16, 8, seed=1)
    options = {"batch_size": 4, "shuffle": False, "verbose": 0, **kwargs}
    return model.fit(x, y, epochs=epochs, **options).history["loss"]


def copy_of(model):
    other = network(model.layers[0].dtype_policy)
    other.set_weights(model.get_weights())
    return other


def assert_same_state(model, other):
    for a, b in zip(model.layers, other.layers, strict=True):
        for operand in OPERANDS:
            for x, y in zip(
                state_of(a)[operand], state_of(b)[operand], strict=True
            ):
                np.testing.assert_array_equal(x, y)


# fit


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize(
    "options",
    [
        {"jit_compile": True},
        {"jit_compile": False},
        {"run_eagerly": True},
    ],
    ids=["compiled", "graph", "eager"],
)
@pytest.mark.slow_except("compiled-delayed", "eager-current", "graph-current")
def test_fit_learns_however_it_is_run(options, recipe):
    model = network(kpe.Float8DTypePolicy("mixed_bfloat16", recipe=recipe))
    model.compile(keras.optimizers.Adam(0.01), "mse", **options)
    losses = fit(model)
    assert losses[-1] < losses[0]
    assert np.isfinite(model.evaluate(normal(4, 8), normal(4, 8), verbose=0))
    assert model.predict(normal(4, 8), verbose=0).shape == (4, 8)


def test_eager_and_compiled_training_agree():
    eager = network(policy("float32"))
    compiled = copy_of(eager)
    eager.compile(keras.optimizers.SGD(0.05), "mse", run_eagerly=True)
    compiled.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=True)
    np.testing.assert_allclose(fit(eager), fit(compiled), rtol=1e-5)
    for a, b in zip(eager.layers, compiled.layers, strict=True):
        for operand in OPERANDS:
            for x, y in zip(
                state_of(a)[operand], state_of(b)[operand], strict=True
            ):
                np.testing.assert_allclose(x, y, rtol=1e-5)


def test_a_custom_loop_trains():
    model = network()
    optimizer = keras.optimizers.Adam(0.01)
    losses = [step(model, optimizer, normal(8, 8), mean_square)]
    for _ in range(10):
        losses.append(step(model, optimizer, normal(8, 8), mean_square))
    assert losses[-1] < losses[0]
    for layer in model.layers:
        for operand in OPERANDS:
            assert np.all(state_of(layer)[operand][1] > 0)


def test_a_loop_that_says_nothing_of_training_observes():
    layer = network().layers[0]
    optimizer = keras.optimizers.SGD(0.0)
    step(layer, optimizer, normal(8, 8), mean_square, training=None)
    seen = state_of(layer)["inputs"][1][0]
    rounded = numpy(ops.cast(ops.cast(normal(8, 8), "bfloat16"), "float32"))
    assert seen == np.abs(rounded).max()


# Moving averages


SWAPS = {
    "at the end": None,
    "for tests": {},
    "after epochs": {"swap_on_epoch": True},
}


@pytest.mark.full
@pytest.mark.parametrize("frequency", mostly([None, 2], 2))
@pytest.mark.parametrize("swap", SWAPS.values(), ids=SWAPS)
@pytest.mark.slow_except("for tests-2")
def test_moving_averages_never_see_the_state(frequency, swap):
    averaged = network()
    plain = copy_of(averaged)
    averaged.compile(
        keras.optimizers.SGD(
            0.0, use_ema=True, ema_overwrite_frequency=frequency
        ),
        "mse",
    )
    plain.compile(keras.optimizers.SGD(0.0), "mse")
    tests = (normal(4, 8, seed=2), normal(4, 8, seed=3))
    swaps = keras.callbacks.SwapEMAWeights
    callbacks = [] if swap is None else [swaps(**swap)]
    fit(averaged, validation_data=tests, callbacks=callbacks)
    fit(plain)
    assert_same_state(averaged, plain)


@pytest.mark.full
def test_averaged_models_are_copied_with_their_optimizers():
    model = network()
    model.compile(keras.optimizers.SGD(0.1, use_ema=True), "mse")
    fit(model, epochs=1)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same_state(model, other)


@pytest.mark.full
def test_moving_averages_of_the_weights_still_happen():
    model = network()
    optimizer = keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.5)
    model.compile(optimizer, "mse")
    plain = copy_of(model)
    plain.compile(keras.optimizers.SGD(0.5), "mse")
    fit(model, epochs=1)
    fit(plain, epochs=1)
    assert not np.array_equal(
        numpy(model.layers[0].kernel), numpy(plain.layers[0].kernel)
    )


# Rematerialization


@pytest.mark.full
@pytest.mark.parametrize(
    "source", mostly(["float32", "mixed_bfloat16"], "mixed_bfloat16")
)
@pytest.mark.parametrize(
    "mode", ["full", "activations", "larger_than", "list_of_layers"]
)
@pytest.mark.slow_except(
    "larger_than-mixed_bfloat16", "list_of_layers-mixed_bfloat16"
)
def test_rematerialization_changes_no_number(mode, source):
    plain = network(policy(source))
    with keras.RematScope(
        mode=mode, output_size_threshold=1, layer_names=["first"]
    ):
        layers = [
            kpe.layers.Dense(16, "relu", dtype=policy(source), name="first"),
            kpe.layers.Dense(8, dtype=policy(source), name="last"),
        ]
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.set_weights(plain.get_weights())
    for network_ in (plain, model):
        network_.compile(keras.optimizers.SGD(0.05), "mse")
    # Another program may sum in another order, also in bfloat16's last place.
    tolerance = 1e-5 if source == "float32" else 2e-2
    np.testing.assert_allclose(fit(model), fit(plain), rtol=tolerance)
    for a, b in zip(model.layers, plain.layers, strict=True):
        np.testing.assert_allclose(
            state_of(a)["inputs"][1], state_of(b)["inputs"][1], rtol=tolerance
        )


# LoRA


def lora_layers():
    dtype = policy("float32")
    return {
        "dense": (kpe.layers.Dense(6, dtype=dtype), (4, 8)),
        "einsum": (
            kpe.layers.EinsumDense(
                "abc,cde->abde", (None, 3, 6), bias_axes="e", dtype=dtype
            ),
            (2, 5, 8),
        ),
        "einsum contracting the last axis": (
            kpe.layers.EinsumDense("abc,dc->abd", (None, 6), dtype=dtype),
            (2, 5, 8),
        ),
        "einsum with a batch axis": (
            kpe.layers.EinsumDense("abc,cb->ab", (8,), dtype=dtype),
            (2, 8, 8),
        ),
        "conv1d": (kpe.layers.Conv1D(6, 3, dtype=dtype), (2, 9, 8)),
        "conv2d": (
            kpe.layers.Conv2D(6, 3, strides=2, padding="same", dtype=dtype),
            (2, 7, 7, 4),
        ),
        "conv in groups": (
            kpe.layers.Conv2D(6, 3, groups=2, dtype=dtype),
            (2, 7, 7, 4),
        ),
    }


# A contraction of each sort; kinds differ in shapes, which are only counted.
KINDS = mostly(
    lora_layers(), "dense", "einsum contracting the last axis", "conv in groups"
)


@pytest.mark.full_except("einsum contracting the last axis")
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_add_what_stock_adapters_add(kind):
    layer, shape = lora_layers()[kind]
    layer.build((None, *shape[1:]))
    x = normal(*shape)
    before = numpy(layer(x, training=False))
    layer.enable_lora(2, lora_alpha=3)
    np.testing.assert_array_equal(before, numpy(layer(x, training=False)))
    layer.lora_kernel_b.assign(normal(*layer.lora_kernel_b.shape))
    added = numpy(layer(x, training=False)) - before

    stock_class = getattr(keras.layers, type(layer).__name__)
    config = {**layer.get_config(), "dtype": "float32"}
    config.pop("lora_rank")
    config.pop("lora_alpha")
    stock = stock_class.from_config(config)
    stock.build((None, *shape[1:]))
    stock.set_weights([numpy(w) for w in stock_weights(layer)])
    plain = numpy(stock(x))
    stock.enable_lora(2, lora_alpha=3)
    stock.lora_kernel_a.assign(numpy(layer.lora_kernel_a))
    stock.lora_kernel_b.assign(numpy(layer.lora_kernel_b))
    expected = numpy(stock(x)) - plain
    np.testing.assert_allclose(added, expected, rtol=1e-3, atol=1e-4)


def stock_weights(layer):
    return [w for w in layer.weights if "lora" not in w.name][
        : 1 + (layer.bias is not None)
    ]


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow_except("dense")
def test_adapters_train_and_the_kernel_does_not(kind):
    layer, shape = lora_layers()[kind]
    layer.build((None, *shape[1:]))
    layer.enable_lora(2)
    kernel = numpy(layer._kernel)
    optimizer = keras.optimizers.Adam(0.05)
    x = normal(*shape)
    losses = [step(layer, optimizer, x, mean_square) for _ in range(8)]
    assert losses[-1] < losses[0]
    np.testing.assert_array_equal(kernel, numpy(layer._kernel))
    assert np.any(numpy(layer.lora_kernel_b) != 0)
    assert np.all(state_of(layer)["outputs_grad"][1] > 0)


def test_a_small_adapter_is_not_rounded_away():
    layer = kpe.layers.Dense(8, dtype=policy("float32"), use_bias=False)
    layer.build((None, 8))
    layer.enable_lora(1)
    layer.lora_kernel_a.assign(np.full((8, 1), 1e-5, "float32"))
    x = np.ones((1, 8), "float32")
    before = numpy(layer(x))
    layer.lora_kernel_b.assign(np.ones((1, 8), "float32"))
    np.testing.assert_allclose(numpy(layer(x)) - before, 8e-5, rtol=0.02)


# Freezing


def test_a_frozen_layer_keeps_its_state_and_passes_gradients():
    model = network()
    model.compile(keras.optimizers.SGD(0.01), "mse")
    fit(model, epochs=1)
    frozen = model.layers[1]
    before = state_of(frozen)
    kernel = numpy(model.layers[0].kernel)
    frozen.trainable = False
    model.compile(keras.optimizers.SGD(0.01), "mse")
    fit(model, epochs=1)
    for operand in OPERANDS:
        np.testing.assert_array_equal(
            before[operand][1], state_of(frozen)[operand][1]
        )
    assert not np.array_equal(kernel, numpy(model.layers[0].kernel))
    frozen.trainable = True
    model.compile(keras.optimizers.SGD(0.01), "mse")
    fit(model, epochs=1)
    assert not np.array_equal(
        before["inputs"][1], state_of(frozen)["inputs"][1]
    )


def test_a_frozen_layer_that_never_trained_is_scaled():
    layer = kpe.layers.Dense(64, dtype=policy("float32"), trainable=False)
    layer.build((None, 64))
    layer.kernel.assign(normal(64, 64) * 1e-3)
    x = normal(16, 64, seed=2)
    y = numpy(layer(x, training=True))
    assert reference.sqnr_db(x @ numpy(layer.kernel), y) > 25


# Steps that are skipped


def test_a_non_finite_gradient_is_skipped_by_the_loss_scaler():
    for recipe in ("delayed", "current"):
        layer = kpe.layers.Dense(
            8, dtype=kpe.Float8DTypePolicy("mixed_float16", recipe=recipe)
        )
        layer.build((None, 8))
        scaler = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
        scaler.build(layer.trainable_variables)
        before = [numpy(w) for w in layer.weights]
        _, _, grads = gradients(
            layer,
            normal(4, 8),
            lambda y: ops.sum(ops.multiply(y, float("inf"))),
        )
        apply_scaled(scaler, grads, layer.trainable_variables)
        for a, b in zip(before, layer.weights, strict=True):
            np.testing.assert_array_equal(a, numpy(b))
        assert float(numpy(scaler.dynamic_scale)) == scaler.initial_scale / 2


def apply_scaled(scaler, grads, variables):
    if BACKEND != "jax":
        scaler.apply(grads, variables)
        return
    # On JAX its `apply` leaks a tracer (keras 3.15); the trainer uses this.
    values, own = scaler.stateless_apply(
        [v.value for v in scaler.variables],
        grads,
        [v.value for v in variables],
    )
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
    for variable, value in zip(scaler.variables, own, strict=True):
        variable.assign(value)


# Replicas


@pytest.mark.full
@pytest.mark.skipif(
    BACKEND != "tensorflow", reason="MirroredStrategy is TensorFlow's"
)
def test_replicas_observe_the_largest_amax():
    # A process of its own: virtual devices are made before TensorFlow starts.
    program = """
        import numpy as np, tensorflow as tf
        cpu = tf.config.list_physical_devices("CPU")[0]
        two = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(cpu, two)
        import keras, keras_policy_ext as kpe
        policy = kpe.Float8DTypePolicy("float32", amax_history_length=2)
        x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
        for spike in (1, 6):
            x[spike, 2] = 10.0 * spike
            with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
                layer = kpe.layers.Dense(3, dtype=policy)
                model = keras.Sequential([keras.Input((4,)), layer])
                model.compile("sgd", "mse", jit_compile=False)
            model.fit(x, x[:, :3], batch_size=8, shuffle=False, verbose=0)
            matrix = layer.float8_state.matrices[0].value
            print([float(v.numpy()[0, 10]) for v in matrix.values])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split("\n")[:2] == ["[10.0, 10.0]", "[60.0, 60.0]"]


# torch


@pytest.mark.skipif(BACKEND != "torch", reason="torch.compile is torch's")
def test_torch_compile_gives_the_numbers_of_eager():
    import torch

    layer = kpe.layers.Dense(8, dtype=policy("float32"))
    layer.build((None, 8))
    x = torch.tensor(normal(4, 8))
    eager = layer(x, training=True)
    compiled = torch.compile(lambda x: layer(x, training=True))(x)
    np.testing.assert_allclose(
        eager.detach().numpy(), compiled.detach().numpy(), rtol=1e-6, atol=1e-6
    )
    compiled.sum().backward()
    assert torch.isfinite(layer.kernel.value.grad).all()


@pytest.mark.skipif(BACKEND != "torch", reason="torch.autocast is torch's")
@pytest.mark.parametrize("narrow", ["float16", "bfloat16"])
def test_torch_autocast_does_not_narrow_the_products(narrow):
    import torch

    layer = kpe.layers.Dense(3, dtype=policy("float32"))
    layer.build((None, 8))
    x = torch.tensor(normal(4, 8) * 100)
    alone = layer(x)
    with torch.autocast("cpu", dtype=getattr(torch, narrow)):
        inside = layer(x)
        inside.sum().backward()
    np.testing.assert_array_equal(numpy(alone), numpy(inside))
    assert torch.isfinite(layer.kernel.value.grad).all()
