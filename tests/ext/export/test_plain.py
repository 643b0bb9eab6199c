"""The plain form: any model, its own names."""

import json
import math
import resource

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from keras_policy_ext.ext.export import plain, safetensors_files
from keras_policy_ext.layers.stored_weights import StoredVariable
from keras_policy_ext.stored_kernels import StoredKernel

KERNELS = [
    "m/conv/kernel",
    "m/dense/kernel",
    "m/embedding/embeddings",
    "m/einsum/kernel",
    "m/lstm/lstm_cell/kernel",
    "m/lstm/lstm_cell/recurrent_kernel",
]


def model(dtype=None):
    keras.utils.set_random_seed(0)
    layers = keras.layers
    made = keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            layers.Embedding(9, 5, name="embedding", dtype=dtype),
            layers.Conv1D(7, 3, name="conv", dtype=dtype),
            layers.LayerNormalization(name="norm", dtype=dtype),
            layers.EinsumDense("btd,dnh->btnh", (4, 2, 3), name="einsum"),
            layers.Reshape((4, 6)),
            layers.LSTM(4, name="lstm"),
            layers.Dense(3, name="dense", dtype=dtype),
        ],
        name="m",
    )
    rng = np.random.default_rng(1)
    for variable in made.weights:
        if keras.backend.is_float_dtype(variable.dtype):
            variable.assign(rng.normal(size=variable.shape))
    return made


def value(variable):
    x = variable.value if hasattr(variable, "value") else variable
    if "float" in keras.backend.standardize_dtype(variable.dtype):
        x = keras.ops.cast(x, "float32")
    return keras.ops.convert_to_numpy(x)


def held(a_model):
    return {
        variable.path: variable.stored
        for variable in a_model.weights
        if isinstance(variable, StoredVariable)
    }


def quantized(path):
    found = plain.read(path)
    return {k: v for k, v in found.items() if isinstance(v, StoredKernel)}


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name, kernel in expected.items():
        one = got[name]
        assert (one.weights, one.granularity, one.axes) == (
            kernel.weights,
            kernel.granularity,
            kernel.axes,
        )
        np.testing.assert_array_equal(one.codes, kernel.codes)
        np.testing.assert_array_equal(one.scale, kernel.scale)


@pytest.mark.full_except(
    "float8_e4m3fn-block", "float8_e5m2-block", "float8_e5m2-tensor"
)
@pytest.mark.parametrize("granularity", ["channel", "tensor", "block"])
@pytest.mark.parametrize("weights", ["float8_e4m3fn", "float8_e5m2"])
def test_a_frozen_model_is_written_with_its_bytes(
    granularity, weights, tmp_path
):
    frozen = model()
    kpe.freeze(frozen, granularity=granularity, weights=weights)
    path = tmp_path / "model.safetensors"
    report = kpe.export(frozen, path, "safetensors")
    assert_same(quantized(path), held(frozen))
    assert sorted(quantized(path)) == sorted(KERNELS)
    assert set(plain.read(path)) == {v.path for v in model().weights}
    assert [w.name for w in report.weights if w.quantized] == [
        name for name in plain.read(path) if name in KERNELS
    ]


@pytest.mark.parametrize("granularity", ["channel", "tensor", "block"])
def test_a_float_model_is_quantized_as_freeze_does(granularity, tmp_path):
    live = model()
    before = {v.path: value(v) for v in live.weights}
    path = tmp_path / "model.safetensors"
    kpe.export(live, path, "safetensors", granularity=granularity)
    for variable in live.weights:
        np.testing.assert_array_equal(value(variable), before[variable.path])
    kpe.freeze(live, granularity=granularity)
    assert_same(quantized(path), held(live))


@pytest.mark.full
def test_all_other_weights_are_in_floats_as_they_are(tmp_path):
    live = model("bfloat16")
    path = tmp_path / "model.safetensors"
    report = kpe.export(live, path, "safetensors", exclude="dense")
    found = plain.read(path)
    for variable in live.weights:
        if variable.path in KERNELS and "dense" not in variable.path:
            continue
        got = found[variable.path]
        assert str(got.dtype) == keras.backend.standardize_dtype(variable.dtype)
        np.testing.assert_array_equal(got.astype("float32"), value(variable))
    reasons = {w.name: w.reason for w in report.weights}
    assert "exclude" in reasons["m/dense/kernel"]
    assert "matrix multiplication" in reasons["m/dense/bias"]
    assert "exclude" in str(report)


def test_what_is_excluded_of_a_frozen_model_is_dequantized(tmp_path):
    frozen = model()
    kpe.freeze(frozen)
    path = tmp_path / "model.safetensors"
    kpe.export(frozen, path, "safetensors", exclude="dense")
    expected = held(frozen)["m/dense/kernel"].dequantized()
    np.testing.assert_array_equal(plain.read(path)["m/dense/kernel"], expected)
    assert len(quantized(path)) == len(KERNELS) - 1


def test_what_was_not_frozen_stays_in_floats(tmp_path):
    partly = model()
    kpe.freeze(partly, exclude="dense")
    path = tmp_path / "model.safetensors"
    report = kpe.export(partly, path, "safetensors")
    assert sorted(quantized(path)) == sorted(set(KERNELS) - {"m/dense/kernel"})
    assert "not frozen" in str(report)


@pytest.mark.full
@pytest.mark.slow_except()
def test_no_state_optimizer_or_adapter_is_in_the_file(tmp_path):
    live = model()
    kpe.convert(live, "delayed")
    live.compile(keras.optimizers.Adam(), "mse", metrics=["mae"])
    live.train_on_batch(np.zeros((2, 6), "int32"), np.zeros((2, 3)))
    live.get_layer("dense").enable_lora(1)
    path = tmp_path / "model.safetensors"
    kpe.export(live, path, "safetensors")
    plain_names = {v.path for v in model().weights}
    assert set(plain.read(path)) == plain_names


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("name", ["dense", "einsum", "embedding", "conv"])
def test_adapters_are_merged(frozen, name, tmp_path):
    live = model()
    kernel = next(v for v in live.get_layer(name).weights)
    if frozen:
        kpe.freeze(live)
        path = kernel.path
        base = held(live)[path].dequantized()
    else:
        path, base = kernel.path, value(kernel)
    live.get_layer(name).enable_lora(2, lora_alpha=3)
    factors = [v for v in live.trainable_weights if "lora" in v.path]
    rng = np.random.default_rng(2)
    for factor in factors:
        factor.assign(rng.normal(size=factor.shape))
    a, b = sorted(
        map(value, factors), key=lambda x: -x.ndim * math.prod(x.shape)
    )
    if a.shape[-1] != 2:
        a, b = b, a
    merged = base + np.float32(1.5) * np.matmul(a, b)
    kpe.export(live, tmp_path / "file", "safetensors")
    got = quantized(tmp_path / "file")[path].dequantized()
    # Half a step of e4m3 at the largest number of a channel.
    error = np.abs(got - merged).max() / np.abs(merged).max()
    assert error <= 16 / 448 * 1.01


@pytest.mark.full
def test_static_scales_of_inputs_are_in_the_file(tmp_path):
    live = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    kpe.convert(live, "delayed")
    kpe.calibrate(live, [np.full((2, 4), 7.0, "float32")])
    kpe.freeze(live, activations="static")
    path = tmp_path / "model.safetensors"
    report = kpe.export(live, path, "safetensors")
    (name,) = (n for n in plain.read(path) if n.endswith("_input_scale"))
    assert plain.read(path)[name] == np.float32(7 / 448)
    assert "static" in str(report)


@pytest.mark.full
def test_embeddings_beside_static_scales_need_none(tmp_path):
    words = keras.layers.Embedding(5, 4, name="words")
    inputs = keras.Input((), dtype="int32")
    live = keras.Model(
        inputs, keras.layers.Dense(3, name="head")(words(inputs))
    )
    kpe.convert(live, "delayed")
    kpe.calibrate(live, np.arange(5))
    kpe.freeze(live, activations="static")
    path = tmp_path / "model.safetensors"
    kpe.export(live, path, "safetensors")
    names = [n for n in plain.read(path) if n.endswith("_input_scale")]
    assert names == ["head/kernel_input_scale"]
    assert set(quantized(path)) == {"head/kernel", "words/embeddings"}


def test_weights_of_one_path_are_both_written(tmp_path):
    class Twins(keras.Model):
        def __init__(self):
            super().__init__()
            self.twins = [keras.layers.Dense(2, name="a") for _ in range(2)]

        def call(self, x):
            return self.twins[1](self.twins[0](x))

    twins = Twins()
    twins(np.ones((1, 2), "float32"))
    kpe.export(twins, tmp_path / "file", "safetensors")
    assert len(quantized(tmp_path / "file")) == 2


def test_a_file_of_another_form_is_refused(tmp_path):
    path = tmp_path / "file"
    safetensors_files.write(path, [], {"format": "pt"})
    with pytest.raises(ValueError, match="not written in the plain form"):
        plain.read(path)


@pytest.mark.parametrize(
    "change",
    [
        {"granularity": "row"},
        {"granularity": "block"},
        {"weights": "float8_e5m2"},
        {"weights": "os.system"},
        {"summed": [1]},
        {"summed": [0, 0]},
        {"summed": None},
        {"free": ["x"]},
    ],
)
def test_metadata_that_does_not_fit_is_refused(change, tmp_path):
    dense = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    path = tmp_path / "file"
    kpe.export(dense, path, "safetensors")
    slots, metadata = safetensors_files.read(path)
    about = json.loads(metadata["kernels"])
    (name,) = about
    about[name] = {**about[name], **change}
    tensors = [
        safetensors_files.Tensor(n, s.dtype, s.shape, s.read)
        for n, s in slots.items()
    ]
    metadata = {**metadata, "kernels": json.dumps(about)}
    safetensors_files.write(tmp_path / "changed", tensors, metadata)
    with pytest.raises(ValueError, match="does not fit its tensors"):
        plain.read(tmp_path / "changed")


def test_a_full_disk_leaves_the_old_file_and_the_live_model(tmp_path):
    """The system refuses to write further, as on a full disk."""
    live = keras.Sequential([keras.Input((256,)), keras.layers.Dense(256)])
    path = tmp_path / "model.safetensors"
    path.write_text("old")
    before = [value(v) for v in live.weights]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(OSError, match="large"):
            kpe.export(live, path, "safetensors", overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    for variable, expected in zip(live.weights, before, strict=True):
        np.testing.assert_array_equal(value(variable), expected)
    kpe.export(live, path, "safetensors", overwrite=True)
    assert len(quantized(path)) == 1


def test_a_kernel_that_is_not_finite_leaves_nothing(tmp_path):
    live = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    live.weights[0].assign([[1.0, np.nan], [1.0, 1.0]])
    with pytest.raises(ValueError, match="NaN or infinity"):
        kpe.export(live, tmp_path / "file", "safetensors")
    assert not list(tmp_path.iterdir())
