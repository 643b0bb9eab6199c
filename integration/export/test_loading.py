"""Folders back into models of KerasHub."""

import json
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import readers
import tiny_models as tiny
from test_hugging_face import HEAD, trained

import keras_policy_ext as kpe
from keras_policy_ext.ext.export import safetensors_files
from keras_policy_ext.ext.export.safetensors_files import Tensor
from keras_policy_ext.layers.stored_weights import StoredVariable

CHANNEL = ("compressed-tensors", "channel", None)
STATIC = ("compressed-tensors", "tensor", "static")
SCHEMES = [
    CHANNEL,
    STATIC,
    ("compressed-tensors", "channel", "dynamic"),
    ("compressed-tensors", "block", None),
    ("modelopt", "tensor", "static"),
    ("fp8", "block", None),
    ("fp8", "tensor", None),
]


@pytest.mark.parametrize(
    ("name", "format", "granularity", "inputs"),
    [
        *[("llama", *scheme) for scheme in SCHEMES],
        *[(n, *STATIC) for n in ("gemma", "gemma3", "mistral", "qwen")],
        ("gemma4", *CHANNEL),
        ("qwen3_5", *CHANNEL),
        ("gpt2", *CHANNEL),
    ],
)
def test_a_model_comes_back_bit_by_bit(
    name, format, granularity, inputs, tmp_path
):
    model = trained(name)
    kpe.freeze(model, granularity=granularity, activations=inputs, exclude=HEAD)
    kpe.export(model, tmp_path, format, overwrite=True)
    loaded = kpe.load_quantized(tmp_path)
    assert type(loaded) is type(model)
    assert_same_kernels(loaded, model)
    ids = tiny.tokens()
    np.testing.assert_array_equal(
        tiny.logits(loaded, ids), tiny.logits(model, ids)
    )


@pytest.mark.parametrize("inputs", [None, "dynamic"])
@pytest.mark.parametrize("granularity", ["channel", "group"])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_integers_come_back_bit_by_bit(weights, granularity, inputs, tmp_path):
    model = trained("llama", width=64, inner=96)
    kpe.revert(model)
    how = dict(weights=weights, granularity=granularity, activations=inputs)
    kpe.freeze(model, exclude=[HEAD, "layer_1/.*query"], **how)
    kpe.export(model, tmp_path, overwrite=True)
    loaded = kpe.load_quantized(tmp_path)
    assert_same_kernels(loaded, model)
    ids = tiny.tokens()
    np.testing.assert_array_equal(
        tiny.logits(loaded, ids), tiny.logits(model, ids)
    )


def test_nvfp4_comes_back_bit_by_bit(tmp_path):
    model = trained("llama", width=64, inner=96)
    kpe.revert(model)
    how = dict(weights="float4_e2m1fn", granularity="group16")
    left_out = [HEAD, "layer_1/.*query"]
    # As it is exported without `freeze`.
    kpe.export(model, tmp_path, exclude=left_out, overwrite=True, **how)
    how["scale_format"] = "float8_e4m3fn"
    kpe.freeze(model, exclude=left_out, **how)
    loaded = kpe.load_quantized(tmp_path)
    assert_same_kernels(loaded, model)
    recipes = {each.recipe for each in kernels(loaded).values()}
    assert recipes == {each.recipe for each in kernels(model).values()}
    ids = tiny.tokens()
    np.testing.assert_array_equal(
        tiny.logits(loaded, ids), tiny.logits(model, ids)
    )


def test_nvfp4_of_other_programs_has_scales_in_float32(tmp_path):
    model = trained("llama", width=64, inner=96)
    kpe.revert(model)
    kpe.freeze(
        model,
        weights="float4_e2m1fn",
        granularity="group16",
        scale_format="float8_e4m3fn",
        exclude=HEAD,
    )
    kpe.export(model, tmp_path, overwrite=True)
    path = tmp_path / "model.safetensors"
    slots, metadata = safetensors_files.read(path)
    arrays = {name: np.array(slot.read()) for name, slot in slots.items()}
    for name in arrays:
        if name.endswith("weight_global_scale"):
            arrays[name] = arrays[name] * np.float32(1.3)
    tensors = [
        Tensor(name, slots[name].dtype, array.shape, lambda array=array: array)
        for name, array in arrays.items()
    ]
    safetensors_files.write(path, tensors, metadata)
    loaded = kernels(kpe.load_quantized(tmp_path))
    for one, other in zip(
        loaded.values(), kernels(model).values(), strict=True
    ):
        assert one.recipe.scale_format == "float32"
        np.testing.assert_array_equal(one.stored.codes, other.stored.codes)
        expected = other.stored.scale / np.float32(1.3)
        np.testing.assert_allclose(one.stored.scale, expected, rtol=2.0**-22)


def kernels(model):
    return {
        variable.path: variable
        for variable in model.weights
        if isinstance(variable, StoredVariable)
    }


def assert_same_kernels(got, expected):
    got, expected = kernels(got), kernels(expected)
    assert len(got) == len(expected) > 8
    for one, other in zip(got.values(), expected.values(), strict=True):
        np.testing.assert_array_equal(one.stored.codes, other.stored.codes)
        np.testing.assert_array_equal(
            np.broadcast_to(one.stored.scale, other.stored.scale.shape),
            other.stored.scale,
        )
        if other.inputs_scale is not None:
            assert float(one.inputs_scale) == float(other.inputs_scale)


def test_a_partly_frozen_model_comes_back_so(tmp_path):
    model = trained("llama")
    kpe.revert(model)
    kpe.freeze(model, exclude=[HEAD, "layer_1/.*query"])
    kpe.export(model, tmp_path, overwrite=True)
    loaded = kpe.load_quantized(tmp_path)
    assert len(kernels(loaded)) == len(kernels(model)) == 13
    ids = tiny.tokens()
    np.testing.assert_array_equal(
        tiny.logits(loaded, ids), tiny.logits(model, ids)
    )


def test_sixteen_bits(tmp_path):
    model = trained("llama", dtype="bfloat16")
    kpe.freeze(model, exclude=HEAD)
    kpe.export(model, tmp_path, overwrite=True)
    ids = tiny.tokens()
    for dtype, expected in ((None, "bfloat16"), ("float32", "float32")):
        loaded = kpe.load_quantized(tmp_path, dtype=dtype)
        assert loaded.backbone.compute_dtype == expected
        assert len(kernels(loaded)) == len(kernels(model))
    loaded = kpe.load_quantized(tmp_path)
    np.testing.assert_array_equal(
        tiny.logits(loaded, ids), tiny.logits(model, ids)
    )


def test_a_loaded_model_takes_adapters_and_is_exported_again(tmp_path):
    model = trained("llama")
    kpe.freeze(model, exclude=HEAD)
    kpe.export(model, tmp_path / "first")
    loaded = kpe.load_quantized(tmp_path / "first")
    kpe.export(loaded, tmp_path / "second")
    first, second = (
        (tmp_path / name / "model.safetensors").read_bytes()
        for name in ("first", "second")
    )
    assert first == second
    loaded.backbone.enable_lora(2)
    loaded.compile("adam", keras.losses.SparseCategoricalCrossentropy(True))
    ids = tiny.tokens()
    loaded.train_on_batch(tiny.inputs(loaded, ids), ids)
    assert_same_kernels(loaded, model)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = tiny.randomized(tiny.llama())
    path = tmp_path_factory.mktemp("folders") / "folder"
    kpe.export(model, path)
    return path


def changed(folder, copy, change=None, config=None):
    """A copy with other tensors, or another config."""
    copy.mkdir()
    found = json.loads((folder / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**found, **(config or {})}))
    slots, metadata = safetensors_files.read(folder / "model.safetensors")
    tensors = {
        name: Tensor(name, slot.dtype, slot.shape, slot.read)
        for name, slot in slots.items()
    }
    if change is not None:
        change(tensors)
    path = copy / "model.safetensors"
    safetensors_files.write(path, list(tensors.values()), metadata)
    return copy


PROJECTION = "model.layers.0.self_attn.q_proj.weight"


def without(name):
    return lambda tensors: tensors.pop(name)


def with_shape(name, shape):
    def change(tensors):
        tensors[name] = Tensor(
            name, "F32", shape, lambda: np.ones(shape, "float32")
        )

    return change


@pytest.mark.parametrize(
    ("change", "config", "words"),
    [
        (without(PROJECTION), {}, "lacks a weight"),
        (without(PROJECTION + "_scale"), {}, "has no scale"),
        (without("model.norm.weight"), {}, "lacks a weight"),
        (with_shape("model.norm.weight", (7,)), {}, "does not fit the model"),
        (with_shape(PROJECTION + "_scale", (7, 1)), {}, "wrong shape"),
        (with_shape(PROJECTION + "_scale", (2, 2)), {}, "wrong shape"),
        (None, {"hidden_size": 64}, "does not fit the model"),
        (None, {"num_hidden_layers": 3}, "lacks a weight"),
        (None, {"num_hidden_layers": 1}, "without a place"),
        (None, {"model_type": "unheard"}, "unheard"),
    ],
)
def test_folders_that_do_not_fit(change, config, words, folder, tmp_path):
    copy = changed(folder, tmp_path / "copy", change, config)
    with pytest.raises(ValueError, match=words):
        kpe.load_quantized(copy)


@pytest.mark.parametrize("size", [4, 100, 5000, -1])
def test_truncated_files(size, folder, tmp_path):
    copy = changed(folder, tmp_path / "copy")
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match="safetensors file is damaged"):
        kpe.load_quantized(copy)


def test_nothing_in_a_folder_is_run(folder, tmp_path):
    """Neither Python files nor what a config names."""
    config = {"auto_map": {"AutoModel": "evil.Model"}, "trust_remote_code": 1}
    copy = changed(folder, tmp_path / "copy", config=config)
    (copy / "evil.py").write_text("raise SystemExit('it was run')")
    (copy / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    kpe.load_quantized(copy)


def test_a_float_folder_names_the_way_out(folder, tmp_path):
    copy = changed(folder, tmp_path / "copy", config={"quantization_config": 0})
    with pytest.raises(ValueError, match="from_preset"):
        kpe.load_quantized(copy)


GIVES_BACK = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
"""What was compiled before takes memory when it is read.

With oneDNN TensorFlow keeps what is free in a pool, without it in a heap.
"""
if keras.backend.backend() == "tensorflow":
    GIVES_BACK["TF_ENABLE_ONEDNN_OPTS"] = "0"
    GIVES_BACK["MALLOC_MMAP_THRESHOLD_"] = "1000000"


def memory(*arguments):
    """What `memory.py` prints."""
    script = str(readers.HERE / "memory.py")
    done = subprocess.run(
        [sys.executable, script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
        env={**os.environ, **GIVES_BACK},
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory(tmp_path):
    """50 M parameters: no more than a file, or the float8 model, is held."""
    written = memory("export", tmp_path / "folder")
    files = (tmp_path / "folder").glob("*.safetensors")
    shard = max(file.stat().st_size for file in files)
    assert written["peak"] < shard + 4 * written["largest"]
    size = sum(p.stat().st_size for p in (tmp_path / "folder").iterdir())
    assert size < 0.27 * written["float32"]
    loaded = memory("load", tmp_path / "folder")
    floats = memory("float")
    print(written, loaded, floats, sep="\n")
    assert loaded["stays"] < 0.35 * floats["stays"]
    assert loaded["peak"] < 0.45 * floats["peak"]
