"""Two hundred damaged files: an error that says so, or what the file says.

Each is one file with one thing changed. To load it ends in a ValueError (or
an OSError of the file system), and the live model is as it was, bit for bit;
or the weights are those that Keras reads in the file itself.
"""

import json
import random
import zipfile

import h5py
import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from converted_models import Block
from steps import numpy

POLICY = "float8/4_from_float32"
SHAPE = (5, 4)
ALLOWED = (ValueError, OSError)
SEED = 20261122
WEIGHTS = "model.weights.h5"

# What Keras says of layers that it skips is not what is looked at here.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def small_model(seed):
    """Two layers and a user's block, all in float8, with made-up states."""
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(4, name="first"), Block(4, name="block")]
    model = keras.Sequential([keras.Input(SHAPE), *layers])
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    kpe.convert(model, POLICY)
    model.optimizer.build(model.trainable_variables)
    rng = np.random.default_rng(seed)
    for variable in [*model.weights, *model.optimizer.variables[2:]]:
        value = rng.uniform(0.1, 1, size=tuple(variable.shape))
        if variable.path.endswith("_amax"):
            value[:, 0], value[:, 1:9] = -1, 0
        variable.assign(value)
    return model


# Ways of damage: each takes the content of a file and a source of chance


def truncated(content, rng):
    return content[: rng.randrange(len(content))]


def byte_flipped(content, rng):
    place = rng.randrange(len(content))
    changed = content[place] ^ rng.randrange(1, 256)
    return content[:place] + bytes([changed]) + content[place + 1 :]


def bits_flipped(content, rng):
    damaged = bytearray(content)
    for _ in range(20):
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def zeroed(content, rng):
    size = rng.randrange(1, 4096)
    place = rng.randrange(len(content) - size)
    return content[:place] + bytes(size) + content[place + size :]


def swapped(content, rng):
    size = rng.randrange(16, 2048)
    a, b = sorted(rng.sample(range(len(content) // size), 2))
    a, b = a * size, b * size
    parts = content[:a], content[b : b + size], content[a + size : b]
    return b"".join((*parts, content[a : a + size], content[b + size :]))


def appended(content, rng):
    return content + rng.randbytes(rng.randrange(1, 4096))


def header_damaged(content, rng):
    """Where a format says how the rest is to be read."""
    place = rng.randrange(min(512, len(content)))
    return content[:place] + rng.randbytes(4) + content[place + 4 :]


BYTES = (
    truncated,
    byte_flipped,
    bits_flipped,
    zeroed,
    swapped,
    appended,
    header_damaged,
)


def state_keys(file):
    found = []

    def visit(name, item):
        if "float8_state/vars/" in name and isinstance(item, h5py.Dataset):
            found.append(name)

    file.visititems(visit)
    return sorted(found)


def replaced(pick, make):
    """Another value for one entry of a state."""

    def damage(file, rng):
        keys = [key for key in state_keys(file) if pick in key]
        key = rng.choice(keys)
        value = make(file[key][()])
        del file[key]
        file[key] = value

    return damage


def entry_removed(file, rng):
    del file[rng.choice(state_keys(file))]


def group_removed(file, rng):
    key = rng.choice(state_keys(file))
    del file[key.rpartition("/")[0]]


def weight_removed(file, rng):
    del file["layers/dense/vars/0" if "layers/dense" in file else "_"]


def renamed(file, rng):
    key = rng.choice(state_keys(file))
    file.move(key, key + "x")


TEXTS = ["", "float9", "float8/0_from_float32", "float32", "\x00", "x" * 300]
ENTRIES = {
    "NaN": replaced("amax_history", lambda x: x * np.nan),
    "infinite": replaced("amax_history", lambda x: x * np.inf),
    "negative": replaced("amax_history", lambda x: -x - 1),
    "NaN scale": replaced("scale", lambda x: np.float32(np.nan)),
    "negative scale": replaced("scale", lambda x: np.float32(-1)),
    "wide": replaced("amax_history", lambda x: np.ones((2, 2), "float32")),
    "empty": replaced("amax_history", lambda x: x[:0]),
    "scalar": replaced("amax_history", lambda x: x[0]),
    "vector": replaced("scale", lambda x: np.ones(3, "float32")),
    "integers": replaced("amax_history", lambda x: x.astype("int32")),
    "text": replaced("scale", lambda x: "one"),
    "complex": replaced("scale", lambda x: np.complex64(1)),
    "longer": replaced("amax_history", lambda x: np.tile(x, 3)),
    "newer": replaced("format_version", lambda x: np.int32(2)),
    "version 0": replaced("format_version", lambda x: np.int32(0)),
    "text version": replaced("format_version", lambda x: "1"),
    "no entry": entry_removed,
    "no group": group_removed,
    "no weight": weight_removed,
    "renamed": renamed,
    **{
        f"policy {text!r:.20}": replaced(
            "policy",
            lambda x, text=text: np.frombuffer(text.encode(), "uint8"),
        )
        for text in TEXTS
    },
    "policy no UTF-8": replaced("policy", lambda x: np.full(9, 255, "uint8")),
    "policy floats": replaced("policy", lambda x: np.ones(9, "float32")),
}


def damages():
    """(name, kind of file, damage), two hundred of them."""
    found = []
    for kind in ("keras", "weights.h5"):
        found += [(f, kind) for f in BYTES for _ in range(10)]
        found += [(f, kind) for f in ENTRIES.values()]
    found += [(truncated, "keras")] * 4
    return found


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A model and its two files."""
    folder = tmp_path_factory.mktemp("good")
    model = small_model(1)
    model.save(folder / "good.keras")
    model.save_weights(folder / "good.weights.h5")
    return folder


@pytest.fixture(scope="module")
def live():
    """The model that files are loaded into, and its own values."""
    model = small_model(2)
    return model, [numpy(v).copy() for v in variables_of(model)]


def damaged_file(damage, kind, good, folder, rng, number):
    """A damaged copy; entries are changed in whole files.

    Each has a path of its own: Keras leaves a file open where it has failed.
    """
    source, path = good / f"good.{kind}", folder / f"{number}.{kind}"
    if damage in BYTES:
        path.write_bytes(damage(source.read_bytes(), rng))
    elif kind == "weights.h5":
        path.write_bytes(source.read_bytes())
        with h5py.File(path, "a") as file:
            damage(file, rng)
    else:
        write_archive(source, path, damage, folder / WEIGHTS, rng)
    return path


def write_archive(source, path, damage, weights, rng):
    with (
        zipfile.ZipFile(source) as archive,
        zipfile.ZipFile(path, "w") as changed,
    ):
        for name in archive.namelist():
            content = archive.read(name)
            if name == WEIGHTS:
                weights.write_bytes(content)
                with h5py.File(weights, "a") as file:
                    damage(file, rng)
                content = weights.read_bytes()
            changed.writestr(name, content)


def variables_of(model):
    return [*model.variables, *model.optimizer.variables]


def everything(model):
    policies = [
        layer.dtype_policy
        for layer in model._flatten_layers()
        if layer.name != "float8_state"
    ]
    return [numpy(v).tobytes() for v in variables_of(model)], policies


def outcome(load, path):
    """What came of it: an allowed error, or what was loaded."""
    try:
        return None, load(path)
    except ALLOWED as error:
        return error, None


def read_by_keras(path):
    """The weights without state, as Keras reads them in this file."""
    other = keras.Sequential(
        [
            keras.Input(SHAPE),
            keras.layers.Dense(4, name="first"),
            Block(4, name="block"),
        ]
    )
    other.load_weights(path)
    return [numpy(v).tobytes() for v in other.weights]


def own_weights(model):
    return [
        numpy(v).tobytes()
        for v in model.weights
        if not v.path.endswith("_amax")
    ]


NUMBERED = list(enumerate(damages()))
PARTS = [NUMBERED[start::20] for start in range(20)]


def test_there_are_two_hundred():
    assert len(NUMBERED) >= 200


@pytest.mark.any_backend_except("1")
@pytest.mark.full_except("1")
@pytest.mark.parametrize("part", PARTS, ids=range(len(PARTS)))
def test_a_damaged_file_is_refused_or_read_as_it_is(part, good, live, tmp_path):
    live, values = live
    before = everything(live)
    for number, (damage, kind) in part:
        rng = random.Random(SEED + number)
        path = damaged_file(damage, kind, good, tmp_path, rng, number)
        said = f"damage {number}, {damage}, {kind}"
        error, _ = outcome(lambda path: kpe.load_weights(live, path), path)
        if error is None:
            assert own_weights(live) == read_by_keras(path), said
            for variable, value in zip(variables_of(live), values, strict=True):
                variable.assign(value)
        assert everything(live) == before, said
        assert error is None or str(error), said
        if kind == "keras":
            error, model = outcome(kpe.load_model, path)
            assert error is None or str(error), said
            if error is None:
                assert own_weights(model) == read_by_keras(path), said


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"class_name": 1}',
        json.dumps({"module": "keras", "class_name": "Sequential"}),
    ],
)
def test_a_config_that_is_none_is_refused(text, good, tmp_path):
    path = tmp_path / "damaged.keras"
    with (
        zipfile.ZipFile(good / "good.keras") as archive,
        zipfile.ZipFile(path, "w") as changed,
    ):
        for name in archive.namelist():
            content = archive.read(name)
            changed.writestr(name, text if name == "config.json" else content)
    with pytest.raises(ALLOWED):
        kpe.load_model(path)
