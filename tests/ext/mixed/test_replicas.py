import keras
import pytest

import processes

PROGRAM = """
import numpy as np, tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
two = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(cpu, two)
import keras, keras_policy_ext as kpe

class Model(kpe.mixed_precision.LossScaleMixin, keras.Sequential):
    pass

policy = kpe.Float8DTypePolicy("mixed_float16", amax_history_length=2)
with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
    model = Model([keras.Input((4,)), kpe.layers.Dense(3, dtype=policy)])
    scaler = kpe.mixed_precision.LossScaleOptimizer(
        keras.optimizers.Adam(0.01), initial_scale=256.0
    )
    model.compile(scaler, "mse", jit_compile=False)
x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
bad = x.copy()
bad[6] = np.nan  # the second half of the batch is the second replica's

def fit(x):
    y = np.zeros((8, 3))
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    copies = [v.value.values for v in (*model.weights, *scaler.variables)]
    flat = [[c.numpy() for c in pair] for pair in copies]
    same = all(np.array_equal(a, b) for a, b in flat)
    return [a for a, b in flat[: len(model.weights)]], same

good, same = fit(x)
skipped, still = fit(bad)
kept = all(np.array_equal(a, b) for a, b in zip(good, skipped))
scale = float(scaler.loss_scale)
moved, yet = fit(x)
moves = any(not np.array_equal(a, b) for a, b in zip(skipped, moved))
print(same, kept, still, scale, moves, yet)
"""


@pytest.mark.full
@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow",
    reason="MirroredStrategy is TensorFlow's",
)
def test_nan_on_one_replica_skips_the_step_on_all():
    # A process of its own: virtual devices are made before TensorFlow starts.
    printed = processes.run("tensorflow", PROGRAM)
    assert printed.split() == ["True", "True", "True", "128.0", "True", "True"]
