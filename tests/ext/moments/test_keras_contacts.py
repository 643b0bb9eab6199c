"""Why `ext/moments/_keras/` is needed."""

import keras
import numpy as np
import pytest

from keras_policy_ext._keras import optimizer_variables
from keras_policy_ext.ext.moments import _keras, moment_kernels
from keras_policy_ext.ext.moments.slots import WeightPart
from public_api import members_about

BACKEND = keras.backend.backend()


def variable(name):
    return keras.Variable(np.ones(2, "float32"), name=name)


def built(*variables):
    optimizer = keras.optimizers.SGD(momentum=0.5)
    optimizer.build(list(variables))
    return optimizer


def test_a_stock_optimizer_reads_the_entries_of_a_file_by_their_number():
    """So another method has to put them into this form: `around_loading`."""
    optimizer = built(variable("first"))
    read = []

    class Store(dict):
        def __getitem__(self, key):
            read.append(key)
            return super().__getitem__(key)

    optimizer.load_own_variables(
        Store({str(i): v.numpy() for i, v in enumerate(optimizer.variables)})
    )
    assert read == ["0", "1", "2"]


def test_slots_are_made_by_a_method_that_knows_their_names():
    """A slot of codes is made in it, and then tracked: `track`."""
    names = []

    class Watched(keras.optimizers.SGD):
        def add_variable(self, *args, name=None, **kwargs):
            names.append(name)
            return super().add_variable(*args, name=name, **kwargs)

    optimizer = Watched(momentum=0.5)
    optimizer.build([variable("first")])
    assert names == ["first_momentum"]
    extra = variable("extra")
    _keras.track(optimizer, extra)
    assert optimizer.variables[-1] is extra
    optimizer_variables.replace_slots(
        optimizer, {id(optimizer.momentums[0]): variable("other")}
    )
    assert [v.name for v in optimizer.variables[2:]] == ["other", "extra"]
    assert optimizer.momentums[0].name == "other"


def test_an_optimizer_finds_the_slots_of_a_variable_and_of_no_part():
    whole = variable("whole")
    optimizer = built(whole)
    part = WeightPart(whole, whole.value)
    assert members_about(type(optimizer), "slots", "index", "key") == []
    assert _keras.takes_parts(optimizer)
    with pytest.raises((AttributeError, KeyError)):
        optimizer.update_step(keras.ops.ones(2), part, 0.1)
    (slot,) = _keras.slots_of_variable(optimizer, whole)
    assert slot is optimizer.momentums[0]


@pytest.mark.skipif(BACKEND != "torch", reason="PyTorch has fused updates")
@pytest.mark.parametrize("cls", [keras.optimizers.Adam, keras.optimizers.Lion])
def test_no_public_class_says_how_it_updates_several_weights(cls):
    assert not hasattr(cls, "_parallel_update_step")
    assert members_about(cls, "parallel", "fused", "foreach") == []
    update = _keras.fused_update(cls)
    x = variable("x")
    optimizer = cls(0.1)
    optimizer.build([x])
    with moment_kernels.current.in_place():
        update(optimizer, [keras.ops.ones(2)], [x], 0.1)
    assert np.all(keras.ops.convert_to_numpy(x) < 1)
