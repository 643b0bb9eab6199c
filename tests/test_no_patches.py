"""The package changes none of its own modules and classes while it runs.

Code that wants to follow a contraction uses `keras_policy_ext.seams`. Read off
the source: in a function, nothing is assigned to an attribute of a module or a
class of the package, or passed to what replaces one. By PEP 8 a class has a
name in CapWords.
"""

import ast
import importlib.util
import pathlib

import pytest

pytestmark = pytest.mark.any_backend

PACKAGE = "keras_policy_ext"
ROOT = pathlib.Path(
    importlib.util.find_spec(PACKAGE).submodule_search_locations[0]
)
CLASS = "a class of the package"

# Functions that set an attribute: the number of the argument with the owner.
SETTERS = {"setattr": 0, "delattr": 0, "put_around": 0, "in_place_of": 2}
# Methods of `vars(owner)`, or of `owner.__dict__`, that set attributes.
CHANGES = {"update", "pop", "setdefault", "clear", "__setitem__"}


def member(module, name):
    """What a name in a module of the package is: a module, a class or None."""
    path = ROOT.joinpath(*module.split(".")[1:], name)
    if path.with_suffix(".py").exists() or path.is_dir():
        return f"{module}.{name}"
    is_class = name.lstrip("_")[:1].isupper() and not name.isupper()
    return CLASS if is_class else None


def value_of(node, names):
    """The module or class of the package that an expression names, or None."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = value_of(node.value, names)
        return None if owner in (None, CLASS) else member(owner, node.attr)
    return None


def names_in(nodes, known):
    """The modules and classes that imports and assignments name."""
    found = dict(known)
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            if f"{node.module}.".startswith(f"{PACKAGE}."):
                for each in node.names:
                    value = member(node.module, each.name)
                    found[each.asname or each.name] = value
        elif isinstance(node, ast.Import):
            for each in node.names:
                if f"{each.name}.".startswith(f"{PACKAGE}."):
                    name = each.name if each.asname else PACKAGE
                    found[each.asname or PACKAGE] = name
        elif isinstance(node, ast.ClassDef):
            found[node.name] = CLASS
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value:
            value = value_of(node.value, found)
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            for target in targets:
                if isinstance(target, ast.Name) and value is not None:
                    found[target.id] = value
    return found


def names_of(function, known):
    """The names in a function: its arguments hide those of the module."""
    given = function.args
    arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    found = {**known, **{each.arg: None for each in arguments}}
    if "classmethod" in map(ast.unparse, function.decorator_list):
        found[arguments[0].arg] = CLASS
    return names_in(ast.walk(function), found)


def owners(node):
    """Expressions for what a statement or a call sets an attribute of."""
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    if isinstance(node, (ast.Assign, ast.Delete, ast.AugAssign, ast.AnnAssign)):
        for target in targets:
            for each in ast.walk(target):
                if isinstance(getattr(each, "ctx", None), (ast.Store, ast.Del)):
                    if isinstance(each, ast.Attribute):
                        yield each.value
                    if isinstance(each, ast.Subscript):
                        yield dictionary_of(each.value)
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name in SETTERS:
            yield from node.args[SETTERS[name] :][:1]
            yield from (x.value for x in node.keywords if x.arg == "cls")
        elif name in ("__setattr__", "__delattr__"):
            yield from node.args[:1]
        elif name in CHANGES and isinstance(node.func, ast.Attribute):
            yield dictionary_of(node.func.value)


def dictionary_of(node):
    """The `owner` of `vars(owner)` or `owner.__dict__`, or None."""
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "vars":
        return node.args[0] if node.args else None
    return node.value if getattr(node, "attr", "") == "__dict__" else None


def patches(tree):
    """The statements in functions that change a module or class of ours."""
    found, known = {}, names_in(tree.body, {})
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names = names_of(function, known)
            for node in ast.walk(function):
                if any(value_of(each, names) for each in owners(node)):
                    found[node.lineno] = ast.unparse(node)
    return found


def test_nothing_patches_the_package_itself():
    found = {
        str(path.relative_to(ROOT)): lines
        for path in ROOT.rglob("*.py")
        if (lines := patches(ast.parse(path.read_text(encoding="utf-8"))))
    }

    assert found == {}


IMPORTS = """
import keras
import keras_policy_ext as kpe
from keras_policy_ext import contractions
from keras_policy_ext.layers.controller import Float8Controller
"""


@pytest.mark.parametrize(
    "line",
    [
        "contractions.run = other",
        "del contractions.run",
        "contractions.plan.run = other",
        "kpe.contractions.Einsum.fold: int = 3",
        "Float8Controller.contract = other",
        "Float8Controller.calls += 1",
        "setattr(contractions, 'run', other)",
        "delattr(Float8Controller, 'contract')",
        "with in_place_of('contract', other, Float8Controller): pass",
        "with calls.in_place_of('run', other, cls=contractions): pass",
        "around.put_around(Float8Controller, 'contract', other)",
        "vars(contractions)['run'] = other",
        "vars(contractions).update(run=other)",
        "contractions.__dict__['run'] = other",
        "type.__setattr__(Float8Controller, 'contract', other)",
        "mine: Any = Float8Controller; mine.contract = other",
        "from keras_policy_ext.layers import mixin as m; m.activated = other",
    ],
)
def test_the_check_sees_every_way_to_patch(line):
    source = f"{IMPORTS}\ndef f(other):\n    {line}"
    assert patches(ast.parse(source))


@pytest.mark.parametrize(
    "line",
    [
        "other.contract = contractions.run",
        "other.run, n = Float8Controller(3), 4",
        "keras.Layer.call = other",
        "setattr(other, 'run', contractions.run)",
        "with in_place_of('call', contractions.run, keras.layers.Dense): pass",
        "vars(other)['run'] = contractions.run",
        "contractions.make_plan(other).slot = 3",
    ],
)
def test_the_check_lets_other_objects_be_changed(line):
    source = f"{IMPORTS}\ndef f(other):\n    {line}"
    assert not patches(ast.parse(source))
