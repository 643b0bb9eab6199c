"""`fully_shard` of PyTorch (FSDP2), two processes over gloo.

Keras reads the tensors that its variables were made with, and PyTorch gives
the optimizer others: no weight of a Keras layer moves.
"""

import concurrent.futures
import json

import pytest

from processes import is_installed, run

TRAIN = """
import datetime, json, pathlib, sys
rank, folder = int(sys.argv[1]), pathlib.Path(sys.argv[2])
import keras, numpy as np, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import keras_policy_ext as kpe

dist.init_process_group(
    "gloo",
    init_method=f"file://{folder}/meeting",
    rank=rank,
    world_size=2,
    timeout=datetime.timedelta(seconds=120),  # a deadlock is an error
)
mesh = init_device_mesh("cpu", (2,))
rng = np.random.default_rng(0)
x = torch.tensor(rng.normal(size=(8, 6)).astype("float32"))
y = torch.tensor(rng.normal(size=(8, 4)).astype("float32"))


class Network(torch.nn.Module):
    def __init__(self, layers=keras.layers, dtype=None):
        super().__init__()
        self.first = layers.Dense(8, "relu", dtype=dtype)
        self.last = layers.Dense(4, dtype=dtype)
        self.first.build((None, 6))
        self.last.build((None, 8))

    @property
    def layers(self):
        return [self.first, self.last]

    def forward(self, x, training):
        return self.last(self.first(x, training=training), training=training)


def sequential():
    layers = [keras.layers.Dense(8, "relu"), keras.layers.Dense(4)]
    return keras.Sequential([keras.Input((6,)), *layers])


def in_float8(recipe):
    model = sequential()
    kpe.convert(model, kpe.Float8DTypePolicy("float32", recipe=recipe))
    return model


def module_in_float8():
    dtype = kpe.Float8DTypePolicy("float32", recipe="delayed")
    return Network(kpe.layers, dtype)


def whole(model):
    fully_shard(model, mesh=mesh)


def by_layer(model):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)


def but_states(model):
    states = [v.value for v in model.variables if kpe.loops.is_state(v)]
    fully_shard(model, mesh=mesh, ignored_params=set(states))


def ignoring_all(model):
    fully_shard(model, mesh=mesh, ignored_params=set(model.parameters()))


def losses(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0625)
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        part = x[rank::2], y[rank::2]
        loss = torch.mean((model(part[0], training=True) - part[1]) ** 2)
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def outcome(model, shard):
    try:
        shard(model)
        return losses(model)
    except (NotImplementedError, RuntimeError) as error:
        return str(error)


def inference(model):
    whole(model)
    try:
        with torch.no_grad():
            return float(model(x, training=False)[0, 0])
    except NotImplementedError as error:
        return str(error)


results = {
    "stock": outcome(sequential(), whole),
    "stock in a module": outcome(Network(), whole),
    "not cut": outcome(in_float8("delayed"), ignoring_all),
    "inference": inference(in_float8("delayed")),
}
for recipe in ("delayed", "current", "rowwise"):
    for shard in (whole, by_layer, but_states):
        found = outcome(in_float8(recipe), shard)
        results[f"{recipe}, {shard.__name__}"] = found
for shard in (whole, by_layer):
    found = outcome(module_in_float8(), shard)
    results[f"module, {shard.__name__}"] = found
(folder / f"{rank}.json").write_text(json.dumps(results))
dist.destroy_process_group()
"""
REFUSED = (
    *(
        f"{recipe}, {how}"
        for recipe in ("delayed", "current", "rowwise")
        for how in ("whole", "by_layer", "but_states")
    ),
    "module, by_layer",
    "inference",
)

pytestmark = pytest.mark.skipif(
    not is_installed("torch"), reason="torch is not installed"
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The results of rank 0 and of rank 1."""
    folder = tmp_path_factory.mktemp("torch")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        jobs = [
            pool.submit(run, "torch", TRAIN, rank, folder) for rank in (0, 1)
        ]
        for job in jobs:
            job.result()
    return [
        json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)
    ]


@pytest.mark.parametrize("case", REFUSED)
def test_a_float8_layer_that_is_cut_says_that_it_would_not_train(ranks, case):
    for results in ranks:
        assert isinstance(results[case], str), results[case]
        for part in ("Received: ", "fully_shard", "Allowed: ", "anew"):
            assert part in results[case]


def test_a_module_around_float8_layers_does_not_train_in_silence(ranks):
    """PyTorch itself refuses parameters that two modules have."""
    for results in ranks:
        assert isinstance(results["module, whole"], str)


@pytest.mark.parametrize("case", ["stock", "stock in a module"])
def test_layers_of_keras_do_not_train_under_fully_shard(ranks, case):
    """Where this fails, Keras trains there, and the refusal can go."""
    for results in ranks:
        first, second = results[case]
        assert second == first


def test_a_model_that_is_not_cut_trains(ranks):
    for results in ranks:
        first, second = results["not cut"]
        assert second != first
