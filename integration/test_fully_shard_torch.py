"""`fully_shard` of PyTorch (FSDP2), two processes over gloo.

The references are DistributedDataParallel, and one process with the whole
batch, where a rank's loss is a mean over its half: its output gradients are
twice as large.
"""

import concurrent.futures
import json

import numpy as np
import pytest

from processes import is_installed, run

TRAIN = """
import datetime, json, pathlib, sys
rank, folder = int(sys.argv[1]), pathlib.Path(sys.argv[2])
import keras, numpy as np, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
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
x = torch.tensor(rng.normal(size=(3, 8, 6)).astype("float32"))
y = torch.tensor(rng.normal(size=(3, 8, 4)).astype("float32"))
results, said = {}, {}


class Around(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.first, self.norm, self.last = layers

    @property
    def layers(self):
        return [self.first, self.norm, self.last]

    def forward(self, x, training):
        for layer in self.layers:
            x = layer(x, training=training)
        return x


def sequential(recipe=None):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([
        keras.Input((6,)),
        keras.layers.Dense(8, "relu", name="first"),
        keras.layers.LayerNormalization(name="norm"),
        keras.layers.Dense(4, name="last"),
    ])
    if recipe is not None:
        policy = kpe.Float8DTypePolicy("float32", recipe=recipe)
        kpe.convert(model, policy)
    return model


def module(recipe):
    return Around(sequential(recipe).layers)


def whole(model):
    fully_shard(model, mesh=mesh, ignored_params=kpe.loops.uncut(model))


def by_layer(model):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, ignored_params=kpe.loops.uncut(model))


def both(model):
    by_layer(model)
    whole(model)


def mine(batch):
    return batch[rank::2]


def train(where, model, run, part, parameters=kpe.loops.parameters):
    optimizer = torch.optim.SGD(parameters(model), lr=0.0625, momentum=0.5)
    for step in range(3):
        optimizer.zero_grad()
        outputs = run(part(x[step]), training=True)
        torch.mean((outputs - part(y[step])) ** 2).backward()
        optimizer.step()
        kpe.loops.settle(model)
    for layer in model.layers:
        for v in layer.variables:
            value = v.value.detach()
            cut = hasattr(value, "full_tensor")
            name = v.path.split("/", 1)[1].replace("/", ".")
            results[f"{where}/{name}"] = np.array(
                value.full_tensor() if cut else value
            )
            if cut:
                results[f"cut/{where}/{name}"] = len(value.to_local())


def saved(recipe, model):
    other = sequential(recipe)
    for one, cut in zip(other.variables, model.variables, strict=True):
        value = cut.value.detach()
        is_cut = isinstance(value, torch.distributed.tensor.DTensor)
        one.assign(value.full_tensor() if is_cut else value)
    other.save(folder / f"{rank}.keras")
    again = kpe.load_model(folder / f"{rank}.keras")
    with torch.no_grad():
        for name, each in (("cut", model), ("loaded", again)):
            outputs = each(x[0], training=False)
            results[f"{name}/outputs"] = outputs.numpy()


def shown(where, function, *arguments):
    try:
        said[where] = function(*arguments)
    except (ValueError, NotImplementedError) as error:
        said[where] = str(error)


def losses(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0625)
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        outputs = model(mine(x[0]), training=True)
        loss = torch.mean((outputs - mine(y[0])) ** 2)
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def forgotten(recipe, shard):
    model = sequential(recipe)
    shard(model)
    return losses(model)


def inference(recipe):
    model = sequential(recipe)
    whole(model)
    with torch.no_grad():
        return float(model(x[0], training=False)[0, 0])


def followed(shard):
    model = sequential("delayed")
    shard(model)
    kpe.loops.follow_shards(model)


for recipe in sys.argv[3].split(";"):
    name = recipe.split("(")[0]
    model = sequential(recipe)
    train(f"{name}/one", model, model, lambda batch: batch)
    model = sequential(recipe)
    train(f"{name}/ddp", model, DistributedDataParallel(model), mine)
    for way, make, shard in (
        ("whole", sequential, whole),
        ("layers", sequential, by_layer),
        ("module", module, by_layer),
        ("all", module, both),
    ):
        model = make(recipe)
        shard(model)
        kpe.loops.follow_shards(model)
        train(f"{name}/{way}", model, model, mine)
    model = sequential(recipe)
    whole(model)
    kpe.loops.follow_shards(model)
    every = torch.nn.Module.parameters
    train(f"{name}/every", model, model, mine, every)
    saved(recipe, model)
    shown(f"{name}, whole", forgotten, recipe, whole)
    shown(f"{name}, by_layer", forgotten, recipe, by_layer)
batches = keras.Sequential([
    keras.Input((6,)), keras.layers.BatchNormalization()
])
fully_shard(batches, mesh=mesh)
shown("average", kpe.loops.follow_shards, batches)
shown("inference", inference, "delayed")
shown("stock", forgotten, None, whole)
shown("uncut", followed, lambda model: None)
shown("twice", followed, both)
shown("state", followed, lambda model: fully_shard(model, mesh=mesh))
np.savez(folder / f"{rank}.npz", **results)
(folder / f"{rank}.json").write_text(json.dumps(said))
dist.destroy_process_group()
"""

RECIPES = {
    "delayed": "delayed(amax_history_length=6,initial_scale=1.0)",
    "current": "current",
    # Scales of a part of the batch round as those of the whole one then do.
    "rowwise": "rowwise(power_of_two=True)",
}
WAYS = ("whole", "layers", "module", "all", "every")
NEWEST = 10

# The longest sum is that of a kernel gradient over 8 examples, in halves; a
# normalization divides by a deviation of some tenths.
TOLERANCE = 64 * 2.0**-24

pytestmark = pytest.mark.skipif(
    not is_installed("torch"), reason="torch is not installed"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torch")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        jobs = [
            pool.submit(
                run, "torch", TRAIN, rank, folder, ";".join(RECIPES.values())
            )
            for rank in (0, 1)
        ]
        for job in jobs:
            job.result()
    return folder


@pytest.fixture(scope="module")
def ranks(folder):
    """The results of rank 0 and of rank 1."""
    found = []
    for rank in (0, 1):
        with np.load(folder / f"{rank}.npz") as file:
            found.append(dict(file))
    return found


@pytest.fixture(scope="module")
def said(folder):
    """What the ranks were told, or their losses."""
    return [
        json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)
    ]


def of(results, where):
    """What a model held at the end, by name."""
    return {
        name.removeprefix(where): value
        for name, value in results.items()
        if name.startswith(where)
    }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_and_states_have_the_bits_of_replicas(ranks, recipe, way):
    for results in ranks:
        found = of(results, f"{recipe}/{way}/")
        expected = of(results, f"{recipe}/ddp/")
        assert len(found) == (8 if recipe == "delayed" else 6)
        assert found.keys() == expected.keys()
        for name, value in found.items():
            np.testing.assert_array_equal(value, expected[name], name)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_each_process_has_a_part_of_the_weights(ranks, recipe, way):
    first, second = (of(each, f"cut/{recipe}/{way}/") for each in ranks)
    assert len(first) == 6  # and no state
    for name, rows in first.items():
        whole = ranks[0][f"{recipe}/{way}/{name}"]
        assert rows == second[name] == len(whole) / 2


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_weights_are_those_of_one_process(ranks, recipe):
    """A scale of the whole tensor that is found now is that of its part."""
    one = of(ranks[0], f"{recipe}/one/")
    for name, value in of(ranks[0], f"{recipe}/whole/").items():
        if "state" not in name:
            np.testing.assert_allclose(
                value, one[name], rtol=TOLERANCE, atol=TOLERANCE
            )


@pytest.mark.parametrize("layer", ["first", "last"])
def test_amaxes_are_those_of_one_process(ranks, layer):
    name = f"{layer}.float8_state.kernel_amax"
    one = ranks[0][f"delayed/one/{name}"]
    for results in ranks:
        state = results[f"delayed/whole/{name}"]
        np.testing.assert_allclose(state[:2], one[:2], rtol=TOLERANCE)
        np.testing.assert_allclose(
            state[2, NEWEST:], 2 * one[2, NEWEST:], rtol=TOLERANCE
        )
        assert np.all(state[:, NEWEST] > 0)


def test_a_model_that_is_not_cut_saves_what_all_have(ranks):
    for results in ranks:
        found, expected = results["loaded/outputs"], results["cut/outputs"]
        np.testing.assert_array_equal(found, expected)
        assert np.all(np.ptp(found, axis=0) > 0)


@pytest.mark.parametrize("shard", ["whole", "by_layer"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_variables_that_do_not_follow_are_refused(said, recipe, shard):
    for results in said:
        text = results[f"{recipe}, {shard}"]
        assert "Received: a layer that torch.distributed.fsdp" in text
        assert "kpe.loops.follow_shards(model)" in text


def test_so_are_they_without_a_gradient(said):
    for results in said:
        assert "follow_shards" in results["inference"]


def test_layers_of_keras_are_not_trained_by_themselves(said):
    """Where this fails, Keras follows, and `follow_shards` can go."""
    for results in said:
        first, second = results["stock"]
        assert second == first


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("uncut", "Nothing of this model is sharded. Received: "),
        ("twice", "A weight is sharded twice"),
        ("state", "first/float8_state/kernel_amax', sharded by fully_shard."),
        ("average", "moving_mean', sharded by fully_shard."),
    ],
)
def test_what_cannot_be_trained_is_refused(said, case, text):
    for results in said:
        assert text in results[case]
        assert "Allowed: " in results[case]
