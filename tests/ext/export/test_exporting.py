"""Arguments of `export`, refusals, and the report."""

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from keras_policy_ext.ext.export import readers, safetensors_files
from keras_policy_ext.ext.export.exported_kernels import Scheme
from keras_policy_ext.ext.export.readers import Reader


def dense(*units):
    layers = [keras.layers.Dense(n, name=f"dense_{n}") for n in units]
    return keras.Sequential([keras.Input((4,)), *layers], name="m")


def refused(words, *args, error=ValueError, **kwargs):
    with pytest.raises(error, match=words) as caught:
        kpe.export(*args, **kwargs)
    text = str(caught.value)
    assert "Received: " in text
    assert "Allowed: " in text


def test_a_format_that_is_none(tmp_path):
    refused("'compressed-tensors'", dense(3), tmp_path / "out", "gguf")
    assert not list(tmp_path.iterdir())


def test_an_argument_that_is_none(tmp_path):
    path = tmp_path / "out"
    refused("'opset'", dense(3), path, "safetensors", opset=21, error=TypeError)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weights", "int5"),
        ("granularity", "row"),
        ("activations", "sometimes"),
        ("activations", "static"),
        ("include", "no such layer"),
    ],
)
def test_values_that_are_not_allowed(name, value, tmp_path):
    path = tmp_path / "out"
    refused(r"\.", dense(3), path, "safetensors", **{name: value})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("format", ["compressed-tensors", "fp8", "modelopt"])
def test_only_language_models_of_keras_hub_have_a_folder(format, tmp_path):
    refused(
        "format='safetensors'",
        dense(3),
        tmp_path / "o",
        format,
        error=TypeError,
    )


def test_a_model_that_is_not_built(tmp_path):
    unbuilt = keras.Sequential([keras.layers.Dense(2)])
    with pytest.raises(ValueError, match=r"built|weights"):
        kpe.export(unbuilt, tmp_path / "out", "safetensors")
    with pytest.raises(TypeError, match="not a Keras model"):
        kpe.export("model.keras", tmp_path / "out", "safetensors")


@pytest.mark.parametrize(
    ("name", "frozen", "asked"),
    [
        ("weights", "float8_e5m2", "float8_e4m3fn"),
        ("granularity", "tensor", "channel"),
    ],
)
def test_frozen_kernels_are_not_stored_anew(name, frozen, asked, tmp_path):
    model = dense(3)
    kpe.freeze(model, **{name: frozen})
    refused("Freeze", model, tmp_path / "o", "safetensors", **{name: asked})
    report = kpe.export(model, tmp_path / "out", "safetensors")
    assert frozen in report.scheme.split(",")[0]


def test_kernels_that_are_frozen_in_two_ways_are_refused(tmp_path):
    model = dense(3, 5)
    kpe.freeze(model, include="dense_3")
    kpe.freeze(model, include="dense_5", granularity="tensor")
    refused("'channel', 'tensor'", model, tmp_path / "out", "safetensors")
    kpe.export(model, tmp_path / "out", "safetensors", exclude="dense_5")


def test_inputs_are_quantized_as_the_frozen_layers_do(tmp_path):
    model = dense(3)
    kpe.freeze(model, activations="dynamic")
    scheme = kpe.export(model, tmp_path / "a", "safetensors").scheme
    assert scheme.endswith("inputs dynamic")
    none = kpe.export(model, tmp_path / "b", "safetensors", activations=None)
    assert none.scheme.endswith("inputs not quantized")


def test_the_report_says_what_was_written(tmp_path):
    model = dense(64, 5)
    path = tmp_path / "out"
    report = kpe.export(model, path, "safetensors", exclude="dense_5")
    text = str(report)
    assert str(path) in text.replace("\n", "")
    assert "m/dense_64/kernel" in text
    assert "exclude" in text
    by_name = {w.name: w for w in report.weights}
    assert by_name["m/dense_64/kernel"].nbytes == 4 * 64 + 4 * 64
    assert by_name["m/dense_5/kernel"].nbytes == 4 * 64 * 5
    assert report.nbytes == sum(w.nbytes for w in report.weights)
    # Beside them, the file has a header.
    assert 0 < path.stat().st_size - report.nbytes < 2000
    assert "m/dense_5/bias" in report.table(full=True)
    assert report.as_dict()["weights"][0]["dtype"] == "float8_e4m3fn"


def test_the_report_says_that_adapters_are_merged(tmp_path):
    model = dense(3, 5, 4)
    assert kpe.export(model, tmp_path / "a", "safetensors").notes == ()
    model.get_layer("dense_4").enable_lora(1)
    report = kpe.export(model, tmp_path / "b", "safetensors")
    merged = "Adapters merged into 1 kernel; "
    assert report.notes == (f"{merged}the sum is rounded.",)
    report = kpe.export(model, tmp_path / "c", "safetensors", exclude=".*_4")
    assert report.notes == (f"{merged}the sum is in floats.",)
    kpe.freeze(model)
    model.get_layer("dense_3").enable_lora(1)
    report = kpe.export(model, tmp_path / "d", "safetensors")
    told = "Adapters merged into 2 kernels; these were rounded again."
    assert report.notes == (told,) and str(report).endswith(told)


def test_the_report_of_onnx_says_so_too(tmp_path):
    pytest.importorskip("onnx", reason="the writer needs it")
    model = dense(3)
    kpe.freeze(model)
    model.get_layer("dense_3").enable_lora(1)
    report = kpe.export(model, tmp_path / "a.onnx", "onnx")
    told = "Adapters merged into 1 kernel; it was rounded again."
    assert report.notes[-1] == told


@pytest.mark.any_backend
@pytest.mark.parametrize(
    ("given", "size"),
    [(7, 7), ("12", 12), ("5GB", 5 * 10**9), ("1.5 MB", 1_500_000)],
)
def test_sizes_of_files(given, size):
    assert safetensors_files.size_of(given) == size


@pytest.mark.any_backend
@pytest.mark.parametrize("given", [0, -1, "", "GB", "5TB", True, None, [5]])
def test_sizes_that_are_none(given):
    with pytest.raises(ValueError, match="'500MB'"):
        safetensors_files.size_of(given)


def scheme(granularity, activations=None, weights="float8_e4m3fn"):
    return Scheme(
        weights=weights, granularity=granularity, activations=activations
    )


@pytest.mark.any_backend
@pytest.mark.parametrize(
    ("rows", "columns", "fits"),
    [
        (128, 256, True),
        (64, 100, True),
        (192, 128, False),
        (128, 130, False),
        (127, 129, False),
    ],
)
def test_blocks_that_fp8_reads(rows, columns, fits):
    reader = Reader("fp8", "Llama3Backbone", scheme("block"))
    assert (reader.why_float(rows, columns) is None) == fits
    whole = Reader("fp8", "Llama3Backbone", scheme("tensor"))
    assert whole.why_float(rows, columns) is None
    other = Reader("compressed-tensors", "Llama3Backbone", scheme("block"))
    assert other.why_float(rows, columns) is None


@pytest.mark.any_backend
@pytest.mark.parametrize("format", readers.USUAL)
def test_the_usual_scheme_of_a_format_is_one_that_it_takes(format):
    Reader(format, "Llama3Backbone", readers.USUAL[format]).check()


@pytest.mark.any_backend
@pytest.mark.parametrize(
    ("format", "family", "wrong"),
    [
        ("compressed-tensors", "Llama3Backbone", scheme("row")),
        ("compressed-tensors", "GPT2Backbone", scheme("block")),
        ("compressed-tensors", "GPT2Backbone", scheme("tensor", "dynamic")),
        ("fp8", "GPT2Backbone", scheme("block")),
        ("fp8", "Llama3Backbone", scheme("channel")),
        ("fp8", "Llama3Backbone", scheme("block", "static")),
        ("modelopt", "Llama3Backbone", scheme("channel", "static")),
        ("modelopt", "Llama3Backbone", scheme("tensor", "dynamic")),
        (
            "modelopt",
            "Llama3Backbone",
            scheme("tensor", "static", "float8_e5m2"),
        ),
    ],
)
def test_schemes_that_a_format_does_not_take(format, family, wrong):
    with pytest.raises(ValueError, match="does not support this model"):
        Reader(format, family, wrong).check()


def test_onnx_is_written_by_its_own_room(tmp_path, monkeypatch):
    onnx = pytest.importorskip(
        "keras_policy_ext.ext.onnx", reason="the writer is there"
    )
    seen = {}

    def write(model, path, **options):
        seen.update(options, model=model, path=path)
        return "written"

    monkeypatch.setattr(onnx, "write", write)
    model = dense(3)
    made = kpe.export(model, "x.onnx", "onnx", granularity="tensor", opset=21)
    assert made == "written"
    assert (seen["model"], seen["path"]) == (model, "x.onnx")
    assert (seen["granularity"], seen["opset"]) == ("tensor", 21)


def test_export_leaves_the_model_as_it_is(tmp_path):
    model = dense(3)
    kpe.convert(model, "delayed")
    x = np.ones((2, 4), "float32")
    before = keras.ops.convert_to_numpy(model(x))
    kpe.export(model, tmp_path / "out", "safetensors")
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(model(x)), before)
