"""What a layer has in a file, damaged: refused as a whole.

Row A11 of the measured facts.
"""

import io
import json
import random
import zipfile
from collections.abc import Callable
from typing import NamedTuple

import h5py
import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from damages import added, change, of_amaxes, removed, replaced, unchanged
from saving_models import LENGTH, matrices, user_model
from steps import normal, numpy, observe_inputs

WEIGHTS = "model.weights.h5"

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


A_SCALE, HISTORY = "1.kernel.scale", "1.kernel.amax_history"
PART = "1.kernel.observed"
OF_STATES = {
    **of_amaxes([A_SCALE], [HISTORY], LENGTH),
    "no version": removed("format_version"),
    "version of zero": replaced("format_version", np.int32(0)),
    "fractional version": replaced("format_version", np.float32(1.5)),
    "vector of versions": replaced("format_version", np.array([1, 1])),
    "no history": removed(HISTORY),
    "no scale": removed(A_SCALE),
    "no operand": removed(A_SCALE, HISTORY),
    "more than all observed": added(PART, np.float32(1.5)),
    "less than nothing observed": added(PART, np.float32(-0.5)),
    "NaN of it observed": added(PART, np.float32(np.nan)),
    "a count of what was observed": added(PART, np.int32(1)),
    "vector of parts observed": added(PART, np.ones(3, "float32")),
}

GONE = object()


def header(**changes):
    """Another header, with changes; GONE takes a field out."""

    def make(value):
        fields = {**json.loads(value.tobytes()), **changes}
        fields = {k: v for k, v in fields.items() if v is not GONE}
        return np.frombuffer(json.dumps(fields).encode(), "uint8")

    return replaced("stored", make)


def text(content):
    return replaced("stored", np.frombuffer(content, "uint8"))


def one_is(value):
    def make(array):
        array = np.array(array)
        array.flat[0] = value
        return array

    return make


def frozen_model(seed):
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(5), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((6,)), *layers], name="model")
    kpe.convert(model, "float8/4_from_float32")
    observe_inputs(model, normal(8, 6, seed=seed))
    kpe.freeze(model, activations="static")
    return model


ENTRIES = ("bias", "kernel", "kernel.scale", "kernel.inputs_scale")
ABSENT = {f"no {name}": name for name in ENTRIES}
SCALE, INPUTS = ENTRIES[2:]
OF_FROZEN_LAYERS = {
    **{case: removed(name) for case, name in ABSENT.items()},
    "no header": removed("stored"),
    "NaN codes": replaced("kernel", one_is(0x7F)),
    "negative NaN codes": replaced("kernel", one_is(0xFF)),
    "float codes": replaced("kernel", lambda x: x.astype("float32")),
    "signed codes": replaced("kernel", lambda x: x.view("int8")),
    "codes turned": replaced("kernel", lambda x: x.T.copy()),
    "codes cut": replaced("kernel", lambda x: x[:-1]),
    "codes flat": replaced("kernel", lambda x: x.reshape(-1)),
    "NaN scale": replaced(SCALE, one_is(np.nan)),
    "infinite scale": replaced(SCALE, one_is(np.inf)),
    "scale 0": replaced(SCALE, one_is(0)),
    "negative scale": replaced(SCALE, one_is(-1)),
    "double scale": replaced(SCALE, lambda x: x.astype("float64")),
    "one scale": replaced(SCALE, lambda x: x[:, :1]),
    "flat scale": replaced(SCALE, lambda x: x.reshape(-1)),
    "inputs NaN": replaced(INPUTS, np.float32(np.nan)),
    "inputs 0": replaced(INPUTS, np.float32(0)),
    "inputs negative": replaced(INPUTS, lambda x: -x),
    "inputs of many": replaced(INPUTS, np.ones(2, "float32")),
    "bias cut": replaced("bias", lambda x: x[:-1]),
    "bias of text": replaced("bias", lambda x: np.array([b"x"] * len(x))),
    "header empty": replaced("stored", lambda x: x[:0]),
    "header cut": replaced("stored", lambda x: x[:-3]),
    "header of numbers": replaced("stored", lambda x: x.astype("float32")),
    "header of no text": text(b"\xff" * 5),
    "header a list": text(b"[1]"),
    "header a number": text(b"1"),
    "header null": text(b"null"),
    "version of text": header(version="1"),
    "no version": header(version=GONE),
    "version 0": header(version=0),
    "version true": header(version=True),
    "no names": header(names=GONE),
    "names a text": header(names="bias"),
    "names of lists": header(names=[["bias"], ["kernel"]]),
    "too few names": header(names=["bias"]),
    "a name twice": header(names=["kernel", "kernel"]),
    "other names": header(names=["bias", "../kernel"]),
    "no summed": header(summed=GONE),
    "summed a list": header(summed=["kernel"]),
    "summed a number": header(summed={"kernel": 0}),
    "summed text": header(summed={"kernel": ["0"]}),
    "other axes": header(summed={"kernel": [1]}),
    "axes too many": header(summed={"kernel": [7]}),
    "bias is stored": header(summed={"kernel": [0], "bias": [0]}),
    "nothing stored": header(summed={}),
    "weights": header(weights="float8"),
    "weights a list": header(weights=["float8_e4m3fn"]),
    "per": header(per="row"),
    "activations": header(activations="sometimes"),
    "no lora": header(lora=GONE),
    "lora": header(lora="yes"),
    "lora without rank": header(lora={"alpha": 1}),
    "lora of text": header(lora={"rank": "a", "alpha": 1}),
    "lora of rank 0": header(lora={"rank": 0, "alpha": 1}),
}


class Kind(NamedTuple):
    """What is in a file, and how it is loaded."""

    group: str  # In the file.
    damages: dict
    model: Callable  # Makes one, from a seed.
    kept: Callable  # The variables that do not change where it is refused.
    told: str
    ways: Callable


KINDS = {
    "state": Kind(
        group="layers/gated/float8_state/vars",
        damages=OF_STATES,
        model=user_model,
        kept=matrices,
        told=r"state of '.*gated.*is damaged",
        ways=lambda model, weights, file: [lambda: model.load_weights(weights)],
    ),
    "frozen": Kind(
        group="layers/dense/vars",
        damages=OF_FROZEN_LAYERS,
        model=frozen_model,
        kept=lambda model: model.weights,
        told="",
        ways=lambda model, weights, file: [
            lambda: kpe.load_model(file),
            lambda: kpe.load_weights(model, weights),
            lambda: kpe.load_weights(model, file),
        ],
    ),
}
CASES = [(kind, case) for kind, of in KINDS.items() for case in of.damages]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The path of a good `.keras` file, and a live model, of each kind."""
    folder = tmp_path_factory.mktemp("good")
    found = {}
    for name, kind in KINDS.items():
        found[name] = folder / f"{name}.keras", kind.model(seed=2)
        kind.model(seed=1).save(found[name][0])
    return found


def damaged(good, folder, group, damage):
    """Copy a file, damaged; return its path, and that of its weights."""
    weights, file = folder / WEIGHTS, folder / "model.keras"
    with zipfile.ZipFile(good) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    weights.write_bytes(contents[WEIGHTS])
    change(weights, group, damage)
    contents[WEIGHTS] = weights.read_bytes()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    return weights, file


def refuses(kind, model, files, told):
    """Every way of loading refuses a file, and has changed nothing."""
    with unchanged(kind.kept(model)):
        for load in kind.ways(model, *files):
            with pytest.raises(ValueError, match=told):
                load()


@pytest.mark.any_backend_except(
    "state-NaN scale",
    "frozen-no kernel",
    "frozen-no header",
    "frozen-header a list",
    "frozen-no names",
)
@pytest.mark.full_except(
    "state-NaN scale",
    "state-more than all observed",
    "state-vector of versions",
    "frozen-no kernel",
    "frozen-no kernel.inputs_scale",
    "frozen-no kernel.scale",
    "frozen-no header",
    "frozen-header a list",
    "frozen-header a number",
    "frozen-header empty",
    "frozen-no names",
    "frozen-summed a list",
    "frozen-version true",
)
@pytest.mark.parametrize(
    ("name", "case"), CASES, ids=[f"{kind}-{case}" for kind, case in CASES]
)
def test_damage_is_refused_and_changes_nothing(name, case, saved, tmp_path):
    kind, (good, model) = KINDS[name], saved[name]
    files = damaged(good, tmp_path, kind.group, kind.damages[case])
    told = repr(ABSENT[case]) if case in ABSENT else kind.told
    refuses(kind, model, files, told)


@pytest.mark.parametrize("name", KINDS)
def test_a_newer_version_names_the_update(name, saved, tmp_path):
    kind, (good, model) = KINDS[name], saved[name]
    newer = {
        "state": replaced("format_version", np.int32(2)),
        "frozen": header(version=2),
    }
    files = damaged(good, tmp_path, kind.group, newer[name])
    refuses(kind, model, files, r"newer version.*Update keras_policy_ext")


@pytest.mark.parametrize("name", KINDS)
def test_the_file_is_whole_where_nothing_is_damaged(name, saved, tmp_path):
    """Else the tests above would not show anything."""
    kind, (good, _) = KINDS[name], saved[name]
    expected = kind.model(seed=1)
    same = header() if name == "frozen" else lambda group: None
    files = damaged(good, tmp_path, kind.group, same)
    loaded = [kpe.load_model(files[1]), kind.model(seed=2)]
    kpe.load_weights(loaded[1], files[0])
    for model in loaded:
        for one, other in zip(model.weights, expected.weights, strict=True):
            np.testing.assert_array_equal(numpy(one), numpy(other))


GROUP = KINDS["frozen"].group


@pytest.mark.parametrize("number", [0, 1], ids=["weights", "keras"])
def test_truncated_files_of_frozen_models(number, saved, tmp_path):
    good, live = saved["frozen"]
    path = damaged(good, tmp_path, GROUP, removed())[number]
    content, rng = path.read_bytes(), random.Random(0)
    with unchanged(live.weights):
        for _ in range(12):
            path.write_bytes(content[: rng.randrange(len(content))])
            with pytest.raises((ValueError, OSError)):
                kpe.load_weights(live, path)
            if path.suffix == ".keras":
                with pytest.raises((ValueError, OSError)):
                    kpe.load_model(path)


@pytest.mark.full
@pytest.mark.any_backend
def test_bytes_that_are_flipped_are_told_or_load_as_codes(saved, tmp_path):
    """Every code but NaN is a number: what is loaded is then what is there."""
    good, live = saved["frozen"]
    weights, _ = damaged(good, tmp_path, GROUP, removed())
    content, rng = weights.read_bytes(), random.Random(1)
    for _ in range(60):
        place = rng.randrange(len(content))
        flipped = content[place] ^ rng.randrange(1, 256)
        weights.write_bytes(
            content[:place] + bytes([flipped]) + content[place + 1 :]
        )
        before = [numpy(v) for v in live.weights]
        try:
            kpe.load_weights(live, weights)
        except (ValueError, OSError):
            for value, variable in zip(before, live.weights, strict=True):
                np.testing.assert_array_equal(value, numpy(variable))
            continue
        with h5py.File(io.BytesIO(weights.read_bytes())) as file:
            for layer, name in zip(live.layers, NAMES, strict=True):
                codes = file[f"layers/{name}/vars/kernel"][()]
                np.testing.assert_array_equal(numpy(layer._kernel.codes), codes)


NAMES = "dense", "dense_1"


def test_dequantizing_refuses_what_loading_refuses(saved, tmp_path):
    nan = OF_FROZEN_LAYERS["NaN codes"]
    _, path = damaged(saved["frozen"][0], tmp_path, GROUP, nan)
    layers = [keras.layers.Dense(5), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((6,)), *layers], name="model")
    with unchanged(model.weights):
        with pytest.raises(ValueError, match="codes of NaN"):
            kpe.load_weights(model, path, dequantize=True)
        with pytest.raises(ValueError):
            kpe.load_weights(model, path, as_saved=True)
    assert not any(getattr(x, "is_frozen", False) for x in model.layers)
