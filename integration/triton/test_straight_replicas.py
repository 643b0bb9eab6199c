"""The straight path in two processes: replicas, and shards of `fully_shard`."""

import concurrent.futures
import importlib.util
import json

import keras
import pytest

from processes import run

if keras.backend.backend() != "torch" or not importlib.util.find_spec("triton"):
    pytest.skip(
        "needs PyTorch and Triton: run `tox run -e triton`",
        allow_module_level=True,
    )

TRAIN = """
import dataclasses, datetime, json, os, pathlib, sys
rank, folder = int(sys.argv[1]), pathlib.Path(sys.argv[2])
os.environ["TRITON_INTERPRET"] = "1"
import keras, numpy as np, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
import keras_policy_ext as kpe
from keras_policy_ext import backends
from keras_policy_ext.backends.torch.backend import BACKEND
from keras_policy_ext.backends.torch.casts import TritonCasts
from keras_policy_ext.ext.delayed import frameworks
from keras_policy_ext.ext.delayed.torch.kernels import TritonStates

dist.init_process_group(
    "gloo",
    init_method=f"file://{folder}/meeting",
    rank=rank,
    world_size=2,
    timeout=datetime.timedelta(seconds=120),  # a deadlock is an error
)
mesh = init_device_mesh("cpu", (2,))
# As on a GPU, whose flags could be read only by waiting for it.
BACKEND.known_any = lambda flags: None
backends.engine = dataclasses.replace(
    backends.engine,
    both_layouts=TritonCasts(interpreted=True),
)
frameworks.current.kernels = (TritonStates(interpreted=True),)
rng = np.random.default_rng(0)
x = torch.tensor(rng.normal(size=(3, 64, 32)).astype("float32"))
y = torch.tensor(rng.normal(size=(3, 64, 16)).astype("float32"))


def made(recipe):
    keras.utils.set_random_seed(0)
    policy = kpe.Float8DTypePolicy("mixed_bfloat16", recipe=recipe)
    return keras.Sequential([
        keras.Input((32,)),
        kpe.layers.Dense(48, "relu", dtype=policy, name="first"),
        kpe.layers.Dense(16, dtype=policy, name="last"),
    ])


def shard(model, gathers):
    if gathers:
        kpe.loops.gather_float8(model)
    for layer in model.layers:
        fully_shard(
            layer, mesh=mesh, ignored_params=kpe.loops.uncut(model)
        )
    kpe.loops.follow_shards(model)
    return model


def train(model, run):
    optimizer = torch.optim.SGD(
        kpe.loops.parameters(model), lr=0.0625, momentum=0.5
    )
    for step in range(3):
        optimizer.zero_grad()
        outputs = run(x[step][rank::2], training=True).float()
        torch.mean((outputs - y[step][rank::2]) ** 2).backward()
        optimizer.step()
        kpe.loops.settle(model)
    found = {}
    for v in model.variables:
        value = v.value.detach()
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        found[v.path.split("/", 1)[1]] = whole.tolist()
    straight = [
        layer.float8_state.last_call.plan.bound.straight
        for layer in model.layers
    ]
    kinds = {type(p).__name__ for s in straight for p in s._passes.values()}
    return [sorted(kinds), found]


results = {}
with kpe.kernels.prefer("native"):
    for recipe in sys.argv[3].split(";"):
        model = made(recipe)
        replica = DistributedDataParallel(model)
        results[f"{recipe}/replicas"] = train(model, replica)
        for way in ("float32", "float8"):
            model = shard(made(recipe), way == "float8")
            results[f"{recipe}/{way}"] = train(model, model)
(folder / f"{rank}.json").write_text(json.dumps(results))
dist.destroy_process_group()
"""

RECIPES = "delayed(amax_history_length=6)", "current"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The kinds of passes, the weights and the states of each rank."""
    folder = tmp_path_factory.mktemp("torch")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        jobs = [
            pool.submit(run, "torch", TRAIN, rank, folder, ";".join(RECIPES))
            for rank in (0, 1)
        ]
        for job in jobs:
            job.result()
    return [
        json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)
    ]


@pytest.mark.parametrize("recipe", RECIPES)
def test_replicas_keep_the_same_weights_and_states(ranks, recipe):
    first, second = (results[f"{recipe}/replicas"] for results in ranks)
    assert first[0] == ["Passes"]
    assert first == second


@pytest.mark.parametrize(
    ("way", "kind"), [("float32", "Passes"), ("float8", "PassesOfCodes")]
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_shards_have_the_bits_of_replicas(ranks, recipe, way, kind):
    for results in ranks:
        kinds, found = results[f"{recipe}/{way}"]
        assert kinds == [kind]
        assert found == results[f"{recipe}/replicas"][1]
