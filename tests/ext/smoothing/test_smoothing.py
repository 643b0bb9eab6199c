"""Scales of channels that are folded into gated blocks."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from keras_policy_ext.conversion import training
from steps import numpy

smooth = kpe.conversion.smooth_swiglu


@keras.saving.register_keras_serializable(package="tests")
class Gated(keras.layers.Layer):
    """A SwiGLU block whose names say nothing."""

    def __init__(self, activation="silu", **kwargs):
        super().__init__(**kwargs)
        self.act = keras.activations.get(activation)
        self.a = keras.layers.Dense(24, name="a", dtype=self.dtype_policy)
        self.b = keras.layers.Dense(24, name="b", dtype=self.dtype_policy)
        self.c = keras.layers.Dense(8, name="c", dtype=self.dtype_policy)

    def build(self, shape):
        self.a.build(shape)
        self.b.build(shape)
        self.c.build((*shape[:-1], 24))

    def call(self, x):
        return x + self.c(self.b(x) * self.act(self.a(x)))


def gated(blocks=2, dtype="float32", **options):
    """A model whose channels differ by orders of magnitude."""
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((5, 8))
    for number in range(blocks):
        x = Gated(name=f"block_{number}", dtype=dtype, **options)(x)
    model = keras.Model(inputs, x)
    rng = np.random.default_rng(0)
    for number in range(blocks):
        up = model.get_layer(f"block_{number}").b
        sizes = 2.0 ** rng.integers(-6, 7, 24) * rng.uniform(1, 2, 24)
        up.kernel.assign(numpy(up.kernel) * sizes)
        up.bias.assign(rng.normal(size=24))
    return model


def batch(*shape):
    return np.random.default_rng(1).normal(size=shape).astype("float32")


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("activation", ["silu", "gelu", "tanh"])
def test_the_function_is_the_same_bit_for_bit(activation, dtype):
    model, x = gated(dtype=dtype, activation=activation), batch(3, 5, 8)
    other = batch(7, 5, 8) * 3
    before = [numpy(ops.cast(model(each), "float32")) for each in (x, other)]
    found = smooth(model, x)
    assert [each.up.rpartition("/")[2] for each in found] == ["b", "b"]
    assert [each.down.rpartition("/")[2] for each in found] == ["c", "c"]
    for each in found:
        assert each.before > 8
        assert each.after <= 2
    for one, was in zip((x, other), before, strict=True):
        now = numpy(ops.cast(model(one), "float32"))
        np.testing.assert_array_equal(now, was)


def error(recipe, outlier, smoothed):
    """The relative error of a converted block with an outlier channel."""
    model, x = gated(1), batch(64, 5, 8)
    block = model.get_layer("block_0")
    up = np.random.default_rng(2).normal(size=(8, 24)).astype("float32")
    up[:, 5] *= outlier
    down = numpy(block.c.kernel).copy()
    down[5] /= outlier
    block.b.kernel.assign(up)
    block.b.bias.assign(np.zeros(24))
    block.c.kernel.assign(down)
    exact = numpy(model(x))
    kpe.convert(
        model, recipe, include="c$", smooth_swiglu=x if smoothed else None
    )
    off = np.mean((numpy(model(x)) - exact) ** 2)
    return float(np.sqrt(off / np.mean((exact - x) ** 2)))


@pytest.mark.parametrize(
    ("recipe", "outlier"),
    [("current(fp8_format='e4m3')", 2.0**16), ("nvfp4", 2.0**10)],
)
def test_an_outlier_channel_no_longer_decides_the_scale(recipe, outlier):
    without = error(recipe, outlier, smoothed=False)
    assert error(recipe, outlier, smoothed=True) < without / 4


def test_convert_smooths_before_it_converts():
    model, x = gated(), batch(3, 5, 8)
    twin = gated()
    report = kpe.convert(model, "current", smooth_swiglu=x)
    assert len(smooth(twin, x)) == 2
    assert report == kpe.convert(twin, "current")
    for one, other in zip(model.weights, twin.weights, strict=True):
        np.testing.assert_array_equal(numpy(one), numpy(other))


def test_a_change_that_fails_folds_nothing(monkeypatch):
    def fail(*args):
        raise MemoryError("for the test")

    model, twin = gated(), gated()
    monkeypatch.setattr(training, "after", fail)
    with pytest.raises(MemoryError, match="for the test"):
        kpe.convert(model, "current", smooth_swiglu=batch(3, 5, 8))
    assert [x.name for x in model.weights] == [x.name for x in twin.weights]
    for one, other in zip(model.weights, twin.weights, strict=True):
        np.testing.assert_array_equal(numpy(one), numpy(other))


def test_what_is_no_gated_block_stays_as_it_is():
    inputs = keras.Input((8,))
    x = keras.layers.Dense(24, name="one")(inputs)
    twice = keras.layers.Dense(24, name="two")(x)
    x = keras.layers.Dense(8, name="three")(ops.gelu(x) * twice)
    model = keras.Model(inputs, [x, ops.sum(twice, axis=-1)])
    before = [numpy(each) for each in model.weights]
    # `two` is a factor of what enters `three`, and an output besides.
    assert smooth(model, batch(4, 8)) == ()
    for one, was in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(numpy(one), was)


def test_a_shared_layer_and_a_layer_without_use_stay():
    inputs = keras.Input((8,))
    up = keras.layers.Dense(8, name="up")
    gate = keras.layers.Dense(8, activation="silu", name="gate")
    down = keras.layers.Dense(8, name="down")
    x = down(gate(inputs) * up(inputs))
    model = keras.Model(inputs, down(gate(x) * up(x)))
    assert smooth(model, batch(4, 8)) == ()


def test_einsum_dense_layers_are_found():
    inputs = keras.Input((5, 8))

    def dense(size, name):
        return keras.layers.EinsumDense(
            "btd,df->btf", (None, size), bias_axes="f", name=name
        )

    product = ops.gelu(dense(16, "gate")(inputs)) * dense(16, "up")(inputs)
    model = keras.Model(inputs, dense(8, "down")(product))
    x = batch(4, 5, 8)
    before = numpy(model(x))
    (found,) = smooth(model, x)
    assert (found.up, found.down) == ("up", "down")
    np.testing.assert_array_equal(numpy(model(x)), before)


def test_models_in_float8_or_in_training_are_refused():
    model = gated(1)
    kpe.convert(model, "current")
    with pytest.raises(ValueError, match="is in float8"):
        smooth(model, batch(2, 5, 8))
    model = gated(1)
    model.compile("adam", "mse")
    model.train_on_batch(batch(2, 5, 8), batch(2, 5, 8))
    with pytest.raises(ValueError, match="slots of the optimizer"):
        smooth(model, batch(2, 5, 8))
    with pytest.raises(TypeError, match="are smoothed"):
        smooth(1, batch(2, 5, 8))
