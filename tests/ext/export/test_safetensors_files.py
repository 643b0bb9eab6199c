import json
import math

import ml_dtypes
import numpy as np
import pytest

from keras_policy_ext.ext.export import safetensors_files
from keras_policy_ext.ext.export.safetensors_files import DTYPES, Tensor

pytestmark = pytest.mark.any_backend


def tensor(name, array):
    array = np.asarray(array)
    codes = {dtype: code for code, dtype in DTYPES.items()}
    return Tensor(name, codes[array.dtype], array.shape, lambda: array)


def numbers(dtype, shape):
    """All bytes in turn, as numbers of a dtype."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.arange(size, dtype="uint32").astype("uint8")
    return (raw % 2 if dtype.kind == "b" else raw).view(dtype).reshape(shape)


@pytest.mark.parametrize("code", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 0, 3), (2, 1, 130)])
def test_tensors_come_back_bit_by_bit(code, shape, tmp_path):
    wanted = numbers(DTYPES[code], shape)
    others = np.arange(7, dtype="float32")
    safetensors_files.write(
        tmp_path / "file",
        [tensor("a", wanted), tensor("b", others)],
        {"format": "pt"},
    )
    slots, metadata = safetensors_files.read(tmp_path / "file")
    got = slots["a"].read()
    assert metadata == {"format": "pt"}
    assert (got.dtype, got.shape) == (wanted.dtype, shape)
    assert got.tobytes() == wanted.tobytes()
    np.testing.assert_array_equal(slots["b"].read(), others)


def test_a_view_is_written_in_its_own_order(tmp_path):
    wanted = np.arange(6, dtype="float32").reshape(2, 3).T
    safetensors_files.write(tmp_path / "file", [tensor("a", wanted)], {})
    slots, _ = safetensors_files.read(tmp_path / "file")
    np.testing.assert_array_equal(slots["a"].read(), wanted)


def test_the_header_is_that_of_the_format(tmp_path):
    array = np.zeros((2, 3), ml_dtypes.float8_e4m3fn)
    safetensors_files.write(tmp_path / "file", [tensor("a", array)], {"k": "v"})
    content = (tmp_path / "file").read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    assert len(content) == 8 + length + 6
    assert json.loads(content[8 : 8 + length]) == {
        "__metadata__": {"k": "v"},
        "a": {"dtype": "F8_E4M3", "shape": [2, 3], "data_offsets": [0, 6]},
    }


def test_a_tensor_is_made_when_it_is_written(tmp_path):
    path = tmp_path / "file"
    seen = []

    def make(number):
        def made():
            seen.append((number, path.stat().st_size if number else 0))
            return np.full(1 << 16, number, "float32")

        return made

    tensors = [Tensor(str(n), "F32", (1 << 16,), make(n)) for n in range(3)]
    safetensors_files.write(path, tensors, {})
    assert [number for number, _ in seen] == [0, 1, 2]
    # Those before it are in the file already.
    assert seen[2][1] >= 2 * (1 << 18)


@pytest.mark.parametrize(
    "array", [np.zeros(3, "float32"), np.zeros((2, 2), "float16")]
)
def test_a_tensor_that_is_not_what_was_said_is_an_error(array, tmp_path):
    wrong = Tensor("a", "F32", (2, 2), lambda: array)
    with pytest.raises(ValueError, match="'a' does not match the header"):
        safetensors_files.write(tmp_path / "file", [wrong], {})


@pytest.fixture
def content(tmp_path):
    arrays = [tensor("a", np.ones((4, 3), "float32")), tensor("b", np.ones(5))]
    safetensors_files.write(tmp_path / "whole", arrays, {"format": "pt"})
    return (tmp_path / "whole").read_bytes()


def check_refused(content, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="safetensors file is damaged"):
        safetensors_files.read(path)


def test_every_truncated_file_is_refused(content, tmp_path):
    for size in range(len(content)):
        check_refused(content[:size], tmp_path)


def test_a_longer_file_is_refused(content, tmp_path):
    check_refused(content + b"\0", tmp_path)


def test_a_flipped_bit_in_the_header_is_refused_or_read(content, tmp_path):
    """Nothing else is raised, and no tensor reaches out of the file."""
    end = 8 + int.from_bytes(content[:8], "little")
    path = tmp_path / "file"
    for place in range(end):
        for bit in (0, 3, 6):
            flipped = bytearray(content)
            flipped[place] ^= 1 << bit
            path.write_bytes(flipped)
            try:
                slots, _ = safetensors_files.read(path)
            except ValueError as error:
                assert "safetensors file is damaged" in str(error)
            else:
                assert sum(s.read().nbytes for s in slots.values()) == 88


def entry(**changes):
    entry = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4], **changes}
    return {k: v for k, v in entry.items() if v is not None}


@pytest.mark.parametrize(
    "header",
    [
        "[]",
        "1",
        '{"a": 1}',
        '{"a": {}, "a": {}}',
        json.dumps({"a": entry(dtype="F1")}),
        json.dumps({"a": entry(dtype=None)}),
        json.dumps({"a": entry(shape=[-4])}),
        json.dumps({"a": entry(shape=[2.0, 2])}),
        json.dumps({"a": entry(shape=[True, 4])}),
        json.dumps({"a": entry(shape=[8])}),
        json.dumps({"a": entry(data_offsets=[0])}),
        json.dumps({"a": entry(data_offsets=[-4, 0])}),
        json.dumps({"a": entry(data_offsets=[1, 5])}),
        json.dumps({"a": entry(), "b": entry()}),
        json.dumps({"a": entry(shape=[2], data_offsets=[0, 2])}),
        '{"a": ' * 50_000,
    ],
)
def test_headers_that_are_none(header, tmp_path):
    text = header.encode()
    check_refused(len(text).to_bytes(8, "little") + text + bytes(4), tmp_path)


def test_a_header_longer_than_the_file_is_not_read(tmp_path):
    check_refused((1 << 62).to_bytes(8, "little") + bytes(100), tmp_path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        safetensors_files.read(tmp_path / "file")
