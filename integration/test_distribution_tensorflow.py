"""MirroredStrategy on TensorFlow, on 2 virtual CPUs.

Each replica computes on its part of the batch and observes that part. Where
a scale comes from the tensor itself it is that of the part: so the first
step of delayed scaling starts from a fixed scale here, and current scaling
takes powers of two, which round all parts alike.
"""

import numpy as np
import pytest

from processes import is_installed, run

TRAIN = """
import sys
import numpy as np, tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]
two = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(cpu, two)

import keras
import keras_policy_ext as kpe

rng = np.random.default_rng(0)
x = rng.normal(size=(3, 16, 4, 4, 3)).astype("float32")
y = rng.normal(size=(3, 16, 8)).astype("float32")
# The largest input is on the second replica, then on the first, ...
for step, row in enumerate((11, 2, 9)):
    x[step, row, 0, 0, 0] = 10.0 * (1 + step)


def network(recipe):
    keras.utils.set_random_seed(0)
    dtype = kpe.Float8DTypePolicy("float32", recipe=recipe)
    inputs = keras.Input((4, 4, 3))
    conv = kpe.layers.Conv2D(8, 3, dtype=dtype, activation="relu")
    shared = kpe.layers.Dense(8, dtype=dtype)
    hidden = keras.layers.GlobalAveragePooling2D()(conv(inputs))
    return keras.Model(inputs, shared(shared(hidden)))


def train(recipe, where, results, optimizer):
    model = network(recipe)
    model.compile(optimizer, "mse", jit_compile=False)
    losses = []
    for step in range(3):
        fit = model.fit(x[step], y[step], batch_size=16, verbose=0)
        losses += fit.history["loss"]
        states = [v.value for v in model.variables if kpe.loops.is_state(v)]
        for i, value in enumerate(states):
            replicas = getattr(value, "values", (value,))
            results[f"{where}/{step}/{i}"] = [v.numpy() for v in replicas]
    results[f"{where}/losses"] = losses


def sgd():
    return keras.optimizers.SGD(0.0625)


def scaled():
    return keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=4.0)


results = {}
# One strategy, since two in one process would share their channels.
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
delayed = "delayed(amax_history_length=4,initial_scale=1.0)"
for name, recipe, optimizer in (
    ("delayed", delayed, sgd),
    ("scaled", delayed, scaled),
    ("current", "current(power_of_two=True)", sgd),
):
    train(recipe, f"{name}/one", results, optimizer())
    with strategy.scope():
        train(recipe, f"{name}/two", results, optimizer())
np.savez(sys.argv[1], **results)
"""

# The longest sum is that of the convolution's kernel gradient: 16 examples
# of 2 * 2 places; halves are summed first.
TOLERANCE = 16 * 2 * 2 * 2.0**-24

pytestmark = pytest.mark.skipif(
    not is_installed("tensorflow"), reason="tensorflow is not installed"
)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    path = tmp_path_factory.mktemp("tensorflow") / "results.npz"
    run("tensorflow", TRAIN, path)
    with np.load(path) as file:
        return dict(file)


@pytest.mark.parametrize("kind", ["delayed", "scaled", "current"])
def test_losses_are_those_of_one_device(results, kind):
    one, two = results[f"{kind}/one/losses"], results[f"{kind}/two/losses"]
    assert np.all(np.diff(one) != 0)
    np.testing.assert_allclose(two, one, rtol=TOLERANCE)


@pytest.mark.parametrize("kind", ["delayed", "scaled"])
@pytest.mark.parametrize("layer", [0, 1], ids=["conv", "shared"])
def test_every_replica_has_the_state_of_one_device(results, kind, layer):
    for step in range(3):
        (one,) = results[f"{kind}/one/{step}/{layer}"]
        first, second = results[f"{kind}/two/{step}/{layer}"]
        np.testing.assert_array_equal(first, second)
        np.testing.assert_allclose(first, one, rtol=TOLERANCE)
        if not step:  # the same numbers, before any sum over the batch
            np.testing.assert_array_equal(first[:2], one[:2])
        assert np.all(one[:, 0] == -1.0)
        assert np.all(one[:, 10] > 0.0)


def test_amaxes_are_the_largest_of_the_replicas(results):
    for step in range(3):
        first, _ = results[f"delayed/two/{step}/0"]
        assert first[0, 10] == 10.0 * (1 + step)
