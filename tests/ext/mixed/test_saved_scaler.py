import json
import zipfile

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from keras_policy_ext import mixed_precision
from keras_policy_ext.ext.mixed import experimental
from keras_policy_ext.mixed_precision import (
    DynamicLossScale,
    LossScaleMixin,
    LossScaleOptimizer,
)
from loss_scaling import BACKEND
from steps import numpy

JIT = BACKEND == "jax"


@keras.saving.register_keras_serializable("test_saved_scaler")
class Mixed(LossScaleMixin, keras.Model):
    """A subclassed model with the mixin."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.head = keras.layers.Dense(2, dtype=POLICY)

    def call(self, x):
        return self.head(x)


def data(bad=False):
    x = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
    return x * np.nan if bad else x, x[:, :2]


# A scale at which the gradients of these models are finite in float16.
POLICY = kpe.LossScaleDTypePolicy("mixed_float16", DynamicLossScale(2.0**8))


def functional():
    inputs = keras.Input((3,))
    return keras.Model(inputs, keras.layers.Dense(2, dtype=POLICY)(inputs))


def trained(kind, optimizer=None, **kwargs):
    """A model after three steps, two of which were skipped."""
    optimizer = optimizer or keras.optimizers.Adam(0.01)
    if kind == "mixin":
        model = Mixed()
        model.compile(optimizer, "mse", jit_compile=JIT, **kwargs)
    else:
        model = functional()
        mixed_precision.compile(
            model, optimizer, "mse", jit_compile=JIT, **kwargs
        )
    for bad in (False, True, True):
        model.fit(*data(bad), verbose=0)
    return model


def assert_same_optimizers(one, other):
    assert type(one) is type(other)
    assert one.get_config() == other.get_config()
    for a, b in zip(one.variables, other.variables, strict=True):
        np.testing.assert_array_equal(numpy(a), numpy(b))


@pytest.mark.full_except("function")
@pytest.mark.parametrize("kind", ["mixin", "function"])
def test_a_file_restores_the_scaler_under_any_global_policy(kind, tmp_path):
    with kpe.policy_scope("mixed_float16"):
        model = trained(kind)
    assert float(model.optimizer.loss_scale) == 2.0**6
    assert int(model.optimizer.skipped_steps) == 2
    model.save(tmp_path / "model.keras")
    for policy in ("float32", "mixed_bfloat16", "mixed_float16"):
        with kpe.policy_scope(policy):
            again = keras.saving.load_model(tmp_path / "model.keras")
        assert_same_optimizers(model.optimizer, again.optimizer)
    model.reset_metrics()  # Keras 3.12 adds up what fit left behind.
    losses = [m.train_on_batch(*data()) for m in (model, again)]
    assert float(losses[0]) == float(losses[1])
    assert_same_optimizers(model.optimizer, again.optimizer)


@pytest.mark.parametrize("kind", ["mixin", "function"])
def test_an_optimizer_that_was_not_to_be_wrapped_is_not_when_loaded(
    kind, tmp_path
):
    with kpe.policy_scope("mixed_float16"):
        model = trained(kind, auto_scale_loss=False)
        model.save(tmp_path / "model.keras")
        again = keras.saving.load_model(tmp_path / "model.keras")
    assert isinstance(again.optimizer, keras.optimizers.Adam)
    assert_same_optimizers(model.optimizer, again.optimizer)


@pytest.mark.full_except("False-function", "False-mixin")
@pytest.mark.parametrize("kind", ["mixin", "function"])
@pytest.mark.parametrize("scale", [True, False])
def test_files_name_the_public_class_of_the_optimizer(kind, scale, tmp_path):
    model = trained(kind, auto_scale_loss=scale)
    model.save(tmp_path / "model.keras")
    with zipfile.ZipFile(tmp_path / "model.keras") as archive:
        config = json.loads(archive.read("config.json"))
    named = config["compile_config"]["optimizer"]
    if scale:
        assert named["registered_name"] == "keras_policy_ext>LossScaleOptimizer"
        named = named["config"]["inner_optimizer"]
    got = (named["module"], named["class_name"], named["registered_name"])
    assert got == ("keras.optimizers", "Adam", None)


@pytest.mark.parametrize("kind", ["mixin", "function"])
def test_files_name_the_public_class_of_what_a_scaler_of_keras_wraps(kind):
    stock = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())
    model = Mixed() if kind == "mixin" else functional()
    compile = {"mixin": Mixed.compile, "function": mixed_precision.compile}
    compile[kind](model, stock, "mse")
    named = model.get_compile_config()["optimizer"]
    assert named["class_name"] == "LossScaleOptimizer"
    named = named["config"]["inner_optimizer"]
    got = (named["module"], named["class_name"], named["registered_name"])
    assert got == ("keras.optimizers", "Adam", None)


@keras.saving.register_keras_serializable("test_saved_scaler")
class Adam(keras.optimizers.Adam):
    """A user's own class with the name of a Keras one."""


@pytest.mark.parametrize(
    "optimizer",
    [
        LossScaleOptimizer(
            keras.optimizers.SGD(0.5, momentum=0.9),
            initial_scale=8.0,
            dynamic_growth_steps=3,
            multiplier=4.0,
            minimum_scale=0.5,
            maximum_scale=64.0,
            max_skipped_steps=7,
            name="scaler",
        ),
        LossScaleOptimizer(Adam(), dynamic=False, initial_scale=4.0),
        experimental.LossScaleOptimizer(Adam(), 4, minimum_scale=0.5),
        experimental.LossScaleOptimizer(
            keras.optimizers.SGD(), DynamicLossScale(8, 3), name="scaler"
        ),
    ],
)
def test_configs_say_everything(optimizer):
    config = keras.saving.serialize_keras_object(optimizer)
    again = keras.saving.deserialize_keras_object(
        json.loads(json.dumps(config))
    )
    assert type(again) is type(optimizer)
    assert type(again.inner_optimizer) is type(optimizer.inner_optimizer)
    assert again.get_config() == optimizer.get_config()


@pytest.mark.parametrize(
    "make",
    [LossScaleOptimizer, lambda x: experimental.LossScaleOptimizer(x, 8)],
    ids=["today", "experimental"],
)
def test_a_config_is_read_with_the_classes_that_are_given(make):
    class Unregistered(keras.optimizers.SGD):
        pass

    scaler = make(Unregistered())
    again = type(scaler).from_config(
        scaler.get_config(), custom_objects={"Unregistered": Unregistered}
    )
    assert type(again.inner_optimizer) is Unregistered


def test_the_config_of_tensorflow_2_3_is_read():
    optimizer = LossScaleOptimizer.from_config(
        {
            "optimizer": {"class_name": "SGD", "config": {"name": "SGD"}},
            "loss_scale": {
                "class_name": "DynamicLossScale",
                "config": {
                    "initial_loss_scale": 8.0,
                    "increment_period": 3,
                    "multiplier": 2.0,
                },
            },
        }
    )
    assert isinstance(optimizer.inner_optimizer, keras.optimizers.SGD)
    assert (optimizer.initial_scale, optimizer.dynamic_growth_steps) == (8, 3)


# Variables of other optimizers


def store_of(optimizer):
    store = {}
    optimizer.save_own_variables(store)
    return store


def built(optimizer, seed=0):
    optimizer.build([keras.Variable(np.ones(3, "float32"))])
    rng = np.random.default_rng(seed)
    for variable in getattr(optimizer, "inner_optimizer", optimizer).variables:
        variable.assign(rng.integers(1, 9, size=tuple(variable.shape)))
    return optimizer


def test_the_variables_of_keras_own_scaler_are_read():
    stock = built(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()))
    stock.dynamic_scale.assign(64.0)
    stock.step_counter.assign(5)
    ours = built(LossScaleOptimizer(keras.optimizers.Adam()), seed=1)
    ours.load_own_variables(store_of(stock))
    assert float(ours.loss_scale) == 64.0
    assert int(ours.dynamic_counter) == 5
    for a, b in zip(
        stock.inner_optimizer.variables,
        ours.inner_optimizer.variables,
        strict=True,
    ):
        np.testing.assert_array_equal(numpy(a), numpy(b))


def test_the_variables_of_an_optimizer_without_scaler_are_read():
    plain = built(keras.optimizers.Adam())
    ours = built(LossScaleOptimizer(keras.optimizers.Adam()), seed=1)
    ours.load_own_variables(store_of(plain))
    assert float(ours.loss_scale) == 2.0**15
    for a, b in zip(
        plain.variables, ours.inner_optimizer.variables, strict=True
    ):
        np.testing.assert_array_equal(numpy(a), numpy(b))


def test_a_fixed_scale_is_not_taken_from_a_file():
    dynamic = built(LossScaleOptimizer(keras.optimizers.SGD()))
    fixed = built(
        LossScaleOptimizer(
            keras.optimizers.SGD(), dynamic=False, initial_scale=4
        )
    )
    fixed.load_own_variables(store_of(dynamic))
    assert float(fixed.loss_scale) == 4.0


@pytest.mark.parametrize(
    ("saved", "loaded"), [(0.125, 1.0), (2.0**20, 2.0**16)]
)
def test_a_scale_in_a_file_is_brought_within_the_limits(saved, loaded):
    optimizer = built(
        LossScaleOptimizer(keras.optimizers.SGD(), maximum_scale=2.0**16)
    )
    store = {**store_of(optimizer), "dynamic_scale": np.float32(saved)}
    optimizer.load_own_variables(store)
    assert float(optimizer.loss_scale) == loaded


@pytest.mark.parametrize("wrong", [np.nan, 0.0, np.inf])
def test_a_damaged_scale_changes_nothing(wrong):
    optimizer = built(LossScaleOptimizer(keras.optimizers.SGD()))
    before = [numpy(v) for v in optimizer.variables]
    store = {**store_of(optimizer), "dynamic_scale": np.float32(wrong)}
    with pytest.raises(ValueError, match="damaged"):
        optimizer.load_own_variables(store)
    for a, b in zip(before, optimizer.variables, strict=True):
        np.testing.assert_array_equal(a, numpy(b))


@keras.saving.register_keras_serializable("test_saved_scaler")
class WithoutPolicy(keras.Model):
    """A model whose config says neither its name nor its dtype policy.

    Its layers are of classes that can be in float8, and none is converted.
    """

    def __init__(self, first, second):
        super().__init__()
        self.config = {"first": first, "second": second}
        self.first, self.second = (
            kpe.layers.Dense(2, dtype=kpe.LossScaleDTypePolicy("float16", x))
            for x in (first, second)
        )

    def call(self, x):
        return self.second(self.first(x))

    def get_config(self):
        return dict(self.config)


@pytest.mark.parametrize("scales", [(8.0, 8.0), (8.0, 16.0)])
def test_load_model_restores_the_scaler_that_keras_compile_put_on(
    scales, tmp_path
):
    with kpe.policy_scope("mixed_float16"):
        model = WithoutPolicy(*scales)
        model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=JIT)
    model.fit(*data(), verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = kpe.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.optimizer, keras.optimizers.LossScaleOptimizer)
    assert_same_optimizers(model.optimizer, loaded.optimizer)
