"""Why a layer that could be frozen is left in floats.

Its kernels would be read or written by code that knows numbers of another
dtype: that of a layer with files of its own, or of one that assigns them.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
import types
from collections.abc import Iterable, Iterator
from typing import Any

import keras

from keras_policy_ext.conversion.candidates import path_of
from keras_policy_ext.layers.drop_in import drop_ins
from keras_policy_ext.layers.mixin import Float8Mixin

_FILES = ("save_own_variables", "load_own_variables")
_ASSIGNS = ("assign", "assign_add", "assign_sub")

# Where a layer may set its weights before it is used.
_BEFORE_CALLS = (
    "__init__",
    "build",
    "build_from_config",
    "from_config",
)


def has_own_files(layer: keras.Layer) -> str | None:
    """Why a layer is not frozen that saves or loads its weights itself.

    Its files have float kernels, and codes would be loaded as numbers.
    """
    for name in _FILES:
        if name in vars(layer):
            return f"it has a `{name}` of its own"
    for base in type(layer).__mro__:
        if base is Float8Mixin or base in _stock():
            return None
        for name in _FILES:
            if name in vars(base) and base not in _own():
                return (
                    f"its class {base.__name__} has a `{name}` of its own, "
                    "which reads and writes float weights"
                )
    return None


def kernels_assigned_in(
    layers: Iterable[keras.Layer],
) -> dict[int, str]:
    """Why weights stay in floats that methods of layers assign, by `id`.

    By the source of their classes: `self.inner.kernel.assign(...)`, or a
    local variable that holds the weight. What makes and builds a layer is not
    looked at, and neither are classes of Keras.
    """
    found: dict[int, str] = {}
    for layer in layers:
        for function in _methods(type(layer)):
            for each in _assigned(function, layer):
                if isinstance(each, keras.Variable):
                    reason = (
                        f"layer {path_of(layer)!r} assigns its weight "
                        f"{each.name!r} in `{function.__name__}`, which a "
                        "frozen one does not take"
                    )
                    found.setdefault(id(each), reason)
    return found


def _stock() -> set[type]:
    return {*drop_ins(), keras.Layer}


def _own() -> set[type]:
    return set(drop_ins().values())


def _methods(cls: type) -> Iterator[types.FunctionType]:
    """The functions of a class that are no code of Keras or this package."""
    for base in cls.__mro__:
        if base.__module__.split(".")[0] in ("keras", "keras_policy_ext"):
            continue
        for name, value in vars(base).items():
            if isinstance(value, property):
                value = value.fget
            wanted = name not in _BEFORE_CALLS
            if wanted and isinstance(value, types.FunctionType):
                yield value


def _assigned(function: types.FunctionType, layer: Any) -> list[Any]:
    """List what a method assigns, as far as its source tells."""
    if not {*_ASSIGNS} & _names(function.__code__):
        return []
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError, TypeError):
        return []
    meant = _Meanings(function.__code__.co_varnames[0], layer)
    meant.read(tree)
    return [
        each
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in _ASSIGNS
        for each in meant.of(node.value)
    ]


def _names(code: types.CodeType) -> set[str]:
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names(constant)
    return found


class _Meanings:
    """Find the objects that expressions in a method can stand for.

    Attributes, what is in lists and dicts, and local names for these.

    Args:
        owner: What the method calls its layer.
        layer: The layer.
    """

    def __init__(self, owner: str, layer: Any):
        self._names: dict[str, list[Any]] = {owner: [layer]}

    def read(self, tree: ast.AST) -> None:
        """Learn what local names stand for."""
        for _ in range(2):  # A name may be used above the line that sets it.
            for node in ast.walk(tree):
                if isinstance(node, ast.Assign):
                    for target in node.targets:
                        self._name(target, self.of(node.value))
                elif isinstance(node, (ast.For, ast.comprehension)):
                    self._name(node.target, _within(self.of(node.iter)))
                elif isinstance(node, ast.NamedExpr):
                    self._name(node.target, self.of(node.value))

    def of(self, node: ast.AST) -> list[Any]:
        """All that an expression can stand for, as far as it is known."""
        if isinstance(node, ast.Name):
            return self._names.get(node.id, [])
        if isinstance(node, ast.Attribute):
            return _attributes(self.of(node.value), node.attr)
        if isinstance(node, ast.Subscript):
            return _within(self.of(node.value))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            name, given = node.func.id, node.args
            if name == "getattr" and isinstance(given[1], ast.Constant):
                return _attributes(self.of(given[0]), str(given[1].value))
            if name in ("list", "tuple", "reversed", "zip", "enumerate"):
                return [each for x in given for each in self.of(x)]
        if isinstance(node, (ast.List, ast.Tuple)):
            return [[each for x in node.elts for each in self.of(x)]]
        if isinstance(node, ast.IfExp):
            return [*self.of(node.body), *self.of(node.orelse)]
        return []

    def _name(self, target: ast.AST, values: list[Any]) -> None:
        names = [target]
        if isinstance(target, (ast.Tuple, ast.List)):
            names, values = list(target.elts), [*values, *_within(values)]
        for name in names:
            if isinstance(name, ast.Name):
                known = self._names.setdefault(name.id, [])
                ids = {id(each) for each in known}
                known += [each for each in values if id(each) not in ids]


def _attributes(values: list[Any], name: str) -> list[Any]:
    """An attribute of each of some things that has it."""
    found = []
    for value in values:
        with contextlib.suppress(Exception):  # A property may need more.
            found.append(getattr(value, name))
    return found


def _within(values: list[Any]) -> list[Any]:
    """List the entries of those values that are lists or dicts."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, dict):
            found += value.values()
        elif isinstance(value, (list, tuple)):
            found += value
    return found
