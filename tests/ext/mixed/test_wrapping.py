import contextlib
import warnings

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
import refusals
from keras_policy_ext import LossScaleDTypePolicy, mixed_precision
from keras_policy_ext.mixed_precision import (
    DynamicLossScale,
    LossScaleMixin,
    LossScaleOptimizer,
    wrap_optimizer,
)
from loss_scaling import BACKEND
from steps import numpy

JIT = BACKEND == "jax"  # XLA takes longer than it saves.
COMPILES = BACKEND != "torch"  # What `fit` does unless told otherwise.


class Mixed(LossScaleMixin, keras.Model):
    """A Functional model with the mixin."""


@keras.saving.register_keras_serializable("test_wrapping")
class Subclassed(LossScaleMixin, keras.Model):
    """A subclassed model with the mixin."""

    def __init__(self, policy="mixed_float16", **kwargs):
        super().__init__(**kwargs)
        self.head = keras.layers.Dense(2, dtype=policy)

    def call(self, x):
        return self.head(x)

    def get_config(self):
        return {"policy": kpe.serialize(self.head.dtype_policy)}


def ends(policy, cls=keras.Model):
    """Inputs and outputs of one layer under a policy, under float32."""
    inputs = keras.Input((3,))
    outputs = kpe.layers.Dense(2, dtype=policy)(inputs)
    return cls(inputs, outputs)


def compiled(policy, optimizer="sgd", cls=Mixed, **kwargs):
    """A model of `ends`, compiled through the mixin or the function."""
    model = ends(policy, cls)
    if cls is Mixed:
        model.compile(optimizer, "mse", jit_compile=JIT, **kwargs)
    else:
        mixed_precision.compile(
            model, optimizer, "mse", jit_compile=JIT, **kwargs
        )
    return model


def a_map():
    return keras.dtype_policies.DTypePolicyMap(
        default_policy="float32",
        policy_map={".*": keras.DTypePolicy("float16")},
    )


def name_of(policy):
    """None, pytest's own name, for what prints its address."""
    return getattr(policy, "full_name", None)


FLOAT16 = [
    "mixed_float16",
    "float16",
    a_map(),
    kpe.Float8DTypePolicy("mixed_float16"),
    kpe.Float8DTypePolicy("float32", rules=[(".*", "mixed_float16")]),
    LossScaleDTypePolicy("float16"),
]
OTHERS = [
    "float32",
    "mixed_bfloat16",
    kpe.Float8DTypePolicy("mixed_bfloat16"),
    LossScaleDTypePolicy("mixed_float16", None),
]


@pytest.mark.parametrize("cls", [Mixed, keras.Model])
@pytest.mark.parametrize("policy", FLOAT16, ids=name_of)
def test_compile_wraps_where_a_layer_of_a_float32_model_is_in_float16(
    policy, cls
):
    model = compiled(policy, cls=cls)
    assert model.compute_dtype == "float32"
    assert type(model.optimizer) is LossScaleOptimizer
    assert model.optimizer.dynamic
    assert type(wrap_optimizer("sgd", policy)) is LossScaleOptimizer


@pytest.mark.parametrize("cls", [Mixed, keras.Model])
@pytest.mark.parametrize("policy", OTHERS, ids=repr)
def test_compile_leaves_the_optimizer_where_nothing_is_to_be_scaled(
    policy, cls
):
    model = compiled(policy, cls=cls)
    assert isinstance(model.optimizer, keras.optimizers.SGD)
    assert isinstance(wrap_optimizer("sgd", policy), keras.optimizers.SGD)


@keras.saving.register_keras_serializable("test_wrapping")
class MixedSequential(LossScaleMixin, keras.Sequential):
    """A Sequential model with the mixin."""


def map_of(path):
    """float16 at one path, float32 everywhere else."""
    policy_map = {path: keras.DTypePolicy("mixed_float16")}
    return keras.dtype_policies.DTypePolicyMap("float32", policy_map)


RULES = kpe.Float8DTypePolicy("float32", rules=[(".*/first", "mixed_float16")])


@pytest.mark.parametrize("cls", [MixedSequential, keras.Sequential])
@pytest.mark.parametrize(
    ("policy", "built", "wrapped"),
    [
        (map_of("net/first"), False, True),
        (map_of("net/first"), True, True),
        (map_of("net/other"), True, False),
        (RULES, False, True),
    ],
    ids=["unbuilt", "built", "another layer", "a rule"],
)
def test_a_map_counts_by_what_a_layer_may_compute_in_once_it_is_built(
    policy, built, wrapped, cls
):
    first = kpe.layers.Dense(2, name="first", dtype=policy)
    model = cls([first], name="net")
    if built:
        model.build((None, 3))
    if cls is MixedSequential:
        model.compile("sgd", "mse")
    else:
        mixed_precision.compile(model, "sgd", "mse")
    assert (type(model.optimizer) is LossScaleOptimizer) == wrapped
    model.build((None, 3))
    assert (first.compute_dtype == "float16") == wrapped


def test_a_model_under_a_float16_policy_is_wrapped_like_in_keras():
    with kpe.policy_scope("mixed_float16"):
        model = Subclassed("float32")
        assert type(wrap_optimizer("sgd")) is LossScaleOptimizer
    model.compile("sgd", "mse")
    assert type(model.optimizer) is LossScaleOptimizer
    model.compile(None, None)
    assert model.optimizer is None


@pytest.mark.parametrize("cls", [Mixed, keras.Model])
@pytest.mark.parametrize(
    ("loss_scale", "expected"),
    [
        (128, {"dynamic": False, "initial_scale": 128.0}),
        (
            DynamicLossScale(8, 3, 4),
            {
                "dynamic": True,
                "initial_scale": 8.0,
                "dynamic_growth_steps": 3,
                "multiplier": 4.0,
            },
        ),
    ],
)
def test_the_loss_scale_of_the_policy_counts(loss_scale, expected, cls):
    policy = LossScaleDTypePolicy("mixed_float16", loss_scale)
    wrapped = wrap_optimizer(keras.optimizers.SGD(), policy)
    for optimizer in (wrapped, compiled(policy, cls=cls).optimizer):
        assert {key: getattr(optimizer, key) for key in expected} == expected


def test_the_policy_of_the_model_decides_over_its_layers():
    policies = [LossScaleDTypePolicy("mixed_float16", x) for x in (64, 128)]

    def model(**kwargs):
        return keras.Sequential(
            [
                keras.layers.Dense(2, dtype="mixed_float16"),
                *(keras.layers.Dense(2, dtype=p) for p in policies),
            ],
            **kwargs,
        )

    with pytest.raises(ValueError, match=r"different loss scales.*128"):
        mixed_precision.compile(model(), "sgd", "mse")
    with kpe.policy_scope(LossScaleDTypePolicy("mixed_float16", 256)):
        decided = model()
    mixed_precision.compile(decided, "sgd", "mse")
    assert decided.optimizer.initial_scale == 256


@pytest.mark.parametrize("cls", [Mixed, keras.Model])
def test_what_the_user_says_about_scaling_wins(cls):
    def own(optimizer, **kwargs):
        with kpe.policy_scope("mixed_float16"):
            model = compiled("mixed_float16", optimizer, cls, **kwargs)
        return model.optimizer

    scalers = (keras.optimizers.LossScaleOptimizer, LossScaleOptimizer)
    for scaler in [make(keras.optimizers.SGD()) for make in scalers]:
        assert own(scaler) is scaler
        assert wrap_optimizer(scaler, "mixed_float16") is scaler
    fixed = keras.optimizers.SGD(loss_scale_factor=64.0)
    assert own(fixed) is fixed
    assert wrap_optimizer(fixed, "mixed_float16") is fixed
    assert fixed.loss_scale_factor == 64.0, "Keras erases it"
    plain = keras.optimizers.SGD()
    assert own(plain, auto_scale_loss=False) is plain


@pytest.mark.parametrize("cls", [Mixed, keras.Model])
@pytest.mark.parametrize("scale", [True, False])
def test_auto_scale_loss_may_be_the_last_positional_argument_as_in_keras(
    scale, cls
):
    model = ends("mixed_float16", cls)
    arguments = ("sgd", "mse", None, None, None, False, 1, JIT, scale)
    if cls is Mixed:
        model.compile(*arguments)
    else:
        mixed_precision.compile(model, *arguments)
    assert (type(model.optimizer) is LossScaleOptimizer) == scale
    assert model.jit_compile == JIT


def test_the_mixin_has_to_come_before_the_keras_class():
    class Base(keras.Model):
        pass

    for base in (keras.Model, keras.Sequential, Base):
        with pytest.raises(TypeError, match=r"class Net\(LossScaleMixin,"):
            type("Net", (base, LossScaleMixin), {})
    # What the first class does not have is found in the mixin here.
    assert type("Net", (Base, Mixed), {}).compile is LossScaleMixin.compile


def test_an_optimizer_keeps_its_wrapper_when_the_model_is_compiled_again():
    sgd = keras.optimizers.SGD()
    model = compiled("mixed_float16", sgd)
    wrapper = model.optimizer
    model.compile(sgd, "mse")
    assert model.optimizer is wrapper
    with pytest.raises(ValueError, match="another loss scale"):
        compiled(LossScaleDTypePolicy("mixed_float16", 128), sgd)


# fit

# A scale at which the gradients of these models are finite in float16.
CALM = LossScaleDTypePolicy("mixed_float16", DynamicLossScale(2.0**8))


def data(size=8, seed=0):
    x = np.random.default_rng(seed).normal(size=(size, 3)).astype("float32")
    return x, x[:, :2]


def test_fit_logs_the_scale_and_how_many_steps_were_skipped():
    model = compiled(CALM)
    x, y = data()
    expected = float(model.evaluate(x, y, verbose=0))
    bad = x.copy()
    bad[3] = np.nan
    logs = [
        model.fit(batch, y, batch_size=8, verbose=0).history
        for batch in (x, bad, bad, x)
    ]
    scale = 2.0**8
    names = ("loss_scale", "skipped_steps")
    got = [tuple(log[name][0] for name in names) for log in logs]
    assert got == [(scale, 0), (scale / 2, 1), (scale / 4, 2), (scale / 4, 0)]
    # The reported loss is not scaled; float16 rounds to 11 bits.
    assert logs[0]["loss"][0] == pytest.approx(expected, rel=2e-3)
    assert np.isnan(logs[1]["loss"][0])
    assert all(np.isfinite(w).all() for w in model.get_weights())
    assert int(numpy(model.optimizer.iterations)) == 2
    assert np.ndim(model.train_on_batch(x, y)) == 0, "the loss alone"


@pytest.mark.parametrize("cls", [Mixed, keras.Model])
def test_fit_ends_when_too_many_steps_were_skipped(cls):
    scaler = LossScaleOptimizer(
        keras.optimizers.SGD(), initial_scale=2.0**8, max_skipped_steps=3
    )
    model = compiled("mixed_float16", scaler, cls)
    x, y = data(16)
    monitor = mixed_precision.LossScaleMonitor()
    callbacks = [monitor] if cls is keras.Model else None
    model.fit(x, y, batch_size=4, verbose=0, callbacks=callbacks)
    with pytest.raises(FloatingPointError, match="3 skipped steps"):
        model.fit(x * np.nan, y, batch_size=4, verbose=0, callbacks=callbacks)
    assert float(scaler.loss_scale) == 2.0**5


@pytest.mark.full
@pytest.mark.parametrize("watched_by", ["nothing", "monitor", "mixin", "eyes"])
def test_a_limit_of_skipped_steps_that_nothing_checks_is_warned_of(watched_by):
    """A compiled `fit` would otherwise skip every step without a word."""
    limit, batches = 3, 8
    scaler = LossScaleOptimizer(
        keras.optimizers.SGD(), initial_scale=2.0**8, max_skipped_steps=limit
    )
    cls = Mixed if watched_by == "mixin" else keras.Model
    model = compiled("mixed_float16", scaler, cls)
    monitor = mixed_precision.LossScaleMonitor()
    callbacks = [monitor] if watched_by == "monitor" else None
    if watched_by == "eyes":
        scaler.check_skipped_steps()
    x, y = data(batches)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with contextlib.suppress(FloatingPointError):
            for _ in range(2):
                model.fit(
                    x * np.nan, y, batch_size=1, verbose=0, callbacks=callbacks
                )
    said = [str(w.message) for w in caught if "max_skipped" in str(w.message)]
    raises = watched_by in ("monitor", "mixin") or not COMPILES
    assert int(scaler.skipped_steps) == (limit if raises else 2 * batches)
    assert len(said) == (COMPILES and watched_by == "nothing")
    for text in said:
        fault, received, allowed = refusals.parts(text)
        assert "no effect" in fault and "=3" in received
        assert "LossScaleMonitor" in allowed


def test_fit_takes_a_list_of_callbacks_that_is_made_already():
    scaler = LossScaleOptimizer(
        keras.optimizers.SGD(), initial_scale=2.0**8, max_skipped_steps=3
    )
    model = compiled("mixed_float16", scaler)
    given = keras.callbacks.CallbackList(model=model, add_history=True)
    x, y = data(16)
    for _ in range(2):
        history = model.fit(x, y, batch_size=4, verbose=0, callbacks=given)
    assert history is given.callbacks[0]
    assert history.epoch == [0]
    with pytest.raises(FloatingPointError, match="3 skipped steps"):
        model.fit(x * np.nan, y, batch_size=4, verbose=0, callbacks=given)
    assert len(given.callbacks) == 1, "the list is the user's"


def test_the_monitor_logs_for_models_of_any_class():
    model = compiled(CALM, cls=keras.Model)
    x, y = data()
    seen = []
    after = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(dict(logs))
    )
    history = model.fit(
        np.concatenate([x, x * np.inf]),
        np.concatenate([y, y]),
        batch_size=8,
        shuffle=False,
        verbose=0,
        callbacks=[mixed_precision.LossScaleMonitor(), after],
    ).history
    assert [log["skipped_steps"] for log in seen] == [0, 1]
    assert [log["loss_scale"] for log in seen] == [2.0**8, 2.0**7]
    assert (history["loss_scale"], history["skipped_steps"]) == ([2.0**7], [1])


OPTIMIZERS = {
    "accumulation": lambda: keras.optimizers.Adam(
        0.01, gradient_accumulation_steps=2, global_clipnorm=0.5
    ),
    "averages": lambda: keras.optimizers.AdamW(
        keras.optimizers.schedules.ExponentialDecay(0.01, 2, 0.5),
        weight_decay=0.1,
        clipnorm=0.3,
        use_ema=True,
        ema_momentum=0.9,
        ema_overwrite_frequency=3,
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_scaler_changes_no_number_in_float32(kind):
    # Powers of two scale without rounding, so that nothing may differ.
    weights = []
    for scale in (False, True):
        keras.utils.set_random_seed(0)
        optimizer = OPTIMIZERS[kind]()
        if scale:
            optimizer = LossScaleOptimizer(optimizer, dynamic_growth_steps=2)
        model = compiled("float32", optimizer)
        x, y = data(16)
        model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        weights.append([numpy(v) for v in (*model.weights, *inner.variables)])
    for a, b in zip(*weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=3e-7, atol=1e-9)


def test_pure_float16_trains_with_accumulated_gradients():
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    model = compiled("float16", LossScaleOptimizer(optimizer, True, 2.0**8))
    x, y = data(16)
    losses = model.fit(x, y, batch_size=4, epochs=4, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    assert int(numpy(model.optimizer.iterations)) == 8


def test_an_embedding_trains_in_float16():
    model = keras.Sequential(
        [
            keras.Input((2,), dtype="int32"),
            keras.layers.Embedding(5, 4, dtype="mixed_float16"),
            keras.layers.Flatten(dtype="mixed_float16"),
        ]
    )
    mixed_precision.compile(model, "sgd", "mse", jit_compile=JIT)
    x = np.array([[0, 1], [1, 2]])
    before = numpy(model.weights[0])
    model.fit(x, np.ones((2, 8)), verbose=0)
    changed = np.any(numpy(model.weights[0]) != before, axis=1)
    assert changed.tolist() == [True, True, True, False, False]
