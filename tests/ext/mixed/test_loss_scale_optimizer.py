"""`LossScaleOptimizer`: how the scale moves, and which steps are skipped."""

import contextlib

import keras
import numpy as np
import pytest
from keras import ops

from keras_policy_ext.mixed_precision import LossScaleOptimizer
from loss_scaling import BACKEND, float8_layer, observation, sgd, steps, tensors
from steps import no_grad, numpy

NAN, INF = np.nan, np.inf
COMPILED = pytest.mark.parametrize("compiled", [False, True])
QUICKLY = BACKEND != "torch"  # Its eager steps are quicker than its compiler.
SEQUENCES = [
    (2, 2, [1, 1, 1, 1], [2, 4, 4, 8], [-1, -2, -3, -4]),
    (8, 2, [1, NAN, 1, 1], [8, 4, 4, 8], [-1, -1, -2, -3]),
    (2, 2, [INF, INF, INF], [1, 1, 1], [0, 0, 0]),
    (2.0**127, 1, [1, 1], [2.0**127] * 2, [-1, -2]),
]


def scaler(inner=None, initial=2.0, growth=2, **kwargs):
    return LossScaleOptimizer(
        inner or sgd(),
        initial_scale=initial,
        dynamic_growth_steps=growth,
        **kwargs,
    )


# How the scale moves


@pytest.mark.full
@COMPILED
def test_the_scale_follows_the_gradients(compiled):
    chosen = SEQUENCES[1:2] if compiled and not QUICKLY else SEQUENCES
    for initial, growth, factors, scales, values in chosen:
        variable = keras.Variable(0.0)
        optimizer = scaler(initial=initial, growth=growth)
        got = steps(optimizer, variable, factors, compiled)
        assert got == (scales, values)


def test_200_bad_batches_do_no_harm():
    variable = keras.Variable(0.0)
    optimizer = LossScaleOptimizer(sgd(), dynamic_growth_steps=2)
    scales, values = steps(optimizer, variable, [NAN] * 200, QUICKLY)
    assert scales[:15] == [2.0**power for power in range(14, -1, -1)]
    assert scales[15:] == [1.0] * 185
    assert values == [0.0] * 200
    assert int(optimizer.skipped_steps) == 200
    assert steps(optimizer, variable, [1] * 4) == (
        [1, 2, 2, 4],
        [-1, -2, -3, -4],
    )
    assert int(optimizer.skipped_steps) == 0


def test_zero_gradients_never_make_the_scale_infinite():
    optimizer = scaler(initial=2.0**100, growth=1)
    scales, values = steps(optimizer, keras.Variable(0.0), [0] * 40, QUICKLY)
    assert max(scales) == scales[-1] == 2.0**127
    assert values == [0.0] * 40


def test_minimum_and_maximum_can_be_set():
    optimizer = scaler(
        initial=4, growth=1, minimum_scale=0.5, maximum_scale=12, multiplier=4
    )
    scales, _ = steps(optimizer, keras.Variable(0.0), [1, 1, NAN, NAN, NAN])
    assert scales == [12, 12, 3, 0.75, 0.5]


def test_a_fixed_scale_stays_and_bad_steps_are_skipped():
    variable = keras.Variable(0.0)
    optimizer = LossScaleOptimizer(sgd(), dynamic=False, initial_scale=64)
    assert steps(optimizer, variable, [1, NAN, 1]) == ([64] * 3, [-1, -1, -2])
    assert optimizer.dynamic is False
    assert optimizer.dynamic_counter is None
    assert optimizer.dynamic_growth_steps is None
    assert optimizer.initial_scale == 64


def test_the_state_of_the_scaler_can_be_read_before_and_after_it_is_built():
    optimizer = LossScaleOptimizer(sgd())
    assert optimizer.dynamic is True
    assert optimizer.dynamic_growth_steps == 2000
    assert optimizer.initial_scale == 2.0**15
    for built in (False, True):
        assert optimizer.built is built
        assert float(optimizer.loss_scale) == 2.0**15
        assert int(optimizer.dynamic_counter) == 0
        assert int(optimizer.skipped_steps) == 0
        dtype = keras.backend.standardize_dtype(optimizer.loss_scale.dtype)
        assert dtype == "float32"
        optimizer.build([keras.Variable(0.0)])


def test_what_was_read_of_the_scaler_is_not_written_to():
    variable = keras.Variable(0.0)
    optimizer = LossScaleOptimizer(sgd())
    optimizer.build([variable])
    before = optimizer.loss_scale
    steps(optimizer, variable, [NAN, 1])
    assert float(before) == 2.0**15
    assert float(optimizer.loss_scale) == 2.0**14
    assert int(optimizer.dynamic_counter) == 1


# Skipped steps


@pytest.mark.parametrize("compiled", {False, QUICKLY})
def test_a_skipped_step_leaves_slots_and_iterations_alone(compiled):
    variable = keras.Variable(1.0)
    inner = keras.optimizers.Adam(
        0.1, use_ema=True, gradient_accumulation_steps=2
    )
    optimizer = scaler(inner, growth=9)
    steps(optimizer, variable, [1, 2, 3], compiled)
    before = [numpy(v) for v in (*inner.variables, variable)]
    assert int(before[0]) == 3
    for skipped in (1, 2):
        steps(optimizer, variable, [NAN], compiled)
        assert int(optimizer.skipped_steps) == skipped
        for a, b in zip(before, (*inner.variables, variable), strict=True):
            np.testing.assert_array_equal(a, numpy(b))
    steps(optimizer, variable, [1], compiled)
    assert int(numpy(inner.variables[0])) == 4
    assert int(optimizer.skipped_steps) == 0


def test_too_many_skipped_steps_in_a_row_raise():
    variable = keras.Variable(0.0)
    optimizer = scaler(max_skipped_steps=3)
    steps(optimizer, variable, [NAN, NAN, 1, NAN, NAN])
    with pytest.raises(FloatingPointError, match="3 skipped steps"):
        steps(optimizer, variable, [NAN])


def test_too_many_skipped_steps_are_found_after_a_compiled_step():
    variable = keras.Variable(0.0)
    optimizer = scaler(max_skipped_steps=2)
    # In a function that torch compiles, `apply` sees the number itself.
    raises = contextlib.suppress(FloatingPointError)
    with contextlib.nullcontext() if QUICKLY else raises:
        steps(optimizer, variable, [NAN, NAN], QUICKLY)
    with pytest.raises(FloatingPointError, match="2 skipped steps"):
        optimizer.check_skipped_steps()


# Float32 arithmetic


@pytest.mark.parametrize("built", [False, True])
def test_a_float16_loss_is_scaled_in_float32(built):
    optimizer = LossScaleOptimizer(sgd())
    if built:
        optimizer.build([keras.Variable(0.0)])
    for method in (optimizer.scale_loss, optimizer.get_scaled_loss):
        scaled = method(ops.convert_to_tensor(3.0, "float16"))
        assert keras.backend.standardize_dtype(scaled.dtype) == "float32"
        assert float(scaled) == 3 * 2.0**15


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_gradients_are_unscaled_in_float32(dtype):
    optimizer = LossScaleOptimizer(sgd())
    gradient = ops.cast(ops.convert_to_tensor([2.0**-9, -1.5]), dtype)
    (unscaled,) = optimizer.get_unscaled_gradients([gradient])
    # 2**-24 / 2 is 0 in float16, and so would be what clipping makes of it.
    np.testing.assert_array_equal(numpy(unscaled), [2.0**-24, -1.5 * 2.0**-15])


@pytest.mark.parametrize("floatx", ["float16", "bfloat16"])
def test_the_arithmetic_does_not_follow_the_floatx(floatx):
    keras.config.set_floatx(floatx)  # restored by a fixture
    variable = keras.Variable(0.0, dtype="float32")
    optimizer = LossScaleOptimizer(sgd(), initial_scale=2.0**100)
    assert steps(optimizer, variable, [1, NAN]) == (
        [2.0**100, 2.0**99],
        [-1, -1],
    )


# What the wrapped optimizer sees


@pytest.mark.parametrize(
    ("clip", "expected"),
    [
        ({"clipnorm": 1.0}, [-0.25, -1.0]),
        ({"clipvalue": 2.0}, [-0.25, -2.0]),
        ({"global_clipnorm": 8.0}, [-0.25, -4.0]),
    ],
)
def test_unscaled_gradients_are_clipped(clip, expected):
    variables = [keras.Variable(0.0), keras.Variable(0.0)]
    optimizer = LossScaleOptimizer(sgd(**clip), initial_scale=2.0**15)
    with no_grad():
        optimizer.apply(tensors(0.25 * 2.0**15, 4 * 2.0**15), variables)
    assert [float(numpy(v)) for v in variables] == expected


def test_some_of_the_variables_can_be_updated_and_missing_gradients_stay_so():
    variables = [keras.Variable(0.0, name=name) for name in "abc"]
    optimizer = scaler()
    optimizer.build(variables)
    with no_grad():
        optimizer.apply(tensors(4.0), variables[1:2])
        with pytest.warns(UserWarning, match="do not exist"):
            optimizer.apply([None, *tensors(4.0), None])
        with pytest.raises(ValueError, match="No gradients"):
            optimizer.apply([None, None, None])
    assert [float(numpy(v)) for v in variables] == [0.0, -4.0, 0.0]


def test_float8_state_is_neither_unscaled_nor_clipped():
    plain, scaled = float8_layer(), float8_layer()
    optimizers = (
        sgd(clipvalue=0.5),
        LossScaleOptimizer(sgd(clipvalue=0.5), initial_scale=1024.0),
    )
    for layer, optimizer, factor in zip(
        (plain, scaled), optimizers, (1, 1024), strict=True
    ):
        gradients = [
            ops.ones((3, 2)) * factor,
            ops.ones((2,)) * factor,
            observation(layer, 3.0),
        ]
        with no_grad():
            optimizer.apply(gradients, layer.trainable_variables)
    for a, b in zip(plain.weights, scaled.weights, strict=True):
        np.testing.assert_array_equal(numpy(a), numpy(b))
    assert 3.0 in numpy(scaled.float8_state.matrices[0])


def test_an_observation_that_is_not_finite_skips_the_whole_step():
    layer = float8_layer()
    optimizer = LossScaleOptimizer(sgd())
    before = [numpy(v) for v in layer.weights]
    gradients = [ops.ones((3, 2)), ops.ones((2,)), observation(layer, INF)]
    with no_grad():
        optimizer.apply(gradients, layer.trainable_variables)
    for a, b in zip(before, layer.weights, strict=True):
        np.testing.assert_array_equal(a, numpy(b))
    assert float(optimizer.loss_scale) == 2.0**14
    got = optimizer.get_unscaled_gradients(gradients)
    assert got[2] is gradients[2], "observations are not scaled"


# Bad arguments


def wrap_twice():
    inner = sgd()
    wrapper = LossScaleOptimizer(inner)
    LossScaleOptimizer(inner)
    return wrapper


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: LossScaleOptimizer("sgd"), TypeError, "`inner_optimizer`"),
        (lambda: LossScaleOptimizer(None), TypeError, "`inner_optimizer`"),
        (
            lambda: LossScaleOptimizer(LossScaleOptimizer(sgd())),
            TypeError,
            "scaled twice",
        ),
        (
            lambda: LossScaleOptimizer(
                keras.optimizers.LossScaleOptimizer(sgd())
            ),
            TypeError,
            "scaled twice",
        ),
        (wrap_twice, ValueError, "wrapped already"),
        (
            lambda: LossScaleOptimizer(sgd(loss_scale_factor=8.0)),
            ValueError,
            "loss_scale_factor=8.0",
        ),
        (lambda: scaler(dynamic="dynamic"), TypeError, "'dynamic'"),
        (lambda: LossScaleOptimizer(sgd(), 2.0**10), TypeError, "1024.0"),
        (
            lambda: LossScaleOptimizer(sgd(), dynamic=False),
            ValueError,
            "without initial_scale",
        ),
        (lambda: scaler(dynamic=False), ValueError, "`dynamic_growth_steps`"),
        (lambda: scaler(growth=0), ValueError, "dynamic_growth_steps"),
        (lambda: scaler(growth=True), TypeError, "dynamic_growth_steps"),
        (lambda: scaler(initial="big"), TypeError, "initial_scale"),
        (lambda: scaler(initial=0.5), ValueError, "minimum_scale=1.0"),
        (lambda: scaler(initial=np.inf), ValueError, "initial_scale"),
        (lambda: scaler(minimum_scale=0), ValueError, "minimum_scale"),
        (lambda: scaler(maximum_scale=np.inf), ValueError, "maximum_scale"),
        (
            lambda: scaler(minimum_scale=4, maximum_scale=2),
            ValueError,
            "Exchange",
        ),
        (lambda: scaler(multiplier=1), ValueError, "multiplier"),
        (lambda: scaler(max_skipped_steps=0), ValueError, "max_skipped_steps"),
    ],
)
def test_bad_arguments_are_refused(make, error, says):
    with pytest.raises(error, match=says) as raised:
        make()
    assert "Received" in str(raised.value)
    assert "Allowed" in str(raised.value)


def test_an_optimizer_is_free_again_when_its_wrapper_is_gone():
    inner = sgd()
    LossScaleOptimizer(inner)
    import gc

    gc.collect()
    assert LossScaleOptimizer(inner).inner_optimizer is inner


def test_gradients_without_variables_need_a_built_optimizer():
    with pytest.raises(ValueError, match="does not know its variables"):
        LossScaleOptimizer(sgd()).apply(tensors(1.0))


@pytest.mark.skipif(
    BACKEND != "tensorflow", reason="TensorFlow's optimizers are stateful"
)
def test_stateless_apply_is_refused_on_tensorflow():
    variable = keras.Variable(0.0)
    optimizer = LossScaleOptimizer(sgd())
    optimizer.build([variable])
    with pytest.raises(ValueError, match="not supported"):
        optimizer.stateless_apply(optimizer.variables, tensors(1), [variable])
