"""Extensions: a folder each, with a sentence, tests, a row, and few ties."""

import ast
import importlib
import inspect
import pathlib
import re
import shutil

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from calls_counted import NO_CORE
from keras_policy_ext import _extensions, ext
from processes import run

pytestmark = pytest.mark.any_backend

ROOT = pathlib.Path(kpe.__file__).parent
TESTS = pathlib.Path(__file__).parent / "ext"
FOLDERS = sorted(path.parent for path in (ROOT / "ext").glob("*/__init__.py"))
PAGE = TESTS.parents[1] / "docs" / "internals" / "design.md"

SURFACE = PAGE.parents[1] / "api" / "extending.md"

FOUNDATION = {"_keras", "_types", "_version"}
"""What is below the core. It knows no room, and any module may import it."""

FOUNDATION_NAMES = 83
"""That extensions use of it. Lower it."""


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


CORE_ALONE = """
import sys
sys.path.insert(0, sys.argv[1])
import keras, keras_policy_ext as kpe, keras_policy_ext_cli
assert kpe.__file__.startswith(sys.argv[1])
model = keras.Sequential([keras.layers.Dense(16)])
model.build((None, 32))
kpe.convert(model, filter="all")
for name in ("tune", "optimizers"):
    try:
        getattr(kpe, name)
    except AttributeError as error:
        assert "belongs to an extension that is not" in str(error)
    else:
        raise AssertionError(name)
assert keras_policy_ext_cli.main(["doctor"]) == 2
"""


@pytest.mark.full
@pytest.mark.parametrize("left", ["ext/__pycache__", "ext/cli/__pycache__"])
def test_a_folder_that_was_left_over_is_no_extension(left, tmp_path):
    without = shutil.ignore_patterns("__pycache__")
    copy = shutil.copytree(ROOT, tmp_path / ROOT.name, ignore=without)
    for name in NO_CORE:
        path = copy / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (copy / left).mkdir(parents=True, exist_ok=True)
    run(keras.backend.backend(), CORE_ALONE, tmp_path)


def test_all_names_can_be_imported_at_once():
    names = {}
    exec("from keras_policy_ext import *", names)
    assert {*kpe.__all__} <= names.keys()


def module_named(name):
    """Whether there is a module of the package of this dotted name."""
    place = ROOT.parent.joinpath(*name.split("."))
    return place.with_suffix(".py").exists() or place.is_dir()


def is_private(module, name):
    """Whether a name, or a module before it, begins with an underscore."""
    return any(x.startswith("_") for x in [*module.split("."), name])


def modules_in_strings(node):
    """The modules of the core that a string names, as an import could.

    Any string that is such a name counts, in an f-string also its beginning.
    Of `import_module`, the package itself and relative names count too.
    """
    name, names = "", r"keras_policy_ext(\.\w*)+"
    if isinstance(node, ast.Constant):
        name = node.value
    elif isinstance(node, ast.Call) and node.args:
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if called in ("import_module", "__import__"):
            name = getattr(node.args[0], "value", "")
            names = r"keras_policy_ext|\.[\w.]*"
    if isinstance(name, str) and re.fullmatch(names, name):
        home = name.rstrip(".").split(".")
        if home[1:2] != ["ext"] and home[-1] not in ext.MODULES:
            yield ".".join(home)


def names_of_the_core(tree):
    """The names of the core that a file imports, each with its module.

    Where a whole module is imported, they are the attributes that it reads.
    Relative imports have no name here that is public.
    """
    for node in ast.walk(tree):
        yield from ((name, "*") for name in modules_in_strings(node))
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            yield from (
                (name, "*")
                for name in names
                if name.split(".")[0] == "keras_policy_ext"
            )
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level:
            yield from (("." * node.level, each.name) for each in node.names)
            continue
        home = node.module.split(".")
        if home[0] != "keras_policy_ext" or home[1:2] == ["ext"]:
            continue
        for alias in node.names:
            name = f"{node.module}.{alias.name}"
            if not module_named(name):
                yield node.module, alias.name
                continue
            read = {
                each.attr
                for each in ast.walk(tree)
                if isinstance(each, ast.Attribute)
                and isinstance(each.value, ast.Name)
                and each.value.id == (alias.asname or alias.name)
            }
            yield from ((name, each) for each in read or {"*"})


def is_foundation(path, module):
    """Whether a file may import a module because it is below the core.

    That is what touches Keras (`_keras`), types and the version, and in the
    folder of a framework that framework's folder of `backends`.
    """
    parts = module.split(".")
    if parts[1:2] == ["backends"]:
        return parts[2:3] == [path.parent.name]
    return not FOUNDATION.isdisjoint(parts[1:2])


def used_of_the_core():
    """The names of the core that extensions use: foundation, and others."""
    foundation, others = set(), set()
    for path in sorted((ROOT / "ext").rglob("*.py")):
        for found in names_of_the_core(parsed(path)):
            if is_foundation(path, found[0]):
                foundation.add(found)
            else:
                others.add((path.relative_to(ROOT).as_posix(), *found))
    return foundation, others


def test_extensions_use_no_private_name_of_the_core():
    _, others = used_of_the_core()
    assert not {each for each in others if is_private(*each[1:])}


def test_extensions_use_few_names_that_are_below_the_core():
    foundation, _ = used_of_the_core()
    assert len(foundation) <= FOUNDATION_NAMES, sorted(foundation)


def test_the_names_of_a_whole_module_are_those_that_are_read():
    tree = ast.parse(
        "from keras_policy_ext._keras import walking\n"
        "from keras_policy_ext import kernels, convert\n"
        "import keras_policy_ext.saving\n"
        "walking.own_weights(kernels.engine())"
    )
    assert set(names_of_the_core(tree)) == {
        ("keras_policy_ext._keras.walking", "own_weights"),
        ("keras_policy_ext.kernels", "engine"),
        ("keras_policy_ext", "convert"),
        ("keras_policy_ext.saving", "*"),
    }


@pytest.mark.parametrize(
    "source",
    [
        "from keras_policy_ext.layers.controller import _plans",
        "from keras_policy_ext._extensions import get",
        "from keras_policy_ext.policies import _global\n_global.set()",
        "from keras_policy_ext.layers import mixin\nmixin._kernels()",
        "importlib.import_module('keras_policy_ext._extensions')",
        "HOMES = {'jax': 'keras_policy_ext.policies._global'}",
        "name = f'keras_policy_ext.policies._global.{own}'",
    ],
)
def test_the_check_sees_every_way_to_a_private_name_of_the_core(source):
    names = [*names_of_the_core(ast.parse(source))]
    assert names
    assert all(is_private(*each) for each in names)
    assert not any(is_foundation(ROOT / "ext" / "a.py", x) for x, _ in names)


def test_a_string_may_name_modules_of_extensions():
    tree = ast.parse(
        "NAMES = ['keras_policy_ext.ext.onnx', 'keras_policy_ext.optimizers']\n"
        "keras.saving.register_keras_serializable('keras_policy_ext')"
    )
    assert not [*names_of_the_core(tree)]


def rows_of(title):
    """The first column of the tables of a section of the page."""
    text = SURFACE.read_text(encoding="utf-8")
    section = text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.+?`) \| \S", section, re.MULTILINE)
    return [name for row in rows for name in re.findall("`(.+?)`", row)]


@pytest.mark.parametrize("topic", ["reports", "stored_kernels"])
def test_each_name_for_extensions_has_a_line_and_a_docstring(topic):
    module = importlib.import_module(f"keras_policy_ext.{topic}")
    assert sorted(rows_of(f"`{topic}`")) == sorted(module.__all__)
    for value in (getattr(module, name) for name in module.__all__):
        if inspect.isroutine(value) or inspect.isclass(value):
            assert inspect.getdoc(value)


def test_a_module_that_the_page_names_is_there():
    for name in rows_of("Where to look"):
        assert module_named(f"keras_policy_ext.{name}")


def test_the_names_of_public_modules_are_public():
    names = rows_of("Names of other modules")
    assert len(names) > 10
    for name in names:
        *home, own = name.split(".")
        module = importlib.import_module(".".join(["keras_policy_ext", *home]))
        assert own in module.__all__
