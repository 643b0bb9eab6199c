"""Stock Keras's averages of variables that are overwritten."""

import keras
import numpy as np
import pytest


def in_stock_float8():
    """A model whose scales are overwritten with their gradients."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.quantize("float8")
    model.compile(keras.optimizers.SGD(0.1, use_ema=True), "mse")
    return model


def test_keras_swaps_averages_that_it_does_not_keep():
    model, callback = in_stock_float8(), keras.callbacks.SwapEMAWeights()
    x, y = np.ones((4, 4), "float32"), np.ones((4, 3), "float32")
    # With None as the average, in whatever way that is noticed.
    errors = (AttributeError, TypeError, ValueError)
    with pytest.raises(errors, match=r"None|object"):
        model.fit(x, y, verbose=0, callbacks=[callback])
        callback.on_test_begin()
