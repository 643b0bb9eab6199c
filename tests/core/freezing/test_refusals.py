"""What freezing refuses, and what a frozen model refuses; nothing changes."""

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from frozen_models import frozen_layers, outputs_of
from steps import normal, numpy

DELAYED = "float8/4_from_float32"


def two_layers():
    layers = [keras.layers.Dense(5, name="a"), keras.layers.Dense(3, name="b")]
    return keras.Sequential([keras.Input((6,)), *layers], name="model")


def frozen(**kwargs):
    model = two_layers()
    kpe.freeze(model, **kwargs)
    return model


class unchanged:
    """A block that raises, after which a model is what it was."""

    def __init__(self, model, *told, error=ValueError):
        self.model, self.told = model, told
        self.raises = pytest.raises(error)

    def facts(self):
        model = self.model
        layers = model._flatten_layers()
        return (
            [type(x) for x in layers],
            [x.dtype_policy for x in layers],
            [v.path for v in model.weights],
            [numpy(v) for v in model.weights],
            [v.path for v in model.trainable_variables],
            outputs_of(model, normal(3, 6)),
        )

    def __enter__(self):
        self.before = self.facts()
        self.caught = self.raises.__enter__()
        return self.caught

    def __exit__(self, *error):
        done = self.raises.__exit__(*error)
        text = str(self.caught.value)
        for word in ("Received", "Allowed", *self.told):
            assert word in text
        *before, weights_before, paths_before, outputs_before = self.before
        *after, weights, paths, outputs = self.facts()
        assert after == before and paths == paths_before
        for one, other in zip(weights_before, weights, strict=True):
            np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(outputs, outputs_before)
        return done


def test_a_model_that_is_not_built():
    model = keras.Sequential([keras.layers.Dense(2)])
    with pytest.raises(ValueError, match="built") as error:
        kpe.freeze(model)
    assert "Received" in str(error.value)
    with pytest.raises(ValueError, match="built"):
        kpe.thaw(model)


@pytest.mark.parametrize(
    "word", ["weights", "granularity", "activations", "scales"]
)
def test_unknown_words(word):
    model = two_layers()
    with unchanged(model, "'int5'", "Pass one of them"):
        kpe.freeze(model, **{word: "int5"})


def test_something_that_is_no_model():
    with pytest.raises(TypeError, match="Received"):
        kpe.freeze("model.keras")
    with pytest.raises(TypeError, match="Received"):
        kpe.thaw("model.keras")


def test_patterns_of_a_wrong_type():
    model = two_layers()
    with unchanged(model, "`include`", error=TypeError):
        kpe.freeze(model, include=3)


def test_an_include_without_a_match():
    model = two_layers()
    with unchanged(model, "`include` matches no layer"):
        kpe.freeze(model, include="nothing")


@pytest.mark.extension("inspect")
def test_a_kernel_that_is_not_finite():
    model = two_layers()
    kernel = normal(5, 3)
    kernel[1, 2] = np.nan
    model.layers[1]._kernel.assign(kernel)
    with unchanged(model, "b/kernel", "Received: 1 of its values"):
        kpe.freeze(model)
    kpe.freeze(model, exclude="b")
    assert [x.path.split("/")[-1] for x in kpe.inspect(model).layers] == [
        "a",
        "b",
    ]


def test_a_second_time():
    model = frozen()
    with unchanged(model, "is frozen", "keras_policy_ext.thaw(model)"):
        kpe.freeze(model, granularity="tensor")
    with unchanged(model, "is frozen"):
        kpe.freeze(model)


def test_the_rest_of_a_model_is_frozen_later():
    model = two_layers()
    kpe.freeze(model, include="a")
    kpe.freeze(model, exclude="a", granularity="tensor")
    recipes = [x.float8_policy.recipe.per for x in model.layers]
    assert recipes == ["channel", "tensor"]


@pytest.mark.parametrize(
    "policy", [None, DELAYED, "float8/current_from_float32"]
)
def test_static_scales_of_inputs_that_were_never_seen(policy):
    model = two_layers()
    if policy:
        kpe.convert(model, policy)
    told = "seen no amax of its inputs", "keras_policy_ext.calibrate"
    with unchanged(model, *told, "activations='dynamic'"):
        kpe.freeze(model, activations="static")


def test_trained_scales_of_another_granularity():
    model = two_layers()
    with unchanged(model, "granularity='channel'", "granularity='tensor'"):
        kpe.freeze(model, trained_scales=True)


def test_a_weight_in_a_list():
    class Listed(kpe.layers.Float8Mixin, keras.layers.Layer):
        def build(self, shape):
            self.parts = [
                self.add_weight(name=f"part_{n}", shape=(shape[-1], 3))
                for n in range(2)
            ]

        def call(self, x):
            first, second = (self.float8_matmul(x, w) for w in self.parts)
            return first - second

    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(6), Listed(name="listed")]
    )
    with unchanged(model, "listed/part_0", "in no attribute", "`exclude`"):
        kpe.freeze(model)
    kpe.freeze(model, exclude="listed")


def test_a_frozen_layer_is_not_converted_and_the_report_says_why():
    model = frozen(include="a")
    before = outputs_of(model, normal(3, 6))
    codes = numpy(model.layers[0]._kernel)
    for policy in ("current", DELAYED, None):
        report = kpe.convert(model, policy)
        (skipped,) = [x for x in report.skipped if x.path.endswith("a")]
        assert "frozen" in skipped.reason and "thaw" in skipped.reason
        assert model.layers[0].is_frozen
        np.testing.assert_array_equal(numpy(model.layers[0]._kernel), codes)
    kpe.freeze(model, include="b")
    kpe.thaw(model)
    kpe.freeze(model, include="a")
    after = outputs_of(model, normal(3, 6))
    assert np.linalg.norm(after - before) < 0.1 * np.linalg.norm(before)


def test_a_model_is_not_converted_to_what_only_freeze_makes():
    model = two_layers()
    policy = kpe.Float8DTypePolicy(
        "float32", recipe=kpe.recipes.FrozenKernels()
    )
    for given in (policy, policy.full_name, policy.recipe):
        with unchanged(model, "keras_policy_ext.freeze(model)"):
            kpe.convert(model, given)


def test_revert_of_a_frozen_model_names_thaw():
    model = frozen()
    with unchanged(model, "All float8", "keras_policy_ext.thaw(model)"):
        kpe.revert(model)
    kpe.thaw(model)
    assert kpe.revert(model).converted == ()


def test_revert_leaves_frozen_layers_and_says_so():
    model = two_layers()
    weights = [numpy(v) for v in model.layers[1].weights]
    kpe.freeze(model, include="a")
    before = outputs_of(model, normal(3, 6))
    kpe.convert(model, DELAYED)
    report = kpe.revert(model)
    (reverted,), (skipped,) = report.converted, report.skipped
    assert reverted.path.endswith("b") and skipped.path.endswith("a")
    assert "frozen" in skipped.reason and "thaw" in skipped.reason
    first, second = model.layers
    assert first.is_frozen and type(second) is keras.layers.Dense
    for one, other in zip(weights, second.weights, strict=True):
        np.testing.assert_array_equal(one, numpy(other))
    np.testing.assert_array_equal(outputs_of(model, normal(3, 6)), before)


@pytest.mark.full
@pytest.mark.slow_except()
def test_revert_leaves_the_layers_around_frozen_cells_and_projections():
    inputs = keras.Input((3, 4))
    x = keras.layers.LSTM(4, return_sequences=True, name="lstm")(inputs)
    x = keras.layers.MultiHeadAttention(2, 2, name="attention")(x, x)
    x = keras.layers.GRU(4, name="gru")(x)
    model = keras.Model(inputs, keras.layers.Dense(2, name="head")(x))
    kpe.freeze(model, include="lstm|attention/query")
    x = normal(2, 3, 4)
    before = outputs_of(model, x)
    kpe.convert(model, DELAYED)
    model.compile("sgd", "mse")
    kpe.revert(model)
    np.testing.assert_array_equal(outputs_of(model, x), before)
    assert sorted(each.name for each in frozen_layers(model)) == [
        "lstm_cell",
        "query",
    ]
    assert type(model.get_layer("lstm")) is kpe.layers.LSTM
    assert type(model.get_layer("gru")) is keras.layers.GRU
    assert type(model.get_layer("head")) is keras.layers.Dense
    value = model.get_layer("attention").value_dense
    assert type(value) is keras.layers.EinsumDense
    model.fit(x, normal(2, 2), verbose=0)
    kpe.thaw(model)
    assert not kpe.policies.of_layers.layers_in_float8(model)


@pytest.mark.parametrize(
    "policy",
    [
        "float32",
        "mixed_bfloat16",
        DELAYED,
        "float8/current_from_float32",
        kpe.Float8DTypePolicy(
            "float32", recipe=kpe.recipes.FrozenKernels(per="tensor")
        ),
    ],
    ids=str,
)
def test_a_policy_does_not_change_what_kernels_are_made_of(policy):
    model = frozen()
    with unchanged(model, "keras_policy_ext.thaw(model)"):
        model.layers[0].dtype_policy = policy
    with unchanged(model, "keras_policy_ext.thaw(model)"):
        kpe.policies.set_layer_policy(model.layers[0], policy)


@pytest.mark.parametrize("given", ["float32", DELAYED])
def test_a_float_layer_is_not_frozen_by_a_policy(given):
    layer = kpe.layers.Dense(3, dtype=given)
    model = keras.Sequential([keras.Input((6,)), layer])
    recipe = kpe.recipes.FrozenKernels()
    policy = kpe.Float8DTypePolicy("float32", recipe=recipe)
    with unchanged(model, "keras_policy_ext.freeze(model)"):
        layer.dtype_policy = policy


def test_the_policy_that_a_frozen_layer_has_may_be_set():
    model = frozen()
    before = outputs_of(model, normal(3, 6))
    model.layers[0].dtype_policy = model.layers[0].dtype_policy
    np.testing.assert_array_equal(outputs_of(model, normal(3, 6)), before)


@pytest.mark.parametrize("mode", ["int8", "float8"])
def test_a_frozen_layer_is_not_quantized_by_keras(mode):
    model = frozen()
    told = "frozen", "keras_policy_ext.thaw(model)"
    with unchanged(model, *told, error=NotImplementedError):
        model.layers[0].quantize(mode)
    before = outputs_of(model, normal(3, 6))
    # Keras goes on with the other layers, and here says so of all of them.
    with pytest.warns(UserWarning, match="frozen and was not quantized"):
        model.quantize(mode)
    assert all(layer.is_frozen for layer in model.layers)
    np.testing.assert_array_equal(outputs_of(model, normal(3, 6)), before)


def test_weights_of_a_float_model_are_not_set():
    model = frozen()
    with unchanged(model, "none was set"):
        model.layers[0].set_weights(two_layers().layers[0].get_weights())


def test_codes_that_mean_nothing_are_not_set():
    model = frozen()
    layer = model.layers[0]
    values = layer.get_weights()
    (place,) = [n for n, v in enumerate(layer.weights) if v is layer._kernel]
    bad = numpy(layer._kernel.codes)
    bad[0, 0] = 0x7F  # NaN
    for wrong, told in ((bad, "NaN"), (normal(*bad.shape), "float32")):
        with unchanged(model, "a/kernel", told, "keras_policy_ext.thaw"):
            layer.set_weights([*values[:place], wrong, *values[place + 1 :]])
    layer.set_weights(values)


@pytest.mark.extension("calibrate")
def test_calibrate_says_that_frozen_layers_see_no_amaxes():
    model = frozen(activations="dynamic")
    way = (
        "kpe.thaw(model)",
        "kpe.convert(model, 'delayed')",
        "activations='static'",
    )
    with unchanged(model, "frozen", *way):
        kpe.calibrate(model, normal(8, 6))


@pytest.mark.parametrize("granularity", ["channel", "tensor", "block"])
@pytest.mark.extension("calibrate")
def test_the_way_to_input_scales_of_other_data_keeps_the_codes(granularity):
    model, options = two_layers(), dict(granularity=granularity)
    kpe.convert(model, "delayed")
    kpe.calibrate(model, normal(8, 6))
    kpe.freeze(model, activations="static", **options)
    kernels = [layer._kernel for layer in model.layers]
    before = [each.stored for each in kernels]
    other = 7 * normal(8, 6, seed=1)
    with pytest.raises(ValueError, match="thaw"):
        kpe.calibrate(model, other)
    kpe.thaw(model)
    kpe.convert(model, "delayed")
    kpe.calibrate(model, other)
    kpe.freeze(model, activations="static", **options)
    first = numpy(model.layers[0]._kernel.inputs_scale)
    assert first == np.float32(abs(other).max() / 448)
    for layer, old in zip(model.layers, before, strict=True):
        new = layer._kernel.stored
        np.testing.assert_array_equal(new.codes, old.codes)
        np.testing.assert_allclose(new.scale, old.scale, rtol=2**-22)


def test_freezing_with_nothing_to_freeze_stores_nothing():
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.LayerNormalization()]
    )
    report = kpe.freeze(model)
    assert report.stored == () and len(report.skipped) == 1
    assert str(report) and report.table(full=True)
    assert kpe.thaw(model).converted == ()
