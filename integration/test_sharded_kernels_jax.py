"""What crosses between devices for a kernel that is cut, on 8 virtual CPUs.

The text of the compiled step says what is gathered. The reference is the same
step where nothing is said of gathering, and one device.
"""

import collections
import math
import re

import numpy as np
import pytest

from processes import is_installed, run

TRAIN = """
import os, re, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
import jax, jax.numpy as jnp, keras, numpy as np
from keras import distribution
import keras_policy_ext as kpe
from keras_policy_ext import backends

rng = np.random.default_rng(0)
x = rng.normal(size=(256, 2, 64)).astype("float32")
y = rng.normal(size=(256, 2, 64)).astype("float32")
framework = backends.current
gather = r"= (\\w+\\[[\\d,]*\\])\\S* all-gather\\("
cut = {
    "batch": {
        "up": ("batch", None),
        "heads": ("batch", None, None),
        "out": (None, None, "batch"),
        "down": (None, "batch"),
    },
    "both": {
        "up": ("batch", "model"),
        "heads": ("batch", "model", None),
        "out": ("model", None, "batch"),
        "down": ("model", "batch"),
    },
    "model": {
        "up": (None, "model"),
        "heads": (None, "model", None),
        "out": ("model", None, None),
        "down": ("model", None),
    },
}


def network(recipe):
    keras.utils.set_random_seed(0)
    dtype = kpe.Float8DTypePolicy("float32", recipe=recipe)
    L = kpe.layers
    heads, out = "abc,cde->abde", "abde,dec->abc"
    return keras.Sequential([
        keras.Input((2, 64)),
        L.Dense(128, "relu", dtype=dtype, name="up"),
        L.EinsumDense(heads, (2, 4, 32), dtype=dtype, name="heads"),
        L.EinsumDense(out, (2, 128), dtype=dtype, name="out"),
        L.Dense(64, dtype=dtype, name="down"),
    ])


def distributed(name):
    mesh = distribution.DeviceMesh(
        (2, 4), ("batch", "model"), distribution.list_devices()
    )
    layouts = distribution.LayoutMap(mesh)
    for layer, axes in cut[name].items():
        layouts[f".*{layer}/kernel"] = axes
    return distribution.ModelParallel(
        layout_map=layouts, batch_dim_name="batch"
    )


def train(recipe, where, results):
    model = network(recipe)
    variables = model.trainable_variables
    values = [v.value for v in variables]
    fixed = [v.value for v in model.non_trainable_variables]
    batch = x, y
    strategy = distribution.distribution()
    if strategy is not None:
        layout = strategy.get_data_layout(x.shape).backend_layout
        batch = [jax.device_put(z, layout) for z in batch]

    def loss_of(values, fixed, x, y):
        found, _ = model.stateless_call(values, fixed, x, training=True)
        return jnp.mean((found - y) ** 2)

    def step(values, fixed, x, y):
        loss, grads = jax.value_and_grad(loss_of)(values, fixed, x, y)
        rates = [0.0 if kpe.loops.is_state(v) else 0.0625 for v in variables]
        moved = [v - r * g for r, v, g in zip(rates, values, grads)]
        return loss, kpe.loops.settled(model, grads, moved)

    placed = None, [v.sharding for v in values]
    step = jax.jit(step, out_shardings=placed)
    step = step.lower(values, fixed, *batch).compile()
    losses = []
    for _ in range(3):
        loss, values = step(values, fixed, *batch)
        losses.append(float(loss))
    results[f"{where}/losses"] = losses
    found = re.findall(gather, step.as_text())
    results[f"{where}/gathers"] = np.array(found, "U")
    for v, value in zip(variables, values):
        layer = v.path.split("/")[1]
        if kpe.loops.is_state(v):
            results[f"{where}/state/{layer}"] = np.stack(
                [np.array(shard.data) for shard in value.addressable_shards]
            )
        elif v.path.endswith("kernel"):
            results[f"{where}/kernel/{layer}"] = np.array(value)


def frozen(where, results):
    model = network("current")
    kpe.freeze(model)
    trained = [v.value for v in model.trainable_variables]
    fixed = [v.value for v in model.non_trainable_variables]
    batch = x
    strategy = distribution.distribution()
    if strategy is not None:
        layout = strategy.get_data_layout(x.shape).backend_layout
        batch = jax.device_put(x, layout)

    def outputs(trained, fixed, x):
        return model.stateless_call(trained, fixed, x, training=False)[0]

    outputs = jax.jit(outputs).lower(trained, fixed, batch).compile()
    results[f"{where}/outputs"] = np.array(outputs(trained, fixed, batch))
    found = re.findall(gather, outputs.as_text())
    results[f"{where}/gathers"] = np.array(found, "U")


def unsaid(recipe, where, results):
    framework.gathering_of = lambda variable: None
    train(recipe, where, results)
    del framework.gathering_of


results = {}
recipes = sys.argv[2].split(";")
for recipe in recipes:
    train(recipe, f"single/{recipe}", results)
frozen("single/frozen", results)
for name in cut:
    distribution.set_distribution(distributed(name))
    for recipe in recipes:
        train(recipe, f"{name}/{recipe}", results)
        unsaid(recipe, f"unsaid/{name}/{recipe}", results)
distribution.set_distribution(distributed("batch"))
with kpe.kernels.prefer("native"):
    train(recipes[0], "native", results)
frozen("batch/frozen", results)
np.savez(sys.argv[1], **results)
"""

RECIPES = ("delayed(amax_history_length=5)", "mxfp8")
KERNELS = {"up": 64 * 128, "heads": 128**2, "out": 128**2, "down": 128 * 64}
NUMBERS = sum(KERNELS.values())
OLDEST = 13  # in a state: three amaxes are in a ring of five
BYTES = {"u8": 1, "f32": 4}

# The longest sum is that of 256 examples with two rows each.
TOLERANCE = 256 * 2 * 2.0**-24

pytestmark = pytest.mark.skipif(
    not is_installed("jax"), reason="jax is not installed"
)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    path = tmp_path_factory.mktemp("jax") / "results.npz"
    run("jax", TRAIN, path, ";".join(RECIPES))
    with np.load(path) as file:
        return dict(file)


def gathers(results, where):
    """How often a step gathers how many numbers of which dtype."""
    found = collections.Counter()
    for text in results[f"{where}/gathers"]:
        dtype, sizes = re.match(r"(\w+)\[([\d,]*)\]", str(text)).groups()
        found[dtype, math.prod(map(int, sizes.split(",")))] += 1
    return found


def moved(found):
    return sum(
        count * BYTES[dtype] * numbers
        for (dtype, numbers), count in found.items()
    )


def beside(results, recipe):
    """What is gathered for kernels that are cut along both axes.

    Cut along the axis of the model alone, activations are gathered and
    kernels are not.
    """
    found = gathers(results, f"both/{recipe}")
    found.subtract(gathers(results, f"model/{recipe}"))
    return +found


def test_a_kernel_is_gathered_once_and_in_bytes(results):
    delayed = RECIPES[0]
    found = gathers(results, f"batch/{delayed}")
    assert found == collections.Counter(("u8", n) for n in KERNELS.values())
    # Without it twice, but for that of the first layer, and in float32.
    before = moved(gathers(results, f"unsaid/batch/{delayed}"))
    assert before == 4 * (2 * NUMBERS - KERNELS["up"])


def test_a_part_of_a_kernel_is_gathered_in_bytes(results):
    found = beside(results, RECIPES[0])
    parts = collections.Counter(("u8", n // 4) for n in KERNELS.values())
    assert found == parts


def test_a_kernel_that_is_read_twice_is_gathered_twice_in_bytes(results):
    """The second time for the gradient of the inputs of all layers but one."""
    both_ways = 2 * NUMBERS - KERNELS["up"]
    for parts, found in (
        (1, gathers(results, f"batch/{RECIPES[1]}")),
        (4, beside(results, RECIPES[1])),
    ):
        assert {dtype for dtype, _ in found} == {"u8"}
        assert moved(found) == both_ways // parts * 33 / 32


def test_float8_numbers_are_gathered_as_bytes(results):
    """XLA for a CPU would make float16 of them."""
    found = gathers(results, "native")
    assert found == collections.Counter(("u8", n) for n in KERNELS.values())


def test_codes_of_frozen_kernels_are_gathered_as_they_are(results):
    found = gathers(results, "batch/frozen")
    assert found == collections.Counter(("u8", n) for n in KERNELS.values())
    np.testing.assert_allclose(
        results["batch/frozen/outputs"],
        results["single/frozen/outputs"],
        rtol=TOLERANCE,
        atol=TOLERANCE,
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_nothing_is_added_where_parts_are_multiplied(results, recipe):
    found = gathers(results, f"model/{recipe}")
    assert found == gathers(results, f"unsaid/model/{recipe}")
    assert {dtype for dtype, _ in found} == {"f32"}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", ["batch", "both"])
def test_numbers_are_those_of_float32_gathered(results, layout, recipe):
    where = f"{layout}/{recipe}/"
    names = [name for name in results if name.startswith(where)]
    names.remove(f"{where}gathers")
    assert len(names) == (9 if recipe == RECIPES[0] else 5)
    for name in names:
        np.testing.assert_array_equal(results[name], results[f"unsaid/{name}"])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", ["batch", "both", "model"])
def test_losses_and_kernels_are_those_of_one_device(results, layout, recipe):
    one = results[f"single/{recipe}/losses"]
    assert np.all(np.diff(one) < 0)
    found = results[f"{layout}/{recipe}/losses"]
    np.testing.assert_allclose(found, one, rtol=TOLERANCE)
    for layer in KERNELS:
        np.testing.assert_allclose(
            results[f"{layout}/{recipe}/kernel/{layer}"],
            results[f"single/{recipe}/kernel/{layer}"],
            rtol=TOLERANCE,
            atol=TOLERANCE,
        )


@pytest.mark.parametrize("layer", KERNELS)
@pytest.mark.parametrize("layout", ["batch", "both", "model"])
def test_amaxes_and_scales_are_the_same_on_every_device(results, layout, layer):
    states = results[f"{layout}/{RECIPES[0]}/state/{layer}"]
    assert len(states) == 8
    for state in states:
        np.testing.assert_array_equal(state, states[0])
    (one,) = results[f"single/{RECIPES[0]}/state/{layer}"]
    np.testing.assert_allclose(states[0], one, rtol=TOLERANCE)
    # Kernels as they were made.
    assert states[0][1, OLDEST] == one[1, OLDEST] > 0
