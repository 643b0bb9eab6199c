"""DistributedDataParallel on PyTorch, two processes over gloo.

The reference is one process with the whole batch. A rank's loss is a mean
over its half, so that output gradients are twice as large there.
"""

import concurrent.futures

import numpy as np
import pytest

from processes import is_installed, run

TRAIN = """
import datetime, pathlib, sys
rank, folder = int(sys.argv[1]), pathlib.Path(sys.argv[2])
import keras, numpy as np, torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
import keras_policy_ext as kpe

dist.init_process_group(
    "gloo",
    init_method=f"file://{folder}/meeting",
    rank=rank,
    world_size=2,
    timeout=datetime.timedelta(seconds=120),  # a deadlock is an error
)
rng = np.random.default_rng(0)
x = torch.tensor(rng.normal(size=(4, 8, 6)).astype("float32"))
y = torch.tensor(rng.normal(size=(4, 8, 4)).astype("float32"))
results = {}


class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(0)
        recipe = "delayed(amax_history_length=6,initial_scale=1.0)"
        dtype = kpe.Float8DTypePolicy("float32", recipe=recipe)
        self.first = kpe.layers.Dense(8, "relu", dtype=dtype)
        self.extra = kpe.layers.Dense(8, dtype=dtype)
        self.last = kpe.layers.Dense(4, dtype=dtype)
        self.first.build((None, 6))
        self.extra.build((None, 8))
        self.last.build((None, 8))

    def forward(self, x, branch=True):
        x = self.first(x, training=True)
        if branch:  # used twice
            x = self.extra(self.extra(x, training=True), training=True)
        return self.last(x, training=True)


def mine(batch):
    return batch[rank::2]


def record(where, model):
    for name in ("first", "extra", "last"):
        layer = getattr(model, name)
        (state,) = layer.float8_state.matrices
        results[f"{where}/{name}"] = state.numpy()
        results[f"{where}/{name}/kernel"] = layer.kernel.numpy()


def distributed(model, **options):
    return DistributedDataParallel(
        model, find_unused_parameters=True, **options
    )


def compiled(model):
    # Dynamo's graph; a C++ compiler would add nothing here.
    return torch.compile(model, backend="aot_eager")


def loss_of(model, x, y, *args):
    return torch.mean((model(x, *args) - y) ** 2)


def keras_loop(where, model, wrapped, part):
    optimizer = keras.optimizers.SGD(0.0625)
    layers = (model.first, model.extra, model.last)
    variables = [v for layer in layers for v in layer.trainable_variables]
    for step in range(3):
        model.zero_grad()
        loss_of(wrapped, part(x[step]), part(y[step])).backward()
        with torch.no_grad():
            grads = [v.value.grad for v in variables]
            optimizer.apply(grads, variables)
        record(f"{where}/{step}", model)


def native_loop(where, model, wrapped):
    parameters = kpe.loops.parameters(wrapped)
    optimizer = torch.optim.SGD(parameters, lr=0.0625)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(wrapped, mine(x[step]), mine(y[step])).backward()
        optimizer.step()
        kpe.loops.settle(wrapped)
        record(f"{where}/{step}", model)


def unmodified_loop(where, model, wrapped):
    # As it would be written for any model.
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.0625)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(wrapped, mine(x[step]), mine(y[step])).backward()
        torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1e9)
        optimizer.step()
        record(f"{where}/{step}", model)
    optimizer.param_groups[0]["lr"] = 0.0
    # One rank uses the layer, then none does.
    for step, branch in ((3, rank == 0), (4, False)):
        optimizer.zero_grad()
        batch = mine(x[3]), mine(y[3])
        loss_of(wrapped, *batch, branch).backward()
        optimizer.step()
        record(f"{where}/{step}", model)
    # Two micro-batches, averaged once.
    optimizer.zero_grad()
    with wrapped.no_sync():
        loss_of(wrapped, 3 * mine(x[0]), mine(y[0])).backward()
    loss_of(wrapped, mine(x[1]), mine(y[1])).backward()
    optimizer.step()
    record(f"{where}/5", model)


model = Branches()
keras_loop("one", model, model, lambda batch: batch)
model = Branches()
keras_loop("keras", model, distributed(model), mine)
model = Branches()
native_loop(
    "native", model, distributed(model, gradient_as_bucket_view=True)
)
model = Branches()
unmodified_loop("unmodified", model, distributed(model))
model = Branches()
unmodified_loop(
    "views", model, distributed(model, gradient_as_bucket_view=True)
)
# A rank alone waits for nobody: it calibrates, and takes steps of its own.
if rank == 0:
    single = keras.Sequential([model.first, model.extra, model.last])
    kpe.calibrate(single, x[0].numpy())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loss_of(model, x[0], y[0]).backward()
    optimizer.step()
results["alone"] = model.first.float8_state.matrices[0].numpy()

# Ranks with batches of different numbers.
model = Branches()
wrapped = distributed(model)
optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.0625)
with wrapped.join():
    for step in range(2 + rank):
        optimizer.zero_grad()
        loss_of(wrapped, mine(x[step]), mine(y[step])).backward()
        optimizer.step()
record("join", model)

# Ranks that keep the slots of a part of the weights each.
model = Branches()
wrapped = distributed(model)
optimizer = ZeroRedundancyOptimizer(
    wrapped.parameters(), torch.optim.SGD, lr=0.0625
)
for step in range(3):
    optimizer.zero_grad()
    loss_of(wrapped, mine(x[step]), mine(y[step])).backward()
    optimizer.step()
    record(f"zero/{step}", model)

# Compiled, inside and outside of the exchange of gradients.
for where, around in (
    ("compiled", lambda model: distributed(compiled(model))),
    ("around", lambda model: compiled(distributed(model))),
):
    model = Branches()
    native_loop(where, model, around(model))
results["x"] = x.numpy()
np.savez(folder / f"{rank}.npz", **results)
dist.destroy_process_group()
"""

# The longest sum is that of a kernel gradient over 8 examples, in halves.
TOLERANCE = 8 * 2.0**-24
LAYERS = ("first", "extra", "last")
NEWEST = 10

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
    found = []
    for rank in (0, 1):
        with np.load(folder / f"{rank}.npz") as file:
            found.append(dict(file))
    return found


def test_ranks_agree_to_the_bit(ranks):
    first, second = ranks
    for name in first:
        if name == "alone":
            continue
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


@pytest.mark.parametrize("layer", LAYERS)
def test_the_state_is_that_of_one_process(ranks, layer):
    for step in range(3):
        one = ranks[0][f"one/{step}/{layer}"]
        two = ranks[0][f"keras/{step}/{layer}"]
        if not step:  # before any sum over the batch
            np.testing.assert_array_equal(two[:2], one[:2])
        np.testing.assert_allclose(two[:2], one[:2], rtol=TOLERANCE)
        np.testing.assert_allclose(
            two[2, NEWEST:], 2 * one[2, NEWEST:], rtol=TOLERANCE
        )
        np.testing.assert_allclose(
            ranks[0][f"keras/{step}/{layer}/kernel"],
            ranks[0][f"one/{step}/{layer}/kernel"],
            rtol=TOLERANCE,
            atol=TOLERANCE,
        )
        assert np.all(two[:, 0] == -1.0)


def test_amaxes_are_those_of_the_whole_batch(ranks):
    for step in range(3):
        newest = ranks[0][f"keras/{step}/first"][0, NEWEST]
        assert newest == np.abs(ranks[0]["x"][step]).max()


@pytest.mark.parametrize(
    "loop",
    ["native", "unmodified", "views", "zero", "compiled", "around"],
)
def test_a_native_loop_has_the_bits_of_a_keras_one(loop, ranks):
    names = [name for name in ranks[0] if name.startswith("keras/")]
    assert len(names) == 18
    for name in names:
        native = name.replace("keras", loop)
        np.testing.assert_array_equal(ranks[0][native], ranks[0][name])


def test_a_layer_that_one_rank_did_not_use_is_observed_on_both(ranks):
    before, after, unused = (
        ranks[1][f"unmodified/{s}/extra"] for s in (2, 3, 4)
    )
    kernel = np.abs(ranks[1]["unmodified/2/extra/kernel"]).max()
    assert after[1, NEWEST] == kernel
    assert not np.array_equal(after[0], before[0])
    np.testing.assert_array_equal(unused, after)


def test_micro_batches_and_ranks_combine_by_maximum(ranks):
    largest = np.abs(ranks[0]["x"][:2]).max(axis=(1, 2)) * [3, 1]
    newest = ranks[0]["unmodified/5/first"][0, NEWEST]
    assert newest == np.float32(largest.max())


def test_a_rank_alone_observes_for_itself(ranks):
    largest = np.abs(ranks[0]["x"][0]).max()
    assert ranks[0]["alone"][0, NEWEST] == largest
    assert not np.array_equal(ranks[0]["alone"], ranks[1]["alone"])


def test_ranks_that_join_end_with_the_state_of_the_last_one(ranks):
    """Its amaxes are its own; PyTorch hands its parameters to all ranks."""
    newest = [found["join/first"][0, NEWEST] for found in ranks]
    largest = np.abs(ranks[0]["x"][2][1::2]).max()
    np.testing.assert_array_equal(newest, [largest, largest])
