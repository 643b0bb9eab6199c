"""Keras's DataParallel and ModelParallel on JAX, on 8 virtual CPUs.

XLA sees one program on the whole batch and splits it: an amax is that of the
whole batch whatever the layout, and only the order of sums differs.
"""

import numpy as np
import pytest

from processes import is_installed, run

TRAIN = """
import os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
import keras, numpy as np
from keras import distribution
import keras_policy_ext as kpe

rng = np.random.default_rng(0)
x = rng.normal(size=(32, 4, 4, 4)).astype("float32")
y = rng.normal(size=(32, 4)).astype("float32")


def network(recipe):
    keras.utils.set_random_seed(0)
    dtype = kpe.Float8DTypePolicy("float32", recipe=recipe)
    einsum = "abc,cd->abd"
    return keras.Sequential([
        keras.Input((4, 4, 4)),
        kpe.layers.Conv2D(16, 3, activation="relu", dtype=dtype, name="conv"),
        keras.layers.Reshape((4, 16)),
        kpe.layers.EinsumDense(einsum, (4, 16), dtype=dtype, name="einsum"),
        keras.layers.Flatten(),
        kpe.layers.Dense(4, dtype=dtype, name="dense"),
    ])


def train(recipe, where, results):
    model = network(recipe)
    model.compile(keras.optimizers.SGD(0.0625), "mse", jit_compile=True)
    losses = []
    for step in range(3):
        # Views of buffers, which JAX then keeps on the first device only.
        views = [np.asarray(v.value) for v in model.variables]
        losses.append(float(model.train_on_batch(x, y)))
        for v in model.variables:
            if kpe.loops.is_state(v):
                name = v.path.split("/")[-3]
                results[f"{where}/{step}/{name}"] = np.array(v.value)
    results[f"{where}/losses"] = losses
    shards = {v.path: v.value.sharding for v in model.variables}
    results[f"{where}/split"] = [
        path.split("/", 1)[1]
        for path, sharding in shards.items()
        if not sharding.is_fully_replicated
    ]
    results[f"{where}/devices"] = [
        len(sharding.device_set) for sharding in shards.values()
    ]
    return model


def layouts():
    mesh = distribution.DeviceMesh(
        (2, 4), ("batch", "model"), distribution.list_devices()
    )
    layouts = distribution.LayoutMap(mesh)
    layouts[".*(einsum|dense)/.*kernel.*"] = (None, "model")
    layouts[".*conv/kernel"] = (None, None, None, "model")
    return distribution.ModelParallel(
        layout_map=layouts, batch_dim_name="batch"
    )


results = {}
train("current", "current/single", results)
train("delayed(amax_history_length=5)", "delayed/single", results)
for recipe, name, make in (
    ("delayed(amax_history_length=5)", "data", distribution.DataParallel),
    ("current", "model", layouts),
    ("delayed(amax_history_length=5)", "model", layouts),
):
    distribution.set_distribution(make())
    model = train(recipe, f"{recipe[:7]}/{name}", results)
    if name == "data":
        history = model.fit(x, y, batch_size=8, epochs=2, verbose=0)
        results["fit/losses"] = history.history["loss"]
    predictions = model.predict_on_batch(x)
    distribution.set_distribution(None)
model.save(sys.argv[1] + ".keras")
again = keras.saving.load_model(sys.argv[1] + ".keras")
results["predictions"] = predictions
results["loaded/predictions"] = again.predict_on_batch(x)
results["loaded/devices"] = [
    len(v.value.sharding.device_set) for v in again.variables
]
np.savez(sys.argv[1], **results)
"""

LAYERS = ("conv", "einsum", "dense")

# The longest sum is that of 128 squares in the loss, and of 32 * 4 * 4 terms
# in the gradient of the convolution's kernel; another order of the terms
# changes a sum of n numbers by up to n roundings.
TOLERANCE = 32 * 4 * 4 * 2.0**-24

pytestmark = pytest.mark.skipif(
    not is_installed("jax"), reason="jax is not installed"
)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    path = tmp_path_factory.mktemp("jax") / "results.npz"
    run("jax", TRAIN, path)
    with np.load(path) as file:
        return dict(file)


@pytest.mark.parametrize(
    "found", ["delayed/data", "delayed/model", "current/model"]
)
def test_losses_are_those_of_one_device(results, found):
    one = f"{found.split('/')[0]}/single"
    assert set(results[f"{found}/devices"]) == {8}
    assert np.all(np.diff(results[f"{one}/losses"]) < 0)
    np.testing.assert_allclose(
        results[f"{found}/losses"], results[f"{one}/losses"], rtol=TOLERANCE
    )


def test_fit_trains_on_all_devices(results):
    first, second = results["fit/losses"]
    assert second < first < results["delayed/data/losses"][-1]


@pytest.mark.parametrize("name", ["data", "model"])
def test_amaxes_are_those_of_the_whole_batch(results, name):
    for layer in LAYERS:
        for step in range(3):
            found = results[f"delayed/{name}/{step}/{layer}"]
            one = results[f"delayed/single/{step}/{layer}"]
            np.testing.assert_allclose(found, one, rtol=TOLERANCE)
            if not step:  # kernels are as they were made
                np.testing.assert_array_equal(found[1], one[1])
        assert np.all(found[:, 10] > 0)
    # The convolution reads the data.
    found = results[f"delayed/{name}/2/conv"][0]
    np.testing.assert_array_equal(found, results["delayed/single/2/conv"][0])


def test_kernels_are_split_and_their_state_is_not(results):
    kernels = [f"{layer}/kernel" for layer in LAYERS]
    assert list(results["delayed/model/split"]) == kernels
    assert list(results["delayed/data/split"]) == []


def test_a_model_saved_on_many_devices_loads_on_one(results):
    assert set(results["loaded/devices"]) == {1}
    np.testing.assert_allclose(
        results["loaded/predictions"],
        results["predictions"],
        rtol=TOLERANCE,
        atol=TOLERANCE,
    )
