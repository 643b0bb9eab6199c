"""Which tensors Keras's layers read on PyTorch."""

import keras
import numpy as np
import pytest

from keras_policy_ext._keras import calls


@pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="parameters of PyTorch"
)
def test_stock_keras_ignores_the_tensors_of_functional_call():
    """Fails once Keras reads them: then nothing is left to warn of."""
    import torch

    found = []

    class Looking(keras.layers.Dense):
        def call(self, x):
            found.append(
                (calls.entry_layer(), calls.parameter_of_call(self.kernel))
            )
            return super().call(x)

    model = keras.Sequential([keras.Input((4,)), Looking(4)])
    x = torch.ones(3, 4)
    wanted = model(x).detach().numpy()
    values = {k: 2 * v.detach() for k, v in model.named_parameters()}
    outputs = torch.func.functional_call(model, values, (x,))
    np.testing.assert_array_equal(outputs.detach().numpy(), wanted)
    (_, own), (entry, given) = found[-2:]
    assert entry is model
    assert own is model.layers[0].kernel.value
    np.testing.assert_array_equal(given.numpy(), 2 * own.detach().numpy())
