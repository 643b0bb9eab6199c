"""The global policy in threads, and float64 where JAX has none.

What it takes, and how scopes nest, is in `test_policy_scopes.py`.
"""

import contextlib
import inspect
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe

JAX = keras.backend.backend() == "jax"


@contextlib.contextmanager
def x64(enabled):
    if not JAX:
        yield
        return
    import jax

    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", enabled)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


class Layer(kpe.layers.AutocastMixin, keras.layers.Layer):
    pass


def enter_scope():
    with kpe.policy_scope("float64"):
        pass


def reset_to_float64():
    keras.config.set_floatx("float64")
    kpe.set_dtype_policy(None)


def set_on_a_layer():
    kpe.layers.Dense(1, dtype="float32").dtype_policy = "float64"


FLOAT64 = {
    "set_dtype_policy": lambda: kpe.set_dtype_policy("float64"),
    "policy object": lambda: kpe.set_dtype_policy(keras.DTypePolicy("float64")),
    "reset": reset_to_float64,
    "policy_scope": enter_scope,
    "get": lambda: kpe.get(np.float64),
    "drop-in": lambda: kpe.layers.Dense(1, dtype="float64"),
    "float8": lambda: kpe.layers.Dense(1, dtype="float8_from_float64"),
    "set on a layer": set_on_a_layer,
    "mixin": lambda: Layer(dtype="float64"),
}


@pytest.mark.parametrize("way", FLOAT64)
def test_float64_that_jax_does_not_have_is_warned_of(way):
    with x64(False), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        FLOAT64[way]()
    if not JAX:
        assert caught == []
        return
    for one in caught:
        assert one.category is UserWarning
        assert "jax_enable_x64" in str(one.message)
        assert "will compute in float32" in str(one.message)
        assert one.filename == __file__
    assert caught


def test_float64_that_there_is_is_not_warned_of():
    with x64(True), warnings.catch_warnings():
        warnings.simplefilter("error")
        for way in FLOAT64.values():
            way()
        assert kpe.policies.actual_dtype("float64") == "float64"


def test_other_policies_are_not_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("float32", "mixed_float16", "int32", "mixed_float8"):
            kpe.get(name)


def test_each_line_that_asks_for_float64_is_warned_of_once():
    if not JAX:
        pytest.skip("other backends have float64 and do not warn")
    with x64(False), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            kpe.layers.Dense(1, dtype="float64")
        line = inspect.currentframe().f_lineno - 1
    assert [one.lineno for one in caught] == [line]


def test_a_strict_layer_takes_what_jax_makes_of_float64():
    class Identity(Layer):
        def call(self, inputs):
            return inputs

    with x64(False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer = Identity(dtype="float64", strict=True)
        outputs = layer(np.ones(1, "float32"))
        actual = kpe.policies.actual_dtype("float64")
    assert actual == ("float32" if JAX else "float64")
    assert keras.backend.standardize_dtype(outputs.dtype) == actual


def test_a_scope_in_one_thread_is_not_seen_in_another():
    entered, looked = threading.Event(), threading.Event()

    def stay_inside():
        with kpe.policy_scope("mixed_bfloat16"):
            entered.set()
            looked.wait(timeout=60)
            return kpe.dtype_policy().name

    with kpe.policy_scope("mixed_float16"), ThreadPoolExecutor(1) as pool:
        inside = pool.submit(stay_inside)
        assert entered.wait(timeout=60)
        assert kpe.dtype_policy().name == "mixed_float16"
        looked.set()
        assert inside.result() == "mixed_bfloat16"
        assert kpe.dtype_policy().name == "mixed_float16"


def test_workers_of_a_pool_make_layers_under_the_carried_policy():
    def make(units):
        return keras.layers.Dense(units).compute_dtype

    with ThreadPoolExecutor(2) as pool:
        with kpe.policy_scope("mixed_float16"):
            carried = kpe.carry_policy(make)
        assert list(pool.map(carried, [1, 2])) == ["float16"] * 2
        assert list(pool.map(make, [1, 2])) == ["float32"] * 2
