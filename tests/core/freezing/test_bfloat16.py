"""Frozen models with weights in bfloat16: files, exports, floats again."""

import keras
import ml_dtypes
import numpy as np
import pytest

import keras_policy_ext as kpe
from keras_policy_ext import stored_kernels
from keras_policy_ext.layers.stored_weights import StoredVariable
from keras_policy_ext.stored_kernels import StoredKernel
from steps import normal

layers = keras.layers
BFLOAT16 = ml_dtypes.bfloat16


def model(dtype="bfloat16", seed=1):
    """Each kind of kernel, between others of which none is stored."""
    keras.utils.set_random_seed(seed)
    with kpe.policy_scope(dtype):
        made = keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                layers.Embedding(9, 8, name="words"),
                layers.Conv1D(10, 3, name="conv"),
                layers.LayerNormalization(name="norm"),
                layers.EinsumDense("abc,cd->abd", (4, 7), name="einsum"),
                layers.Flatten(),
                layers.Dense(5, "relu", name="hidden"),
                layers.Dense(3, bias_initializer="uniform", name="last"),
            ]
        )
    return made


def words():
    return np.random.default_rng(0).integers(0, 9, (4, 6)).astype("int32")


def wide(x):
    return keras.ops.convert_to_numpy(keras.ops.cast(x, "float32"))


def floats(model):
    return {v.path: wide(v.value) for v in model.weights}


def frozen(**options):
    """A frozen model, and what its float weights stand for from now on."""
    made = model()
    before = floats(made)
    report = kpe.freeze(made, **options)
    assert str(report)
    after = dict(before)
    for variable in made.weights:
        if isinstance(variable, StoredVariable):
            stored = stored_kernels.quantize(
                before[variable.path],
                variable.axes,
                variable.granularity,
                variable.weights,
            )
            np.testing.assert_array_equal(variable.stored.codes, stored.codes)
            after[variable.path] = stored.dequantized()
    return made, after


def names(path):
    """A path without the name of its model."""
    return path.split("/", 1)[-1] if path.startswith("sequential") else path


def assert_floats(model, expected, dtype):
    expected = {names(path): value for path, value in expected.items()}
    for variable in model.weights:
        assert variable.dtype == np.dtype(dtype).name
        value = expected.pop(names(variable.path)).astype(dtype)
        np.testing.assert_array_equal(
            wide(variable.value), value.astype("float32"), variable.path
        )
    assert not expected


@pytest.mark.slow_except("channel")
@pytest.mark.full_except("tensor")
@pytest.mark.parametrize("granularity", ["channel", "tensor", "block"])
def test_kernels_are_those_of_the_same_numbers_in_float32(granularity):
    made, expected = frozen(granularity=granularity)
    y = made(words())
    assert keras.backend.standardize_dtype(y.dtype) == "bfloat16"
    same = model("float32")
    for variable, value in zip(same.weights, expected.values(), strict=True):
        variable.assign(value)
    # Each layer rounds what it computes to 8 bits: 2**-9, seven deep.
    exact = wide(same(words()))
    assert np.abs(wide(y) - exact).max() <= 2**-5 * np.abs(exact).max()


def test_thawed_weights_are_bfloat16():
    made, expected = frozen()
    kpe.thaw(made)
    assert_floats(made, expected, BFLOAT16)


@pytest.mark.parametrize("name", ["model.keras", "model.weights.h5"])
@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype("float32")])
def test_dequantized_weights_load_into_floats(name, dtype, tmp_path):
    made, expected = frozen(exclude="hidden")
    save = made.save if name.endswith(".keras") else made.save_weights
    save(tmp_path / name)
    other = model(np.dtype(dtype).name, seed=2)
    kpe.load_weights(other, tmp_path / name, dequantize=True)
    assert_floats(other, expected, dtype)


@pytest.mark.parametrize("rank", [2])
def test_adapters_are_added_in_float32(rank, tmp_path):
    made, expected = frozen()
    layer = made.get_layer("hidden")
    layer.enable_lora(2)
    for factor in (layer.lora_kernel_a, layer.lora_kernel_b):
        factor.assign(normal(*factor.shape))
    a, b = wide(layer.lora_kernel_a), wide(layer.lora_kernel_b)
    path = next(p for p in expected if p.endswith("hidden/kernel"))
    expected[path] = expected[path] + a @ b
    made.save(tmp_path / "model.keras")
    other = model("float32", seed=2)
    kpe.load_weights(other, tmp_path / "model.keras", dequantize=True)
    got = {names(v.path): wide(v.value) for v in other.weights}
    for each, value in expected.items():
        np.testing.assert_allclose(got[names(each)], value, rtol=2**-20)


@pytest.mark.full_except("None")
@pytest.mark.parametrize("activations", [None, "dynamic"])
def test_a_saved_model_is_the_same(activations, tmp_path):
    made, _ = frozen(activations=activations)
    made.save(tmp_path / "model.keras")
    loaded = kpe.load_model(tmp_path / "model.keras")
    other = model(seed=2)
    kpe.load_weights(other, tmp_path / "model.keras", as_saved=True)
    for each in (loaded, other):
        np.testing.assert_array_equal(wide(each(words())), wide(made(words())))
        assert each.get_layer("hidden").bias.dtype == "bfloat16"


@pytest.mark.extension("export")
def test_a_file_of_safetensors_has_codes_and_bfloat16(tmp_path):
    from keras_policy_ext.ext.export import plain

    made, expected = frozen(exclude="hidden")
    kpe.export(made, tmp_path / "file", "safetensors")
    found = plain.read(tmp_path / "file")
    stored = {k for k, v in found.items() if isinstance(v, StoredKernel)}
    assert len(stored) == 4
    for name, value in expected.items():
        got = found[name]
        if name in stored:
            got = got.dequantized()
        else:
            assert got.dtype == BFLOAT16
        np.testing.assert_array_equal(got.astype("float32"), value)


@pytest.mark.parametrize("activations", [None, "dynamic"])
@pytest.mark.extension("onnx")
def test_an_onnx_file_computes_in_float32(activations, tmp_path):
    pytest.importorskip("onnxruntime")
    from onnx_files import run_at_all_levels

    made, expected = frozen(activations=activations)
    same = model("float32")
    for variable, value in zip(same.weights, expected.values(), strict=True):
        variable.assign(value)
    kpe.freeze(same, activations=activations)
    exact = wide(same(words()))
    for (outputs,) in run_at_all_levels(
        made, tmp_path, words(), activations="auto"
    ):
        assert outputs.dtype == "float32"
        np.testing.assert_allclose(outputs, exact, rtol=1e-4, atol=1e-5)
