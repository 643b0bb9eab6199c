"""One-byte optimizer state on two devices, and on one with the whole batch.

The weight has 600 numbers: blocks of 256 go across shards of rows and of
columns, and a part of the batch is half of it.
"""

import concurrent.futures

import numpy as np
import pytest

from processes import is_installed, run

COMMON = """
import keras, numpy as np
import keras_policy_ext as kpe

rng = np.random.default_rng(0)
x = rng.normal(size=(3, 8, 20)).astype("float32")
y = rng.normal(size=(3, 8, 30)).astype("float32")
results = {}


def network():
    keras.utils.set_random_seed(0)
    layer = keras.layers.Dense(30, use_bias=False)
    return keras.Sequential([keras.Input((20,)), layer])


def adam(form="float8", **options):
    options = {"weight_decay": 0.1, "global_clipnorm": 0.5, **options}
    optimizer = keras.optimizers.Adam(0.01, **options)
    return kpe.optimizers.quantize_state(optimizer, form, minimum_size=1)


def slots(optimizer):
    return zip("mv", (*optimizer._momentums, *optimizer._velocities))


def record(where, model, optimizer):
    results[f"{where}/kernel"] = of_replicas(model.layers[0].kernel)
    for name, slot in slots(optimizer):
        results[f"{where}/{name}/codes"] = of_replicas(slot.codes)
        results[f"{where}/{name}/scale"] = of_replicas(slot.scale)
"""

TENSORFLOW = """
import sys, tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]
two = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(cpu, two)
COMMON

def of_replicas(variable):
    value = variable.value
    return [np.array(each) for each in getattr(value, "values", (value,))]


def fit(model, steps):
    for step in steps:
        model.fit(x[step], y[step], batch_size=8, verbose=0)


def train(where, form):
    model = network()
    # Keras clips the gradients of each replica, before it adds them.
    optimizer = adam(form, global_clipnorm=None)
    model.compile(optimizer, "mse", jit_compile=False)
    fit(model, range(3))
    record(where, model, model.optimizer)
    return model


def train_then_quantize(where, scope):
    with scope:
        model = network()
        stock = keras.optimizers.Adam(0.01)
        model.compile(stock, "mse", jit_compile=False)
    fit(model, [0])
    # Outside of the scope.
    kpe.optimizers.quantize_state(stock, minimum_size=1)
    model.make_train_function(force=True)
    fit(model, [1, 2])
    record(where, model, stock)


one = contextlib.nullcontext()
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
for form in ("float8", "mx"):
    train(f"{form}/one", form)
    with strategy.scope():
        model = train(f"{form}/two", form)
train_then_quantize("late/one", one)
train_then_quantize("late/two", strategy.scope())

checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
path = checkpoint.save(sys.argv[1])
fit(model, [0])
with strategy.scope():
    checkpoint.restore(path)
record("restored", model, model.optimizer)
np.savez(sys.argv[1], **results)
"""

JAX = """
import os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax
from keras import distribution
COMMON
from keras_policy_ext.ext.moments.codes import quantize_moments


def of_replicas(variable):
    return [np.asarray(variable.value)]


def cut(*spec):
    mesh = distribution.DeviceMesh(
        (1, 2), ("batch", "model"), distribution.list_devices()
    )
    layouts = distribution.LayoutMap(mesh)
    layouts[".*kernel.*"] = spec
    return distribution.ModelParallel(
        layout_map=layouts, batch_dim_name="batch"
    )


def train(where, form):
    model = network()
    model.compile(adam(form), "mse")
    for step in range(3):
        model.train_on_batch(x[step], y[step])
    record(where, model, model.optimizer)
    for name, slot in slots(model.optimizer):
        for part in ("codes", "scale"):
            value = getattr(slot, part).value
            shards = [each.data.shape for each in value.addressable_shards]
            results[f"{where}/{name}/{part}/shards"] = shards


ways = {
    "data": distribution.DataParallel,
    "columns": lambda: cut(None, "model"),
    "rows": lambda: cut("model", None),
}
for form in ("float8", "mx"):
    train(f"{form}/one", form)
    for way in ways if form == "float8" else ("columns",):
        distribution.set_distribution(ways[way]())
        train(f"{form}/{way}", form)
        distribution.set_distribution(None)

# A model that was made before: paths choose the layouts of the slots.
before = network()
distribution.set_distribution(cut("model", None))
optimizer = adam()
optimizer.build(before.trainable_variables)
slot = optimizer._momentums[0]
for part in ("codes", "scale"):
    value = getattr(slot, part).value
    shards = [each.data.shape for each in value.addressable_shards]
    results[f"before/{part}/shards"] = shards
distribution.set_distribution(None)

# The blocks of a weight in shards, from equal moments.
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("model",))
moment = np.abs(rng.normal(size=(20, 30))).astype("float32")
for name, spec in {"columns": (None, "model"), "rows": ("model", None)}.items():
    sharding = jax.sharding.NamedSharding(
        mesh, jax.sharding.PartitionSpec(*spec)
    )
    for kind in ("first", "second"):
        for form in ("float8", "mx"):
            found = jax.jit(lambda x: quantize_moments(x, kind, form))(
                jax.device_put(moment, sharding)
            )
            for part, value in zip(("codes", "scale"), found):
                results[f"blocks/{name}/{kind}/{form}/{part}"] = value
            wanted = kpe.reference.quantize_moments(moment, kind, form)
            for part, value in zip(("codes", "scale"), wanted):
                results[f"numpy/{kind}/{form}/{part}"] = value
np.savez(sys.argv[1], **results)
"""

TORCH = """
import datetime, pathlib, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
COMMON
rank, folder = int(sys.argv[1]), pathlib.Path(sys.argv[2])
dist.init_process_group(
    "gloo",
    init_method=f"file://{folder}/meeting",
    rank=rank,
    world_size=2,
    timeout=datetime.timedelta(seconds=120),  # a deadlock is an error
)


def of_replicas(variable):
    return [variable.numpy()]


def train(where, form, around, part):
    model, optimizer = network(), adam(form)
    variables = model.trainable_variables
    run = around(model)
    for step in range(3):
        model.zero_grad()
        inputs, wanted = map(torch.tensor, (part(x[step]), part(y[step])))
        torch.mean((run(inputs) - wanted) ** 2).backward()
        with torch.no_grad():
            optimizer.apply([v.value.grad for v in variables], variables)
    record(where, model, optimizer)


for form in ("float8", "mx"):
    train(f"{form}/one", form, lambda model: model, lambda batch: batch)
    mine = slice(rank, None, 2)
    train(f"{form}/two", form, DistributedDataParallel, lambda x: x[mine])
np.savez(folder / f"{rank}.npz", **results)
dist.destroy_process_group()
"""

PARTS = [f"{name}/{part}" for name in "mv" for part in ("codes", "scale")]

# A gradient is a sum over 8 examples, in halves on two devices.
TOLERANCE = 8 * 2.0**-20


def ran(backend, program, *arguments):
    program = program.replace("COMMON", f"import contextlib\n{COMMON}")
    run(backend, program, *arguments)


def load(path):
    with np.load(path) as file:
        return dict(file)


def check_equal(found, expected):
    """Numbers differ by the order of a sum; it rounds few to other codes."""
    (one,) = expected["kernel"]
    for kernel in found["kernel"]:
        np.testing.assert_allclose(kernel, one, atol=2e-4, rtol=2e-4)
    for part in PARTS:
        (one,) = expected[part]
        for each in found[part]:
            np.testing.assert_array_equal(each, found[part][0], part)
            if part.endswith("codes"):
                off = each.astype(int) - one.astype(int)
                assert np.mean(off != 0) < 0.01
            else:
                np.testing.assert_allclose(each, one, rtol=TOLERANCE)


def of(results, where):
    return {
        name.removeprefix(f"{where}/"): value
        for name, value in results.items()
        if name.startswith(f"{where}/")
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def on_tensorflow(folder):
    if not is_installed("tensorflow"):
        pytest.skip("tensorflow is not installed")
    ran("tensorflow", TENSORFLOW, folder / "tensorflow.npz")
    return load(folder / "tensorflow.npz")


@pytest.fixture(scope="module")
def on_jax(folder):
    if not is_installed("jax"):
        pytest.skip("jax is not installed")
    ran("jax", JAX, folder / "jax.npz")
    return load(folder / "jax.npz")


@pytest.fixture(scope="module")
def ranks(folder):
    if not is_installed("torch"):
        pytest.skip("torch is not installed")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda rank: ran("torch", TORCH, rank, folder), (0, 1)))
    return [load(folder / f"{rank}.npz") for rank in (0, 1)]


@pytest.mark.parametrize("case", ["float8", "mx", "late"])
def test_mirrored_replicas_have_the_state_of_one_device(on_tensorflow, case):
    found = of(on_tensorflow, f"{case}/two")
    assert all(len(found[part]) == 2 for part in PARTS)
    check_equal(found, of(on_tensorflow, f"{case}/one"))


def test_a_tf_checkpoint_gives_all_replicas_their_bits_back(on_tensorflow):
    wanted = of(on_tensorflow, "mx/two")
    for part in PARTS:
        found = on_tensorflow[f"restored/{part}"]
        np.testing.assert_array_equal(found, wanted[part])


@pytest.mark.parametrize(
    "case", ["float8/data", "float8/columns", "float8/rows", "mx/columns"]
)
def test_devices_of_jax_have_the_state_of_one(on_jax, case):
    form = case.partition("/")[0]
    check_equal(of(on_jax, case), of(on_jax, f"{form}/one"))


@pytest.mark.parametrize(
    ("case", "shape"),
    [("data", (20, 30)), ("columns", (20, 15)), ("rows", (10, 30))],
)
def test_codes_are_cut_as_slots_and_scales_are_everywhere(on_jax, case, shape):
    for name in "mv":
        shards = of(on_jax, f"float8/{case}/{name}")
        np.testing.assert_array_equal(shards["codes/shards"], [shape] * 2)
        np.testing.assert_array_equal(shards["scale/shards"], [(3,)] * 2)


def test_a_layout_for_kernels_is_none_for_scales(on_jax):
    np.testing.assert_array_equal(on_jax["before/codes/shards"], [(10, 30)] * 2)
    np.testing.assert_array_equal(on_jax["before/scale/shards"], [(3,)] * 2)


@pytest.mark.parametrize("way", ["columns", "rows"])
def test_blocks_across_shards_have_the_bits_of_numpy(on_jax, way):
    found = of(on_jax, f"blocks/{way}")
    wanted = of(on_jax, "numpy")
    assert found.keys() == wanted.keys() and len(found) == 8
    for name, value in found.items():
        np.testing.assert_array_equal(value, wanted[name], name)


@pytest.mark.parametrize("form", ["float8", "mx"])
def test_ranks_have_the_state_of_one_process(ranks, form):
    first, second = (of(results, f"{form}/two") for results in ranks)
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name], name)
    check_equal(first, of(ranks[0], f"{form}/one"))
