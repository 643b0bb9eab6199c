"""Loops of PyTorch as they are written for any model."""

import functools

import keras
import numpy as np

import keras_policy_ext as kpe
from steps import numpy

LENGTH = 16
DELAYED = kpe.recipes.DelayedScaling(amax_history_length=LENGTH)
FREE = 4  # outputs of the model


def batches(count, size=16):
    rng = np.random.default_rng(0)
    target = rng.normal(size=(8, FREE))
    for x in rng.normal(size=(count, size, 8)).astype("float32"):
        yield x, np.sin(x @ target).astype("float32")


def network():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(32, "relu"), keras.layers.Dense(FREE)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    kpe.convert(model, DELAYED)
    return model


def adam(parameters):
    import torch

    return torch.optim.Adam(parameters, 1e-3)


def adamw(parameters):
    import torch

    return torch.optim.AdamW(parameters, 1e-3, weight_decay=0.5)


def momentum(parameters):
    import torch

    return torch.optim.SGD(
        parameters, 0.01, momentum=0.9, nesterov=True, weight_decay=1e-2
    )


def by_size(parameters):
    """Weight decay for matrices only, as language models are trained."""
    import torch

    parameters = list(parameters)
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim >= 2]},
            {"params": [p for p in parameters if p.ndim < 2]},
        ],
        1e-3,
        weight_decay=0.5,
    )


OPTIMIZERS = [adam, adamw, momentum, by_size]


def loss_of(model, x, y):
    import torch

    x, y = torch.tensor(x), torch.tensor(y)
    return torch.mean((model(x, training=True) - y) ** 2)


def plain(model, optimizer, parameters, x, y):
    optimizer.zero_grad()
    loss_of(model, x, y).backward()
    optimizer.step()


def with_zeros(model, optimizer, parameters, x, y):
    optimizer.zero_grad(set_to_none=False)
    loss_of(model, x, y).backward()
    optimizer.step()


def clipped(model, optimizer, parameters, x, y):
    import torch

    optimizer.zero_grad()
    loss_of(model, x, y).backward()
    torch.nn.utils.clip_grad_norm_(parameters, 0.125)
    optimizer.step()


def scaled(model, optimizer, parameters, x, y):
    """Mixed precision as in PyTorch's examples."""
    import torch

    if not hasattr(optimizer, "scaler"):
        optimizer.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    scaler = optimizer.scaler
    optimizer.zero_grad()
    scaler.scale(loss_of(model, x, y)).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(parameters, 0.125)
    scaler.step(optimizer)
    scaler.update()


def accumulated(model, optimizer, parameters, x, y):
    optimizer.zero_grad()
    for half in (slice(0, 8), slice(8, 16)):
        (loss_of(model, x[half], y[half]) / 2).backward()
    optimizer.step()


def trained(loop, make, steps, unmodified, model=None, call=None):
    """A model after some steps, of all parameters or by `kpe.loops`."""
    model = model or network()
    parameters = list(model.parameters())
    if not unmodified:
        parameters = kpe.loops.parameters(model)
    optimizer = make(parameters)
    for x, y in batches(steps):
        loop(model if call is None else call, optimizer, parameters, x, y)
        if not unmodified:
            kpe.loops.settle(model)
    return model


def forward_error(model):
    """How far float8 is from float32, as a fraction, on a new batch."""
    x = np.random.default_rng(9).normal(size=(256, 8)).astype("float32")
    found = numpy(model(x))
    kpe.revert(model)
    exact = numpy(model(x))
    return np.linalg.norm(found - exact) / np.linalg.norm(exact)


@functools.cache
def error_with_kpe_loops(loop, make):
    """The reference after 1000 steps."""
    return forward_error(trained(loop, make, 1000, unmodified=False))


def assert_same_bits(first, second):
    for a, b in zip(first.weights, second.weights, strict=True):
        np.testing.assert_array_equal(numpy(a), numpy(b), err_msg=a.path)
