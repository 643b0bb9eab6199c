"""Why `_keras/optimizer_variables.py` is needed. See `_keras/__init__.py`."""

import warnings

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from keras_policy_ext._keras import optimizer_variables
from public_api import lists_with, members_about

BACKEND = keras.backend.backend()
DELAYED = kpe.Float8DTypePolicy("mixed_bfloat16")


def variable(name):
    return keras.Variable(np.ones(2, "float32"), name=name)


def built(*variables):
    optimizer = keras.optimizers.SGD(momentum=0.5)
    optimizer.build(list(variables))
    return optimizer


def test_an_optimizer_does_not_tell_for_which_variables_it_was_built():
    first = variable("first")
    optimizer = built(first)
    assert lists_with(optimizer, first) == []
    (known,) = optimizer_variables.known_to_optimizer(optimizer)
    assert known is first


def test_a_built_optimizer_takes_no_more_variables():
    first, state = variable("first"), variable("state")
    state.overwrite_with_gradient = True
    optimizer = built(first)
    gradients = [keras.ops.ones(2)] * 2
    optimizer.build([first, state])  # Does nothing the second time.
    with pytest.raises(ValueError, match="optimizer"):
        optimizer.apply(gradients, [first, state])
    words = ("build", "extend", "track", "variables")
    assert members_about(type(optimizer), *words) == [
        "add_optimizer_variables",
        "build",
        "load_own_variables",
        "save_own_variables",
        "variables",
    ]
    slots = optimizer.variables
    optimizer_variables.retarget_optimizer(optimizer, [first, state])
    optimizer.apply(gradients, [first, state])
    for now, before in zip(optimizer.variables, slots, strict=True):
        assert now is before


@pytest.mark.skipif(
    BACKEND != "tensorflow", reason="TensorFlow has checkpoints of objects"
)
@pytest.mark.parametrize("replaced", ["element", "list"])
def test_tensorflow_saves_no_list_whose_elements_were_replaced(
    replaced, tmp_path
):
    import tensorflow as tf

    optimizer, other = built(variable("first")), variable("other")
    checkpoint = tf.train.Checkpoint(optimizer)
    name = "_trainable_variables"
    if replaced == "list":
        optimizer_variables._replace_list(optimizer, name, [other])
        checkpoint.save(tmp_path / "checkpoint")
        return
    getattr(optimizer, name)[0] = other
    with pytest.raises(ValueError, match="Unable to save"):
        checkpoint.save(tmp_path / "checkpoint")


@pytest.mark.extension("delayed")
def test_keras_names_states_without_gradients_and_we_leave_them_out():
    keras.layers.Dense(2, dtype=DELAYED).build((None, 2))  # The first state.
    weight, state = variable("weight"), variable("state")
    state.overwrite_with_gradient = True
    optimizer = built(weight, state)
    pairs = [keras.ops.ones(2), None], [weight, state]
    stock = optimizer._filter_empty_gradients.__wrapped__
    with pytest.warns(UserWarning, match="do not exist.*state"):
        stock(optimizer, *pairs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.apply(*pairs)
    assert np.all(keras.ops.convert_to_numpy(state.value) == 1)
    with pytest.warns(UserWarning, match=r"do not exist for .*\['weight'\]"):
        optimizer.apply([None, keras.ops.ones(2)], pairs[1])
    with pytest.raises(ValueError, match="No gradients"):
        optimizer.apply([None, None], pairs[1])


def test_a_head_without_a_loss_is_named_without_its_state():
    x = keras.Input((8,))
    heads = [keras.layers.Dense(4, name=name)(x) for name in ("used", "idle")]
    model = keras.Model(x, heads)
    kpe.convert(model, "delayed")
    model.compile("sgd", loss=["mse", None])
    arrays = np.ones((4, 8), "float32"), np.ones((4, 4), "float32")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(arrays[0], [arrays[1]] * 2, verbose=0)
    told = [str(e.message) for e in caught if "do not exist" in str(e.message)]
    assert len(told) == (BACKEND != "jax")
    assert all("idle/kernel" in each for each in told)
    assert not any("float8_state" in each for each in told)
