"""Why `_keras/calls.py` is needed. See `_keras/__init__.py`."""

import threading

import keras
import numpy as np
import pytest
from keras import ops

from keras_policy_ext._keras import calls, versions
from public_api import functions_about, members_about

BACKEND = keras.backend.backend()


class Asks(keras.layers.Layer):
    """A layer whose `call` is not told whether it trains."""

    def call(self, inputs):
        self.training = calls.training_of_call()
        self.root = (calls.root_of_call(),)
        return inputs


@pytest.mark.parametrize("training", [True, False, None])
def test_keras_offers_no_public_way_to_ask_whether_a_call_trains(training):
    layer = Asks()
    model = keras.Sequential([keras.Input((2,)), layer])
    model(np.ones((1, 2), "float32"), training=training)
    assert layer.training is training
    assert functions_about("call_context", "training", "phase") == []
    assert members_about(keras.layers.Layer, "context", "training") == []


def test_keras_offers_no_public_way_to_ask_which_calls_belong_together():
    first, second = Asks(), Asks()
    model = keras.Sequential([keras.Input((2,)), first, second])
    x = ops.ones((1, 2))
    model(x)
    root = first.root[0]
    assert root is not None and second.root[0] is root
    model.stateless_call([], [], x)
    assert first.root[0] not in (None, root)
    assert second.root[0] is first.root[0]
    for alone in (first, lambda x: first.stateless_call([], [], x)):
        alone(x)
        assert first.root[0] is None
    assert functions_about("entry_layer", "call_root") == []
    assert members_about(keras.layers.Layer, "entry", "outermost") == []


class Enters(keras.layers.Layer):
    """A layer that looks at whose call it is in."""

    def call(self, inputs):
        context = calls._global_state.get_global_attribute("current_call_ctx")
        self.entered = id(context.entry_layer)
        return inputs


def test_a_stateless_call_enters_a_call_context_from_keras_3_16_on():
    """No version has to be looked at once Keras 3.16 is the oldest."""
    layer = Enters()
    model = keras.Sequential([keras.Input((2,)), layer])
    model.stateless_call([], [], ops.ones((1, 2)))
    assert (layer.entered == id(model)) == calls._STATELESS_CALL_ENTERS
    assert versions.OLDEST < (3, 16)


class Shaped(keras.layers.Layer):
    """A layer of which Keras knows no shape without a call."""

    def call(self, inputs):
        self.shapes_alone = calls.are_shapes_alone_wanted()
        return inputs + 1.0


def test_keras_does_not_say_that_shapes_alone_are_wanted():
    layer = Shaped()
    layer(keras.KerasTensor((2, 3)))
    assert layer.shapes_alone is True
    layer(np.ones((2, 3), "float32"))
    assert layer.shapes_alone is False
    assert functions_about("in_symbolic", "is_symbolic") == []
    assert members_about(keras.SymbolicScope, "entered", "active") == []


class Softmaxes(keras.layers.Layer):
    """Calls a softmax with a keyword argument, as attention does."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.softmax = keras.layers.Softmax()

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones")
        self.built = True

    def call(self, inputs):
        return self.softmax(inputs * self.scale, mask=ops.ones((1, 2), "bool"))


def rematerialized(prepare=lambda layer: None):
    """A model that trains a step through `Softmaxes` in a `RematScope`."""
    with keras.RematScope(mode="full"):
        layer = Softmaxes()
        prepare(layer.softmax)
    model = keras.Sequential([keras.Input((2,)), layer])
    model.compile("sgd", "mse")
    x = np.ones((1, 2), "float32")
    return model.train_on_batch(x, x)


def test_keras_cannot_rematerialize_a_softmax_with_its_mask_on_tensorflow():
    """On JAX and PyTorch it can."""
    if BACKEND == "tensorflow":
        with pytest.raises(Exception, match="mask"):
            rematerialized()
    else:
        rematerialized()
    rematerialized(calls.rematerialize_with_outer)


def test_each_call_of_a_layer_is_replaced_on_this_thread():
    inner = keras.layers.Dense(2, name="inner")
    model = keras.Sequential([keras.Input((2,)), inner], name="model")
    seen = []

    def call(stock, layer, *args, **kwargs):
        seen.append(f"+{layer.name}")
        outputs = stock(layer, *args, **kwargs)
        seen.append(f"-{layer.name}")
        return outputs

    with calls.instead_of_each_call(call):
        model(np.ones((1, 2)))
        thread = threading.Thread(target=inner, args=(np.ones((1, 2)),))
        thread.start()
        thread.join()
    model(np.ones((1, 2)))
    assert seen == ["+model", "+inner", "-inner", "-model"]


def test_keras_has_no_hook_around_calls():
    """PyTorch has one for its modules, and JAX and TensorFlow none."""
    assert members_about(keras.Layer, "hook") == []
