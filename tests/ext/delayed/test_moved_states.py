"""States that an optimizer has changed as if they were weights."""

import warnings

import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from foreign_loops import (
    BACKEND,
    assert_same_bits,
    batches,
    gradients_of,
    network,
    states_of,
    states_variable,
    trained_by_keras,
    update_weights,
    values_of,
)
from keras_policy_ext.ext.delayed.observations import VALID_MARK
from keras_policy_ext.layers.stored_weights import is_state
from steps import no_grad, normal, numpy, state_of, weights_of


def move(variable):
    """Decay a variable as an optimizer does that takes it for a weight."""
    if BACKEND == "tensorflow":
        variable.value.assign(0.75 * variable.value)
    elif BACKEND == "torch":
        with no_grad():
            variable.value.mul_(0.75)
    else:
        variable.assign(0.75 * variable.value)


def moved(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX: said as it is assigned
        for variable in model.trainable_variables:
            if is_state(variable):
                move(variable)
                variable._has_warned, variable._checked_value = False, None
                if BACKEND == "torch":
                    variable.observed.version = -1
    return model


SAID = pytest.warns(UserWarning, match="changed as if it were a weight")


def without_state(model):
    """The same weights, and states that were never observed."""
    fresh = network()
    pairs = zip(model.weights, fresh.weights, strict=True)
    for variable, other in pairs:
        if not is_state(variable):
            other.assign(numpy(variable))
    return fresh


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The float8 state of a layer was changed")
@pytest.mark.extension("loops")
def test_a_state_that_was_moved_counts_as_never_observed():
    model = moved(trained_by_keras([16 * x for x in batches()]))
    fresh = without_state(model)
    x = batches(1)[0]
    np.testing.assert_array_equal(numpy(model(x)), numpy(fresh(x)))
    for each in (model, fresh):
        kpe.loops.settle(each, gradients_of(each, x))
    assert_same_bits(states_of(model), states_of(fresh))


def test_a_state_that_was_moved_is_said_in_the_next_forward_pass_once():
    model = moved(trained_by_keras(batches(1)))
    with SAID as said:
        model(batches(1)[0])
        model(batches(1)[0])
    assert len(said) == len(states_of(model))


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(
            lambda m: kpe.inspect(m), marks=pytest.mark.extension("inspect")
        ),
        lambda m: m(batches(1)[0]),
    ],
)
def test_a_state_that_was_moved_is_said_of_the_line_of_the_user(use):
    model = moved(trained_by_keras(batches(1)))
    with SAID as said:
        use(model)
    lines = {x.filename for x in said if "as if it were" in str(x.message)}
    assert lines == {__file__}


@pytest.mark.extension("inspect")
def test_a_state_that_was_moved_is_said_by_inspect():
    model = moved(trained_by_keras(batches(1)))
    with SAID:
        rows = kpe.inspect(model).as_dict()["layers"]
    operands = [o for row in rows for o in row["operands"]]
    assert [o["amax"] for o in operands] == [None] * 6


def test_a_state_that_was_moved_is_said_on_saving_and_not_saved(tmp_path):
    model = moved(trained_by_keras(batches(1)))
    with SAID:
        model.save_weights(tmp_path / "model.weights.h5")
    loaded = network()
    loaded.load_weights(tmp_path / "model.weights.h5")
    assert_same_bits(states_of(loaded), states_of(without_state(model)))


def test_arrays_of_a_state_that_was_moved_are_refused():
    model = trained_by_keras(batches(1))
    arrays = model.get_weights()
    before = values_of(model)
    places = [is_state(v) for v in model.weights]
    arrays[places.index(True)] *= 0.75
    with pytest.raises(ValueError, match=r"not (a|the) float8 state"):
        model.layers[0].set_weights(arrays[:3])
    assert_same_bits(values_of(model), before)


@pytest.mark.full
def test_an_average_of_two_states_is_a_state():
    """`zip(net.weights, ema.weights)`, as moving averages are written."""
    model, average = trained_by_keras(batches()), trained_by_keras(batches(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(100):
            pairs = zip(model.weights, average.weights, strict=True)
            for variable, other in pairs:
                other.assign(0.99 * other.value + 0.01 * variable.value)
        average(batches(1)[0])
    for state in states_of(average):
        np.testing.assert_array_equal(state[:, 0], VALID_MARK)
    first = state_of(average.layers[0])["inputs"][1]
    ends = [state_of(m.layers[0])["inputs"][1] for m in (model, average)]
    assert np.all(first <= np.maximum(*ends))


def averaged_by_variables(model, average, part):
    with no_grad():
        for v, w in zip(model.weights, average.weights, strict=True):
            w.assign((1 - part) * w.value + part * v.value)


def averaged_by_arrays(model, average, part):
    pairs = zip(model.get_weights(), average.get_weights(), strict=True)
    average.set_weights([(1 - part) * w + part * v for v, w in pairs])


@pytest.mark.full
@pytest.mark.parametrize(
    "averaged", [averaged_by_variables, averaged_by_arrays]
)
@pytest.mark.extension("loops")
def test_a_moving_average_from_the_start_cuts_nothing(averaged):
    """A target network follows from before its model has observed anything."""
    model, average = network(), network()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The float8 state")
        for x in batches():
            kpe.loops.settle(model, grads := gradients_of(model, x))
            update_weights(model, grads)
            averaged(model, average, 0.005)
            found = numpy(average(x))
            expected = numpy(without_state(average)(x))
            np.testing.assert_array_equal(found, expected)
        rows = kpe.inspect(average).as_dict()["layers"]
    assert {o["amax"] for row in rows for o in row["operands"]} == {None}


@pytest.mark.parametrize("converted", [0, 1])
def test_weights_of_a_model_and_its_copy_are_not_paired_wrong(converted):
    """Where one of two twins is in float8, `weights` do not fit."""
    twins = [network("current"), network("current")]
    kpe.revert(twins[1 - converted])
    kpe.revert(twins[converted])
    kpe.convert(twins[converted], kpe.recipes.get("delayed"))
    net, average = twins
    with pytest.raises(ValueError, match="shape"):
        for w, other in zip(net.weights, average.weights, strict=False):
            other.assign(numpy(w))
    # A model without float8 layers has the `set_weights` of Keras.
    fault = "are not those of layer" if converted else "weight list of length"
    with pytest.raises(ValueError, match=fault):
        average.set_weights(net.get_weights())
    pairs = zip(weights_of(net), weights_of(average), strict=True)
    for w, other in pairs:
        other.assign(numpy(w))
    for first, second in zip(net.layers, average.layers, strict=True):
        np.testing.assert_array_equal(numpy(first.kernel), numpy(second.kernel))


def test_a_state_of_another_shape_is_refused_with_what_to_do():
    state = states_variable(network())
    before = numpy(state)
    with pytest.raises(ValueError, match=r"loops\.weights\(model\)"):
        state.assign(normal(8, 16))
    np.testing.assert_array_equal(numpy(state), before)


def test_a_weight_that_is_mixed_into_a_state_is_said():
    """A bias of one unit has a shape that fits everything."""
    state = states_variable(trained_by_keras(batches(1)))
    bias = ops.convert_to_tensor(np.float32([0.5]))
    with SAID:
        state.assign(0.75 * state.value + 0.25 * bias)
