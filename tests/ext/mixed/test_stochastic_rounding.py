"""`StochasticRounding`: what bfloat16 weights learn, and what is kept."""

import json
import math

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from keras_policy_ext.ext.mixed import stochastic_rounding
from keras_policy_ext.mixed_precision import StochasticRounding
from steps import no_grad, numpy, state_of, step

BACKEND = keras.backend.backend()
SIZE = 4096
STEPS = 20

SIGNS = np.where(np.arange(64) % 2, -1.0, 1.0).astype("float32")
"""Of the inputs, and so of the gradient in each row of the kernel."""


def mean_output(y, outputs):
    return ops.mean(ops.cast(outputs, "float32"))


def values(variable):
    return numpy(ops.cast(variable.value, "float32"))


def fitted(dtype, optimizer, steps=STEPS):
    """A 64x64 kernel of ones after steps with the same gradient."""
    layer = keras.layers.Dense(
        64, use_bias=False, kernel_initializer="ones", dtype=dtype
    )
    model = keras.Sequential([keras.Input((64,)), layer])
    model.compile(optimizer, loss=mean_output)
    x = np.tile(SIGNS, (2 * steps, 1))
    model.fit(x, np.zeros((len(x), 64)), batch_size=2, verbose=0)
    return model


def moves(model):
    """How far down and how far up the two halves of the weights went."""
    weights = values(model.weights[0]).astype("float64")
    return np.array(
        [1 - weights[SIGNS > 0].mean(), weights[SIGNS < 0].mean() - 1]
    )


def standard_errors(update, steps=STEPS, size=SIZE // 2):
    """Of both `moves`, after steps with this update.

    A step of size u between numbers d apart is 0 or d: variance u (d - u).
    bfloat16 numbers are 2^-8 apart below 1 and 2^-7 above.
    """
    variances = [update * (2.0**-k - update) for k in (8, 7)]
    return np.sqrt(steps * np.array(variances) / size)


# The weights move


@pytest.mark.full
def test_adam_steps_that_bfloat16_loses_arrive_in_expectation():
    """Adam's update here is the learning rate: 1e-3, a quarter of a gap."""
    wide = moves(fitted("float32", keras.optimizers.Adam(1e-3)))
    lost = moves(fitted("bfloat16", keras.optimizers.Adam(1e-3)))
    optimizer = StochasticRounding(keras.optimizers.Adam(1e-3), seed=1)
    model = fitted("bfloat16", optimizer)

    assert np.all(lost == 0)
    assert np.all(np.abs(wide - STEPS * 1e-3) < 1e-5)
    assert np.all(np.abs(moves(model) - wide) < 5 * standard_errors(1e-3))
    no_float32_copy_is_kept(model, optimizer)


def no_float32_copy_is_kept(model, optimizer):
    assert [v.dtype for v in model.weights] == ["bfloat16"]
    slots = [v for v in optimizer.variables if tuple(v.shape) == (64, 64)]
    names = [v.path.rpartition("_")[2] for v in slots]
    assert names == ["momentum", "velocity"]
    assert {v.dtype for v in slots} == {"float32"}
    assert all(view._kept is None for view in optimizer._views._views.values())


def descend(inner, dtype, gradient, steps):
    """Weights of 1 after steps of an eager loop with the same gradient."""
    variable = keras.Variable(np.ones(SIZE), dtype=dtype)
    optimizer = inner
    if dtype != "float32":
        optimizer = StochasticRounding(inner, seed=3)
    gradient = ops.full((SIZE,), gradient, dtype)
    with no_grad():
        for _ in range(steps):
            optimizer.apply([gradient], [variable])
    return values(variable).mean(dtype="float64")


@pytest.mark.full
def test_equal_variables_with_equal_gradients_are_rounded_by_other_bits():
    variables = [
        keras.Variable(np.ones(SIZE), dtype="bfloat16") for _ in range(2)
    ]
    optimizer = StochasticRounding(keras.optimizers.SGD(1e-3), seed=1)
    with no_grad():
        optimizer.apply([ops.ones(SIZE, "bfloat16")] * 2, variables)
    first, second = map(values, variables)
    # A step is a quarter of a gap: 3 of 8 are rounded otherwise.
    assert 0.3 < np.mean(first != second) < 0.45


INNER = {
    "momentum": lambda: keras.optimizers.SGD(2.0**-11, momentum=0.5),
    "decay": lambda: keras.optimizers.SGD(2.0**-11, weight_decay=0.5),
    "clip": lambda: keras.optimizers.SGD(1.0, clipvalue=2.0**-11),
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.PiecewiseConstantDecay(
            [4], [2.0**-10, 2.0**-12]
        )
    ),
    "lion": lambda: keras.optimizers.Lion(2.0**-11),
}


@pytest.mark.parametrize("inner", INNER)
def test_settings_of_the_inner_optimizer_act_as_in_float32(inner):
    wide = descend(INNER[inner](), "float32", 1.0, 8)
    narrow = descend(INNER[inner](), "bfloat16", 1.0, 8)
    # At most a quarter of a squared gap of variance for each rounding; on
    # TensorFlow weight decay is rounded by itself.
    bound = 5 * math.sqrt(16 * 2.0**-16 / 4 / SIZE)
    assert abs(narrow - wide) < bound
    assert 1 - wide > 2 * bound


def test_float16_weights_move_too():
    narrow = descend(keras.optimizers.SGD(2.0**-15), "float16", 1.0, 8)
    bound = 5 * math.sqrt(8 * 2.0**-22 / 4 / SIZE)
    assert abs(narrow - (1 - 2.0**-12)) < bound < 2.0**-13


@pytest.mark.full
def test_accumulation_and_averages_act_as_in_float32_when_compiled():
    """Both take other branches of the graph in some steps."""

    def inner():
        return keras.optimizers.SGD(
            2.0**-3,  # times a gradient of 2^-6
            use_ema=True,
            ema_momentum=0.5,
            ema_overwrite_frequency=2,
            gradient_accumulation_steps=2,
        )

    wide = moves(fitted("float32", inner(), steps=8))
    narrow = fitted("bfloat16", StochasticRounding(inner(), seed=1), steps=8)

    # 4 updates and no more than 8 averages are rounded, at gaps of 2^-7.
    bound = 5 * math.sqrt(12 * 2.0**-14 / 4 / (SIZE // 2))
    assert np.all(np.abs(moves(narrow) - wide) < bound)
    assert np.all(wide > 2 * bound)


def test_a_seed_gives_one_run_and_a_neighbouring_seed_another():
    def run(seed):
        variable = keras.Variable(np.ones(SIZE), dtype="bfloat16")
        inner = keras.optimizers.SGD(2.0**-9)
        optimizer = StochasticRounding(inner, seed=seed)
        with no_grad():
            for _ in range(3):
                optimizer.apply([ops.ones(SIZE)], [variable])
        return values(variable)

    first = run(1)
    np.testing.assert_array_equal(run(1), first)
    # Independent weights differ in most places: 2 of 3 with these shares.
    assert np.mean(run(2) != first) > 0.5


# What is not rounded


def test_a_zero_gradient_leaves_every_weight_as_it_is():
    random = np.random.default_rng(0).normal(size=SIZE)
    variable = keras.Variable(random, dtype="bfloat16")
    before = values(variable)
    optimizer = StochasticRounding(keras.optimizers.Adam(1e-3), seed=1)
    with no_grad():
        optimizer.apply([ops.zeros(SIZE, "bfloat16")], [variable])
    np.testing.assert_array_equal(values(variable), before)


def test_float32_and_unused_variables_fare_as_without_the_wrapper():
    def run(wrap):
        wide = keras.Variable(np.linspace(-1, 1, SIZE), dtype="float32")
        narrow = keras.Variable(np.ones(SIZE), dtype="bfloat16")
        unused = keras.Variable(np.full(SIZE, 1 / 3), dtype="bfloat16")
        variables = [wide, unused, narrow]
        optimizer = wrap(keras.optimizers.Adam(1e-3))
        with no_grad(), pytest.warns(UserWarning, match="do not exist"):
            for i in range(3):
                wide_grad = ops.full((SIZE,), 0.1 * i)
                grads = [wide_grad, None, ops.ones(SIZE, "bfloat16")]
                optimizer.apply(grads, variables)
        return values(wide), values(unused)

    plain = run(lambda optimizer: optimizer)
    wrapped = run(lambda optimizer: StochasticRounding(optimizer, seed=1))
    np.testing.assert_array_equal(wrapped, plain)


def one_step(optimizer, gradient=1.0, constraint=None):
    """A variable of ones after one eager step, and the optimizer."""
    variable = keras.Variable(np.ones(SIZE), dtype="bfloat16", name="w")
    variable.constraint = constraint
    with no_grad():
        optimizer.apply([ops.full((SIZE,), gradient)], [variable])
    return variable


def test_a_constraint_holds_after_rounding():
    inner = keras.optimizers.SGD(1 + 2.0**-9)
    constraint = keras.constraints.NonNeg()
    variable = one_step(StochasticRounding(inner, seed=1), 1.0, constraint)
    assert np.all(values(variable) == 0)


@pytest.mark.parametrize("how", ["before wrapping", "wrapped", "by name"])
def test_an_excluded_variable_does_not_decay(how):
    kept, decays = (
        keras.Variable(np.ones(SIZE), dtype="bfloat16", name=name)
        for name in ("kept", "decays")
    )
    inner = keras.optimizers.SGD(1.0, weight_decay=0.5)
    if how == "before wrapping":
        inner.exclude_from_weight_decay(var_list=[kept])
    optimizer = StochasticRounding(inner, seed=1)
    if how == "wrapped":
        optimizer.exclude_from_weight_decay(var_list=[kept])
    if how == "by name":
        optimizer.exclude_from_weight_decay(var_names=["kept"])
    with no_grad():
        optimizer.apply([ops.zeros(SIZE)] * 2, [kept, decays])
    assert np.all(values(kept) == 1)
    assert np.all(values(decays) == 0.5)


def test_rows_of_an_embedding_that_are_used_twice_get_both_gradients():
    layer = keras.layers.Embedding(8, 4, "ones", dtype="bfloat16")
    model = keras.Sequential([layer])
    model.build((3,))
    inner = keras.optimizers.SGD(0.25)
    used = np.float32([1, 5, 1])  # JAX differentiates floats only
    optimizer = StochasticRounding(inner, seed=1)
    step(model, optimizer, used, lambda y: ops.sum(ops.cast(y, "float32")))
    rows = [1, 0.5, 1, 1, 1, 0.75, 1, 1]
    expected = np.repeat(np.float32(rows)[:, None], 4, axis=1)
    np.testing.assert_array_equal(values(layer.embeddings), expected)


# Around and inside


def test_a_loss_scaler_around_it_skips_the_whole_step():
    inner = StochasticRounding(keras.optimizers.SGD(2.0**-9), seed=1)
    optimizer = kpe.mixed_precision.LossScaleOptimizer(inner, initial_scale=8.0)
    variable = one_step(optimizer, np.inf)
    assert np.all(values(variable) == 1)
    assert numpy(inner.seed_generator.state)[1] == 0
    assert numpy(optimizer.loss_scale) == 4

    with no_grad():
        optimizer.apply([ops.full((SIZE,), 4.0)], [variable])
    bound = 5 * math.sqrt(2.0**-16 / 4 / SIZE)
    assert abs(1 - values(variable).mean(dtype="float64") - 2.0**-9) < bound
    assert numpy(inner.seed_generator.state)[1] == 1


def test_float16_models_get_a_loss_scaler_around_it():
    inner = StochasticRounding(keras.optimizers.SGD(1.0), seed=1)
    optimizer = kpe.mixed_precision.wrap_optimizer(inner, "mixed_float16")
    assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    assert optimizer.inner_optimizer is inner


@pytest.mark.full
def test_a_model_converted_to_float8_goes_on_training_with_its_averages():
    layers = [
        keras.layers.Dense(n, use_bias=False, dtype="bfloat16") for n in (8, 4)
    ]
    model = keras.Sequential([keras.Input((8,)), *layers])
    inner = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
    model.compile(StochasticRounding(inner, seed=1), loss="mse")
    x = np.float32(np.random.default_rng(0).integers(-8, 8, (8, 8)) / 8)
    model.fit(x, x[:, :4], verbose=0)
    kpe.convert(model, "float8/4_from_bfloat16")
    model.fit(x, x[:, :4], verbose=0)

    averages = [v for v in inner.variables if v.path.endswith("average")]
    kernels = [layer.kernel for layer in model.layers]
    assert len(averages) == len(kernels) == 2
    for kernel, average in zip(kernels, averages, strict=True):
        error = np.abs(values(kernel) - values(average))
        assert np.all(error <= 2.0**-7 * np.abs(values(average)))
    assert numpy(inner.iterations) == 2
    # Float8 state is overwritten as without the wrapper.
    assert state_of(model.layers[0])["inputs"][1][0] == np.abs(x).max()
    assert not any("amax" in v.path for v in model.optimizer.variables)


def test_stateless_apply_gives_what_apply_assigns_and_assigns_nothing():
    if BACKEND == "tensorflow":
        pytest.skip("Keras optimizers have no stateless_apply on TensorFlow")

    def make():
        variable = keras.Variable(np.ones(SIZE), dtype="bfloat16", name="w")
        optimizer = StochasticRounding(keras.optimizers.SGD(2.0**-9), seed=1)
        optimizer.build([variable])
        return variable, optimizer

    variable, optimizer = make()
    state = [v.value for v in optimizer.variables]
    with no_grad():
        (new,), new_state = optimizer.stateless_apply(
            state, [ops.ones(SIZE)], [variable.value]
        )
    assert np.all(values(variable) == 1)
    other, reference = make()
    with no_grad():
        reference.apply([ops.ones(SIZE)], [other])
    np.testing.assert_array_equal(
        numpy(ops.cast(new, "float32")), values(other)
    )
    for got, wanted in zip(new_state, reference.variables, strict=True):
        np.testing.assert_array_equal(numpy(got), numpy(wanted))


def test_learning_rate_and_iterations_are_those_of_the_inner_optimizer():
    inner = keras.optimizers.SGD(0.5)
    optimizer = StochasticRounding(inner, seed=1)
    optimizer.learning_rate = 0.25
    one_step(optimizer)
    assert numpy(inner.learning_rate) == numpy(optimizer.learning_rate) == 0.25
    assert numpy(inner.iterations) == numpy(optimizer.iterations) == 1
    optimizer.loss_scale_factor = 2.0
    assert inner.loss_scale_factor == 2.0
    assert optimizer.scale_loss(1.0) == 2.0


# Files


@pytest.mark.full
def test_training_goes_on_after_reloading_as_if_it_had_not_stopped(tmp_path):
    random = np.random.default_rng(0)
    x = random.normal(size=(12, 8)).astype("float32")

    def train(model):
        model.fit(x, x, batch_size=4, shuffle=False, verbose=0)

    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(8, dtype="bfloat16"),
            keras.layers.Dense(8, dtype="float32"),
        ]
    )
    inner = keras.optimizers.Adam(1e-3)
    model.compile(StochasticRounding(inner, seed=1), loss="mse")
    train(model)
    model.save(tmp_path / "model.keras")
    reloaded = keras.saving.load_model(tmp_path / "model.keras")
    train(model)
    train(reloaded)

    assert isinstance(reloaded.optimizer, StochasticRounding)
    pairs = [
        *zip(model.weights, reloaded.weights, strict=True),
        *zip(
            model.optimizer.variables,
            reloaded.optimizer.variables,
            strict=True,
        ),
    ]
    for kept, loaded in pairs:
        assert kept.dtype == loaded.dtype
        np.testing.assert_array_equal(values(loaded), values(kept))


def test_the_config_is_json_and_names_public_classes():
    optimizer = StochasticRounding(
        keras.optimizers.AdamW(0.5, weight_decay=0.25), seed=7, name="rounded"
    )
    config = json.loads(json.dumps(keras.optimizers.serialize(optimizer)))
    inner = config["config"]["inner_optimizer"]
    assert (inner["module"], inner["class_name"]) == (
        "keras.optimizers",
        "AdamW",
    )
    again = keras.optimizers.deserialize(config)
    assert again.get_config() == optimizer.get_config()
    assert again.inner_optimizer.weight_decay == 0.25


def test_gradients_without_variables_are_refused():
    optimizer = StochasticRounding(keras.optimizers.SGD(0.5))
    with pytest.raises(ValueError, match="trainable_variables=None"):
        optimizer.apply([ops.ones(2)])
    variable = keras.Variable(np.ones(2), dtype="bfloat16")
    with pytest.raises(ValueError, match="2 gradients and 1 variables"):
        optimizer.apply([ops.ones(2)] * 2, [variable])
    assert np.all(values(variable) == 1)


# Groups


in_groups = pytest.mark.skipif(
    BACKEND != "torch", reason="a compiled step has no copies of all weights"
)
GROUPED = {
    "adam": lambda: keras.optimizers.AdamW(1e-3, weight_decay=0.1),
    "one byte": lambda: kpe.optimizers.quantize_state(
        keras.optimizers.Adam(1e-3), minimum_size=0
    ),
}


def after_steps(optimizer):
    """The numbers of weights and optimizer after two steps."""
    shapes = [(8, 8), (8,), (16, 8), ()]
    variables = [keras.Variable(np.ones(s), dtype="bfloat16") for s in shapes]
    variables.insert(2, keras.Variable(np.ones(8), dtype="float32"))
    with no_grad():
        for step in (1.0, 2.0):
            grads = [ops.full(v.shape, step, v.dtype) for v in variables]
            optimizer.apply(grads, variables)
    found = [*variables, *optimizer.variables]
    return [numpy(ops.cast(v.value, "float32")) for v in found]


@in_groups
@pytest.mark.parametrize("inner", GROUPED)
def test_weights_get_the_same_bits_in_groups_as_together(inner, monkeypatch):
    calls = []

    def run(numbers):
        monkeypatch.setattr(stochastic_rounding, "NUMBERS_OF_A_GROUP", numbers)
        optimizer = StochasticRounding(GROUPED[inner](), seed=1)
        apply = optimizer.inner_optimizer.apply
        calls.append(0)

        def counted(*args):
            calls[-1] += 1
            return apply(*args)

        monkeypatch.setattr(optimizer.inner_optimizer, "apply", counted)
        return after_steps(optimizer)

    for one, other in zip(run(1 << 20), run(72), strict=True):
        np.testing.assert_array_equal(one, other)
    assert calls == [2, 8]


@in_groups
@pytest.mark.parametrize(
    "options",
    [
        {"use_ema": True},
        {"global_clipnorm": 1.0},
        {"gradient_accumulation_steps": 2},
        {"weight_decay": 0.5},
    ],
)
def test_what_reads_all_weights_gets_them_together(options, monkeypatch):
    monkeypatch.setattr(stochastic_rounding, "NUMBERS_OF_A_GROUP", 1)
    optimizer = StochasticRounding(keras.optimizers.SGD(0.5, **options))
    variables = [keras.Variable(np.ones(4), dtype="bfloat16") for _ in "ab"]
    # A group of which no weight decays is an error of Keras.
    optimizer.exclude_from_weight_decay(variables[:1])
    with no_grad():
        optimizer.apply([ops.ones(4, "bfloat16")] * 2, variables)
    assert numpy(optimizer.inner_optimizer._iterations) == 1
    assert not optimizer.updates_in_groups
