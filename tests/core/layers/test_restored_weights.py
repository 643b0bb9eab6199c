"""Checkpoints that are restored variable by variable, in any order.

What was saved has kernels that have outgrown their states, as after any step:
a state that follows its kernel would be another one.
"""

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from steps import normal, numpy, relative_rms, step
from ways import BACKEND

X = normal(16, 8)

ROUNDED = 0.1
"""More than e4m3 rounds a product by, less than a cut kernel is off."""


def built(seed, recipe="delayed"):
    keras.utils.set_random_seed(seed)
    hidden = keras.layers.Dense(8, "relu", name="hidden")
    outputs = keras.layers.Dense(4, name="scores")
    model = keras.Sequential([keras.Input((8,)), hidden, outputs], name="net")
    kpe.convert(model, recipe)
    return model


def trained(recipe="delayed"):
    """A model whose kernels exceed their recorded amaxes, and its outputs."""
    model = built(0, recipe)
    for _ in range(2):
        step(model, keras.optimizers.Adam(0.1), X, growing)
    return model, numpy(model(X, training=False))


def growing(y):
    """A loss that makes kernels larger."""
    return -ops.mean(ops.square(y))


def by_path(model):
    return {v.path: np.array(numpy(v)) for v in model.variables}


def outgrown(model):
    """By how much kernels exceed the newest amaxes that were recorded."""
    pairs = [(s.kernel, s) for layer in model.layers for s in states(layer)]
    return [np.abs(numpy(k)).max() / s.newest("kernel") for k, s in pairs]


def states(layer):
    return layer.float8_state.matrices


def shuffled(paths):
    return list(np.random.default_rng(3).permutation(sorted(paths)))


ORDERS = {
    "states_first": sorted,
    "kernels_first": lambda paths: sorted(paths, reverse=True),
    "all_states_then_kernels": lambda paths: sorted(
        paths, key=lambda path: "float8_state" not in path
    ),
    "all_kernels_then_states": lambda paths: sorted(
        paths, key=lambda path: "float8_state" in path
    ),
    "shuffled": shuffled,
}

KINDS = {"array": np.asarray, "tensor": ops.convert_to_tensor}


def restore(model, saved, order, kind="array"):
    variables = {v.path: v for v in model.variables}
    assert sorted(saved) == sorted(variables)
    for path in ORDERS[order](saved):
        variables[path].assign(KINDS[kind](saved[path]))


def assert_is(model, saved, outputs):
    found = numpy(model(X, training=False))
    for path, value in by_path(model).items():
        np.testing.assert_array_equal(value, saved[path], path)
    np.testing.assert_array_equal(found, outputs)


def untouched(model):
    pass


def called(model):
    model(X, training=False)


def predicted(model):
    model.predict(X, verbose=0)


def enlarged(model):
    """Its kernels alone were assigned, far larger, and nobody used it."""
    for layer in model.layers:
        layer.kernel.assign(20 * numpy(layer.kernel))


def fitted(model):
    step(model, keras.optimizers.Adam(0.5), X, growing)


def test_what_is_restored_here_has_outgrown_kernels():
    model, _ = trained()
    assert all(1.05 < ratio < 2.0 for ratio in outgrown(model))


@pytest.mark.parametrize("before", [untouched, called, enlarged, fitted])
@pytest.mark.parametrize("order", ORDERS)
def test_arrays_by_path_restore_the_model_in_any_order(order, before):
    model, outputs = trained()
    saved = by_path(model)
    other = built(5)
    before(other)
    restore(other, saved, order)
    assert_is(other, saved, outputs)


@pytest.mark.parametrize("before", [untouched, called, fitted])
@pytest.mark.parametrize("order", ORDERS)
def test_tensors_by_path_restore_the_model_in_any_order(order, before):
    model, outputs = trained()
    saved = by_path(model)
    other = built(5)
    before(other)
    restore(other, saved, order, "tensor")
    assert_is(other, saved, outputs)


@pytest.mark.full
@pytest.mark.parametrize("order", ORDERS)
def test_a_compiled_forward_pass_uses_what_was_restored(order):
    model, _ = trained()
    saved, outputs = by_path(model), model.predict(X, verbose=0)
    other = built(5)
    predicted(other)
    restore(other, saved, order)
    np.testing.assert_array_equal(other.predict(X, verbose=0), outputs)


@pytest.mark.parametrize("second", ORDERS)
@pytest.mark.parametrize("first", ["states_first", "kernels_first"])
def test_the_second_of_two_checkpoints_is_restored(first, second):
    model, _ = trained()
    earlier = by_path(model)
    step(model, keras.optimizers.Adam(0.2), X, growing)
    later, outputs = by_path(model), numpy(model(X, training=False))
    other = built(5)
    restore(other, earlier, first)
    restore(other, later, second)
    assert_is(other, later, outputs)


def test_a_value_that_is_read_between_two_assignments_changes_nothing():
    model, outputs = trained()
    saved = by_path(model)
    other = built(5)
    for variable in sorted(other.variables, key=lambda v: v.path):
        variable.assign(saved[variable.path])
        np.testing.assert_array_equal(numpy(variable), saved[variable.path])
    assert_is(other, saved, outputs)


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
@pytest.mark.parametrize("order", ["states_first", "kernels_first"])
def test_training_goes_on_as_it_would_have(recipe, order):
    def goes_on(model):
        for _ in range(2):
            sgd = keras.optimizers.SGD(2.0**-4)
            step(model, sgd, X, growing)
        return model.get_weights()

    model, _ = trained(recipe)
    saved = by_path(model)
    other = built(5, recipe)
    restore(other, saved, order)
    keras.utils.set_random_seed(7)
    wanted = goes_on(model)
    keras.utils.set_random_seed(7)
    for one, two in zip(goes_on(other), wanted, strict=True):
        np.testing.assert_array_equal(one, two)


# A kernel that is assigned by itself


def error(model):
    """How far the first layer is off the product in float32."""
    layer = model.layers[0]
    kernel, bias = numpy(layer.kernel), numpy(layer.bias)
    wanted = np.maximum(X @ kernel + bias, 0)
    return relative_rms(numpy(layer(X, training=False)), wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ["states_first", "kernels_first"])
@pytest.mark.parametrize("factor", [1.5, 3.0, 20.0])
def test_a_kernel_assigned_after_a_restored_model_ran_is_not_cut(
    factor, order, kind
):
    model, _ = trained()
    other = built(5)
    restore(other, by_path(model), order, kind)
    called(other)
    kernel = factor * numpy(other.layers[0].kernel)
    other.layers[0].kernel.assign(KINDS[kind](kernel))
    assert error(other) < ROUNDED


@pytest.mark.parametrize("order", ["states_first", "kernels_first"])
def test_a_kernel_far_off_the_state_before_it_is_not_cut(order):
    """As if it were another's; twice what a step of training may do."""
    model, _ = trained()
    saved = by_path(model)
    kernel = model.layers[0].kernel.path
    saved[kernel] = 20 * saved[kernel]
    restore(model, saved, order)
    assert error(model) < ROUNDED


def test_a_kernel_assigned_after_set_weights_is_not_cut():
    model, _ = trained()
    other = built(5)
    other.set_weights(model.get_weights())
    kernel = other.layers[0].kernel
    kernel.assign(1.5 * numpy(kernel))
    assert error(other) < ROUNDED


@pytest.mark.parametrize("way", ["fit", "step"])
def test_a_kernel_assigned_after_training_forgets_no_other_operand(way):
    """What was given before is not given once a step has changed it."""
    model = built(5)
    restore(model, by_path(trained()[0]), "kernels_first")
    if way == "fit":
        model.compile("sgd", "mse")
        model.fit(9 * X, np.zeros((16, 4)), verbose=0)
    else:
        step(model, keras.optimizers.SGD(0.01), 9 * X, lambda y: ops.mean(y))
    (state,) = states(model.layers[0])
    newest = state.newest("inputs")
    assert newest == np.abs(9 * X).max()
    model.layers[0].kernel.assign(3 * numpy(model.layers[0].kernel))
    assert error(model) < ROUNDED
    assert state.newest("inputs") == newest


# Ways of a framework


@pytest.mark.skipif(BACKEND != "jax", reason="a function of JAX")
@pytest.mark.parametrize("order", ["kernels_first", "states_first"])
def test_a_function_that_is_compiled_after_that_uses_the_model(order):
    import jax

    model, outputs = trained()
    saved = by_path(model)
    other = built(5)
    restore(other, saved, order)
    jax.jit(lambda x: other(x, training=False))(X)
    assert_is(other, saved, outputs)


@pytest.mark.skipif(BACKEND != "jax", reason="orbax restores JAX's arrays")
@pytest.mark.parametrize("order", ["kernels_first", "states_first"])
def test_orbax_restores_the_model(order, tmp_path):
    orbax = pytest.importorskip("orbax.checkpoint")
    model, outputs = trained()
    saved = by_path(model)
    nested = {path.replace("/", "."): x for path, x in saved.items()}
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", nested)
        checkpointer.wait_until_finished()
        found = checkpointer.restore(tmp_path / "checkpoint")
    found = {path.replace(".", "/"): x for path, x in found.items()}
    other = built(5)
    variables = {v.path: v for v in other.variables}
    for path in ORDERS[order](found):
        variables[path].assign(found[path])
    assert_is(other, saved, outputs)
