"""What stock Keras does not tell of assignments. See `_keras/__init__.py`."""

import keras
import numpy as np
import pytest

from keras_policy_ext._keras import variable_values
from keras_policy_ext.ext.delayed import _keras
from steps import no_grad


@pytest.fixture(scope="module", autouse=True)
def installed():
    """Keras notifies companions once there is a state."""
    _keras.install()


class Beside(_keras.Companion):
    """Counts what it is told."""

    def __init__(self, variable):
        self.variable = variable
        self.assigned = self.stepped = 0
        _keras.watch(variable, self)

    def assigned_beside(self):
        self.assigned += 1

    def stepped_beside(self):
        self.stepped += 1


def test_keras_has_no_hook_for_assignments():
    public = [name for name in dir(keras.Variable) if name[0] != "_"]
    assert not [name for name in public if "hook" in name or "on_" in name]
    assert not hasattr(keras.optimizers.Optimizer, "trainable_variables")


def test_an_assignment_is_told_and_not_that_of_an_optimizer():
    variable = keras.Variable(np.ones(2, "float32"))
    beside = Beside(variable)
    variable.assign(np.zeros(2, "float32"))
    variable.assign_add(np.ones(2, "float32"))
    assert beside.assigned == 2
    with variable_values.without_notifying():
        variable.assign(np.zeros(2, "float32"))
    optimizer = keras.optimizers.SGD(0.1)
    with no_grad():
        optimizer.apply([keras.ops.ones(2)], [variable])
    assert (beside.assigned, beside.stepped) == (2, 1)
    assert beside.left_out


def test_who_is_gone_is_told_nothing():
    variable = keras.Variable(np.ones(2, "float32"))
    Beside(variable)
    variable.assign(np.zeros(2, "float32"))
    other = Beside(variable)
    variable.assign(np.ones(2, "float32"))
    assert other.assigned == 1
