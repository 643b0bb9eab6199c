"""Damaged files of frozen models: an error, and a live model untouched."""

import io
import json
import random
import shutil
import zipfile

import h5py
import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from steps import normal, numpy, observe_inputs

WEIGHTS = "model.weights.h5"
GROUP = "layers/dense/vars"
ENTRIES = ("bias", "kernel", "kernel.scale", "kernel.inputs_scale", "stored")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def static_model(seed=0):
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(5), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((6,)), *layers], name="model")
    kpe.convert(model, "float8/4_from_float32")
    observe_inputs(model, normal(8, 6, seed=seed))
    kpe.freeze(model, activations="static")
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("frozen") / "model.keras"
    static_model(seed=1).save(path)
    return path


@pytest.fixture(scope="module")
def live():
    return static_model()


def damaged(saved, folder, damage):
    """A copy of the file whose weights a function has changed."""
    path = folder / "model.keras"
    with zipfile.ZipFile(saved) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    weights = folder / WEIGHTS
    weights.write_bytes(contents[WEIGHTS])
    with h5py.File(weights, "a") as file:
        damage(file)
    contents[WEIGHTS] = weights.read_bytes()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    return path, weights


def refuses(live, path, weights, *told):
    """Whether every way of loading refuses a file and changes nothing."""
    before = [numpy(v) for v in live.weights]
    for load in (
        lambda: kpe.load_model(path),
        lambda: kpe.load_weights(live, weights),
        lambda: kpe.load_weights(live, path),
    ):
        with pytest.raises(ValueError) as error:
            load()
        for word in told:
            assert word in str(error.value)
    for value, variable in zip(before, live.weights, strict=True):
        np.testing.assert_array_equal(value, numpy(variable))


def changed(name, make):
    """Another value of an entry."""

    def damage(file):
        value = file[f"{GROUP}/{name}"][()]
        del file[f"{GROUP}/{name}"]
        file[f"{GROUP}/{name}"] = make(value)

    return damage


GONE = object()


def with_header(**changes):
    """Another header, with changes; GONE takes a field out."""

    def make(value):
        header = json.loads(value.tobytes())
        header.update(changes)
        header = {k: v for k, v in header.items() if v is not GONE}
        return np.frombuffer(json.dumps(header).encode(), "uint8")

    return changed("stored", make)


def one_is(value):
    def make(array):
        array = np.array(array)
        array.flat[0] = value
        return array

    return make


@pytest.mark.any_backend_except("kernel")
@pytest.mark.full_except("kernel", "kernel.inputs_scale", "kernel.scale")
@pytest.mark.parametrize("name", ENTRIES[:-1])
def test_an_entry_that_is_missing(live, saved, tmp_path, name):
    def damage(file):
        del file[f"{GROUP}/{name}"]

    refuses(live, *damaged(saved, tmp_path, damage), repr(name))


def test_a_header_that_is_missing(live, saved, tmp_path):
    def damage(file):
        del file[f"{GROUP}/stored"]

    refuses(live, *damaged(saved, tmp_path, damage))


WRONG = {
    "NaN codes": ("kernel", one_is(0x7F)),
    "negative NaN codes": ("kernel", one_is(0xFF)),
    "float codes": ("kernel", lambda x: x.astype("float32")),
    "signed codes": ("kernel", lambda x: x.view("int8")),
    "codes turned": ("kernel", lambda x: x.T.copy()),
    "codes cut": ("kernel", lambda x: x[:-1]),
    "codes flat": ("kernel", lambda x: x.reshape(-1)),
    "NaN scale": ("kernel.scale", one_is(np.nan)),
    "infinite scale": ("kernel.scale", one_is(np.inf)),
    "scale 0": ("kernel.scale", one_is(0)),
    "negative scale": ("kernel.scale", one_is(-1)),
    "double scale": ("kernel.scale", lambda x: x.astype("float64")),
    "one scale": ("kernel.scale", lambda x: x[:, :1]),
    "flat scale": ("kernel.scale", lambda x: x.reshape(-1)),
    "inputs NaN": ("kernel.inputs_scale", lambda x: np.float32(np.nan)),
    "inputs 0": ("kernel.inputs_scale", lambda x: np.float32(0)),
    "inputs negative": ("kernel.inputs_scale", lambda x: -x),
    "inputs of many": ("kernel.inputs_scale", lambda x: np.ones(2, "float32")),
    "bias cut": ("bias", lambda x: x[:-1]),
    "bias of text": ("bias", lambda x: np.array([b"x"] * len(x))),
    "header empty": ("stored", lambda x: x[:0]),
    "header cut": ("stored", lambda x: x[:-3]),
    "header of numbers": ("stored", lambda x: x.astype("float32")),
    "header of no text": ("stored", lambda x: np.full(5, 255, "uint8")),
    "header a list": ("stored", lambda x: np.frombuffer(b"[1]", "uint8")),
    "header a number": ("stored", lambda x: np.frombuffer(b"1", "uint8")),
    "header null": ("stored", lambda x: np.frombuffer(b"null", "uint8")),
}


@pytest.mark.any_backend_except("header a list")
@pytest.mark.full_except("header a list", "header a number", "header empty")
@pytest.mark.parametrize("kind", WRONG)
def test_an_entry_that_is_wrong(live, saved, tmp_path, kind):
    path, weights = damaged(saved, tmp_path, changed(*WRONG[kind]))
    refuses(live, path, weights)


HEADERS = {
    "version of text": dict(version="1"),
    "no version": dict(version=GONE),
    "version 0": dict(version=0),
    "version true": dict(version=True),
    "no names": dict(names=GONE),
    "names a text": dict(names="bias"),
    "names of lists": dict(names=[["bias"], ["kernel"]]),
    "too few names": dict(names=["bias"]),
    "a name twice": dict(names=["kernel", "kernel"]),
    "other names": dict(names=["bias", "../kernel"]),
    "no summed": dict(summed=GONE),
    "summed a list": dict(summed=["kernel"]),
    "summed a number": dict(summed={"kernel": 0}),
    "summed text": dict(summed={"kernel": ["0"]}),
    "other axes": dict(summed={"kernel": [1]}),
    "axes too many": dict(summed={"kernel": [7]}),
    "bias is stored": dict(summed={"kernel": [0], "bias": [0]}),
    "nothing stored": dict(summed={}),
    "weights": dict(weights="float8"),
    "weights a list": dict(weights=["float8_e4m3fn"]),
    "per": dict(per="row"),
    "activations": dict(activations="sometimes"),
    "no lora": dict(lora=GONE),
    "lora": dict(lora="yes"),
    "lora without rank": dict(lora={"alpha": 1}),
    "lora of text": dict(lora={"rank": "a", "alpha": 1}),
    "lora of rank 0": dict(lora={"rank": 0, "alpha": 1}),
}


@pytest.mark.any_backend_except("no names")
@pytest.mark.full_except("no names", "summed a list", "version true")
@pytest.mark.parametrize("kind", HEADERS)
def test_a_header_that_says_nonsense(live, saved, tmp_path, kind):
    path, weights = damaged(saved, tmp_path, with_header(**HEADERS[kind]))
    refuses(live, path, weights)


def test_a_newer_version_names_the_update(live, saved, tmp_path):
    path, weights = damaged(saved, tmp_path, with_header(version=2))
    refuses(live, path, weights, "newer version", "Update keras_policy_ext")


@pytest.mark.parametrize("kind", ["keras", "weights"])
def test_truncated_files(live, saved, tmp_path, kind):
    path, weights = damaged(saved, tmp_path, lambda file: None)
    place = path if kind == "keras" else weights
    content, rng = place.read_bytes(), random.Random(0)
    before = [numpy(v) for v in live.weights]
    for _ in range(12):
        place.write_bytes(content[: rng.randrange(len(content))])
        with pytest.raises((ValueError, OSError)):
            kpe.load_weights(live, place)
        if kind == "keras":
            with pytest.raises((ValueError, OSError)):
                kpe.load_model(place)
    for value, variable in zip(before, live.weights, strict=True):
        np.testing.assert_array_equal(value, numpy(variable))


@pytest.mark.full
@pytest.mark.any_backend
def test_bytes_that_are_flipped_are_told_or_load_as_codes(
    live, saved, tmp_path
):
    """Every code but NaN is a number: what is loaded is then what is there."""
    _, weights = damaged(saved, tmp_path, lambda file: None)
    content, rng = weights.read_bytes(), random.Random(1)
    for _ in range(60):
        place = rng.randrange(len(content))
        changed = content[place] ^ rng.randrange(1, 256)
        weights.write_bytes(
            content[:place] + bytes([changed]) + content[place + 1 :]
        )
        before = [numpy(v) for v in live.weights]
        try:
            kpe.load_weights(live, weights)
        except (ValueError, OSError):
            for value, variable in zip(before, live.weights, strict=True):
                np.testing.assert_array_equal(value, numpy(variable))
            continue
        with h5py.File(io.BytesIO(weights.read_bytes())) as file:
            for number, layer in enumerate(live.layers):
                name = "dense" + (f"_{number}" if number else "")
                group = file[f"layers/{name}/vars"]
                np.testing.assert_array_equal(
                    numpy(layer._kernel.codes), group["kernel"][()]
                )


def test_dequantizing_refuses_what_loading_refuses(saved, tmp_path):
    path, _ = damaged(saved, tmp_path, changed("kernel", one_is(0x7F)))
    layers = [keras.layers.Dense(5), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((6,)), *layers], name="model")
    before = [numpy(v) for v in model.weights]
    with pytest.raises(ValueError, match="codes of NaN"):
        kpe.load_weights(model, path, dequantize=True)
    with pytest.raises(ValueError):
        kpe.load_weights(model, path, as_saved=True)
    for value, variable in zip(before, model.weights, strict=True):
        np.testing.assert_array_equal(value, numpy(variable))
    assert not any(getattr(x, "is_frozen", False) for x in model.layers)


def test_the_file_is_whole_where_nothing_is_damaged(saved, tmp_path):
    """Else the tests above would not show anything."""
    path, weights = damaged(saved, tmp_path, lambda file: None)
    expected = static_model(seed=1)
    _, same = damaged(saved, tmp_path, with_header())
    for load in (
        lambda: kpe.load_model(path),
        lambda: _loaded(weights),
        lambda: _loaded(same),
    ):
        for one, other in zip(load().weights, expected.weights, strict=True):
            np.testing.assert_array_equal(numpy(one), numpy(other))
    shutil.rmtree(tmp_path)


def _loaded(weights):
    model = static_model()
    kpe.load_weights(model, weights)
    return model
