"""`kpe.plan`: times by counted bytes and multiplications, and their errors."""

import dataclasses
import pathlib

import keras
import numpy as np
import published
import pytest

import keras_policy_ext as kpe
from keras_policy_ext import recipes
from keras_policy_ext.backends import devices
from keras_policy_ext.ext.gain import estimate
from keras_policy_ext.ext.gain.estimate import CARDS, Estimator, Matmuls
from keras_policy_ext.ext.gain.products import device_named

LARGE = Matmuls.of(16384, 16384, 16384)


def mlp():
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((32,)),
            layers.Dense(64, activation="gelu", name="up"),
            layers.LayerNormalization(),
            layers.Dense(16, name="down"),
        ]
    )


@pytest.mark.any_backend
def test_the_file_and_the_guide_have_the_errors_of_the_constants():
    errors = published.errors(list(published.rows()), estimate.FITTED)
    assert published.ERRORS.read_text("utf-8") == published.text_of(errors), (
        "run python integration/benchmarks/published.py"
    )
    kept = errors["groups"]["kept out"]
    assert 0.09 < kept["error"] < 0.105
    assert 1 / 9 < 1 - kept["signs_right"] / kept["rows"] < 1 / 7
    guide = pathlib.Path(published.__file__).parents[2] / "docs/see_and_act.md"
    text = " ".join(guide.read_text("utf-8").split())
    assert "the mean error of the speed-up is about 10 %" in text
    assert "one estimate in eight is on the wrong side of 1" in text


@pytest.mark.any_backend
@pytest.mark.full
def test_the_constants_are_fitted_to_half_of_the_rows():
    rows = list(published.rows())
    out = published.kept_out(rows)
    assert len(out) >= len(rows) / 2
    assert all(n in out for n, row in enumerate(rows) if row.ours)
    fitted = published.fit([r for n, r in enumerate(rows) if n not in out])
    assert fitted == pytest.approx(estimate.FITTED, rel=0.01)


@pytest.mark.any_backend
def test_casts_read_and_write_what_a_recipe_needs():
    ours = Matmuls(inputs=10, kernel=20, outputs=40, multiplications=1)
    read, numbers = 2 * 10 + 4 * 20 + 2 * 40, 70

    def bytes_of(recipe, one_layout):
        estimator = Estimator(CARDS["H200"], one_layout)
        return estimator.cast_bytes(ours, recipes.get(recipe))[0]

    assert bytes_of("delayed", False) == read + numbers
    assert bytes_of("delayed", True) == read + 2 * numbers
    assert bytes_of("current", True) == 2 * read + 2 * numbers
    assert bytes_of("rowwise", False) == 4 * read + 2 * numbers
    assert bytes_of("mxfp8", False) == 2 * read + 2 * numbers


@pytest.mark.any_backend
def test_speed_grows_with_the_size_and_emulation_never_gains():
    estimator = Estimator(CARDS["H200"], one_layout=True)
    recipe = recipes.get("delayed")
    speeds = [
        estimator.plain(each) / estimator.quantized(each, recipe)
        for each in (Matmuls.of(n, n, n) for n in (256, 4096, 16384))
    ]
    assert speeds == sorted(speeds) and speeds[0] < 1 < speeds[-1] < 2.2
    emulated = estimator.quantized(LARGE, recipe, native=())
    assert emulated > estimator.plain(LARGE)
    high = recipes.get("current(kernel_grad='high_precision')")
    both = [estimator.quantized(LARGE, recipes.get("current")), 0]
    both[1] = estimator.quantized(LARGE, high)
    assert both[0] < both[1] < estimator.plain(LARGE)


@pytest.mark.any_backend
@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("H100", "H100"),
        ("h200", "H200"),
        ("GB200", "GB200"),
        ("rtx 6000 ada", "RTX6000"),
        ("mi300x", "MI300X"),
        ("mi350x", "MI350X"),
        ("tpu7x", "TPU7x"),
        ("ironwood", "TPU7x"),
        ("trillium", "v6e"),
        ("v5p", "v5p"),
    ],
)
def test_speeds_are_found_by_the_names_of_devices(name, key):
    assert estimate.product_named(device_named(name), name) == key


@pytest.mark.any_backend
def test_peaks_and_sources_of_all_devices_are_plausible():
    for card in CARDS.values():
        assert card.source and 0.1e12 < card.bandwidth < 10e12
        ratios = card.float8 / card.bfloat16, card.float4 / card.bfloat16
        assert ratios[0] == 0 or 1.99 < ratios[0] < 2.03
        assert ratios[1] == 0 or 3.99 < ratios[1] < 8.01


@pytest.fixture
def measured(monkeypatch):
    """Takes two recipes to have been measured on an H200, at two sizes."""
    rows = tuple(
        estimate.Measured("H200", recipe, size, speed, "in a dream")
        for recipe, size, speed in (
            ("delayed", 2048, 0.5),
            ("delayed", 8192, 1.5),
            ("rowwise", 2048, 0.25),
            ("rowwise", 4096, 0.75),
        )
    )
    for function in (estimate.estimator_of, estimate.break_even):
        function.cache_clear()
        monkeypatch.setattr(estimate, function.__name__, function.__wrapped__)
    monkeypatch.setattr(estimate, "measured", lambda: rows)
    return rows


@pytest.mark.any_backend
def test_where_a_step_was_measured_the_estimate_is_its_speed(measured):
    estimator = estimate.estimator_of("jax", "H200", device_named("h200"))

    def speed(size, recipe="delayed"):
        return estimator.speed(Matmuls.square(size), recipes.get(recipe))

    for row in measured:
        assert speed(row.size, row.recipe) == pytest.approx(row.speed)
    # Between two sizes, and like the slowest recipe where one has no row.
    assert speed(2048) < speed(3072) < speed(4096) < speed(8192)
    plain = dataclasses.replace(estimator, corrections={})
    square = Matmuls.square(2048)
    parts = [
        plain.speed(square, recipes.get(row.recipe)) / row.speed
        for row in measured
        if row.size == 2048
    ]
    uncorrected = plain.speed(square, recipes.get("current"))
    expected = uncorrected / max(parts)
    assert speed(2048, "current") == pytest.approx(expected)
    # An H100 runs the programs of an H200; PyTorch runs others.
    for backend, product in (("jax", "B200"), ("torch", "H200")):
        device = device_named(product)
        assert not estimate.estimator_of(backend, product, device).corrections
    h100 = estimate.estimator_of("tensorflow", "H100", device_named("h100"))
    assert set(h100.corrections) == {"delayed", "rowwise", ""}


@pytest.mark.any_backend
def test_from_the_break_even_on_both_recipes_are_faster(measured):
    device = device_named("h200")
    row = estimate.break_even("jax", device)
    estimator = estimate.estimator_of("jax", "H200", device)

    def speeds(size):
        return [
            estimator.speed(Matmuls.square(size), recipes.get(name))
            for name in ("delayed", "current")
        ]

    assert min(speeds(row.size)) > 1 >= min(speeds(row.size - 64))
    assert row.origin == (
        "estimated, corrected by what was measured, in speeds of bfloat16, on "
        "an in a dream: 0.50 at 2048³ under delayed, 1.50 at 8192³ under "
        "delayed, 0.25 at 2048³ under rowwise, 0.75 at 4096³ under rowwise"
    )
    unknown = devices.of_nvidia((9, 0), "NVIDIA Pretence 9000")
    assert estimate.break_even("jax", unknown).origin.startswith("assumed")
    # The host of eager PyTorch takes longer than the GPU.
    torch, xla = (
        estimate.break_even(backend, device_named("b200")).size
        for backend in ("torch", "jax")
    )
    assert torch > xla


@pytest.mark.slow_except()
def test_a_row_for_each_recipe_and_the_model_is_unchanged():
    model = mlp()
    before = [type(layer) for layer in model.layers]
    report = kpe.plan(
        model,
        8,
        "h200",
        ["current", "mxfp8"],
        compiled=True,
        data=np.ones((4, 32), "float32"),
    )
    assert [type(layer) for layer in model.layers] == before
    current, mxfp8 = report
    assert (current.recipe, mxfp8.recipe) == ("current", "mxfp8")
    assert current.native == tuple(recipes.MATMULS) and not current.reason
    assert mxfp8.native == () and mxfp8.reason
    assert current.speedup == pytest.approx(report.seconds / current.seconds)
    assert current.speedup < 1 and len(current.slower) == 2
    assert report.layers == 2 and current.sqnr_db < 40
    policy = kpe.Float8DTypePolicy("mixed_bfloat16", recipe="current")
    (form,) = kpe.memory(model, 8, [policy]).forms[1:]
    assert current.memory == form.together
    numbers = 8 * 32 + 8 * 64, 32 * 64 + 64 * 16, 8 * 64 + 8 * 16
    moved = 2 * (2 * numbers[0] + 4 * numbers[1] + 2 * numbers[2])
    assert current.bytes_cast == moved + 2 * sum(numbers)
    assert "H200" in str(report) and "emulated" in str(report)
    counts_no_host = "host's time for compiled steps is not counted"
    is_torch = keras.backend.backend() == "torch"
    assert (counts_no_host in " ".join(report.notes)) == is_torch


@pytest.mark.parametrize(
    ("device", "words"),
    [("h20000", "not a known device"), ("rtx3090", "speed of .*3090 is not")],
)
def test_a_device_without_a_speed_is_refused(device, words):
    with pytest.raises(ValueError, match=words):
        kpe.plan(mlp(), 8, device)


def test_a_model_without_float8_layers_is_refused():
    with pytest.raises(ValueError, match="No layer of the model"):
        kpe.plan(mlp(), 8, "h200", "current", filter=lambda layer: False)


class Float32Only(keras.layers.Dense):
    """A Dense whose `call` raises for inputs in another dtype."""

    def call(self, x, training=None):
        if keras.backend.standardize_dtype(x.dtype) != "float32":
            raise TypeError("only in float32")
        return super().call(x, training=training)


@pytest.mark.parametrize("convert", [False, True])
def test_a_model_for_float32_alone_is_counted_in_its_own_dtypes(convert):
    layers = [keras.layers.Dense(64, name="up"), Float32Only(8, name="own")]
    model = keras.Sequential([keras.Input((32,)), *layers])
    own = kpe.memory(model, 8, []).forms[0].together
    if convert:
        kpe.convert(model, "current")
    report = kpe.plan(model, 8, "h200", "current", compiled=True)
    assert report.memory == own
    assert "the model does not work under mixed_bfloat16" in report.notes[0]
    words = "cannot be called under 'mixed_bfloat16'.*only in float32.*Allowed"
    with pytest.raises(ValueError, match=f"(?s){words}"):
        kpe.memory(model, 8, "mixed_bfloat16")
    assert model.layers[1].dtype_policy.compute_dtype == "float32"


def test_a_model_with_weights_in_two_dtypes_is_counted_in_its_own():
    layers = [keras.layers.Dense(64), keras.layers.Dense(8, dtype="float16")]
    model = keras.Sequential([keras.Input((32,)), *layers])
    report = kpe.plan(model, 8, "h200", "current", compiled=True)
    assert report.memory == kpe.memory(model, 8, []).forms[0].together
    assert "own dtypes" in report.notes[0]
