"""Whole models: shared, nested, subclassed, chosen by path; and reports."""

import warnings

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from converted_models import BUILDERS, batch_for, randomized
from frozen_models import JIT, frozen_layers, outputs_of
from steps import normal, numpy, observe_inputs

LAYERS = keras.layers


def sequential(shape, *layers):
    return keras.Sequential([keras.Input(shape), *layers])


def test_a_shared_layer_is_stored_once():
    shared = LAYERS.Dense(6, name="shared")
    a, b = keras.Input((6,)), keras.Input((6,))
    model = keras.Model([a, b], shared(shared(a)) + shared(b))
    report = kpe.freeze(model)
    assert len(report.stored) == len(frozen_layers(model)) == 1
    x, y = normal(3, 6), normal(3, 6, seed=1)
    kernel, bias = shared._kernel.stored.dequantized(), numpy(shared.bias)
    first = (x @ kernel + bias) @ kernel + bias
    np.testing.assert_allclose(
        outputs_of(model, [x, y]), first + y @ kernel + bias, rtol=1e-4
    )


def test_models_in_models_are_frozen_too():
    inner = sequential((6,), LAYERS.Dense(6, name="deep"))
    model = sequential((6,), sequential((6,), inner), LAYERS.Dense(2))
    kpe.freeze(model)
    assert len(frozen_layers(model)) == 2
    assert inner.layers[0].is_frozen


@pytest.mark.full
@pytest.mark.parametrize("kind", BUILDERS)
@pytest.mark.slow_except("mixed")
def test_models_of_every_sort_are_frozen_and_thawed(kind):
    model, _ = BUILDERS[kind]()
    model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=JIT)
    randomized(model)
    x, y = batch_for(model)
    names = [type(v).__name__ for v in model._flatten_layers()]
    exact = outputs_of(model, x)
    report = kpe.freeze(model)
    assert report.stored and not any(
        "LayerNorm" in s.path for s in report.stored
    )
    frozen = outputs_of(model, x)
    assert 0 < np.linalg.norm(frozen - exact) < 0.2 * np.linalg.norm(exact)
    np.testing.assert_allclose(
        model.predict(x, verbose=0), frozen, rtol=2e-2, atol=2e-2
    )
    model.train_on_batch(x, y)
    kpe.thaw(model)
    assert [type(v).__name__ for v in model._flatten_layers()] == names
    assert not frozen_layers(model)
    model.train_on_batch(x, y)


@pytest.mark.slow_except()
@pytest.mark.full
@pytest.mark.parametrize("kind", BUILDERS)
def test_converted_models_are_frozen(kind):
    model, conversions = BUILDERS[kind]()
    model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=JIT)
    randomized(model)
    x, y = batch_for(model)
    exact = outputs_of(model, x)
    for conversion in conversions:
        kpe.convert(model, **conversion)
    model.train_on_batch(0 * x, outputs_of(model, 0 * x))
    kpe.freeze(model, activations="dynamic")
    assert not any("amax" in v.path for v in model.variables)
    after = outputs_of(model, x)
    assert np.linalg.norm(after - exact) < 0.2 * np.linalg.norm(exact)
    model.train_on_batch(x, y)
    kpe.thaw(model)
    model.train_on_batch(x, y)


@pytest.mark.full
def test_attention_whose_products_are_float8_stays_so():
    x = keras.Input((5, 8))
    layer = LAYERS.MultiHeadAttention(2, 4, name="attention")
    model = keras.Model(x, layer(x, x))
    kpe.convert(model, "current", attention="float8")
    values = normal(2, 5, 8)
    before = outputs_of(model, values)
    kpe.freeze(model, activations="dynamic")
    after = outputs_of(model, values)
    # Kernels are rounded per output now, and per tensor before.
    assert np.linalg.norm(after - before) < 0.15 * np.linalg.norm(before)
    kpe.thaw(model)
    assert type(model.get_layer("attention")) is LAYERS.MultiHeadAttention


def test_include_and_exclude_go_by_paths():
    def model():
        layers = [LAYERS.Dense(6, name=name) for name in ("a", "b", "head")]
        return sequential((6,), *layers)

    chosen = model()
    report = kpe.freeze(chosen, exclude="head")
    assert [x.name for x in frozen_layers(chosen)] == ["a", "b"]
    (skipped,) = report.skipped
    assert "head" in skipped.path and "exclude" in skipped.reason
    chosen = model()
    kpe.freeze(chosen, include=["a$", "head"])
    assert [x.name for x in frozen_layers(chosen)] == ["a", "head"]


def test_layers_without_a_form_are_named_with_the_reason():
    model = sequential(
        (6, 4),
        LAYERS.DepthwiseConv1D(2),
        LAYERS.LayerNormalization(),
        LAYERS.Conv1D(3, 2),
        LAYERS.Conv1DTranspose(4, 2),
        LAYERS.SeparableConv1D(4, 2),
    )
    report = kpe.freeze(model)
    skipped = {x.class_name: x for x in report.skipped}
    depthwise = skipped.pop("SeparableConv1D")
    assert depthwise.path.endswith("separable_conv1d/depthwise_kernel")
    assert set(skipped) == {"DepthwiseConv1D", "LayerNormalization"}
    assert all(x.reason for x in skipped.values())


class Averaged(keras.layers.Embedding):
    """The mean of the words in a row."""

    def call(self, inputs):
        return keras.ops.mean(super().call(inputs), axis=-2)


class Doubled(keras.layers.Embedding):
    float8_calls_super = True

    def call(self, inputs):
        return 2 * super().call(inputs)


def test_an_embedding_that_computes_something_else_stays_and_says_why():
    words = Averaged(20, 8, name="words")
    inputs = keras.Input((3,), dtype="int32")
    model = keras.Sequential([inputs, words, LAYERS.Dense(4, name="head")])
    report = kpe.freeze(model)
    assert [x.name for x in frozen_layers(model)] == ["head"]
    (left,) = report.skipped
    assert left.path == words.path and type(words) is Averaged
    assert "class Averaged has a `call` of its own" in left.reason


def test_an_embedding_that_goes_on_to_that_of_keras_is_frozen():
    words = Doubled(20, 8)
    words.build()
    kpe.freeze(words)
    rounded = words._embeddings.stored.dequantized()
    np.testing.assert_array_equal(numpy(words(np.arange(20))), 2 * rounded)
    kpe.thaw(words)
    assert type(words) is Doubled


def test_a_layer_that_keras_has_quantized_is_left():
    model = sequential(
        (6,), LAYERS.Dense(4, name="a"), LAYERS.Dense(4, name="b")
    )
    model.layers[0].quantize("int8")
    report = kpe.freeze(model)
    assert [x.name for x in frozen_layers(model)] == ["b"]
    assert "int8" in report.skipped[0].reason


def test_the_report_says_bytes_and_decibels_of_each_kernel():
    model = sequential(
        (64,), LAYERS.Dense(96, name="a"), LAYERS.Dense(8, name="b")
    )
    kernel = numpy(model.layers[0]._kernel)
    report = kpe.freeze(model)
    first, second = report.stored
    assert (first.bytes_before, first.bytes_after) == (4 * 6144, 6144 + 384)
    assert (second.bytes_before, second.bytes_after) == (4 * 768, 768 + 32)
    assert report.bytes_before == 4 * 6912
    assert report.bytes_after == 6912 + 416
    noise = kernel - model.layers[0]._kernel.stored.dequantized()
    ratio = np.linalg.norm(kernel) / np.linalg.norm(noise)
    np.testing.assert_allclose(first.sqnr_db, 20 * np.log10(ratio), rtol=1e-5)
    text = report.table(full=True)
    for word in ("a/kernel", "24.6 kB", "6.53 kB", f"{first.sqnr_db:.1f}"):
        assert word in text
    short = str(report)
    assert "27.6 kB before" in short and "7.33 kB now" in short
    assert report.as_dict()["stored"][0]["path"] == first.path


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "All kernels are stored in float8, "),
        ({"include": "/a"}, "The kernels of 1 of 2 layers are stored in "),
    ],
)
@pytest.mark.extension("inspect")
def test_matmuls_with_stored_kernels_run_in_floats(options, told, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    model = sequential((64,), LAYERS.Dense(96, name="a"), LAYERS.Dense(8))
    report = kpe.freeze(model, **options)
    for each in (report, kpe.inspect(model)):
        first, second, *_ = str(each).splitlines()
        assert first.startswith(told)
        assert first.endswith(" of the parameters. Matmuls run in floats.")
        assert second.startswith("2 layers with a kernel; ")
        assert each.totals.multiplications_in_float8 == 0
        share = f"{100 * each.totals.parameters_in_float8 / 7016:.1f} %"
        assert share in first
    for entry in report.converted:
        assert entry.plain_multiplications == entry.multiplications > 0


@pytest.mark.extension("inspect")
def test_rounded_inputs_are_multiplied_in_float8(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    model = sequential((64,), LAYERS.Dense(96, name="a"), LAYERS.Dense(8))
    kpe.freeze(model, include="/a", activations="dynamic")
    text = str(kpe.inspect(model))
    assert text.startswith("88.9 % of the multiplications and 87.6 % of")
    kpe.freeze(model, exclude="/a")
    text = str(kpe.inspect(model))
    assert text.startswith("88.9 % of the multiplications and 98.5 % of")
    told = "The matmuls of 1 layer run in floats, with kernels that are stored"
    assert told in text


def test_layers_that_are_frozen_are_no_reason_to_warn():
    model = sequential((64,), LAYERS.Dense(96), LAYERS.Dense(8))
    kpe.freeze(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert not kpe.convert(model).converted


@pytest.mark.parametrize(
    ("source", "width"),
    [("float32", 4), ("mixed_bfloat16", 4), ("bfloat16", 2), ("float16", 2)],
)
def test_bytes_before_are_those_of_the_dtype(source, width):
    model = sequential((6,), LAYERS.Dense(4, dtype=source))
    assert kpe.freeze(model).bytes_before == width * 24


@pytest.mark.extension("inspect")
def test_inspect_says_how_kernels_are_stored():
    model = sequential((64,), LAYERS.Dense(96, name="a"), LAYERS.Dense(8))
    kpe.freeze(model, include="/a", activations="dynamic")
    before = kpe.inspect(model)
    assert before.layers[0].kernel is None
    outputs_of(model, normal(2, 64))
    entry, other = kpe.inspect(model).layers
    assert entry.kernel == "emulated" and entry.reason
    (stored,) = entry.stored
    kernel = model.layers[0]._kernel
    assert stored.kernel == kernel.path
    assert (stored.bytes, stored.format) == (6144 + 384, "float8_e4m3fn")
    assert (stored.granularity, stored.activations) == ("channel", "dynamic")
    scale = kernel.stored.scale
    assert (stored.smallest_scale, stored.largest_scale) == (
        scale.min(),
        scale.max(),
    )
    assert stored.inputs_scale is None and other.stored == ()
    text = kpe.inspect(model).table(full=True)
    for word in ("6.53 kB", "channel", "dynamic"):
        assert word in text
    assert "1 layer is frozen" in str(kpe.inspect(model))
    assert kpe.inspect(model).as_dict()["layers"][0]["stored"]


@pytest.mark.full
def test_inspect_says_the_scale_of_static_inputs():
    model = sequential((6,), LAYERS.Dense(4))
    kpe.convert(model, "float8/4_from_float32")
    observe_inputs(model, normal(8, 6))
    kpe.freeze(model, activations="static")
    (entry,) = kpe.inspect(model).layers
    scale = numpy(model.layers[0]._kernel.inputs_scale)
    assert entry.stored[0].inputs_scale == scale


@pytest.mark.extension("inspect")
def test_parameters_are_counted_without_scales():
    model = sequential((64,), LAYERS.Dense(96))
    kpe.freeze(model)
    assert model.layers[0].count_params() == 64 * 96 + 96
    inspection = kpe.inspect(model)
    assert (inspection.parameters, inspection.state) == (64 * 96 + 96, 96)
    assert model.count_params() == 64 * 96 + 2 * 96


@pytest.mark.extension("loops")
def test_loops_have_what_trains_and_no_codes():
    model = sequential((6,), LAYERS.Dense(4), LAYERS.Dense(2))
    kpe.freeze(model)
    assert len(kpe.loops.parameters(model)) == 2
    assert not any(map(kpe.loops.is_state, model.trainable_variables))
    weights = kpe.loops.weights(model)
    assert [tuple(v.shape) for v in weights] == [(4,), (6, 4), (2,), (4, 2)]
    if keras.backend.backend() == "torch":
        kpe.loops.settle(model)


@pytest.mark.full
@pytest.mark.extension("calibrate")
def test_doctor_and_calibrate_pass_frozen_layers_by():
    model = sequential((6,), LAYERS.Dense(4, name="a"), LAYERS.Dense(2))
    kpe.freeze(model, include="/a", activations="dynamic")
    kpe.convert(model, "float8/4_from_float32")
    paths = kpe.calibrate(model, normal(8, 6))
    assert paths == (model.layers[1].path,)


def test_a_frozen_model_is_cloned_as_frozen_without_values():
    model = sequential((6,), LAYERS.Dense(4))
    kpe.freeze(model, granularity="tensor")
    twin = keras.models.clone_model(model)
    assert twin.layers[0].is_frozen
    twin.set_weights(model.get_weights())
    x = normal(3, 6)
    np.testing.assert_array_equal(outputs_of(twin, x), outputs_of(model, x))


def test_a_frozen_layer_runs_in_a_recomputed_block():
    with keras.RematScope(mode="full"):
        layers = [LAYERS.Dense(4, "tanh"), LAYERS.Dense(2)]
    model = sequential((6,), *layers)
    x, y = normal(8, 6), normal(8, 2)
    kpe.freeze(model)  # TensorFlow recomputes no stock layer in a graph.
    model.compile("sgd", "mse", jit_compile=JIT)
    before = numpy(layers[0].bias)
    model.fit(x, y, verbose=0)
    assert np.any(numpy(layers[0].bias) != before)


@pytest.mark.extension("inspect")
def test_what_is_looked_up_multiplies_nothing():
    model = sequential((4,), LAYERS.Embedding(11, 6), LAYERS.Dense(2))
    kpe.freeze(model)
    table, dense = kpe.inspect(model).layers
    assert table.multiplications == 0 and table.stored
    assert dense.multiplications == 4 * 12


def test_the_report_of_thaw_says_that_weights_are_rounded():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    kpe.freeze(model)
    assert "The weights of 1 layer are those" in str(kpe.thaw(model))
    assert "rounded" not in str(kpe.thaw(model))
