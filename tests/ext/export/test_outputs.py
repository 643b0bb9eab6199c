import os
import signal
import subprocess
import sys

import pytest

from keras_policy_ext.ext.export import language_models

pytestmark = pytest.mark.any_backend


def write(path, text, folder=True, overwrite=False):
    with language_models.whole(
        path, folder=folder, overwrite=overwrite
    ) as place:
        (place / "config.json" if folder else place).write_text(text)


def content(path):
    return (path / "config.json" if path.is_dir() else path).read_text()


@pytest.mark.parametrize("folder", [True, False])
def test_an_output_appears_when_it_is_whole(folder, tmp_path):
    path = tmp_path / "out"
    with language_models.whole(path, folder=folder, overwrite=False) as place:
        (place / "config.json" if folder else place).write_text("new")
        assert not path.exists()
    assert content(path) == "new"
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("folder", [True, False])
@pytest.mark.parametrize("exists", [True, False])
def test_an_error_leaves_everything_as_it_was(folder, exists, tmp_path):
    path = tmp_path / "out"
    if exists:
        write(path, "old", folder)
    with pytest.raises(OSError, match="disk"):  # noqa: SIM117
        with language_models.whole(
            path, folder=folder, overwrite=True
        ) as place:
            (place / "config.json" if folder else place).write_text("half")
            raise OSError("the disk is full")
    assert os.listdir(tmp_path) == (["out"] if exists else [])
    assert not exists or content(path) == "old"


@pytest.mark.parametrize("folder", [True, False])
def test_an_output_is_replaced_if_asked_for(folder, tmp_path):
    path = tmp_path / "out"
    write(path, "old", folder)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        write(path, "new", folder)
    assert content(path) == "old"
    write(path, "new", folder, overwrite=True)
    assert content(path) == "new"
    assert os.listdir(tmp_path) == ["out"]


def test_what_came_meanwhile_is_not_replaced(tmp_path):
    path = tmp_path / "out"
    with pytest.raises(FileExistsError):  # noqa: SIM117
        with language_models.whole(
            path, folder=False, overwrite=False
        ) as place:
            place.write_text("new")
            path.write_text("of another process")
    assert path.read_text() == "of another process"


@pytest.mark.parametrize("within", [["notes.txt"], ["config.json", "sub/x"]])
def test_a_folder_of_something_else_is_never_replaced(within, tmp_path):
    path = tmp_path / "out"
    for name in within:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("mine")
    with pytest.raises(FileExistsError, match="other than an earlier export"):
        write(path, "new", overwrite=True)
    with pytest.raises(FileExistsError, match="other than an earlier export"):
        write(path, "new", folder=False, overwrite=True)
    assert (path / within[0]).read_text() == "mine"


def test_a_link_to_a_folder_is_never_replaced(tmp_path):
    write(tmp_path / "real", "old")
    (tmp_path / "out").symlink_to(tmp_path / "real")
    with pytest.raises(FileExistsError, match="other than an earlier export"):
        write(tmp_path / "out", "new", overwrite=True)
    assert content(tmp_path / "real") == "old"


def test_a_folder_that_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match="Make the folder first"):
        write(tmp_path / "missing" / "out", "new")


@pytest.mark.parametrize("failures", [1, 2])
def test_what_was_there_is_put_back(failures, tmp_path, monkeypatch):
    """Also where that fails, what was there is not deleted."""
    path = tmp_path / "out"
    write(path, "old")
    stock, calls = os.replace, []

    def replace(source, target):
        calls.append(source)
        if 2 <= len(calls) < 2 + failures:
            raise OSError("not now")
        stock(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OSError, match="not now"):
        write(path, "new", overwrite=True)
    if failures == 1:
        assert content(path) == "old"
        assert os.listdir(tmp_path) == ["out"]
    else:
        (kept,) = tmp_path.glob(".out.*.partial/replaced/config.json")
        assert kept.read_text() == "old"


@pytest.mark.full
def test_a_killed_process_leaves_nothing_under_the_name(tmp_path):
    path = tmp_path / "out"
    write(path, "old")
    code = (
        "import os, signal, sys\n"
        "from keras_policy_ext.ext.export import language_models\n"
        "path = sys.argv[1]\n"
        "whole = language_models.whole(path, folder=True, overwrite=True)\n"
        "with whole as place:\n"
        "    (place / 'config.json').write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, str(path)], timeout=300, check=False
    )
    assert process.returncode == -signal.SIGKILL
    assert content(path) == "old"
    left = [p.name for p in tmp_path.iterdir() if p != path]
    assert len(left) == 1
    assert left[0].startswith(".out.")
    assert left[0].endswith(".partial")
