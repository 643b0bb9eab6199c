"""Which Keras was tested, and what users of another one are told."""

import configparser
import pathlib
import re
import warnings

import keras
import pytest

from keras_policy_ext._keras import versions
from processes import run

pytestmark = pytest.mark.any_backend

ROOT = pathlib.Path(__file__).parents[3]


def said(monkeypatch, version):
    """What is warned of under a version of Keras, asked twice."""
    monkeypatch.setattr(keras, "__version__", version)
    monkeypatch.setattr(versions, "WARNED_OF", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        versions.warn_of_a_newer_keras()
        versions.warn_of_a_newer_keras()
    return [str(each.message) for each in caught]


@pytest.mark.parametrize(
    "version", ["3.12.0", "3.16.0", "3.16.9", "3.16.0.dev2026102704", "unknown"]
)
def test_of_a_tested_version_nothing_is_said(version, monkeypatch):
    assert said(monkeypatch, version) == []


@pytest.mark.parametrize("version", ["3.17.0", "3.17.0.dev1", "3.100.1", "4.0"])
def test_of_a_newer_version_one_warning_names_the_way_out(version, monkeypatch):
    (text,) = said(monkeypatch, version)
    assert text.startswith(f"Keras {version} is newer than")
    assert "Keras 3.12 to 3.16" in text
    assert "pip install 'keras>=3.12,<3.17'" in text


def test_each_tested_minor_version_has_an_environment_of_tox():
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / "tox.ini")
    steps = parser["testenv"]["commands_pre"]
    found = re.findall(r"keras==(\d+)\.(\d+)", steps)
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    found += re.findall(r"^keras-nightly==(\d+)\.(\d+)", pins, re.MULTILINE)
    numbers = sorted((int(major), int(minor)) for major, minor in found)
    assert numbers[0] == versions.OLDEST
    assert numbers[-1] == versions.NEWEST
    minors = [minor for _, minor in numbers]
    assert minors == list(range(minors[0], minors[-1] + 1))


def test_the_package_and_its_pages_name_the_same_versions():
    oldest = "{}.{}".format(*versions.OLDEST)
    assert f'"keras>={oldest}"' in (ROOT / "pyproject.toml").read_text()
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert versions.tested().removeprefix("Keras ") in page
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    for minor in re.findall(r"^keras-hub\S*==(0\.\d+)", pins, re.MULTILINE):
        assert minor in versions.HUB


@pytest.mark.full
def test_an_import_under_a_newer_keras_warns_once_and_goes_on():
    code = (
        "import warnings, keras; keras.__version__ = '3.99.0'\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    import keras_policy_ext as kpe\n"
        "print([str(x.message)[:23] for x in caught])\n"
        "print(len(kpe.convert(keras.Sequential([keras.Input((4,)),"
        " keras.layers.Dense(2)])).converted))\n"
    )
    first, second = run(keras.backend.backend(), code).splitlines()
    assert first.count("Keras 3.99.0 is newer t") == 1
    assert second == "1"
