"""Optimizers of the user's own, with a slot for each variable they get."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from steps import no_grad, numpy


class Momentum(keras.optimizers.Optimizer):
    """As Keras's guide has one: a slot for each variable, states too."""

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self.momentums = [
            self.add_variable_from_reference(v, "momentum") for v in variables
        ]

    def update_step(self, gradient, variable, learning_rate):
        slot = self.momentums[self._get_variable_index(variable)]
        rate = ops.cast(learning_rate, variable.dtype)
        self.assign(slot, 0.9 * slot + gradient)
        self.assign_sub(variable, rate * slot)


def compiled():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    model.compile(Momentum(0.1, name="own"), "mse")
    return model


def trained(model):
    optimizer, variables = model.optimizer, model.trainable_variables
    optimizer.build(variables)
    gradients = [ops.ones(v.shape) for v in variables if "amax" not in v.path]
    weights = [v for v in variables if "amax" not in v.path]
    with no_grad():
        optimizer.apply(gradients, weights)


def delayed(model):
    """Convert with a state for each kernel, which the optimizer gets too."""
    return kpe.convert(model, "delayed")


STEPS = {
    "converted at first": [delayed, trained],
    "converted midway": [trained, delayed, trained],
    "reverted midway": [delayed, trained, kpe.revert, trained],
    "both": [trained, delayed, trained, kpe.revert],
}


@pytest.mark.parametrize("steps", STEPS)
def test_an_optimizer_of_ones_own_is_loaded_as_it_was_live(steps, tmp_path):
    model = compiled()
    for step in STEPS[steps]:
        step(model)
    model.save(tmp_path / "model.keras")
    loaded = kpe.load_model(
        tmp_path / "model.keras", custom_objects={"Momentum": Momentum}
    )
    for each in (model, loaded):
        trained(each)
    live, again = model.optimizer.variables, loaded.optimizer.variables
    assert len(live) == len(again)
    for one, two in zip(live, again, strict=True):
        np.testing.assert_array_equal(numpy(one), numpy(two))
    for one, two in zip(model.weights, loaded.weights, strict=True):
        np.testing.assert_array_equal(numpy(one), numpy(two))


def test_slots_of_weights_stay_where_states_come_and_go():
    model = compiled()
    trained(model)
    slots = list(model.optimizer.momentums)
    values = [numpy(slot) for slot in slots]
    for change in (delayed, kpe.revert):
        change(model)
        ids = set(map(id, slots))
        kept = [s for s in model.optimizer.momentums if id(s) in ids]
        assert len(kept) == len(slots)
    for slot, value in zip(slots, values, strict=True):
        np.testing.assert_array_equal(numpy(slot), value)
