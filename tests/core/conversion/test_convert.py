"""Built models into float8 in place, and back."""

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from keras_policy_ext.ext.delayed.variable import StateVariable
from small_models import LITTLE, POLICY, Block, assert_same, sequential, weights
from steps import normal, numpy, state_of

JIT = keras.backend.backend() == "jax"


class Subclassed(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.block = Block()
        self.head = keras.layers.Dense(2)

    def call(self, x):
        return self.head(self.block(x))


def functional():
    inputs = keras.Input((4, 6))
    shared = keras.layers.Dense(6, activation="tanh")
    inner = keras.Sequential([keras.Input((4, 6)), keras.layers.Dense(6)])
    x = shared(inner(shared(inputs)))
    x = keras.layers.TimeDistributed(keras.layers.Dense(5))(x)
    x = keras.layers.SpectralNormalization(keras.layers.Dense(4))(x)
    return keras.Model(inputs, keras.layers.Dense(2)(x))


def subclassed():
    model = Subclassed()
    model(np.zeros((1, 4, 6), "float32"))
    return model


MODELS = {
    "sequential": (sequential, 2),
    "functional": (functional, 5),
    "subclassed": (subclassed, 4),
}


@pytest.fixture(params=MODELS)
def model_and_count(request):
    make, count = MODELS[request.param]
    return make(), count


# There and back


@pytest.mark.full_except("functional", "subclassed")
@pytest.mark.extension("inspect")
def test_every_contraction_is_converted_and_its_weights_stay_in_place(
    model_and_count,
):
    model, count = model_and_count
    before = weights(model)
    buffers = {v.path: v.value for v in model.weights}
    parameters = model.count_params()
    report = kpe.convert(model, POLICY)
    assert kpe.inspect(model).parameters == report.parameters == parameters
    assert len(report.converted) == count
    assert {entry.policy for entry in report.converted} == {POLICY}
    assert_same(before, weights(model))
    for variable in model.weights:
        if variable.path in buffers:
            assert variable.value is buffers[variable.path]
    paths = [v.path for v in model.variables]
    assert len(paths) == len(set(paths))
    assert sum(p.endswith("_amax") for p in paths) == count


def test_reverted_models_are_stock_models_with_the_same_predictions(
    model_and_count,
):
    model, count = model_and_count
    x = normal(2, 4, 6)
    classes = [type(layer) for layer in flat(model)]
    expected, before = numpy(model(x)), weights(model)
    kpe.convert(model, POLICY)
    changed = numpy(model(x))
    assert not np.array_equal(changed, expected)
    report = kpe.revert(model)
    assert len(report.converted) == count
    assert [type(layer) for layer in flat(model)] == classes
    assert [v.path for v in model.variables] == list(before)
    assert_same(before, weights(model))
    np.testing.assert_array_equal(numpy(model(x)), expected)
    assert all(layer.quantization_mode is None for layer in flat(model))


def flat(model):
    from keras_policy_ext._keras.walking import layers_within

    return layers_within(model)


def test_a_converted_model_computes_what_one_made_in_float8_does():
    model = sequential()
    made = keras.Sequential(
        [
            keras.Input((4, 6)),
            kpe.layers.Conv1D(5, 3, activation="relu", dtype=POLICY),
            keras.layers.LayerNormalization(),
            kpe.layers.Dense(2, dtype=POLICY),
        ]
    )
    for variable, value in zip(
        [v for v in made.weights if not isinstance(v, StateVariable)],
        weights(model).values(),
        strict=True,
    ):
        variable.assign(value)
    kpe.convert(model, POLICY)
    x, y = normal(8, 4, 6), normal(8, 2, 2, seed=1)
    np.testing.assert_array_equal(numpy(model(x)), numpy(made(x)))
    losses = []
    for each in (model, made):
        each.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=JIT)
        history = each.fit(x, y, epochs=3, batch_size=8, verbose=0)
        losses.append(history.history["loss"])
    # Compiled one by one: XLA may order the sums of the two in its own way.
    np.testing.assert_allclose(*losses, rtol=4 * np.finfo("float32").eps)


def test_small_kernels_are_scaled_before_any_step():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64)])
    dense = model.layers[0]
    dense.kernel.assign(0.002 * normal(64, 64))
    x = normal(16, 64, seed=1)
    exact = numpy(model(x))
    kpe.convert(model, POLICY)
    scale, history = state_of(dense)["kernel"]
    assert history[0] == np.abs(numpy(dense.kernel)).max()
    assert scale == 0  # none was used yet
    # E4M3 keeps 3 bits: an operand is off by 2^-4 at most and some 2.6 % in
    # the mean square, the product of two by some 3.7 %. Without scales half
    # of such a kernel is subnormal, and the product off by 28 %.
    error = np.linalg.norm(numpy(model(x)) - exact) / np.linalg.norm(exact)
    assert error < 0.05


# Which layers, and in what


def test_each_layer_keeps_its_own_dtypes():
    dtypes = ["float32", "mixed_bfloat16", "mixed_float16", "bfloat16"]
    inputs = keras.Input((6,))
    x = inputs
    for dtype in dtypes:
        x = keras.layers.Dense(6, dtype=dtype)(x)
    model = keras.Model(inputs, x)
    report = kpe.convert(model, "float8/current_from_float32")
    assert [entry.policy for entry in report.converted] == [
        f"float8/current_from_{dtype}" for dtype in dtypes
    ]
    for layer, dtype in zip(model.layers[1:], dtypes, strict=True):
        plain = keras.DTypePolicy(dtype)
        assert layer.compute_dtype == plain.compute_dtype
        assert layer.kernel.dtype == plain.variable_dtype
    assert numpy(model(normal(2, 6))).shape == (2, 6)


def test_a_global_policy_runs_everywhere_and_is_realised_in_stock_layers():
    with kpe.policy_scope("mixed_float8"):
        model = sequential()
        before = [type(layer) for layer in model.layers]
        model(normal(1, 4, 6))
        assert before == [type(layer) for layer in sequential().layers]
    report = kpe.convert(model)
    assert {e.policy for e in report.converted} == {
        "float8/current_from_mixed_bfloat16"
    }
    assert len(report.converted) == 2


@pytest.mark.parametrize("recipe", ["current", kpe.recipes.CurrentScaling()])
def test_a_recipe_alone_is_a_policy(recipe):
    report = kpe.convert(sequential(), recipe)
    assert {e.policy for e in report.converted} == {
        "float8/current_from_float32"
    }


def test_so_is_the_name_of_one_with_fields():
    spec = "rowwise(kernel_grad='high_precision',power_of_two=True)"
    report = kpe.convert(sequential(), spec)
    assert {e.policy for e in report.converted} == {
        f"float8/{spec}_from_float32"
    }
    with pytest.raises(ValueError, match="Unknown parameter of recipe"):
        kpe.convert(sequential(), "nvfp4(sead=1)")


def test_without_any_float8_policy_scaling_is_current():
    report = kpe.convert(sequential())
    assert {e.policy for e in report.converted} == {
        "float8/current_from_float32"
    }


@pytest.mark.filterwarnings(LITTLE)
def test_rules_decide_by_path_and_the_first_match_wins():
    policy = kpe.Float8DTypePolicy(
        "mixed_bfloat16",
        recipe="current",
        rules=[
            (".*/dense", None),
            ("sequential.*/conv1d", "float8/2_from_float32"),
            (".*", None),
        ],
    )
    model = keras.Sequential(sequential().layers, name="sequential_of_mine")
    model.build((None, 4, 6))
    report = kpe.convert(model, policy)
    paths = [entry.path for entry in report.converted]
    assert all("conv1d" in path for path in paths)
    assert [e.policy for e in report.converted] == ["float8/2_from_float32"] * (
        len(paths)
    )
    reasons = {e.class_name: e.reason for e in report.skipped}
    assert "rule" in reasons["Dense"]


def test_a_layer_that_a_rule_leaves_out_is_reported_in_the_dtypes_it_keeps():
    rules = [(".*/conv1d.*", "bfloat16")]
    policy = kpe.Float8DTypePolicy("mixed_bfloat16", rules=rules)
    model = sequential()
    report = kpe.convert(model, policy)
    (reason,) = (e.reason for e in report.skipped if e.class_name == "Conv1D")
    assert reason == "a rule of the policy keeps it in float32"
    assert model.layers[0].compute_dtype == "float32"


@pytest.mark.filterwarnings(LITTLE)
@pytest.mark.parametrize(
    ("arguments", "converted", "reason"),
    [
        ({"include": "conv"}, ["Conv1D"], "`include` does not match"),
        ({"exclude": ["conv"]}, ["Dense"], "`exclude` matches its path"),
        (
            {"filter": lambda layer: layer.name.startswith("dense")},
            ["Dense"],
            "`filter` returned False",
        ),
        ({"min_size": 90}, ["Conv1D"], "has 10 entries, fewer than 90"),
    ],
)
def test_what_is_left_out_says_why(arguments, converted, reason):
    report = kpe.convert(sequential(), POLICY, **arguments)
    assert [e.class_name for e in report.converted] == converted
    left = [e for e in report.skipped if "Norm" not in e.class_name]
    assert len(left) == 2 - len(converted)
    assert all(reason in entry.reason for entry in left)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"include": "["}, ValueError, "regular expression"),
        ({"exclude": 3}, TypeError, "regular expression"),
        ({"include": "nothing"}, ValueError, "matches no layer"),
        ({"filter": 3}, TypeError, "returns a bool"),
        ({"filter": lambda layer: None}, TypeError, "True or False"),
        ({"min_size": -1}, ValueError, ">= 0"),
        ({"min_size": True}, TypeError, ">= 0"),
        ({"policy": "mixed_bfloat16"}, ValueError, "float8"),
        ({"policy": "nonsense"}, ValueError, "dtype policy"),
    ],
)
def test_bad_arguments_change_nothing(arguments, error, message):
    model = sequential()
    with pytest.raises(error, match=message):
        kpe.convert(model, **arguments)
    assert all(
        type(layer) in vars(keras.layers).values() for layer in model.layers
    )
    assert not any("amax" in v.path for v in model.variables)


@pytest.mark.full
@pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"),
    reason=f"Keras {keras.__version__} has no MultiOptimizer",
)
def test_a_used_multi_optimizer_is_refused_and_a_new_one_trains():
    model, x = sequential(), normal(4, 4, 6)
    y = numpy(model(x))

    def compile():
        sgd = keras.optimizers.SGD(0.1)
        optimizer = keras.optimizers.MultiOptimizer(lambda variable: sgd)
        model.compile(optimizer, "mse", jit_compile=JIT)

    compile()
    model.fit(x, y, verbose=0)
    paths = [v.path for v in model.weights]
    with pytest.raises(ValueError, match=r"MultiOptimizer.*Allowed.*Convert"):
        kpe.convert(model, POLICY)
    assert [v.path for v in model.weights] == paths
    compile()
    kpe.convert(model, POLICY)
    model.fit(x, y, verbose=0)
    assert np.any(state_of(model.layers[-1])["outputs_grad"][1] > 0)


def test_an_exclude_without_effect_warns():
    with pytest.warns(UserWarning, match="matches no layer") as found:
        kpe.convert(sequential(), POLICY, exclude="nothing")
    assert found[0].filename == __file__


def test_only_built_keras_models_are_converted():
    with pytest.raises(ValueError, match="not built"):
        kpe.convert(keras.Sequential([keras.layers.Dense(2)]))
    with pytest.raises(ValueError, match="not built"):
        kpe.revert(keras.Sequential([keras.layers.Dense(2)]))
    with pytest.raises(TypeError, match=r"keras\.Model"):
        kpe.convert(lambda x: x)


@pytest.mark.full
def test_a_second_conversion_changes_nothing_or_the_recipe_alone():
    model = sequential()
    x, y = normal(8, 4, 6), normal(8, 2, 2, seed=1)
    kpe.convert(model, POLICY)
    model.compile("sgd", "mse", jit_compile=JIT)
    model.fit(x, y, epochs=2, verbose=0)
    before = state_of(model.layers[0])
    again = kpe.convert(model, POLICY)
    assert not again.converted
    assert "already" in again.skipped[0].reason
    kpe.convert(model, "float8/2_from_float32")
    for operand, (scale, history) in state_of(model.layers[0]).items():
        newest = 2 if operand == "kernel" else 1
        assert len(history) == 2
        assert history[0] != 0 and scale == before[operand][0]
        assert (before[operand][1] != 0).sum() >= newest
    model.fit(x, y, epochs=1, verbose=0)
    assert (
        "current"
        in kpe.convert(model, "float8/current_from_float32").converted[0].policy
    )
    assert not any("amax" in v.path for v in model.variables)
    model.fit(x, y, epochs=1, verbose=0)
