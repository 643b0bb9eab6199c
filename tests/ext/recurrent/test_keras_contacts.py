"""Why `ext/recurrent/_keras/` is needed."""

import inspect

import keras
import pytest

from keras_policy_ext.ext.recurrent import _keras
from keras_policy_ext.layers.drop_in import form_of
from public_api import functions_about, members_about


@pytest.mark.parametrize("name", _keras.PARTS_OF_LSTM_STEPS)
def test_an_lstm_cell_computes_in_private_methods(name):
    assert callable(getattr(keras.layers.LSTMCell, name))
    assert members_about(keras.layers.LSTMCell, "carry", "output") == [
        "compute_output_shape",
        "compute_output_spec",
        "output",
    ]
    changed = {name: lambda self, *args: None}
    assert form_of(type("Other", (keras.layers.LSTMCell,), {})) is not None
    with pytest.raises(TypeError, match=name):
        form_of(type("Other", (keras.layers.LSTMCell,), changed))


def test_keras_offers_no_public_loop_over_time_steps():
    places = {name.rpartition(".")[0] for name in functions_about("rnn")}
    assert places == {"keras.layers"}
    assert members_about(keras.layers.RNN, "loop") == ["inner_loop"]
    called = inspect.signature(keras.layers.RNN.inner_loop).parameters
    assert "cell" not in called and "step" not in called
