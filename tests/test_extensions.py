"""Extensions: a folder each, with a sentence, tests, a row, and few ties."""

import ast
import importlib
import pathlib

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from keras_policy_ext import _extensions, ext

pytestmark = pytest.mark.any_backend

ROOT = pathlib.Path(kpe.__file__).parent
TESTS = pathlib.Path(__file__).parent / "ext"
FOLDERS = sorted(path.parent for path in (ROOT / "ext").glob("*/__init__.py"))
PAGE = TESTS.parents[1] / "docs" / "internals" / "design.md"

OTHER_NAMES = 143
"""Of the core, that extensions use and that are not public. Lower it."""


def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda x: x.name)
def test_an_extension_says_what_it_is_for_and_has_tests(folder):
    sentence = ast.get_docstring(parsed(folder / "__init__.py"))
    assert sentence.splitlines()[0].endswith(".")
    assert list((TESTS / folder.name).glob("test_*.py"))
    assert f"`{folder.name}`" in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(ext.NAMES))
def test_a_row_of_the_table_names_what_is_there(name):
    *home, own = name.split(".")
    public = importlib.import_module(".".join(["keras_policy_ext", *home]))
    there = getattr(importlib.import_module(ext.NAMES[name]), own)
    assert getattr(public, own) is there
    assert own in public.__all__


@pytest.mark.parametrize("name", ext.MODULES)
def test_a_module_of_public_names_is_there(name):
    assert getattr(kpe, name).__all__


def test_a_new_row_makes_a_name_of_the_package(monkeypatch):
    monkeypatch.setattr(_extensions, "_homes", {**_extensions._homes})
    with pytest.raises(AttributeError, match="no attribute 'ndarray'"):
        kpe.ndarray  # noqa: B018
    _extensions.add({"ndarray": "numpy"}, ())
    assert kpe.ndarray is np.ndarray


def test_without_its_extension_a_filter_is_asked_for_by_name(monkeypatch):
    monkeypatch.setattr(_extensions, "_homes", {})
    model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(16)])
    for call in (
        lambda: kpe.convert(model, filter="auto"),
        lambda: kpe.filters.Auto(),
    ):
        with pytest.raises(AttributeError, match=r"filters\.Auto` belongs to"):
            call()
    assert type(model.layers[0]) is keras.layers.Dense
    assert len(kpe.convert(model, filter="safe").skipped) == 1


def is_public(module, name):
    """Whether users may import this name."""
    parts = module.split(".")[1:]
    if len(parts) > 1 or any(part[0] == "_" for part in parts):
        return False
    return name in getattr(importlib.import_module(module), "__all__", ())


def test_extensions_use_few_names_of_the_core_that_are_not_public():
    used = {
        (node.module, alias.name)
        for path in (ROOT / "ext").rglob("*.py")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ImportFrom)
        and node.module.startswith("keras_policy_ext")
        and not node.module.startswith("keras_policy_ext.ext")
        for alias in node.names
    }
    others = sorted(x for x in used if not is_public(*x))
    assert len(others) <= OTHER_NAMES, others
