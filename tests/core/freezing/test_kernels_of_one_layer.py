"""Layers with several kernels, or several uses of one, that `freeze` meets."""

import math

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from frozen_models import outputs_of
from steps import normal, relative_rms

LAYERS = keras.layers
WIDTH = 16

MOVES = {
    "as it is": lambda w: w,
    "transpose": ops.transpose,
    "swapaxes": lambda w: ops.swapaxes(w, 0, 1),
    "moveaxis": lambda w: ops.moveaxis(w, 0, 1),
    "reshape": lambda w: ops.reshape(ops.reshape(w, (8, 32)), (WIDTH, WIDTH)),
    "take": lambda w: ops.take(w, np.arange(WIDTH - 1, -1, -1), axis=0),
    "slice": lambda w: w[::1][:, :],
    "cast": lambda w: ops.cast(ops.transpose(w), w.dtype),
    "two moves": lambda w: ops.squeeze(ops.expand_dims(ops.transpose(w), 0), 0),
}

PRODUCTS = {
    "matmul": ops.matmul,
    "transposing einsum": lambda x, w: ops.einsum("bi,ji->bj", x, w),
    "kernel first": lambda x, w: ops.transpose(ops.matmul(w, ops.transpose(x))),
    "tensordot": lambda x, w: ops.tensordot(x, w, [[1], [1]]),
    "both operands": lambda x, w: ops.matmul(
        x, ops.matmul(w, ops.transpose(w))
    ),
    "conv": lambda x, w: ops.conv(
        x[:, None], w[None], padding="same", data_format="channels_last"
    )[:, 0],
}


class Uses(LAYERS.Layer):
    """Multiplies by its kernel several times, moved each time."""

    def __init__(self, *uses, shape=(WIDTH, WIDTH)):
        super().__init__(name="uses")
        self.uses, self.shape = uses, shape

    def build(self, shape):
        self.w = self.add_weight(name="w", shape=self.shape)

    def call(self, x):
        for move, product in self.uses:
            x = ops.tanh(product(x, move(self.w)))
        return x


def model_of(layer, *shape):
    keras.utils.set_random_seed(0)
    inputs = keras.Input(shape)
    return keras.Model(inputs, layer(inputs))


def stored_in(model):
    codes = [v for v in model.variables if "uint8" in str(v.dtype)]
    return sum(int(np.prod(v.shape)) for v in codes)


PLAIN = MOVES["as it is"], PRODUCTS["matmul"]


QUICK = [
    *(f"matmul-{move}" for move in MOVES),
    *(f"{product}-transpose" for product in PRODUCTS if product != "matmul"),
]


@pytest.mark.full_except(*QUICK)
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("product", PRODUCTS)
def test_a_kernel_used_twice_is_right(move, product):
    """Off by 90 % and more if a moved kernel is read as the stored one."""
    use = MOVES[move], PRODUCTS[product]
    for uses in [(PLAIN, use)] + [(use, PLAIN)] * (move == "transpose"):
        compare_frozen(Uses(*uses))


def compare_frozen(layer):
    model = model_of(layer, WIDTH)
    x = normal(8, WIDTH)
    before = outputs_of(model, x)
    report = kpe.freeze(model)
    # Half a unit of e4m3 is at most 1/16, its RMS 1/40; three times at most.
    assert relative_rms(outputs_of(model, x), before) < 0.1
    assert sum(e.parameters for e in report.converted) == stored_in(model)
    assert report.converted or report.skipped[0].reason


def test_a_frozen_kernel_that_only_training_moves_is_read_as_numbers():
    class OtherwayInTraining(Uses):
        def call(self, x, training=False):
            w = ops.transpose(self.w) if training else self.w
            return ops.matmul(x, w)

    model = model_of(OtherwayInTraining(), WIDTH)
    x = normal(8, WIDTH)
    before = ops.convert_to_numpy(model(x, training=True))
    assert kpe.freeze(model).stored
    after = ops.convert_to_numpy(model(x, training=True))
    assert np.abs(after - before).max() < 0.1 * np.abs(before).max()


def test_a_rectangular_kernel_of_tied_weights_stays_in_floats():
    layer = Uses(PLAIN, (ops.transpose, ops.matmul), shape=(WIDTH, 8))
    model = model_of(layer, WIDTH)
    before = outputs_of(model, normal(4, WIDTH))
    report = kpe.freeze(model)
    np.testing.assert_array_equal(before, outputs_of(model, normal(4, WIDTH)))
    assert not report.stored
    assert "moves its kernel" in report.skipped[0].reason


class Experts(LAYERS.Layer):
    """Reshapes one of its kernels, and multiplies by the other as it is."""

    def build(self, shape):
        self.k = self.add_weight(name="k", shape=(shape[-1], 4, 2))
        self.gate = self.add_weight(name="gate", shape=(shape[-1], 2))

    def call(self, x):
        k = ops.reshape(self.k, (-1, 8))
        each = ops.reshape(ops.matmul(x, k), (-1, 4, 2))
        return ops.sum(each * ops.matmul(x, self.gate)[:, None], -1)


PARTLY = {
    # What is stored; what is left; multiplications of both.
    "moved": (Experts, (WIDTH,), (WIDTH * 2, "k", WIDTH * 8)),
    "depthwise": (
        lambda: LAYERS.SeparableConv1D(4, 3, padding="same"),
        (5, WIDTH),
        (WIDTH * 4, "depthwise_kernel", 5 * WIDTH * 3),
    ),
}


@pytest.mark.parametrize("activations", [None, "dynamic"])
@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("kind", PARTLY)
@pytest.mark.extension("inspect")
def test_the_report_of_freeze_counts_kernels(kind, converted, activations):
    make, shape, (entries, left, multiplications) = PARTLY[kind]
    model = model_of(make(), *shape)
    if converted:
        kpe.convert(model)
    report = kpe.freeze(model, activations=activations)
    (done,) = report.converted
    (kept,) = report.skipped
    assert done.parameters == stored_in(model) == entries
    assert kept.path.endswith("/" + left) and repr(left) in kept.reason
    assert kept.multiplications == multiplications and not kept.in_float8
    assert done.multiplications == entries * math.prod(shape[:-1])
    totals = report.totals
    assert totals.parameters_in_float8 == entries and totals.layers == 1
    assert "All kernels" not in str(report)
    # One entry a layer.
    inspected = kpe.inspect(model)
    assert inspected.totals.parameters_in_float8 == entries
    assert "All kernels" not in str(inspected)


@pytest.mark.extension("count")
def test_the_report_of_convert_counts_no_depthwise_kernel_as_float8():
    model = model_of(LAYERS.SeparableConv1D(4, 3), 5, WIDTH)
    totals = kpe.convert(model).totals
    assert totals.parameters_in_float8 == WIDTH * 4
