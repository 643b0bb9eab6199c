"""Products with kernels that are moved first: each move, product and use.

Every case is computed by stock Keras too. `kpe.recipes` has a recipe that
rounds to eleven bits or more nowhere, so float8 is compared by its error.
"""

import itertools

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from frozen_models import outputs_of
from steps import normal, relative_rms

SIZE = 8
REVERSED = np.arange(SIZE - 1, -1, -1)

MOVES = {
    "none": lambda w: w,
    "transpose": ops.transpose,
    "swapaxes": lambda w: ops.swapaxes(w, 0, 1),
    "moveaxis": lambda w: ops.moveaxis(w, 0, -1),
    "reshape": lambda w: ops.reshape(ops.reshape(w, (-1, 2)), (SIZE, SIZE)),
    "expand": lambda w: ops.squeeze(ops.expand_dims(w, 0), 0),
    "take": lambda w: ops.take(w, REVERSED, axis=0),
    "entries": lambda w: w[::1, :],
    "cast": lambda w: ops.cast(w, "float32"),
}

PRODUCTS = {
    "matmul": ops.matmul,
    "dot": ops.dot,
    "einsum": lambda x, w: ops.einsum("bi,ij->bj", x, w),
    "capital einsum": lambda x, w: ops.einsum("BI,JI->BJ", x, w),
    "tensordot": lambda x, w: ops.tensordot(x, w, 1),
    "tensordot of axes": lambda x, w: ops.tensordot(x, w, [[1], [1]]),
    "kernel first": lambda x, w: ops.transpose(ops.matmul(w, ops.transpose(x))),
    "conv": lambda x, w: ops.conv(
        x[:, None], w[None], padding="same", data_format="channels_last"
    )[:, 0],
    "both": lambda x, w: ops.matmul(x, ops.matmul(w, ops.transpose(w))),
}


class Multiplies(keras.layers.Layer):
    """Multiplies by its one kernel once for each use.

    Args:
        uses: For each product: names of moves, one after the other, and the
            name of the product.
    """

    def __init__(self, uses):
        super().__init__(name="multiplies")
        self.uses = uses

    def build(self, shape):
        self.w = self.add_weight(name="w", shape=(SIZE, SIZE))

    def call(self, x):
        for moves, product in self.uses:
            w = self.w
            for move in moves:
                w = MOVES[move](w)
            x = PRODUCTS[product](x, w)
        return x


def uses_of_all():
    """Yield uses: each move and product, two moves, and two uses."""
    for move, product in itertools.product(MOVES, PRODUCTS):
        yield [((move,), product)]
    for first, second in itertools.product(list(MOVES)[1:], repeat=2):
        yield [((first, second), "matmul")]
    for move, product in itertools.product(MOVES, PRODUCTS):
        yield [(("none",), "matmul"), ((move,), product)]


def named(uses):
    return "; ".join(f"{' '.join(moves)} {product}" for moves, product in uses)


CASES = {named(uses): uses for uses in uses_of_all()}
QUICK = [
    *(f"{move} matmul" for move in MOVES),
    *(f"transpose {product}" for product in PRODUCTS if product != "matmul"),
    *(f"swapaxes {move} matmul" for move in ("moveaxis", "take", "entries")),
    "none matmul; transpose matmul",
    "none matmul; moveaxis tensordot",
]


@pytest.mark.full_except(*QUICK)
@pytest.mark.parametrize("case", CASES)
def test_a_moved_kernel_trains_and_freezes_as_stock(case):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((SIZE,))
    model = keras.Model(inputs, Multiplies(CASES[case])(inputs))
    model.compile(keras.optimizers.SGD(0.0), "mse")
    x, y = normal(16, SIZE), normal(16, SIZE, seed=1)
    before = outputs_of(model, x)
    loss = model.train_on_batch(x, y)
    kpe.convert(model, "current", filter="all")
    # e4m3 rounds by 1/40 RMS: two operands, at most three times.
    assert relative_rms(outputs_of(model, x), before) < 0.15
    assert model.train_on_batch(x, y) == pytest.approx(loss, rel=0.3)
    kpe.revert(model)
    np.testing.assert_array_equal(outputs_of(model, x), before)
    report = kpe.freeze(model)
    assert relative_rms(outputs_of(model, x), before) < 0.1
    assert model.train_on_batch(x, y) == pytest.approx(loss, rel=0.2)
    entries = sum(each.parameters for each in report.converted)
    assert entries == sum(
        int(np.prod(v.shape)) for v in model.variables if v.dtype == "uint8"
    )
