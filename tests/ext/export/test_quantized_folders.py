"""Folders of Hugging Face, as far as they can be read without KerasHub."""

import json

import numpy as np
import pytest

import keras_policy_ext as kpe
from keras_policy_ext.ext.export import loading, readers, safetensors_files
from keras_policy_ext.ext.export.exported_kernels import Scheme
from keras_policy_ext.ext.export.loading import QuantizedFolder
from keras_policy_ext.ext.export.readers import USUAL, Reader
from keras_policy_ext.ext.export.safetensors_files import Tensor
from keras_policy_ext.recipes import FrozenKernels
from keras_policy_ext.stored_kernels import pack

pytestmark = pytest.mark.any_backend


def write_config(folder, quantization, **more):
    config = {"model_type": "llama", "quantization_config": quantization}
    text = json.dumps({**config, **more})
    (folder / "config.json").write_text(text)


def written(format, granularity, activations, weights=None):
    usual = USUAL[format]
    scheme = type(usual)(
        weights=weights or usual.weights,
        granularity=granularity,
        activations=activations,
    )
    return Reader(format, "Llama3Backbone", scheme).config(["lm_head"])


@pytest.mark.parametrize(
    ("format", "granularity", "activations"),
    [
        *[
            ("compressed-tensors", granularity, activations)
            for granularity in ("channel", "tensor", "block")
            for activations in (None, "dynamic", "static")
        ],
        ("modelopt", "tensor", "static"),
        ("fp8", "block", None),
        ("fp8", "tensor", None),
    ],
)
def test_what_is_written_is_read(format, granularity, activations, tmp_path):
    write_config(
        tmp_path,
        written(format, granularity, activations),
        torch_dtype="bfloat16",
    )
    found = QuantizedFolder.read(tmp_path)
    assert found.recipe == FrozenKernels(
        per=granularity, activations=activations
    )
    assert found.dtype == "bfloat16"


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("granularity", ["channel", "group32", "group128"])
@pytest.mark.parametrize("activations", [None, "dynamic"])
def test_integers_that_are_written_are_read(
    weights, granularity, activations, tmp_path
):
    format = "compressed-tensors"
    quantization = written(format, granularity, activations, weights)
    kind = "pack-quantized" if activations is None else "int-quantized"
    assert quantization["format"] == kind
    write_config(tmp_path, quantization)
    assert QuantizedFolder.read(tmp_path).recipe == FrozenKernels(
        weights=weights, per=granularity, activations=activations
    )


def test_nvfp4_that_is_written_is_read(tmp_path):
    quantization = written(
        "compressed-tensors", "group16", None, "float4_e2m1fn"
    )
    assert quantization["format"] == "nvfp4-pack-quantized"
    weights = quantization["config_groups"]["group_0"]["weights"]
    assert weights["strategy"] == "tensor_group"
    write_config(tmp_path, quantization)
    assert QuantizedFolder.read(tmp_path).recipe == FrozenKernels(
        weights="float4_e2m1fn", per="group16", scale_format="float8_e4m3fn"
    )
    weights["strategy"], weights["group_size"] = "group", 32  # MXFP4.
    write_config(tmp_path, quantization)
    with pytest.raises(ValueError, match="Allowed"):
        QuantizedFolder.read(tmp_path)


def test_codes_and_scales_of_nvfp4_are_read(tmp_path):
    recipe = FrozenKernels(weights="float4_e2m1fn", per="group16")
    codes = np.arange(32, dtype="uint8").reshape(2, 16) % 16
    packed = pack(codes, recipe.weights).reshape(2, 8)
    found = slots(
        tmp_path,
        tensor("a.weight_packed", packed, "U8"),
        tensor("a.weight_scale", [[0.5], [3]], "F8_E4M3"),
        tensor("a.weight_global_scale", [4], "F32"),
    )
    found = loading.unpacked(found, recipe)
    values = found["a.weight"].read()
    np.testing.assert_array_equal(values.view("uint8"), codes)
    assert values.astype("float32").max() == 6
    scale, _ = loading.scales(found, "a.weight")
    np.testing.assert_array_equal(scale, [[0.125], [0.75]])


def test_packed_floats_that_are_no_bytes_are_refused(tmp_path):
    found = slots(tmp_path, tensor("a.weight_packed", np.zeros((2, 8)), "I32"))
    with pytest.raises(ValueError, match="no matrix of bytes"):
        loading.unpacked(found, FrozenKernels(weights="float4_e2m1fn"))


@pytest.mark.parametrize(
    ("granularity", "activations", "fault"),
    [
        ("group32", None, "granularity='group32'"),
        ("channel", None, "granularity='channel'"),
        ("group16", "dynamic", "activations='dynamic' beside float4_e2m1fn"),
    ],
)
def test_other_four_bit_floats_are_refused(granularity, activations, fault):
    scheme = Scheme(
        weights="float4_e2m1fn",
        granularity=granularity,
        activations=activations,
    )
    with pytest.raises(ValueError, match=fault) as error:
        Reader("compressed-tensors", "Llama3Backbone", scheme).check()
    assert "Allowed" in str(error.value)


@pytest.mark.parametrize("bits", [8, 4])
def test_packed_codes_are_unpacked(bits):
    most = 2 ** (bits - 1) - 1
    codes = np.arange(-most, most + 1, dtype="int8")[None].repeat(3, 0)
    scheme = Scheme(
        weights=f"int{bits}", granularity="channel", activations=None
    )
    packed = Reader("compressed-tensors", "Llama3Backbone", scheme).packed(
        codes
    )
    found = readers.unpacked(packed, codes.shape[1], bits)
    np.testing.assert_array_equal(found, codes)


@pytest.mark.parametrize("damage", ["no shape", "a row less", "another dtype"])
def test_packed_codes_that_do_not_fit_are_refused(damage, tmp_path):
    rows = 2 if damage == "a row less" else 3
    dtype = "F32" if damage == "another dtype" else "I32"
    tensors = [tensor("a.weight_packed", np.zeros((rows, 2)), dtype)]
    if damage != "no shape":
        tensors.append(tensor("a.weight_shape", [3, 16], "I64"))
    found = slots(tmp_path, *tensors)
    with pytest.raises(ValueError, match="does not fit its shape"):
        loading.unpacked(found, FrozenKernels(weights="int4"))


def test_a_model_that_is_dequantized_has_float_inputs(tmp_path):
    quantization = written("compressed-tensors", "channel", "dynamic")
    write_config(tmp_path, {**quantization, "dequantize": True})
    assert QuantizedFolder.read(tmp_path).recipe.activations is None


def changed(**changes):
    """A group of compressed-tensors with other weights or inputs."""
    quantization = written("compressed-tensors", "channel", "dynamic")
    group = quantization["config_groups"]["group_0"]
    for name, value in changes.items():
        part, _, key = name.partition("__")
        if key:
            group[part][key] = value
        else:
            group[part] = value
    return quantization


@pytest.mark.parametrize(
    "quantization",
    [
        None,
        {},
        [],
        "fp8",
        {"quant_method": "gptq"},
        {"quant_method": ["fp8"]},
        {"quant_method": "fp8", "weight_block_size": [64, 64]},
        {"quant_method": "fp8", "weight_block_size": 128},
        {"quant_method": "compressed-tensors"},
        changed(weights__num_bits=4),
        changed(weights__type="int"),
        changed(weights__type="int", weights__num_bits=3),
        changed(weights__strategy="group", weights__group_size=48),
        changed(weights__symmetric=False),
        changed(weights__strategy="group"),
        changed(weights__dynamic=True),
        changed(targets=["Linear", "Embedding"]),
        changed(input_activations__strategy="tensor"),
        changed(input_activations__num_bits=16),
        {**changed(), "quantization_status": "frozen"},
        {**changed(), "config_groups": {}},
        {**changed(), "config_groups": []},
    ],
)
def test_what_is_not_known_is_refused(quantization, tmp_path):
    write_config(tmp_path, quantization)
    with pytest.raises(ValueError, match="has no kernels that can be read"):
        kpe.load_quantized(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "1", "null", "{}", '{"a": ' * 50_000, "\xff"]
)
def test_a_damaged_config_is_refused(text, tmp_path):
    (tmp_path / "config.json").write_text(text, "latin1")
    with pytest.raises(ValueError, match=r"config\.json"):
        kpe.load_quantized(tmp_path)


def test_a_folder_without_a_config(tmp_path):
    for place in (tmp_path, tmp_path / "missing"):
        with pytest.raises(FileNotFoundError, match="Check the path"):
            kpe.load_quantized(place)


def test_a_folder_without_weights(tmp_path):
    write_config(tmp_path, written("fp8", "block", None))
    with pytest.raises(FileNotFoundError):
        kpe.load_quantized(tmp_path)


def tensor(name, value, dtype="F32"):
    array = np.asarray(value, safetensors_files.DTYPES[dtype])
    return Tensor(name, dtype, array.shape, lambda: array)


@pytest.fixture
def folder(tmp_path):
    """Three tensors in three files."""
    tensors = [tensor(name, np.full(4, n)) for n, name in enumerate("abc")]
    safetensors_files.write_shards(tmp_path, tensors, most=20)
    return tmp_path


def test_several_files_are_read(folder):
    assert len(list(folder.glob("*.safetensors"))) == 3
    found = safetensors_files.read_folder(folder)
    assert {n: s.read()[0] for n, s in found.items()} == {
        "a": 0,
        "b": 1,
        "c": 2,
    }


def test_a_missing_file_is_an_error(folder):
    next(folder.glob("*00002*")).unlink()
    with pytest.raises(FileNotFoundError, match="00002"):
        safetensors_files.read_folder(folder)


@pytest.mark.parametrize(
    "places",
    [
        None,
        [],
        {"a": 1},
        {"a": "../other/model.safetensors"},
        {"a": "/etc/passwd"},
        {"d": "model-00001-of-00003.safetensors"},
        {"b": "model-00001-of-00003.safetensors"},
    ],
)
def test_an_index_that_does_not_fit(places, folder):
    (folder / safetensors_files.INDEX).write_text(
        json.dumps({"weight_map": places})
    )
    with pytest.raises(ValueError, match="index of this folder"):
        safetensors_files.read_folder(folder)


def slots(tmp_path, *tensors):
    path = tmp_path / "model.safetensors"
    safetensors_files.write(path, tensors, {})
    return safetensors_files.read(path)[0]


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
def test_scales_of_a_weight(name, tmp_path):
    found = slots(
        tmp_path, tensor(f"a.{name}", [[2.0]]), tensor("a.input_scale", [3.0])
    )
    scale, inputs = loading.scales(found, "a.weight")
    assert (scale.tolist(), inputs) == ([[2.0]], 3.0)


@pytest.mark.parametrize(
    "tensors",
    [
        [],
        [tensor("b.weight_scale", [1.0])],
        [tensor("a.weight_scale", [1], "U8")],
        [tensor("a.weight_scale", 1.0), tensor("a.weight_scale_inv", 1.0)],
    ],
)
def test_scales_that_are_missing(tensors, tmp_path):
    found = slots(tmp_path, *tensors)
    with pytest.raises(ValueError, match=r"'a\.weight'"):
        loading.scales(found, "a.weight")
