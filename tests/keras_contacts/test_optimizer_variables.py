"""Why `_keras/optimizer_variables.py` is needed. See `_keras/__init__.py`."""

import keras
import numpy as np
import pytest

from keras_policy_ext._keras import optimizer_variables
from public_api import lists_with, members_about

BACKEND = keras.backend.backend()


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


def test_an_optimizer_does_not_tell_what_it_excludes_from_weight_decay():
    first, wide, other = map(variable, ["first", "wide", "other"])
    optimizer = keras.optimizers.SGD(weight_decay=0.1)
    optimizer.exclude_from_weight_decay([first])
    words = ("decay", "exclu")
    assert set(members_about(type(optimizer), *words)) <= {
        "exclude_from_weight_decay"
    }
    assert lists_with(optimizer, first) == []
    optimizer_variables.follow_weight_decay_exclusions(
        optimizer, [(first, wide)]
    )
    optimizer.apply([keras.ops.zeros(2)] * 2, [wide, other])
    assert keras.ops.max(other) < keras.ops.max(wide) == 1
