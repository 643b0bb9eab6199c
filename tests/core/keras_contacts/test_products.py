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


@pytest.fixture
def unfollowed():
    """No class is followed, so that the operations are those of Keras."""
    names = tuple(products._watching) if products._FOLLOWED else ()
    products._unwrap(names)
    yield
    products._wrap(names)


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
def test_an_operation_is_seen_in_a_layer(name, call, unfollowed, monkeypatch):
    """`keras.ops` has no hook; it calls the function of the backend."""
    seen = []

    def note(layer, stock, name, args, kwargs):
        seen.append(name)
        return stock(*args, **kwargs)

    monkeypatch.setattr(products, "_FOLLOWED", {Layer})
    monkeypatch.setattr(products, "_watching", dict.fromkeys(SEEN, note))
    x = np.ones((2, 2), "float32")
    with products.wrapped():
        call(x)
        assert name not in seen
        Layer(call)(x)
        assert name in seen
        seen.clear()
        keras.layers.Lambda(call)(x)
        assert not seen
    Layer(call)(x)
    assert not seen


def functions():
    """What an operation that is replaced may stand in."""
    homes = [*products.modules(), keras.Variable]
    return [vars(home).get(name) for home in homes for name in SEEN]


def test_operations_are_those_of_keras_again_after_the_last_block(
    unfollowed, monkeypatch
):
    monkeypatch.setattr(products, "_watching", {})
    before = functions()
    with products.on_operation({tuple(SEEN): None}):
        within = functions()
        with products.on_operation({("matmul",): None}):
            assert functions() == within
        assert functions() == within
    assert functions() == before
    assert within != before


def test_a_function_that_others_replaced_meanwhile_stays(
    unfollowed, monkeypatch
):
    """Theirs calls ours, which goes on to that of Keras."""
    (home, *_) = [x for x in products.modules() if hasattr(x, "matmul")]
    stock = home.matmul
    with products.on_operation({("matmul",): None}):
        ours = home.matmul

        def theirs(*args, **kwargs):
            return ours(*args, **kwargs)

        monkeypatch.setattr(home, "matmul", theirs)
    assert home.matmul is theirs
    eye = np.eye(2, dtype="float32")
    same = ops.convert_to_numpy(ops.matmul(eye, eye)) == eye
    assert same.all() and ours is not stock


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
