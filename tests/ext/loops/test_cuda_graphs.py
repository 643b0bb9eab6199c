"""Where the steps of `fit` can run as CUDA graphs, and where they cannot."""

import keras
import pytest

import keras_policy_ext as kpe
from keras_policy_ext._keras import versions
from keras_policy_ext.backends import devices

ON_TORCH = keras.backend.backend() == "torch"

on_torch = pytest.mark.skipif(not ON_TORCH, reason="PyTorch has CUDA graphs")


class OwnStep(keras.Model):
    def call(self, x):
        return x

    def train_step(self, *args):
        raise NotImplementedError


def network(optimizer="adam", jit_compile=True, **kwargs):
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    model.compile(optimizer, "mse", jit_compile=jit_compile, **kwargs)
    return model


def own():
    model = OwnStep()
    model.compile("adam", "mse", jit_compile=True)
    return model


def trained_before():
    model = network()
    model.make_train_function()
    return model


def adam(**kwargs):
    return network(keras.optimizers.Adam(**kwargs))


def scaled():
    inner = keras.optimizers.Adam()
    return network(keras.optimizers.LossScaleOptimizer(inner))


def rounded():
    inner = keras.optimizers.Adam(gradient_accumulation_steps=2)
    return network(kpe.mixed_precision.StochasticRounding(inner))


@pytest.fixture
def on_gpu(monkeypatch):
    """As with the Keras that makes one graph of a step."""
    monkeypatch.setattr(versions, "number", lambda: (3, 16))
    with devices.pretend("h200"):
        yield


@on_torch
def test_the_setting_of_the_compiler_lasts_for_the_block(on_gpu):
    import torch._inductor.config as settings

    before = settings.triton.cudagraphs
    scaler = kpe.mixed_precision.LossScaleOptimizer(keras.optimizers.Adam())
    with pytest.raises(KeyError), kpe.loops.cuda_graphs(network(scaler)):
        assert settings.triton.cudagraphs is True
        raise KeyError
    assert settings.triton.cudagraphs is before is False


@on_torch
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (own, "a `train_step` of its own"),
        (lambda: network(jit_compile=False), "jit_compile=True"),
        (lambda: network(jit_compile=False, run_eagerly=True), "jit_compile"),
        (trained_before, "whose step is compiled already"),
        (lambda: adam(gradient_accumulation_steps=2), "branches on numbers"),
        (scaled, "branches on numbers"),
        (rounded, "branches on numbers"),
    ],
)
def test_a_step_of_several_graphs_is_refused(on_gpu, make, reason):
    with (
        pytest.raises(ValueError, match=reason),
        kpe.loops.cuda_graphs(make()),
    ):
        pass


@on_torch
def test_replicas_are_refused(on_gpu, monkeypatch):
    from keras_policy_ext.ext.loops import torch as of_torch

    monkeypatch.setattr(of_torch, "has_replicas", lambda: True)
    with (
        pytest.raises(ValueError, match="a process of several"),
        kpe.loops.cuda_graphs(network()),
    ):
        pass


@on_torch
def test_a_keras_that_takes_gradients_outside_is_refused(on_gpu, monkeypatch):
    monkeypatch.setattr(versions, "number", lambda: (3, 15))
    with (
        pytest.raises(ValueError, match="which takes gradients outside"),
        kpe.loops.cuda_graphs(network()),
    ):
        pass


def test_without_a_gpu_that_pytorch_uses_they_are_refused():
    reason = "the device" if ON_TORCH else "the backend"
    with (
        pytest.raises(ValueError, match=reason),
        devices.pretend("cpu"),
        kpe.loops.cuda_graphs(network(jit_compile="auto")),
    ):
        pass
