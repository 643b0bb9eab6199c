"""`fully_shard` of PyTorch gathers kernels as float8: two processes, gloo.

The reference is `fully_shard` that gathers kernels in float32.
"""

import concurrent.futures
import json

import numpy as np
import pytest

from processes import is_installed, run

TRAIN = """
import collections, datetime, gc, json, pathlib, sys, weakref
rank, folder = int(sys.argv[1]), pathlib.Path(sys.argv[2])
import keras, numpy as np, torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard
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
results, said, counted, held = {}, {}, {}, []
sent = collections.Counter()


def count(name):
    collective = getattr(dist, name)

    def call(*args, **kwargs):
        tensor = args[0] if args else kwargs["output_tensor"]
        kind = " ".join([*name.split("_")[:2], str(tensor.dtype)])
        sent[kind] += tensor.numel() * tensor.itemsize
        return collective(*args, **kwargs)

    setattr(dist, name, call)


# PyTorch 2.13 has renamed the first.
for name in ("all_gather_into_tensor", "all_gather_single", "all_reduce"):
    if hasattr(dist, name):
        count(name)


def dense(recipe, source="float32", units=9):
    # The last kernel has shards of 5 and of 4 rows.
    keras.utils.set_random_seed(0)
    policy = kpe.Float8DTypePolicy(source, recipe=recipe)
    return keras.Sequential([
        keras.Input((6,)),
        kpe.layers.Dense(units, "relu", dtype=policy, name="first"),
        keras.layers.LayerNormalization(name="norm"),
        kpe.layers.Dense(4, dtype=policy, name="last"),
    ])


def attention(recipe, source="float32"):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6,))
    outputs = keras.layers.Reshape((3, 2))(inputs)
    outputs = keras.layers.MultiHeadAttention(2, 4, name="attention")(
        outputs, outputs
    )
    outputs = keras.layers.Flatten()(outputs)
    outputs = keras.layers.Dense(4, name="last")(outputs)
    model = keras.Model(inputs, outputs)
    kpe.convert(model, kpe.Float8DTypePolicy(source, recipe=recipe))
    return model


class Around(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.first, self.norm, self.last = layers

    @property
    def layers(self):
        return [self.first, self.norm, self.last]

    @property
    def variables(self):
        return [v for layer in self.layers for v in layer.variables]

    def forward(self, x, training):
        for layer in self.layers:
            x = layer(x, training=training)
        return x


def module(recipe, source="float32"):
    return Around(dense(recipe, source).layers)


def shard(model, gathers, whole=False, **options):
    weights = [
        weakref.ref(v.value)
        for v in model.variables
        if v.trainable and not kpe.loops.is_state(v)
    ]
    found = kpe.loops.gather_float8(model) if gathers else []
    ignored = kpe.loops.uncut(model)
    parts = [model] if whole else model.layers
    # A part of a sharded module frees what it has gathered after each pass.
    if isinstance(model, Around):
        parts = [*parts, model]
    for part in parts:
        fully_shard(part, mesh=mesh, ignored_params=ignored, **options)
    kpe.loops.follow_shards(model)
    gc.collect()
    held.append(sum(weight() is not None for weight in weights))
    return [v.path.split("/", 1)[1] for v in found]


def train(where, model, training=True, backwards=1):
    optimizer = torch.optim.AdamW(kpe.loops.parameters(model), lr=0.0625)
    for step in range(3):
        sent.clear()
        optimizer.zero_grad()
        for number in range(backwards):
            batch = (step + number) % 3
            outputs = model(x[batch][rank::2], training=training)
            loss = torch.mean((outputs - y[batch][rank::2]) ** 2)
            loss.backward()
        weights = kpe.loops.parameters(model)
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
    counted[where] = dict(sent)
    for v in model.variables:
        value = v.value.detach()
        is_cut = hasattr(value, "full_tensor")
        value = value.full_tensor() if is_cut else value
        name = v.path.split("/", 1)[1]
        results[f"{where}/{name}"] = value.numpy()
        if is_cut and "kernel" in name:
            rows = len(v.value.to_local())
            results[f"rows/{where}/{name}"] = rows
    with torch.no_grad():
        outputs = model(x[0], training=False)
    results[f"{where}/outputs"] = outputs.float().numpy()


def shown(where, function, *arguments):
    try:
        said[where] = function(*arguments)
    except (ValueError, NotImplementedError) as error:
        said[where] = str(error)


def both(name, make, recipe, source="float32", training=True, backwards=1,
         **options):
    for gathers in (False, True):
        where = f"{name}/{'float8' if gathers else 'float32'}"
        model = make(recipe, source)
        found = shard(model, gathers, **options)
        if gathers:
            said[name] = found
        train(where, model, training, backwards)


def infinite(gathers):
    model = dense("current")
    kernel = np.array(model.layers[-1].kernel)
    kernel[0, 0] = np.inf  # of the shard of rank 0
    model.layers[-1].kernel.assign(kernel)
    shard(model, gathers)
    model(x[0][rank::2], training=True).sum().backward()
    gradient = model.layers[0].kernel.value.grad.full_tensor()
    return bool(torch.isnan(gradient).any())


def checkpoint(gathers):
    # Saved from a model that gathers float8, loaded into one that may.
    found = []
    for seed, here in ((0, True), (1, gathers)):
        keras.backend.clear_session()  # The paths are part of a checkpoint.
        model = dense("delayed")
        keras.utils.set_random_seed(seed)
        for v in model.trainable_variables:
            if not kpe.loops.is_state(v):
                v.assign(keras.random.normal(v.shape))
        shard(model, here)
        values = {"model": model.state_dict()}
        place = str(folder / f"checkpoint {gathers}")
        if seed:
            found.append(call(model))
            for layer in model.layers:
                layer.reshard()
            dcp.load(values, checkpoint_id=place)
            model.load_state_dict(values["model"])
        else:
            dcp.save(values, checkpoint_id=place)
        found.append(call(model))
    return found


def call(model):
    return float(model(x[0][rank::2], training=False).sum())


def forgotten(sharded):
    model = dense("delayed")
    kpe.loops.gather_float8(model)
    if sharded:
        fully_shard(model, mesh=mesh, ignored_params=kpe.loops.uncut(model))
    return call(model)


def too_late(followed):
    model = dense("delayed")
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, ignored_params=kpe.loops.uncut(model))
    if followed:
        kpe.loops.follow_shards(model)
    return str(kpe.loops.gather_float8(model))


class Norms(kpe.layers.Dense):
    def call(self, inputs, training=None):
        outputs = super().call(inputs, training=training)
        return outputs / keras.ops.norm(self.kernel)


def read_after():
    model = dense("delayed")
    shard(model, True)
    call(model)  # A root keeps what it has gathered.
    model.layers[0].reshard()
    kernel = model.layers[0].kernel.value.full_tensor()
    return list(kernel.shape), float(model.layers[-1].kernel.value.sum())


def read_elsewhere():
    policy = kpe.Float8DTypePolicy("float32")
    model = keras.Sequential([keras.Input((6,)), Norms(4, dtype=policy)])
    shard(model, True)
    return call(model)


def by_columns():
    model = dense("delayed", units=8)
    shard(model, True, shard_placement_fn=lambda x: Shard(x.dim() - 1))
    return call(model)


HISTORY = "amax_history_length=6"
both("delayed", dense, f"delayed({HISTORY})")
both("fixed", dense, f"delayed({HISTORY},initial_scale=1.0)")
both("current", dense, "current")
both("rowwise", dense, "rowwise")
both("whole", dense, f"delayed({HISTORY})", whole=True)
both("module", module, f"delayed({HISTORY})")
both("module, current", module, "current")
both("attention", attention, f"delayed({HISTORY})")
both("16 bits", dense, f"delayed({HISTORY})", "mixed_bfloat16")
both("inference", dense, f"delayed({HISTORY})", training=False)
both("accumulated", dense, "current", backwards=2)
both("kept", dense, "current", reshard_after_forward=False)
on_host = CPUOffloadPolicy(pin_memory=False)
both("offloaded", dense, "current", offload_policy=on_host)
halves = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
model = dense("current", "mixed_bfloat16")
said["halves"] = shard(model, True, mp_policy=halves)
train("halves", model)
for gathers in (False, True):
    said[f"infinite, {gathers}"] = infinite(gathers)
    said[f"checkpoint, {gathers}"] = checkpoint(gathers)
shown("not sharded", forgotten, False)
shown("not followed", forgotten, True)
shown("too late", too_late, False)
shown("too late, followed", too_late, True)
shown("read elsewhere", read_elsewhere)
shown("by columns", by_columns)
shown("read after", read_after)
np.savez(folder / f"{rank}.npz", **results)
said["held"] = held
(folder / f"{rank}.json").write_text(json.dumps([said, counted]))
dist.destroy_process_group()
"""

ALIKE = (
    "delayed",
    "fixed",
    "current",
    "rowwise",
    "whole",
    "module",
    "module, current",
    "attention",
    "16 bits",
    "inference",
    "accumulated",
    "kept",
    "offloaded",
)

pytestmark = pytest.mark.skipif(
    not is_installed("torch"), reason="torch is not installed"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torch")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        jobs = [
            pool.submit(run, "torch", TRAIN, rank, folder) for rank in (0, 1)
        ]
        for job in jobs:
            job.result()
    return folder


@pytest.fixture(scope="module")
def ranks(folder):
    """The weights, states and outputs of rank 0 and of rank 1."""
    found = []
    for rank in (0, 1):
        with np.load(folder / f"{rank}.npz") as file:
            found.append(dict(file))
    return found


@pytest.fixture(scope="module")
def told(folder):
    """For each rank what it was told, and the bytes of its collectives."""
    return [
        json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)
    ]


@pytest.mark.parametrize("case", ALIKE)
def test_training_has_the_bits_of_kernels_gathered_in_float32(ranks, case):
    for results in ranks:
        begin = f"{case}/float32/"
        names = [name for name in results if name.startswith(begin)]
        assert any("kernel" in name for name in names)
        for name in names:
            found = results[name.replace("/float32/", "/float8/")]
            np.testing.assert_array_equal(found, results[name], name)


@pytest.mark.parametrize("case", ALIKE)
def test_each_process_has_a_part_of_the_kernels(ranks, case):
    begin = f"rows/{case}/float8/"
    names = [name for name in ranks[0] if name.startswith(begin)]
    assert names
    for name in names:
        rows = len(ranks[0][name.removeprefix("rows/")])
        first, second = (int(results[name]) for results in ranks)
        assert (first, first + second) == (-(-rows // 2), rows)


def test_no_process_keeps_a_whole_weight(told):
    for said, _ in told:
        assert len(said["held"]) > 2 * len(ALIKE)
        assert not any(said["held"])


@pytest.mark.parametrize(
    ("case", "kernels"),
    [
        ("delayed", ["first/kernel", "last/kernel"]),
        ("current", ["first/kernel", "last/kernel"]),
        ("rowwise", []),
        (
            "attention",
            [
                *(f"{name}/kernel" for name in ("query", "key", "value")),
                "attention_output/kernel",
                "kernel",
            ],
        ),
    ],
)
def test_the_kernels_that_have_one_scale_are_named(told, case, kernels):
    for said, _ in told:
        assert sorted(said[case]) == sorted(kernels)


@pytest.mark.parametrize(("case", "passes"), [("delayed", 1), ("module", 2)])
def test_a_kernel_is_gathered_in_one_byte_per_element(told, case, passes):
    """In the forward pass, and for parts of a module in the backward pass."""
    # Shards have equal sizes; the last kernel is filled up to 10 rows.
    kernels, vectors, norm = 6 * 9 + 10 * 4, 4 * (10 + 4), 4 * 2 * 10
    for _, counted in told:
        wide, narrow = counted[f"{case}/float32"], counted[f"{case}/float8"]
        everything = (4 * kernels + vectors + norm) * passes
        assert wide["all gather torch.float32"] == everything
        assert narrow["all gather torch.uint8"] == (kernels + vectors) * passes
        assert narrow["all gather torch.float32"] == norm * passes


def test_a_known_scale_needs_no_all_reduce_and_an_own_amax_one(told):
    for _, counted in told:
        for case in ("delayed", "fixed"):
            assert "all reduce torch.int32" not in counted[f"{case}/float8"]
        # Not again in the backward pass.
        for case in ("current", "module, current"):
            assert counted[f"{case}/float8"]["all reduce torch.int32"] == 2 * 4
        assert counted["accumulated/float8"]["all reduce torch.int32"] == 16


def test_a_model_trains_where_other_weights_are_gathered_in_16_bits(
    told, ranks
):
    for said, _ in told:
        assert said["halves"] == ["first/kernel", "last/kernel"]
    for name, value in ranks[0].items():
        if name.startswith("halves/"):
            assert np.all(np.isfinite(value))
            np.testing.assert_array_equal(value, ranks[1][name], name)


@pytest.mark.parametrize("gathers", [False, True])
def test_an_infinite_kernel_of_one_process_marks_gradients_of_all(
    told, gathers
):
    for said, _ in told:
        assert said[f"infinite, {gathers}"] is True


@pytest.mark.parametrize("gathers", [False, True])
def test_a_checkpoint_is_loaded_however_kernels_are_gathered(told, gathers):
    for said, _ in told:
        saved, before, loaded = said[f"checkpoint, {gathers}"]
        assert loaded == saved != before


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("not sharded", "kpe.loops.follow_shards(model)"),
        ("not followed", "kpe.loops.follow_shards(model)"),
        ("too late", "sharded already"),
        ("too late, followed", "sharded already"),
        ("read elsewhere", "can be multiplied by its float8 layer only"),
        ("read after", "Call `reshard()` of the layer first"),
        ("by columns", "must be sharded along its first axis"),
    ],
)
def test_what_cannot_be_gathered_is_refused(told, case, text):
    for said, _ in told:
        assert text in said[case]
        assert "Allowed: " in said[case]
