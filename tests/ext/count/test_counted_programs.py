"""Layers of users' programs that were counted wrong, or not traced at all."""

import warnings

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe

TOKENS, WIDTH, HIDDEN, EXPERTS, TOP = 6, 8, 4, 4, 2

GATHERED = {
    "take": lambda k, i: ops.take(k, i, axis=0),
    "moved first": lambda k, i: ops.take(
        ops.reshape(k, (EXPERTS, WIDTH, HIDDEN)), i, axis=0
    ),
    "moved after": lambda k, i: ops.transpose(
        ops.take(ops.transpose(k, (0, 2, 1)), i, axis=0), (0, 1, 2, 4, 3)
    ),
}
if keras.backend.backend() != "tensorflow":  # It takes no such index.
    GATHERED["entries"] = lambda k, i: k[i]


MULTIPLIED = {
    "einsum": lambda x, k: ops.einsum("btd,btkdf->btkf", x, k),
    "broadcast": lambda x, k: ops.matmul(x[:, :, None, None], k)[..., 0, :],
}


class Gathers(keras.layers.Layer):
    """Experts whose kernels are gathered for each token."""

    def __init__(self, gather, multiply):
        super().__init__(name="moe")
        self.router = keras.layers.Dense(EXPERTS, name="router")
        self.gather, self.multiply = gather, multiply

    def build(self, shape):
        self.router.build(shape)
        self.up = self.add_weight(name="up", shape=(EXPERTS, WIDTH, HIDDEN))

    def call(self, x):
        gates, chosen = ops.top_k(ops.softmax(self.router(x)), TOP)
        kernels = self.gather(self.up, chosen)
        each = self.multiply(x, kernels)
        return ops.sum(each * gates[..., None], 2)


def model_of(*layers, shape=(TOKENS, WIDTH)):
    keras.utils.set_random_seed(0)
    inputs = outputs = keras.Input(shape)
    for layer in layers:
        outputs = layer(outputs)
    return keras.Model(inputs, outputs, name="model")


def counts(report):
    entries = (*report.converted, *report.skipped)
    return {e.path: (e.multiplications, e.sizes_known) for e in entries}


@pytest.mark.full_except("take-einsum")
@pytest.mark.parametrize(
    ("gather", "product"),
    [*((gather, "einsum") for gather in GATHERED), ("take", "broadcast")],
)
@pytest.mark.extension("plan")
def test_products_of_gathered_kernels_are_counted(gather, product):
    model = model_of(Gathers(GATHERED[gather], MULTIPLIED[product]))
    plan = kpe.plan(model, 8, "h200", compiled=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        report = kpe.convert(model, "current")
    wanted = TOKENS * TOP * WIDTH * HIDDEN
    assert counts(report)["moe"] == (wanted, True)
    (entry,) = report.converted
    assert entry.parameters == EXPERTS * WIDTH * HIDDEN
    assert "moe/router" in [e.path for e in report.skipped]
    (inspected,) = [x for x in kpe.inspect(model).layers if x.path == "moe"]
    assert inspected.multiplications == wanted
    assert plan.as_dict()
    kpe.revert(model)
    (skipped,) = [
        e for e in kpe.convert(model, exclude="moe$").skipped if e.path == "moe"
    ]
    assert skipped.multiplications == wanted


class Routed(keras.layers.Layer):
    """A router, and a product that Keras infers no shape of."""

    def __init__(self, product, shape):
        super().__init__(name="moe")
        self.router = keras.layers.Dense(EXPERTS, name="router")
        self.product, self.shape = product, shape

    def build(self, shape):
        self.router.build(shape)
        self.k = self.add_weight(name="k", shape=self.shape)

    def call(self, x):
        each = self.product(x, self.k)
        chosen = ops.argmax(self.router(x), -1)
        gate = ops.one_hot(chosen, EXPERTS, dtype=each.dtype)
        return ops.sum(each * ops.expand_dims(gate, -1), 2)


UNTRACED = {
    "tensordot": Routed(
        lambda x, k: ops.tensordot(x, k, 1), (WIDTH, EXPERTS, HIDDEN)
    ),
    "capital letters": Routed(
        lambda x, k: ops.einsum("BTD,EDF->BTEF", x, k),
        (EXPERTS, WIDTH, HIDDEN),
    ),
    "grouped convolution": Routed(
        lambda x, k: ops.reshape(
            ops.conv(x, k, padding="same", data_format="channels_last"),
            (-1, ops.shape(x)[1], EXPERTS, HIDDEN),
        ),
        (1, WIDTH // 2, EXPERTS * HIDDEN),
    ),
}


@pytest.mark.full_except("grouped convolution")
@pytest.mark.parametrize("kind", UNTRACED)
@pytest.mark.extension("plan")
def test_a_converted_model_is_traced_as_before(kind):
    layer = UNTRACED[kind].__class__(
        UNTRACED[kind].product, UNTRACED[kind].shape
    )
    dense = keras.layers.EinsumDense("BTD,DF->BTF", (None, WIDTH), name="in")
    model = model_of(dense, layer)
    assert kpe.plan(model, 8, "h200", compiled=True).as_dict()
    first = kpe.convert(model)
    entries = int(np.prod(layer.shape))
    wanted = {
        "in": (TOKENS * WIDTH * WIDTH, True),
        "moe": (TOKENS * entries, True),
        "moe/router": (TOKENS * WIDTH * EXPERTS, True),
    }
    assert counts(first) == wanted
    assert [e.path for e in first.skipped] == ["moe/router"]
    assert counts(kpe.convert(model)) == wanted  # Traced in float8.
    frozen = kpe.freeze(model)
    assert "moe/router" in [e.path for e in frozen.skipped]
    assert counts(frozen) == wanted


class EachSample(keras.layers.Layer):
    """A product for each sample; PyTorch's trace has one for each."""

    def build(self, shape):
        self.w = self.add_weight(name="w", shape=(WIDTH, WIDTH))

    def call(self, x):
        return ops.map(lambda sample: ops.matmul(sample, self.w), x)


@pytest.mark.full
@pytest.mark.extension("plan")
def test_a_loop_over_the_samples_hides_no_router():
    moe = Gathers(GATHERED["take"], MULTIPLIED["einsum"])
    model = model_of(EachSample(name="each"), moe)
    report = kpe.convert(model, "current")
    assert [e.path for e in report.converted] == ["moe"]
    found = counts(report)
    assert found["moe"] == (TOKENS * TOP * WIDTH * HIDDEN, True)
    assert found["moe/router"] == (TOKENS * WIDTH * EXPERTS, True)
    assert kpe.plan(model, 8, "h200", compiled=True).as_dict()
