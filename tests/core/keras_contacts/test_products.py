"""Why `_keras/products.py` is needed. See `_keras/__init__.py`."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_policy_ext._keras import products

SEEN = {
    *products.PRODUCTS,
    products.CONVOLUTION,
    *products.MOVES,
    *products.CASTS,
    *products.BRANCHES,
    *products.CHOICES,
    *products.PASSES,
    products.SOFTMAX,
    products.ATTENTION,
}


class Layer(keras.layers.Layer):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(x)


def test_a_layer_is_known_inside_of_its_call_alone():
    """Keras has no public way to ask for it."""
    seen = []
    inner = Layer(lambda x: (seen.append(products.innermost_layer()), x)[1])
    outer = Layer(inner)
    outer(np.ones((1, 2)))
    assert seen and all(each is inner for each in seen)
    assert products.innermost_layer() is None
    assert not hasattr(keras.layers.Layer, "current")


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("matmul", lambda x: ops.matmul(x, x)),
        ("einsum", lambda x: ops.einsum("ab,bc->ac", x, x)),
        ("dot", lambda x: ops.dot(x, x)),
        ("tensordot", lambda x: ops.tensordot(x, x, 1)),
        ("conv", lambda x: ops.conv(x[None], x[None])),
        ("transpose", ops.transpose),
        ("reshape", lambda x: ops.reshape(x, (-1,))),
        ("swapaxes", lambda x: ops.swapaxes(x, 0, 1)),
        ("moveaxis", lambda x: ops.moveaxis(x, 0, 1)),
        ("expand_dims", lambda x: ops.expand_dims(x, 0)),
        ("squeeze", lambda x: ops.squeeze(x[:1, :1])),
        ("take", lambda x: ops.take(x, 0, axis=0)),
        ("cast", lambda x: ops.cast(x, "float16")),
        ("convert_to_tensor", ops.convert_to_tensor),
        ("argmax", ops.argmax),
        ("where", lambda x: ops.where(x > 0, x, 0.0)),
        ("dropout", lambda x: keras.random.dropout(ops.array(x), 0.5)),
        ("softmax", keras.activations.softmax),
        (
            "dot_product_attention",
            lambda x: ops.dot_product_attention(*[x[None, None]] * 3),
        ),
        ("top_k", lambda x: ops.top_k(x, 1)),
        ("cond", lambda x: ops.cond(x[0, 0] > 0, lambda: x, lambda: -x)),
    ],
)
def test_an_operation_is_seen_in_a_layer(name, call, monkeypatch):
    """`keras.ops` has no hook; it calls the function of the backend."""
    seen = []

    def note(layer, stock, name, args, kwargs):
        seen.append(name)
        return stock(*args, **kwargs)

    for module in products.modules():
        for each, function in list(vars(module).items()):
            if each in SEEN:  # and taken back afterwards
                stock = vars(function).get("__wrapped__", function)
                is_ours = products._MARK in vars(function)
                stock = stock if is_ours else function
                monkeypatch.setattr(module, each, stock)
    monkeypatch.setattr(products, "_FOLLOWED", {Layer})
    products.watch({tuple(SEEN): note})
    call(np.ones((2, 2), "float32"))
    assert name not in seen
    Layer(call)(np.ones((2, 2), "float32"))
    assert name in seen
    other = keras.layers.Lambda(call)
    seen.clear()
    other(np.ones((2, 2), "float32"))
    assert not seen


def test_entries_of_a_variable_are_taken_by_its_class(monkeypatch):
    """An index of a weight is no operation of Keras."""
    seen, stock = [], keras.Variable.__getitem__

    def take(self, index):
        seen.append(index)
        return stock(self, index)

    monkeypatch.setattr(keras.Variable, products.ENTRIES, take)
    variable = keras.Variable(np.eye(3, dtype="float32"))
    assert ops.convert_to_numpy(variable[1]).tolist() == [0.0, 1.0, 0.0]
    assert seen == [1]
