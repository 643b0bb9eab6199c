"""Files made to do harm: a `ValueError`, little memory, nothing elsewhere."""

import io
import json
import pathlib
import resource
import struct
import warnings
import zipfile
import zlib

import h5py
import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from keras_policy_ext.ext.export import plain, safetensors_files
from keras_policy_ext.ext.export.loading import QuantizedFolder
from keras_policy_ext.files import input_files

WEIGHTS = "model.weights.h5"
CODES, SCALE = "layers/dense/vars/kernel", "layers/dense/vars/kernel.scale"
HEADER = "layers/dense/vars/stored"
STATE = "layers/dense_1/float8_state/vars"
MOST = 200 * 2**10  # in KiB, as `ru_maxrss` counts


@pytest.fixture(scope="module")
def members(tmp_path_factory):
    """What is in a file with a frozen layer and one in float8."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(8, name="a"), keras.layers.Dense(4, name="b")]
    model = keras.Sequential([keras.Input((6,)), *layers])
    kpe.freeze(model, include="/a$")
    kpe.convert(model, "float8/4_from_float32", include="/b$")
    path = tmp_path_factory.mktemp("hostile") / "model.keras"
    model.save(path)
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def written(folder, members, **options):
    path = folder / "model.keras"
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def refused(load, path, error=ValueError):
    """Loading raises, and takes little memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(error) as caught:
        load(path)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after - before < MOST
    return str(caught.value)


def test_the_file_loads_where_nothing_is_changed(members, tmp_path):
    """Else the tests below would not show anything."""
    model = kpe.load_model(written(tmp_path, members))
    assert model.layers[0].is_frozen and model.layers[1].float8_policy
    packed = dict(compression=zipfile.ZIP_DEFLATED)
    kpe.load_model(written(tmp_path, members, **packed))
    (tmp_path / WEIGHTS).write_bytes(members[WEIGHTS])
    kpe.load_weights(model, tmp_path / WEIGHTS)


def put(file, name, *args, **kwargs):
    del file[name]
    file.create_dataset(name, *args, **kwargs)


def one_chunk(file):
    put(file, CODES, shape=(2**20, 2**14), dtype="uint8", compression="gzip",
        chunks=(2**10, 2**10))  # fmt: skip
    file[CODES][:1, :1] = 1


def bomb(file):
    """Zeros that take a thousandth of their bytes."""
    put(
        file,
        CODES,
        shape=(2**14, 2**13),
        dtype="uint8",
        compression="gzip",
        chunks=(2**12, 2**13),
    )
    chunk = zlib.compress(bytes(2**25))
    for number in range(4):
        file[CODES].id.write_direct_chunk((number * 2**12, 0), chunk)


def outside(file):
    secret = pathlib.Path(file.filename + ".secret")
    secret.write_bytes(b"TOP-SECRET" * 100)
    put(file, CODES, shape=(48,), dtype="uint8",
        external=[(str(secret), 0, 48)])  # fmt: skip


def virtual(file):
    del file[CODES]
    layout = h5py.VirtualLayout((6, 8), "uint8")
    layout[:] = h5py.VirtualSource("other.h5", "x", (6, 8))
    file.create_virtual_dataset(CODES, layout)


def link(target):
    def change(file):
        del file[CODES]
        file[CODES] = target

    return change


def looped(file):
    del file["layers/dense/vars"]
    file["layers/dense/vars"] = h5py.SoftLink("/layers/other")
    file["layers/other"] = h5py.SoftLink("/layers/dense/vars")


def text(value):
    return lambda file: put(file, HEADER, data=np.frombuffer(value, "uint8"))


def header(**changes):
    def change(file):
        found = json.loads(file[HEADER][()].tobytes())
        text(json.dumps({**found, **changes}).encode())(file)

    return change


def data(name, value):
    return lambda file: put(file, name, data=value)


HISTORY = f"{STATE}/0.inputs.amax_history"
IN_HDF5 = {
    "huge, without chunks": lambda f: put(f, CODES, shape=(2**42,), dtype="u1"),
    "huge, in chunks": lambda f: put(
        f, HEADER, shape=(2**40,), dtype="u1", chunks=(2**20,)
    ),
    "huge, compressed, empty": lambda f: put(
        f, SCALE, shape=(2**38,), dtype="f4", compression="gzip"
    ),
    "huge history": lambda f: put(f, HISTORY, shape=(2**38,), dtype="f4"),
    "one chunk of many": one_chunk,
    "a bomb of zeros": bomb,
    "storage outside": outside,
    "virtual": virtual,
    "link outside": link(h5py.ExternalLink("other.h5", "/x")),
    "link to the password file": link(h5py.ExternalLink("/etc/passwd", "/")),
    "soft link": link(h5py.SoftLink("/layers/dense/vars/bias")),
    "broken link": link(h5py.SoftLink("/nowhere")),
    "links in a loop": looped,
    "a type": link(np.dtype("f4")),
    "a group for an array": lambda f: (f.pop(CODES), f.create_group(CODES)),
    "codes in floats": data(CODES, np.zeros((6, 8), "float32")),
    "codes of another shape": data(CODES, np.zeros((8, 6), "uint8")),
    "codes of NaN": data(CODES, np.full((6, 8), 0x7F, "uint8")),
    "codes of text": data(CODES, np.full((6, 8), b"a")),
    "scales of NaN": data(SCALE, np.full((1, 8), np.nan, "float32")),
    "infinite scales": data(SCALE, np.full((1, 8), np.inf, "float32")),
    "negative scales": data(SCALE, np.full((1, 8), -1, "float32")),
    "scales of 0": data(SCALE, np.zeros((1, 8), "float32")),
    "scales of another shape": data(SCALE, np.ones((8,), "float32")),
    "a header that nests": text(b"[" * 100_000),
    "a header not in UTF-8": text(b"\xff\xfe\x00"),
    "an empty header": text(b""),
    "a header that is a list": text(b"[]"),
    "a version below 1": header(version=-3),
    "a version of 10^400": header(version=10**400),
    "names twice": header(names=["kernel", "kernel"]),
    "names that are none": header(names=[1, 2]),
    "axes that are none": header(summed={"kernel": [10**30]}),
    "negative axes": header(summed={"kernel": [-1]}),
    "a rank of 10^12": header(lora={"rank": 10**12, "alpha": 1}),
    "a way that is none": header(per="galaxy"),
    "an amax of NaN": data(HISTORY, np.full(4, np.nan, "float32")),
    "a negative amax": data(HISTORY, np.full(4, -1, "float32")),
    "a policy not in UTF-8": data(f"{STATE}/policy", np.full(9, 255, "uint8")),
    "a policy with a long history": data(
        f"{STATE}/policy",
        np.frombuffer(b"float8/1000000000000_from_float32", "uint8"),
    ),
}


@pytest.mark.any_backend_except("storage outside")
@pytest.mark.full_except("a type", "links in a loop", "storage outside")
@pytest.mark.parametrize("case", IN_HDF5)
def test_weights(case, members, tmp_path):
    path = tmp_path / WEIGHTS
    path.write_bytes(members[WEIGHTS])
    with h5py.File(path, "r+") as file:
        IN_HDF5[case](file)
    changed = {**members, WEIGHTS: path.read_bytes()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        refused(kpe.load_model, written(tmp_path, changed))
        model = kpe.load_model(written(tmp_path, members))
        before = model.get_weights()
        if not case.startswith("a policy"):  # Layers keep theirs.
            refused(lambda at: kpe.load_weights(model, at), path)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def config(change):
    """A change of the config of the first layer."""

    def changed(members):
        found = json.loads(members["config.json"])
        layer = found["config"]["layers"][1]
        change(layer["config"])
        return {**members, "config.json": json.dumps(found).encode()}

    return changed


def policy(length):
    return {
        "module": "keras_policy_ext",
        "class_name": "Float8DTypePolicy",
        "config": {
            "source": "float32",
            "recipe": {
                "class_name": "DelayedScaling",
                "config": {"amax_history_length": length},
            },
        },
        "registered_name": "keras_policy_ext>Float8DTypePolicy",
    }


def with_config(content):
    return lambda members: {**members, "config.json": content}


CONFIGS = {
    "brackets": with_config(b"[" * 100_000),
    "brackets that close": with_config(b"[" * 50_000 + b"]" * 50_000),
    "dicts": with_config(b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
    "as deep as Python goes": with_config(b"[" * 900 + b"]" * 900),
    "no JSON": with_config(b"model"),
    "nothing": with_config(b""),
    "a list": with_config(b"[]"),
    "a number": with_config(b"1" * 5000),
    "not UTF-8": with_config(b"\xff\xfe{}"),
    "units of 10^12": config(lambda c: c.update(units=10**12)),
    "units of 10^9": config(lambda c: c.update(units=10**9)),
    "units of 10^30": config(lambda c: c.update(units=10**30)),
    "negative units": config(lambda c: c.update(units=-5)),
    "units in text": config(lambda c: c.update(units="8")),
    "a history of 10^12": config(lambda c: c.update(dtype=policy(10**12))),
}


@pytest.mark.parametrize("form", ["file", "folder"])
@pytest.mark.parametrize("case", CONFIGS)
def test_configs(case, form, members, tmp_path):
    changed = CONFIGS[case](members)
    path = written(tmp_path, changed)
    if form == "folder":
        path = tmp_path / "model"
        with zipfile.ZipFile(written(tmp_path, changed)) as archive:
            archive.extractall(path)
    refused(kpe.load_model, path, (ValueError, TypeError))


def cut(content):
    return content[: len(content) // 2]


def flipped(content):
    return content.replace(b"PK\x01\x02", b"PK\x09\x09")


def archive_with(name, content=b"", **options):
    def change(members, path):
        with (
            zipfile.ZipFile(path, "a", **options) as archive,
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            archive.writestr(name, content)

    return change


def bytes_changed(change):
    return lambda members, path: path.write_bytes(change(path.read_bytes()))


PACKED = dict(compression=zipfile.ZIP_DEFLATED)
ARCHIVES = {
    "a name that leads out": archive_with("../evil.txt"),
    "a name that leads out later": archive_with("assets/../../evil.txt"),
    "an absolute name": archive_with("/tmp/evil.txt"),
    "a name of Windows": archive_with("..\\evil.txt"),
    "a name with a drive": archive_with("C:evil.txt"),
    "the config twice": archive_with("config.json", b"{}"),
    "the weights twice": archive_with(WEIGHTS, b""),
    "a bomb": archive_with("assets/a", bytes(2**27), **PACKED),
    "cut": bytes_changed(cut),
    "its list damaged": bytes_changed(flipped),
    "nothing": bytes_changed(lambda content: b""),
    "no archive": bytes_changed(lambda content: b"model" * 100),
    "no weights": lambda members, path: written(
        path.parent, {"config.json": members["config.json"]}
    ),
    "no config": lambda members, path: written(
        path.parent, {WEIGHTS: members[WEIGHTS]}
    ),
    "no HDF5": lambda members, path: written(
        path.parent, {**members, WEIGHTS: b"weights"}
    ),
}


@pytest.mark.any_backend_except("cut")
@pytest.mark.parametrize("case", ARCHIVES)
def test_archives(case, members, tmp_path):
    path = written(tmp_path, members)
    ARCHIVES[case](members, path)
    refused(kpe.load_model, path, (ValueError, OSError))
    assert not (tmp_path.parent / "evil.txt").exists()


INDEXES = {
    "leads out": {"weight_map": {"/a": ["../model.weights.h5"]}},
    "absolute": {"weight_map": {"/a": "/etc/passwd"}},
    "a number": {"weight_map": {"/a": [1]}},
    "a list": [],
    "no map": {"weight_map": 3},
}


@pytest.mark.any_backend
@pytest.mark.parametrize("case", INDEXES)
def test_an_index_of_weights(case, tmp_path):
    path = tmp_path / "model.weights.json"
    path.write_text(json.dumps(INDEXES[case]))
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    refused(lambda at: kpe.load_weights(model, at), path)


def tensors(entries, numbers=b"\0" * 16, length=None):
    content = (
        entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    )
    size = len(content) if length is None else length
    return struct.pack("<Q", size) + content + numbers


def entry(dtype="F32", shape=(4,), offsets=(0, 16)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


TENSORS = {
    "a header beyond the file": tensors({"a": entry()}, length=2**40),
    "a header of 2^64 - 1": tensors({"a": entry()}, length=2**64 - 1),
    "offsets beyond the file": tensors({"a": entry(offsets=(0, 2**40))}),
    "negative offsets": tensors({"a": entry(offsets=(-16, 0))}),
    "offsets turned around": tensors({"a": entry(offsets=(16, 0))}),
    "overlapping": tensors({"a": entry(), "b": entry()}),
    "a gap": tensors({"a": entry(shape=(2,), offsets=(8, 16))}),
    "a huge shape": tensors({"a": entry(shape=(2**40, 2**40))}),
    "a negative shape": tensors({"a": entry(shape=(-1, -4))}),
    "a shape in text": tensors({"a": entry(shape=("4",))}),
    "a shape in floats": tensors({"a": entry(shape=(4.0,))}),
    "another dtype": tensors({"a": entry(dtype="F128")}),
    "a dtype that is none": tensors({"a": entry(dtype=None)}),
    "a name twice": tensors(
        b'{"a":%b,"a":%b}' % ((json.dumps(entry()).encode(),) * 2)
    ),
    "a list": tensors(b"[1]"),
    "an entry that is a list": tensors({"a": [1]}),
    "brackets": tensors(b"[" * 100_000),
    "not UTF-8": tensors(b"\xff\xfe"),
    "numbers that are missing": tensors({"a": entry()}, numbers=b"\0" * 8),
    "bytes that are too many": tensors({"a": entry()}, numbers=b"\0" * 99),
    "nothing": b"",
    "four bytes": b"\0\0\0\0",
}


@pytest.mark.any_backend
@pytest.mark.parametrize("case", TENSORS)
def test_safetensors(case, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(TENSORS[case])
    for load in (safetensors_files.read, plain.read):
        refused(load, path)
    refused(safetensors_files.read_folder, tmp_path)


OUT = "../model.safetensors"
FOLDERS = {
    ("model.safetensors.index.json", "leads out"): {"weight_map": {"a": OUT}},
    ("model.safetensors.index.json", "absolute"): {"weight_map": {"a": "/x"}},
    ("model.safetensors.index.json", "no map"): [1],
    ("model.safetensors.index.json", "brackets"): "[" * 100_000,
    ("config.json", "brackets"): '{"quantization_config":' * 50_000,
    ("config.json", "a list"): [],
    ("config.json", "no method"): {"quantization_config": {}},
    ("config.json", "not UTF-8"): b"\xff\xfe",
}


@pytest.mark.any_backend
@pytest.mark.parametrize("case", FOLDERS, ids=" ".join)
def test_folders_of_hugging_face(case, tmp_path):
    content, name = FOLDERS[case], case[0]
    if not isinstance(content, (bytes, str)):
        content = json.dumps(content)
    content = content if isinstance(content, bytes) else content.encode()
    (tmp_path / name).write_bytes(content)
    read = (
        QuantizedFolder.read
        if name == "config.json"
        else safetensors_files.read_folder
    )
    refused(read, tmp_path)


@pytest.mark.any_backend
def test_brackets_in_strings_do_not_nest():
    value = {"a": "[" * 1000, "b": '\\"[[' * 1000, "c": [[["\\"]]]}
    assert input_files.json_in(json.dumps(value), "here") == value
    flat = [[1]] * 1000
    assert input_files.json_in(json.dumps(flat).encode(), "here") == flat


@pytest.mark.any_backend
def test_an_array_that_is_written_whole_is_taken_in_each_layout():
    made = np.arange(48, dtype="uint8").reshape(6, 8)
    with h5py.File(io.BytesIO(), "w") as file:
        file["plain"] = made
        file["scalar"], file["none"] = np.float32(1), np.zeros((0, 3))
        file["text"] = "a text"
        file.create_dataset("cut", data=made, chunks=(4, 4))
        file.create_dataset("packed", data=made, chunks=(4, 4), compression=9)
        assert input_files.check_hdf5("here", file) == 3 * 48 + 2
        for name in ("plain", "cut", "packed"):
            found = input_files.array_in("here", file[name])
            np.testing.assert_array_equal(found, made)
