"""What `put_around` of `_keras/__init__.py` does."""

import types

from keras_policy_ext._keras import put_around


def test_a_function_is_put_around_another_once():
    owner = types.SimpleNamespace(double=lambda x: 2 * x)
    for _ in range(2):
        put_around(owner, "double", lambda stock, x, more=0: stock(x) + more)
    assert owner.double(3) == 6
    assert owner.double(3, more=1) == 7
    put_around(owner, "double", lambda stock, x: stock(x) + 100)
    assert owner.double(3) == 6
    put_around(owner, "gone", lambda stock: None)
    assert not hasattr(owner, "gone")
