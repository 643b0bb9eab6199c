"""Functions that a model compiled before it was changed, and keeps."""

import functools
import gc

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from steps import normal, numpy

BACKEND = keras.backend.backend()
X = normal(4, 16)


def compiled(function, **options):
    """A function compiled as users of each framework do."""
    if BACKEND == "jax":
        import jax

        return jax.jit(function, **options)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.function(function)
    import torch

    return torch.compile(function, backend="eager")


# Of a method, JAX is told that `self` is none of the arrays.
method = functools.partial(
    compiled, **({"static_argnums": 0} if BACKEND == "jax" else {})
)


class Model(keras.Model):
    """A model that keeps what it compiles in each of the usual ways."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(16)
        self.made_once = None
        self.at_once = compiled(self.predict_plainly)
        self.part = functools.partial(compiled(self.predict_plainly))

    def call(self, inputs):
        return self.dense(inputs)

    def predict_plainly(self, inputs):
        return self(inputs, training=False)

    def by_attribute(self, inputs):
        self.made_once = self.made_once or compiled(self.predict_plainly)
        return self.made_once(inputs)

    @method
    def by_method(self, inputs):
        return self(inputs, training=False)

    @property
    def ways(self):
        several = [self.at_once, self.part, self.by_method]
        # torch.compile sees for itself what has changed, and takes long.
        return [self.by_attribute, *(several if BACKEND != "torch" else [])]


def assert_all_ways_agree(model):
    """All of them compute what a call does; not what it did."""
    x = ops.convert_to_tensor(X)
    expected = ops.stop_gradient(model(x, training=False))
    for way in model.ways:
        found = ops.stop_gradient(way(x))
        np.testing.assert_allclose(
            numpy(found), numpy(expected), rtol=1e-5, atol=1e-5
        )


@pytest.fixture
def model():
    model = Model()
    assert_all_ways_agree(model)
    return model


@pytest.mark.full
def test_functions_that_a_model_keeps_follow_each_change(model):
    before = numpy(ops.stop_gradient(model(X)))
    changes = [
        lambda: kpe.convert(model, "current"),
        lambda: kpe.revert(model),
        lambda: kpe.freeze(model),
        lambda: kpe.widen(model),
        lambda: kpe.thaw(model),
    ]
    if BACKEND == "torch":  # Each takes seconds to compile there.
        changes = [changes[0], changes[2]]
    for change in changes:
        change()
        assert_all_ways_agree(model)
    kpe.convert(model, "current")
    after = numpy(ops.stop_gradient(model(X)))
    assert (
        np.abs(after - before).max() > 1e-3
    )  # They could not agree by chance.


SEES_CHANGES = pytest.mark.skipif(
    BACKEND == "torch",
    reason="torch.compile looks itself at what has changed, as shown above",
)


@SEES_CHANGES
def test_functions_follow_layers_that_a_file_brings_into_float8(
    model, tmp_path
):
    kpe.convert(model, "current")
    model.save_weights(tmp_path / "model.weights.h5")
    kpe.revert(model)
    assert_all_ways_agree(model)
    kpe.load_weights(model, tmp_path / "model.weights.h5", as_saved=True)
    assert model.dense.quantization_mode == "float8"
    assert_all_ways_agree(model)


@SEES_CHANGES
def test_the_report_names_the_functions_that_are_traced_anew(model):
    names = {f"model.{name}" for name in ("made_once", "at_once", "part")}
    names.add("model.by_method")
    for change in (kpe.convert, kpe.revert, kpe.freeze, kpe.thaw):
        report = change(model)
        found = {
            name.replace(model.path or model.name, "model")
            for name in report.retraced
        }
        assert found == names
        assert "made_once" in str(report)
        assert report.as_dict()["retraced"] == list(report.retraced)


def test_functions_that_are_not_compiled_are_left_alone(model):
    class Cache:
        """Has one of the names of a compiled function."""

        cleared = False

        def clear_cache(self):
            self.cleared = True

    model.cache, model.plain = Cache(), lambda x: x
    plain = model.plain
    kpe.convert(model)
    assert not model.cache.cleared and model.plain is plain


def test_steps_of_keras_are_not_among_the_functions_traced_anew():
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(4)])
    model.kept = {"in a list": [compiled(model.__call__)]}
    model.compile("sgd", "mse")
    for change in (kpe.convert, kpe.freeze, kpe.thaw, kpe.revert):
        model.predict(X, verbose=0)
        model.evaluate(X, normal(4, 4), verbose=0)
        names = [f"{model.name}.kept['in a list'][0]"]
        names = [] if BACKEND == "torch" else names  # It looks itself.
        assert list(change(model).retraced) == names


def test_a_function_of_the_user_runs_on_after_revert():
    """It reads the state that the layer had: TensorFlow must not free it."""
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(4)])
    kpe.convert(model, "delayed")
    x = ops.convert_to_tensor(X)
    function = compiled(lambda x: model(x, training=False))
    before = numpy(function(x))
    kpe.revert(model)
    gc.collect()
    after = numpy(function(x))
    # torch.compile notices that the layer has changed.
    expected = numpy(model(x)) if BACKEND == "torch" else before
    np.testing.assert_allclose(after, expected, rtol=1e-6)
