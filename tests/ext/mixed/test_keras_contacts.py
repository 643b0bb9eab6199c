"""Why `ext/mixed/_keras/` is needed."""

import inspect

import keras
import numpy as np
import pytest
from keras import ops

from keras_policy_ext._keras import versions
from keras_policy_ext.ext.mixed import _keras
from public_api import functions_about, lists_with, members_about

BACKEND = keras.backend.backend()
X = np.ones((2, 2), "float32")


def variable(name):
    return keras.Variable(np.ones(2, "float32"), name=name)


def dense_model():
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


class SeesScope(keras.layers.Layer):
    """Keeps the scope in which it is called."""

    def call(self, inputs):
        self.in_scope = _keras.stored_autocast_scope()
        return inputs


def test_keras_offers_no_public_scope_of_autocasting():
    layer = SeesScope(dtype="mixed_bfloat16")
    layer(np.ones((1, 2), "float32"))
    assert layer.in_scope is not None
    assert _keras.stored_autocast_scope() is None
    assert functions_about("autocast", "cast_scope") == []


class TakesTwo(keras.layers.Layer):
    """Remembers the dtypes of its arguments."""

    def call(self, first, second):
        self.dtypes = [
            keras.backend.standardize_dtype(x.dtype) for x in (first, second)
        ]
        return first


def test_keras_casts_all_arguments_of_a_call_or_none():
    x = ops.ones((1, 2))
    for autocast, dtype in [(True, "bfloat16"), (False, "float32")]:
        layer = TakesTwo(dtype="mixed_bfloat16", autocast=autocast)
        layer(x, x)
        assert layer.dtypes == [dtype, dtype]
    words = ("cast", "convert")
    arguments = inspect.signature(keras.layers.Layer.__init__).parameters
    assert members_about(keras.layers.Layer, *words) == []
    assert [x for x in arguments if any(w in x for w in words)] == ["autocast"]


def test_a_variable_does_not_tell_whether_it_autocasts():
    for value in (True, False):
        variable = keras.Variable(1.0, autocast=value)
        assert not hasattr(variable, "autocast")
        assert _keras.autocasts(variable) is value


class LogsMore(keras.Model):
    """Logs a number that is no metric."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, *args):
        result = super().train_step(*args)
        if BACKEND == "jax":
            logs, state = result
            return {**logs, "more": 1.0}, state
        return {**result, "more": 1.0}


class ReturnsLoss(_keras.OwnReturnedLogs, LogsMore):
    """Returns the loss alone."""

    def returned_logs(self, logs):
        return {"loss": logs["loss"]}


def test_train_on_batch_returns_whatever_a_training_step_logs():
    for cls, returned in [(LogsMore, 2), (ReturnsLoss, 1)]:
        model = cls()
        model.compile("sgd", "mse")
        assert np.size(model.train_on_batch(X, X)) == returned
    assert members_about(keras.Model, "log", "flatten") == []


def test_metrics_of_a_layer_include_those_of_the_layers_in_it():
    inner, outer = keras.layers.Layer(), keras.layers.Layer()
    inner.metric, outer.inner = keras.metrics.Mean(), inner
    assert lists_with(outer, inner.metric) == ["metrics"]
    assert _keras.tracked_metrics(inner) == [inner.metric]
    assert _keras.tracked_metrics(outer) == []


class Takes(keras.layers.Layer):
    """Has an argument and leaves the config to Keras."""

    def __init__(self, size=2, **kwargs):
        super().__init__(**kwargs)


class Overrides(Takes):
    """Overrides `get_config` and adds nothing."""

    def __init__(self, size=3, **kwargs):
        super().__init__(**kwargs)

    def get_config(self):
        return super().get_config()


def test_keras_takes_an_overridden_get_config_for_one_of_the_author():
    """Without its mark the arguments of the constructor are not saved."""
    assert Takes().get_config()["size"] == 2
    assert _keras.is_default(Takes.get_config)
    assert "size" not in Overrides().get_config()
    assert not _keras.is_default(Overrides.get_config)


def test_a_file_does_not_say_whether_the_loss_is_scaled():
    assert (
        "auto_scale_loss" in inspect.signature(keras.Model.compile).parameters
    )
    model = dense_model()
    model.compile("sgd", "mse", auto_scale_loss=False)
    assert "auto_scale_loss" not in model.get_compile_config()
    _keras.amend_compile_config(model, {"auto_scale_loss": False})
    assert model.get_compile_config()["auto_scale_loss"] is False


def test_an_optimizer_does_not_tell_what_it_excludes_from_weight_decay():
    first, wide, other = map(variable, ["first", "wide", "other"])
    optimizer = keras.optimizers.SGD(weight_decay=0.1)
    optimizer.exclude_from_weight_decay([first])
    words = ("decay", "exclu")
    assert set(members_about(type(optimizer), *words)) <= {
        "exclude_from_weight_decay"
    }
    assert lists_with(optimizer, first) == []
    _keras.follow_weight_decay_exclusions(optimizer, [(first, wide)])
    optimizer.apply([keras.ops.zeros(2)] * 2, [wide, other])
    assert keras.ops.max(other) < keras.ops.max(wide) == 1


class SeesMask(keras.layers.Layer):
    """Remembers the mask of its argument."""

    supports_masking = True

    def call(self, inputs, mask=None):
        self.seen = mask
        return inputs


def test_a_cast_loses_the_mask_and_keras_offers_no_way_to_give_it_one():
    x = keras.layers.Masking()(np.ones((1, 2, 3), "float32"))
    cast = ops.cast(x, "bfloat16")
    layer = SeesMask(dtype="bfloat16")
    layer(cast)
    assert layer.seen is None
    layer(_keras.keep_mask(x, cast))
    assert layer.seen is not None
    assert functions_about("get_mask", "set_mask", "keras_mask") == []


def test_a_mask_that_is_lost_is_said_once(monkeypatch):
    monkeypatch.setattr(_keras, "_masking", None)
    monkeypatch.setattr(versions, "WARNED_OF", set())
    old, new = (keras.ops.ones((1,), dtype) for dtype in ("float32", "float16"))
    with pytest.warns(UserWarning, match="mask is lost"):
        _keras.keep_mask(old, new)
    _keras.keep_mask(old, new)  # warnings are errors here
