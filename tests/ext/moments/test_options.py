"""One-byte state under the options that Keras's own tests of optimizers use.

Each optimizer makes steps with and without it, from equal gradients.
"""

import keras
import numpy as np
import pytest
from keras import ops

from cases import mostly
from keras_policy_ext.optimizers import quantize_state
from steps import no_grad, normal, numpy

O = keras.optimizers  # noqa: E741
SHAPE = (16, 40)
STEPS = 8


def rate():
    """A learning rate that is a function."""
    return 0.01


CASES = {
    "Adam": lambda **k: O.Adam(0.01, **k),
    "Adam, amsgrad": lambda **k: O.Adam(0.01, amsgrad=True, **k),
    "AdamW": lambda **k: O.AdamW(0.01, weight_decay=0.1, **k),
    "Adamax": lambda **k: O.Adamax(0.01, **k),
    "Nadam": lambda **k: O.Nadam(0.01, **k),
    "Lamb": lambda **k: O.Lamb(0.01, **k),
    "RMSprop": lambda **k: O.RMSprop(0.01, momentum=0.5, **k),
    "RMSprop, centered": lambda **k: O.RMSprop(
        0.01, momentum=0.5, centered=True, **k
    ),
    "SGD": lambda **k: O.SGD(0.01, momentum=0.9, **k),
    "SGD, nesterov": lambda **k: O.SGD(0.01, momentum=0.9, nesterov=True, **k),
    "Adagrad": lambda **k: O.Adagrad(0.01, **k),
    "Adadelta": lambda **k: O.Adadelta(1.0, **k),
    "Muon": lambda **k: O.Muon(0.01, exclude_layers=["no"], **k),
    "clipnorm": lambda: O.Adam(0.01, clipnorm=0.5),
    "clipvalue": lambda: O.Adam(0.01, clipvalue=0.5),
    "global_clipnorm": lambda: O.Adam(0.01, global_clipnorm=0.5),
    "weight_decay": lambda: O.RMSprop(0.01, momentum=0.5, weight_decay=0.1),
    "averages that overwrite": lambda: O.Adam(
        0.01, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3
    ),
    "accumulation": lambda: O.Adam(
        0.01, gradient_accumulation_steps=2, weight_decay=0.1, clipnorm=0.5
    ),
    "loss_scale_factor": lambda: O.Adam(0.01, loss_scale_factor=8.0),
    "function": lambda: O.Adam(rate),
    "schedule": lambda: O.AdamW(O.schedules.CosineDecay(0.01, 6)),
}


def trained(optimizer):
    """What the steps add to two weights."""
    variables = [
        keras.Variable(normal(*SHAPE, seed=seed), name=f"w{seed}")
        for seed in (1, 2)
    ]
    before = [numpy(v).copy() for v in variables]
    optimizer.build(variables)
    for step in range(STEPS):
        gradients = [normal(*SHAPE, seed=10), normal(*SHAPE, seed=20 + step)]
        with no_grad():
            optimizer.apply([ops.convert_to_tensor(g) for g in gradients])
    after = [numpy(v) for v in variables]
    return np.stack([a - b for a, b in zip(after, before, strict=True)])


@pytest.mark.full
@pytest.mark.parametrize("name", mostly(CASES, "Adam", "accumulation"))
def test_weights_move_as_with_float32(name):
    """A code is off by 1/16; what 8 steps add is off by a few hundredths."""
    stock = trained(CASES[name]())
    optimizer = CASES[name]()
    quantize_state(optimizer, minimum_size=1)
    found = trained(optimizer)
    assert len(optimizer.variables) > len(optimizer._variables)
    error = np.sqrt(np.mean((found - stock) ** 2))
    off = error / np.sqrt(np.mean(stock**2))
    assert 1e-6 < off < 0.05
    assert np.mean(found / stock > 0) > 0.97
