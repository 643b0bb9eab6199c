"""One-byte state in copies, checkpoints, `set_weights` and other steps."""

import copy
import pickle

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from keras_policy_ext.ext.moments.slots import QuantizedSlot
from keras_policy_ext.optimizers import dequantize_state, quantize_state
from refusals import refused
from steps import no_grad, normal, numpy

BACKEND = keras.backend.backend()
SHAPE = (20, 30)
"""Of 3 blocks, the last of which is not full."""

only_tensorflow = pytest.mark.skipif(
    BACKEND != "tensorflow", reason="a class of TensorFlow"
)


def adam(**options):
    optimizer = keras.optimizers.Adam(0.01, **options)
    return quantize_state(optimizer, minimum_size=1)


def stepped(optimizer, steps=1, first=0):
    """The optimizer after some steps, and its weight."""
    variable = keras.Variable(normal(*SHAPE, seed=9))
    optimizer.build([variable])
    step(optimizer, variable, steps, first)
    return optimizer, variable


def step(optimizer, variable, steps=1, first=0):
    for seed in range(first, first + steps):
        apply(optimizer, variable, normal(*SHAPE, seed=seed))


def apply(optimizer, variable, gradient):
    gradient = ops.convert_to_tensor(gradient)
    if BACKEND != "jax":
        with no_grad():
            optimizer.apply([gradient], [variable])
        return
    # Keras's loss scaler knows no other way there.
    (value,), state = optimizer.stateless_apply(
        [v.value for v in optimizer.variables], [gradient], [variable.value]
    )
    for each, new in zip(optimizer.variables, state, strict=True):
        each.assign(new)
    variable.assign(value)


def bits(optimizer):
    return [numpy(v).copy() for v in optimizer.variables]


def equal(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))]
)
def test_a_copy_of_an_optimizer_is_not_built_as_in_keras(copied):
    optimizer, _ = stepped(adam(weight_decay=0.1))
    again = copied(optimizer)
    assert type(again) is type(optimizer) and not again.built
    assert again.get_config() == optimizer.get_config()
    other, _ = stepped(again)
    assert equal(bits(other), bits(optimizer))


@pytest.mark.full
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))]
)
@pytest.mark.slow_except("<lambda>")
def test_a_copy_of_a_model_has_state_of_its_own(copied):
    model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(30)])
    model.compile(adam(), "mse")
    batch = normal(8, 20), normal(8, 30, seed=1)
    model.train_on_batch(*batch)
    again = copied(model)
    before = bits(again.optimizer)
    assert equal(before, bits(model.optimizer))
    model.train_on_batch(*batch)
    assert equal(before, bits(again.optimizer))
    again.train_on_batch(*batch)
    assert equal(bits(model.optimizer), bits(again.optimizer))


def test_set_weights_sets_all_or_nothing():
    optimizer, variable = stepped(adam(), 2)
    before = bits(optimizer)
    plain, _ = stepped(dequantize_state(adam()))
    wrong = [before[:-1], [*before[:-1], before[-1][:1]], bits(plain)]
    for weights in wrong:
        with refused(ValueError, "do not fit", "(20, 30)", "(3,)"):
            optimizer.set_weights([np.zeros_like(each) for each in weights])
        assert equal(before, bits(optimizer))
    with refused(ValueError, "do not fit", "(20, 30)", "is built"):
        adam().set_weights(before)
    other, its_weight = stepped(adam())
    its_weight.assign(variable)
    other.set_weights(before)
    step(optimizer, variable, first=5)
    step(other, its_weight, first=5)
    assert equal(bits(optimizer), bits(other))


def test_slots_have_the_paths_of_stock_ones():
    stock, _ = stepped(keras.optimizers.Adam(name="mine"))
    paths = [v.path for v in stock._variables]
    made = quantize_state(keras.optimizers.Adam(name="mine"), minimum_size=1)
    made, _ = stepped(made)
    stock.iterations.assign(0)  # no step was traced
    quantize_state(stock, minimum_size=1)
    # A name has the number of the weight.
    ends = [path.rpartition("_")[2] for path in paths]
    for each in (stock, made):
        found = [v.path for v in each._variables]
        assert [path.rpartition("_")[2] for path in found] == ends
        assert [path.count("/") for path in found] == [1] * len(paths)


@pytest.mark.skipif(BACKEND != "torch", reason="an optimizer of PyTorch")
def test_an_optimizer_of_pytorch_is_refused():
    import torch

    theirs = torch.optim.Adam([torch.nn.Parameter(torch.ones(3))])
    with refused(TypeError, "not a Keras", "torch.optim", "optimizer.apply"):
        quantize_state(theirs)


SCALERS = {
    "own": lambda: kpe.mixed_precision.LossScaleOptimizer(adam()),
    "fixed": lambda: kpe.mixed_precision.LossScaleOptimizer(
        adam(), dynamic=False, initial_scale=8.0
    ),
    "Keras's": lambda: keras.optimizers.LossScaleOptimizer(adam()),
    "accumulating": lambda: keras.optimizers.LossScaleOptimizer(
        adam(gradient_accumulation_steps=2)
    ),
}


@pytest.mark.filterwarnings("ignore:The loss is not scaled")
@pytest.mark.full_except("own-nan")
@pytest.mark.parametrize("form", ["nan", "inf"])
@pytest.mark.parametrize("name", SCALERS)
def test_a_step_that_is_skipped_changes_no_bit(name, form):
    scaler, variable = stepped(SCALERS[name](), 2)
    before = bits(scaler.inner_optimizer)
    weight = numpy(variable).copy()
    gradient = normal(*SHAPE)
    gradient[3, 5] = float(form)
    apply(scaler, variable, gradient)
    assert equal(before, bits(scaler.inner_optimizer))
    assert equal([weight], [numpy(variable)])
    step(scaler, variable, 2)
    assert not equal(before, bits(scaler.inner_optimizer))


@pytest.mark.parametrize("moments", ["float8", "mx"])
def test_nan_without_a_scaler_leaves_finite_slots(moments):
    optimizer = quantize_state(keras.optimizers.Adam(), moments, minimum_size=1)
    optimizer, variable = stepped(optimizer, 2)
    gradient = normal(*SHAPE)
    gradient[3, 5] = np.nan
    apply(optimizer, variable, gradient)
    slots = [v for v in optimizer._variables if isinstance(v, QuantizedSlot)]
    assert len(slots) == 2
    assert all(np.all(np.isfinite(slot.numpy())) for slot in slots)


@only_tensorflow
def test_tf_checkpoints_keep_all_bits(tmp_path):
    import tensorflow as tf

    optimizer, variable = stepped(adam(), 2)
    checkpoint = tf.train.Checkpoint(optimizer=optimizer)
    path = checkpoint.save(tmp_path / "one")
    before = bits(optimizer)
    step(optimizer, variable)
    assert not equal(before, bits(optimizer))
    checkpoint.restore(path).assert_consumed()
    assert equal(before, bits(optimizer))
    # One that is not built gets its slots when it is.
    other = adam()
    tf.train.Checkpoint(optimizer=other).restore(path)
    other.build([variable])
    assert equal(before, bits(other))
    # Another form has no entry for a slot.
    plain, _ = stepped(keras.optimizers.Adam(0.01))
    unchanged = bits(plain)
    with pytest.raises(tf.errors.NotFoundError, match="VARIABLE_VALUE"):
        tf.train.Checkpoint(optimizer=plain).restore(path)
    assert equal(unchanged, bits(plain))
    path = tf.train.Checkpoint(optimizer=plain).save(tmp_path / "plain")
    with pytest.raises(tf.errors.NotFoundError, match="quantized_codes"):
        checkpoint.restore(path)
    assert equal(before, bits(optimizer))


@pytest.mark.full
@only_tensorflow
def test_a_step_that_was_traced_before_is_told_of():
    model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(30)])
    model.compile(keras.optimizers.Adam(), "mse")
    batch = normal(8, 20), normal(8, 30, seed=1)
    model.train_on_batch(*batch)
    for change in (
        lambda each: quantize_state(each, minimum_size=1),
        dequantize_state,
    ):
        with pytest.warns(UserWarning, match=r"make_train_function\(force"):
            change(model.optimizer)
        model.make_train_function(force=True)
        before = bits(model.optimizer)[2]
        model.train_on_batch(*batch)
        assert not np.array_equal(before, bits(model.optimizer)[2])


class Rows(keras.optimizers.Optimizer):
    """It assigns gradients, sparse ones too, to its slot."""

    def build(self, variables):
        super().build(variables)
        self.moments = self.add_optimizer_variables(variables, "momentum")

    def update_step(self, gradient, variable, learning_rate):
        moment = self.moments[self._get_variable_index(variable)]
        self.assign(moment, ops.cast(gradient, moment.dtype))


@only_tensorflow
@pytest.mark.parametrize("cls", [Rows, keras.optimizers.Adagrad])
def test_gradients_of_some_rows_are_as_in_float32(cls):
    import tensorflow as tf

    found = []
    for change in (lambda each: each, quantize_state):
        optimizer = cls(learning_rate=0.1)
        variable = keras.Variable(normal(64, 80, seed=9))
        change(optimizer).build([variable])
        for rows in ((1, 4), (4, 7)):
            values = tf.constant(normal(2, 80, seed=rows[0]))
            gradient = tf.IndexedSlices(values, tf.constant(rows), (64, 80))
            optimizer.apply([gradient], [variable])
        found.append((numpy(variable), numpy(optimizer._variables[2])))
    (weight, slot), (its_weight, its_slot) = found
    np.testing.assert_allclose(its_weight, weight, atol=0.05)
    # Two steps round at random, by a code each.
    room = 2 * (np.abs(slot) / 7 + np.abs(slot).max() / 448 / 2**9)
    assert np.all(np.abs(its_slot - slot) <= room)
    assert slot[1].any() and slot[7].any()
