"""Frozen models under torch.compile: one graph, and the same numbers."""

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from cases import needs_whole_graphs
from steps import normal

torch = pytest.importorskip("torch", reason="it compiles with torch")
pytestmark = [
    pytest.mark.skipif(
        keras.backend.backend() != "torch", reason="torch.compile is of PyTorch"
    ),
    needs_whole_graphs,
]

MODELS = {
    "dense": (
        lambda: [
            keras.layers.Dense(32, "relu"),
            keras.layers.EinsumDense("abc,cde->abde", (10, 2, 8)),
        ]
    ),
    "convolution": lambda: [keras.layers.Conv1D(8, 3)],
}


def gradients(model, call, x):
    call(x).square().sum().backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    for parameter in model.parameters():
        parameter.grad = None
    return found


@pytest.mark.full
@pytest.mark.nightly_except("dense-block-dynamic", "convolution-channel-None")
@pytest.mark.parametrize("activations", [None, "dynamic"])
@pytest.mark.parametrize("granularity", ["channel", "block"])
@pytest.mark.parametrize("name", MODELS)
def test_compiled_in_one_graph(name, granularity, activations):
    torch._dynamo.reset()
    model = keras.Sequential([keras.Input((10, 24)), *MODELS[name]()])
    kpe.freeze(model, granularity=granularity, activations=activations)
    for layer in model.layers:
        layer.enable_lora(2)
    compiled = torch.compile(model, fullgraph=True)
    x = torch.from_numpy(normal(4, 10, 24))
    with torch.no_grad():
        wanted, found = model(x).numpy(), compiled(x).numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    wanted, found = (gradients(model, each, x) for each in (model, compiled))
    assert len(found) == len(wanted) > 0
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm() + 1e-6
