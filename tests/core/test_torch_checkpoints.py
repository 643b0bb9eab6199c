"""Checkpoints of PyTorch: `state_dict`, and what reads and writes them."""

import copy
import io
import warnings

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from steps import numpy, relative_rms
from torch_loops import DELAYED, FREE, batches

pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="checkpoints of PyTorch"
)

X = next(batches(1))[0]


def network(seed=0):
    """A model whose parameters have the same names each time."""
    keras.utils.set_random_seed(seed)
    hidden = keras.layers.Dense(32, "relu", name="hidden")
    outputs = keras.layers.Dense(FREE, name="outputs")
    model = keras.Sequential([keras.Input((8,)), hidden, outputs], name="net")
    kpe.convert(model, DELAYED)
    return model


def outputs(model):
    import torch

    with torch.no_grad():
        return numpy(model(torch.from_numpy(X)))


def train(model, optimizer, steps=2):
    import torch

    losses = []
    for x, y in batches(steps):
        optimizer.zero_grad()
        predicted = model(torch.from_numpy(x), training=True)
        loss = ((predicted - torch.from_numpy(y)) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def adam(model):
    import torch

    return torch.optim.AdamW(model.parameters(), 0.05)


def trained():
    """A model whose kernels exceed their recorded amaxes, and its optimizer."""
    model = network()
    optimizer = adam(model)
    train(model, optimizer)
    return model, optimizer


def other_network():
    """A model with other, far larger kernels."""
    model = network(5)
    for variable in kpe.loops.weights(model):
        variable.assign(20 * numpy(variable))
    return model


# Ways to restore a model from another, `saved`; each has what it reads first.


def by_state_dict(model, saved, tmp_path):
    import torch

    file = io.BytesIO()
    torch.save(saved.state_dict(), file)
    file.seek(0)
    model.load_state_dict(torch.load(file))


def by_partial_state_dict(model, saved, tmp_path):
    """In two parts, states first, as from shards of a checkpoint."""
    whole = saved.state_dict()
    for is_state in (True, False):
        part = {k: v for k, v in whole.items() if ("_amax" in k) is is_state}
        model.load_state_dict(part, strict=False)


def in_a_module(model, saved, tmp_path):
    """As Lightning and accelerate do, whose module holds the model."""
    import torch

    holders = [torch.nn.Module() for _ in range(2)]
    for holder, each in zip(holders, (model, saved), strict=True):
        holder.net = each
    mine, others = holders
    mine.load_state_dict(others.state_dict())


def by_parameters(model, saved, tmp_path):
    """In place, in sorted order."""
    import torch

    found = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in sorted(saved.state_dict().items()):
            if name in found:
                found[name].copy_(value)


def by_parameters_from_the_last(model, saved, tmp_path):
    import torch

    found = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in sorted(saved.state_dict().items(), reverse=True):
            if name in found:
                found[name].copy_(value)


def by_variables_and_parameters(model, saved, tmp_path):
    """States by Keras, kernels by PyTorch."""
    import torch

    values = {v.path: np.array(numpy(v)) for v in saved.variables}
    for variable in sorted(model.variables, key=lambda v: v.path):
        if kpe.loops.is_state(variable):
            variable.assign(values[variable.path])
        else:
            with torch.no_grad():
                variable.value.copy_(torch.from_numpy(values[variable.path]))


def by_safetensors(model, saved, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_model(saved, tmp_path / "model.safetensors")
    safetensors.load_model(model, tmp_path / "model.safetensors")


@pytest.mark.filterwarnings("ignore")
def by_distributed_checkpoint(model, saved, tmp_path):
    import torch.distributed.checkpoint as checkpoint

    checkpoint.save(saved.state_dict(), checkpoint_id=tmp_path / "saved")
    checkpoint.load(model.state_dict(), checkpoint_id=tmp_path / "saved")


def by_distributed_state_dict(model, saved, tmp_path):
    from torch.distributed.checkpoint import state_dict as of

    values = of.get_model_state_dict(saved)
    of.set_model_state_dict(model, values)


WAYS = [
    by_state_dict,
    by_partial_state_dict,
    in_a_module,
    by_parameters,
    by_parameters_from_the_last,
    by_variables_and_parameters,
    by_safetensors,
    by_distributed_checkpoint,
    by_distributed_state_dict,
]


def untouched(model):
    """A model that was made, and not called."""


def called(model):
    outputs(model)


def fitted(model):
    train(model, adam(model))


@pytest.mark.filterwarnings("ignore:torch.distributed")
@pytest.mark.parametrize("before", [untouched, called, fitted])
@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_of_pytorch_restores_the_model(way, before, tmp_path):
    model, optimizer = trained()
    wanted = outputs(model)
    other = other_network()
    before(other)
    way(other, model, tmp_path)
    np.testing.assert_array_equal(outputs(other), wanted)
    for one, two in zip(other.variables, model.variables, strict=True):
        np.testing.assert_array_equal(numpy(one), numpy(two), one.path)
    resumed = adam(other)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert train(other, resumed) == train(model, optimizer)


def test_a_copy_of_a_restored_model_is_that_model():
    model, _ = trained()
    other = network()
    other.load_state_dict(model.state_dict())
    for each in (copy.deepcopy(other), copy.deepcopy(model)):
        np.testing.assert_array_equal(outputs(each), outputs(model))


@pytest.mark.parametrize("runs", [True, False])
@pytest.mark.parametrize("factor", [1.5, 20.0])
def test_kernels_alone_in_a_state_dict_are_not_cut(factor, runs):
    """Nobody wrote their states: these follow, as for any changed kernel."""
    model = network()
    if runs:
        outputs(model)
    kernels = {
        name: factor * value
        for name, value in model.state_dict().items()
        if name.endswith("/kernel")
    }
    model.load_state_dict(kernels, strict=False)
    first = model.layers[0]
    kernel, bias = numpy(first.kernel), numpy(first.bias)
    wanted = np.maximum(X @ kernel + bias, 0)
    assert relative_rms(numpy(first(X)), wanted) < 0.1


# Parameters that are replaced, which Keras does not read


def functional_call(model, x):
    import torch

    values = {k: 2 * v.detach() for k, v in model.named_parameters()}
    return torch.func.functional_call(model, values, (x,))


def gradient(model, x):
    import torch

    def loss(values):
        return torch.func.functional_call(model, values, (x,)).sum()

    values = {k: v.detach() for k, v in model.named_parameters()}
    return torch.func.grad(loss)(values)


def assigned_parameters(model, x):
    values = {k: 2 * v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict(values, assign=True)
    return model(x)


@pytest.mark.parametrize(
    "replace", [functional_call, gradient, assigned_parameters]
)
@pytest.mark.parametrize("recipe", ["delayed", "current", "frozen"])
def test_a_model_whose_parameters_are_replaced_warns_once(recipe, replace):
    import torch

    if recipe == "frozen" and replace is gradient:
        pytest.skip("torch.func.grad takes no gradient of integer codes")
    model = keras.Sequential(
        [keras.Input((32,)), keras.layers.Dense(32), keras.layers.Dense(32)]
    )
    if recipe == "frozen":
        kpe.freeze(model)
    else:
        kpe.convert(model, recipe)
    x = torch.ones(3, 32)
    wanted = numpy(model(x).detach())
    for time in range(2):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            replace(model, x)
        told = [w for w in found if "Keras ignores" in str(w.message)]
        assert len(told) == (time == 0)
    np.testing.assert_array_equal(numpy(model(x).detach()), wanted)


@pytest.mark.parametrize("use", ["call", "copy", "to", "fit", "stateless"])
def test_a_model_with_its_own_parameters_does_not_warn(use):
    import torch

    model = network()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        if use == "copy":
            model = copy.deepcopy(model)
        elif use == "to":
            model.to("cpu").float()
        elif use == "fit":
            train(model, adam(model))
        elif use == "stateless":
            values = [2 * v.value.detach() for v in model.trainable_variables]
            model.stateless_call(values, [], torch.from_numpy(X))
        outputs(model)
    assert not [w for w in found if "Keras ignores" in str(w.message)]


def test_stateless_call_uses_the_values_and_has_their_gradients():
    import torch

    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    kpe.convert(model, "current")
    x = torch.from_numpy(X)
    values = [2 * v.value.detach() for v in model.trainable_variables]
    for each in values:
        each.requires_grad_()
    given, _ = model.stateless_call(values, [], x)
    assert relative_rms(numpy(given.detach()), 2 * outputs(model)) < 0.1
    grads = torch.autograd.grad(given.sum(), values)
    assert all(np.abs(numpy(each)).max() > 0 for each in grads)
