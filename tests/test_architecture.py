"""Who may touch what, read off the source of the installed package.

The import linter checks the direction between the rooms. These rules need to
look at parts of an external package, or at imports that happen inside a
function or through `importlib`, which it does not see.
"""

import ast
import functools
import importlib.util
import inspect
import pathlib
import re
import textwrap

import keras
import pytest

from calls_counted import NO_CORE
from private_names import (
    private_attributes,
    private_definitions,
    private_strings,
)

pytestmark = pytest.mark.any_backend

FRAMEWORKS = {"jax", "jaxlib", "tensorflow", "torch", "triton"}

# What the files of `backends/<framework>/` may import.
MODULES = {
    "jax": {"jax", "jaxlib"},
    "tensorflow": {"tensorflow"},
    "torch": {"torch", "triton"},
}


# Whose classes are Keras's own affair, or a framework's.
OTHER_CLASSES = ("backends/", "__main")

# Private names of others than Keras.
NOT_OF_KERAS = {
    "_asdict": "a public method of named tuples",
    "_replace": "a public method of named tuples",
    "_fields": "a public attribute of named tuples",
    "_active_ddp_module": "PyTorch: the module that is distributed",
    "_join_config": "PyTorch: of that module",
    "_fsdp_orig_uid": "PyTorch: of parameters that fully_shard replaced",
    "_current_graph_task_id": "PyTorch: whether this is a backward pass",
    "_disabled_torch_function_impl": "PyTorch: of classes of tensors",
    "_make_wrapper_subclass": "PyTorch: of tensors of other classes",
    "_pin_memory": "PyTorch: an operation of a compiler's",
    "_to_copy": "PyTorch: an operation of a compiler's",
    "_clone": "TensorFlow: of compiled functions",
    "_C": "PyTorch: what is compiled of it",
    "_are_functorch_transforms_active": "PyTorch: of torch.func",
    "_guards": "PyTorch: of the graph that is being made",
    "_output_shapes": "TensorFlow: shapes of the outputs of a node",
    "_get_function": "TensorFlow: the graph of a function, by its name",
    "_is_view": "PyTorch: of tensors",
    "_version": "PyTorch: of tensors",
}


def package_root():
    spec = importlib.util.find_spec("keras_policy_ext")
    return pathlib.Path(spec.submodule_search_locations[0])


SOURCES = {
    path.relative_to(package_root()).as_posix(): path
    for path in sorted(package_root().rglob("*.py"))
}


def is_keras_room(name):
    """Whether a file is in a `_keras/`, of the core or of an extension."""
    path = pathlib.PurePosixPath(name)
    return "_keras" in path.parts


def imported_names(tree):
    """Every dotted name that an import, wherever it stands, may load.

    `from a.b import c` gives both `a.b` and `a.b.c`; a call of
    `import_module` or `__import__` with a literal gives that literal.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            function, first = node.func, node.args[0]
            name = getattr(function, "attr", getattr(function, "id", ""))
            if (
                name in ("import_module", "__import__")
                and isinstance(first, ast.Constant)
                and isinstance(first.value, str)
            ):
                yield first.value


def attribute_chains(tree):
    """`keras.src.backend` as it is written in an expression."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            parts = [node.attr]
            value = node.value
            while isinstance(value, ast.Attribute):
                parts.append(value.attr)
                value = value.value
            if isinstance(value, ast.Name):
                yield ".".join([value.id, *reversed(parts)])


def uses_keras_internals(tree):
    names = [*imported_names(tree), *attribute_chains(tree)]
    return sorted({n for n in names if f"{n}.".startswith("keras.src.")})


def imported_frameworks(tree):
    return sorted(
        {n for n in imported_names(tree) if n.split(".")[0] in FRAMEWORKS}
    )


@functools.cache
def parse(name):
    return ast.parse(SOURCES[name].read_text(encoding="utf-8"), filename=name)


@functools.cache
def names_of_this_package():
    """Private names that it defines outside of the rooms for Keras."""
    found = {pathlib.PurePath(name).stem for name in SOURCES}
    for name in SOURCES:
        if not is_keras_room(name):
            found |= private_definitions(parse(name))
    return found


def foreign_attributes(tree):
    known = names_of_this_package() | NOT_OF_KERAS.keys()
    return sorted(private_attributes(tree) - known)


def classes_of(name):
    """The classes that a file of this package defines."""
    module = importlib.import_module(module_name(name))
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__
    ]


@functools.cache
def class_tree(cls):
    try:
        source = inspect.getsource(cls)
    except OSError:  # Keras exports it from another module than it is in.
        home = next(
            value.__code__.co_filename
            for value in vars(cls).values()
            if inspect.isfunction(value)
            and value.__qualname__.startswith(f"{cls.__qualname__}.")
        )
        tree = ast.parse(pathlib.Path(home).read_text(encoding="utf-8"))
        return next(
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef) and node.name == cls.__name__
        )
    return ast.parse(textwrap.dedent(source))


def names_shared_with_keras(cls):
    """Private names in a class of ours that Keras's classes below it define.

    Mixins count as part of the class, and names in strings are names.
    """
    ours, theirs = set(), set()
    for base in cls.__mro__:
        if base.__module__.startswith("keras."):
            theirs |= private_definitions(class_tree(base))
        elif "._keras" in base.__module__:
            continue
        elif base.__module__.startswith(("keras_policy_ext.", __name__)):
            tree = class_tree(base)
            ours |= private_attributes(tree) | private_definitions(tree)
            ours |= private_strings(tree)
    return sorted(ours & theirs)


def offenders(rule, names=SOURCES):
    """What `rule` finds in each of the files that break it, by file."""
    found = {name: rule(name) for name in names}
    return {name: what for name, what in found.items() if what}


OUTSIDE_THE_KERAS_ROOM = [x for x in SOURCES if not is_keras_room(x)]


def test_only_the_room_for_it_touches_keras_internals():
    found = offenders(
        lambda name: uses_keras_internals(parse(name)), OUTSIDE_THE_KERAS_ROOM
    )

    assert found == {}


def test_only_the_room_for_it_touches_private_attributes_of_keras():
    found = offenders(
        lambda name: foreign_attributes(parse(name)), OUTSIDE_THE_KERAS_ROOM
    )

    assert found == {}


def test_classes_use_no_private_name_of_the_keras_class_below():
    classes = {
        f"{name}: {cls.__qualname__}": cls
        for name in SOURCES
        if not name.startswith(OTHER_CLASSES)
        and not is_keras_room(name)
        and not folder_of(name)
        for cls in classes_of(name)
    }
    found = offenders(lambda x: names_shared_with_keras(classes[x]), classes)

    assert found == {}


def folder_of(name):
    """The framework in whose folder a file is; None if it is in none."""
    path = pathlib.PurePosixPath(name)
    is_one = (
        path.parts[0] in ("backends", "ext") and path.parent.name in MODULES
    )
    return path.parent.name if is_one else None


def foreign_frameworks(name):
    """Frameworks that a file imports although it is not in their folder.

    Their folders are `backends/<framework>` and `ext/<name>/<framework>`.
    """
    allowed = MODULES.get(folder_of(name), set())
    imported = imported_frameworks(parse(name))
    return [n for n in imported if n.split(".")[0] not in allowed]


def test_only_the_folder_of_a_framework_imports_it():
    assert offenders(foreign_frameworks) == {}


CORE = [x for x in SOURCES if pathlib.PurePath(x).parts[0] not in NO_CORE]

FORWARDING = {
    "__init__.py",
    "conversion/__init__.py",
    "conversion/filters.py",
    "layers/__init__.py",
}
"""Modules of the core that show names of extensions too, to type checkers."""

OF_EXTENSIONS = "|".join(x.removesuffix(".py") for x in NO_CORE)


def imported_extensions(tree):
    """The modules of extensions that imports of a file name."""
    names = rf"keras_policy_ext\.({OF_EXTENSIONS})\b.*"
    return sorted({n for n in imported_names(tree) if re.fullmatch(names, n)})


def strings_of_extensions(tree):
    """The strings, and parts of f-strings, that name a module of extensions."""
    names = rf"(keras_policy_ext)?\.+({OF_EXTENSIONS})\b[\w.:]*"
    return sorted(
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(names, node.value)
    )


def test_few_modules_of_the_core_import_extensions_for_type_checkers():
    found = offenders(lambda name: imported_extensions(parse(name)), CORE)

    assert found.keys() == FORWARDING, "the core imports no extension"


def test_the_core_names_no_module_of_an_extension_in_a_string():
    found = offenders(lambda name: strings_of_extensions(parse(name)), CORE)

    # The package asks whether there are extensions. Their table names them,
    # and `_extensions.get` imports what it names.
    assert found == {"__init__.py": [".ext"]}


def lines_of_asserts(name):
    nodes = ast.walk(parse(name))
    return [node.lineno for node in nodes if isinstance(node, ast.Assert)]


def test_package_contains_no_assert_statement():
    found = offenders(lines_of_asserts)

    assert found == {}, "python -O drops asserts: raise an error instead"


def readers_of_the_environment(name):
    tree = parse(name)
    used = {*imported_names(tree), *attribute_chains(tree)}
    return sorted({"os.environ", "os.getenv"} & used)


def test_the_package_does_not_read_the_environment():
    assert offenders(readers_of_the_environment) == {}


def imported_modules(tree, modules):
    """The modules of a package that an import, wherever it stands, names.

    `from a import b` is an import of the module `a.b` if there is one, and
    of something in `a` otherwise.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [
                (f"{node.module}.{alias.name}", node.module)
                for alias in node.names
            ]
        else:
            continue
        for name, parent in names:
            yield from [each for each in (name, parent) if each in modules][:1]


def reachable(start, imports):
    found, waiting = set(), [start]
    while waiting:
        new = imports[waiting.pop()] - found
        found |= new
        waiting.extend(new)
    return found


def circles(trees):
    """The sets of modules each of which leads to all others of its set."""
    imports = {
        name: set(imported_modules(tree, trees)) for name, tree in trees.items()
    }
    within = {name: reachable(name, imports) for name in imports}
    found = []
    for name in sorted(within):
        circle = {other for other in within[name] if name in within[other]}
        if circle and circle not in found:
            found.append(circle)
    return found


def module_name(name):
    parts = ["keras_policy_ext", *name.removesuffix(".py").split("/")]
    return ".".join(parts).removesuffix(".__init__")


def test_no_modules_import_each_other():
    found = circles({module_name(name): parse(name) for name in SOURCES})

    assert found == []


@pytest.mark.parametrize(
    "sources, expected",
    [
        ({"p.a": "import p.b", "p.b": "import p.c", "p.c": ""}, []),
        ({"p.a": "import p.b", "p.b": "from p import a"}, [{"p.a", "p.b"}]),
        (
            {
                "p": "from p.a import f",
                "p.a": "from p import b",
                "p.b": "def f():\n    from p.a import f",
            },
            [{"p.a", "p.b"}],
        ),
        ({"p": "from p.a import f", "p.a": "from p import f"}, [{"p", "p.a"}]),
        ({"p": "from p.a import f", "p.a": "from p import b", "p.b": ""}, []),
    ],
)
def test_the_check_finds_circles(sources, expected):
    trees = {name: ast.parse(source) for name, source in sources.items()}

    assert circles(trees) == expected


@pytest.mark.parametrize(
    "source",
    [
        "import keras.src",
        "from keras.src import backend",
        "from keras import src",
        "def f():\n    from keras.src.layers import layer",
        "import importlib\nimportlib.import_module('keras.src.utils')",
        "import keras\nx = keras.src.backend.config",
    ],
)
def test_the_check_sees_every_way_into_keras_internals(source):
    assert uses_keras_internals(ast.parse(source))


@pytest.mark.parametrize(
    "source",
    [
        "import jax.numpy as jnp",
        "def f():\n    import torch",
        "from tensorflow import function",
        "from importlib import import_module\nimport_module('jax')",
    ],
)
def test_the_check_sees_every_way_to_a_framework(source):
    assert imported_frameworks(ast.parse(source))


@pytest.mark.parametrize(
    "source",
    [
        "import_module('keras_policy_ext.ext.gain.auto')",
        "import_module('keras_policy_ext.optimizers')",
        "import_module('.ext.gain.auto', __package__)",
        "name = f'{__package__}.ext.{extension}'",
        "name = f'keras_policy_ext.ext.{extension}'",
        "HOMES = {'filters.Auto': 'keras_policy_ext.ext.gain.auto:Auto'}",
    ],
)
def test_the_check_sees_strings_that_name_a_module_of_an_extension(source):
    assert strings_of_extensions(ast.parse(source))


@pytest.mark.parametrize(
    "source",
    [
        "layer._tracker.unlock()",
        "layer._tracker = None",
        "def f(self):\n    return self._tracker",
        "class A:\n    def f(self):\n        return super()._tracker",
        "getattr(layer, '_tracker', None)",
        "hasattr(layer, '_tracker')",
        "setattr(layer, '_tracker', None)",
        "delattr(layer, '_tracker')",
        "object.__setattr__(layer, '_tracker', None)",
        "operator.attrgetter('_tracker')(layer)",
        "vars(layer)['_tracker']",
        "vars(layer).pop('_tracker')",
        "layer.__dict__['_tracker']",
        "layer.__dict__.get('_tracker')",
        "layer.__dict__.update(_tracker=None)",
        "'_tracker' in vars(layer)",
    ],
)
def test_the_check_sees_every_way_to_a_private_attribute(source):
    assert foreign_attributes(ast.parse(source)) == ["_tracker"]


@pytest.mark.parametrize(
    "source",
    [
        "def f(self):\n    self._own = 1\n    return self._own",
        "class A:\n    _own: int = 1",
        "class A:\n    def _own(self):\n        pass",
        "def f(self):\n    self.__dict__['_own'] = 1",
        "def f(self):\n    self.__dict__.update(_own=1)",
    ],
)
def test_the_check_knows_what_a_class_defines(source):
    assert private_definitions(ast.parse(source)) == {"_own"}


def test_what_is_written_into_another_object_is_no_definition():
    assert not private_definitions(ast.parse("layer._theirs = 1"))


class Mixin:
    def call(self, inputs):
        return inputs * self._kernel


class Reads(Mixin, keras.layers.Dense):
    pass


class Overrides(keras.layers.Dense):
    def _untrack_variable(self, variable):
        pass


class Names(keras.layers.Dense):
    names = ("_kernel",)


class UsesItsOwn(keras.layers.Dense):
    def call(self, inputs):
        self._number_of_calls = 1
        return super().call(inputs)


@pytest.mark.parametrize("cls", [Reads, Overrides, Names])
def test_the_check_sees_a_private_name_of_the_keras_class_below(cls):
    assert names_shared_with_keras(cls)
    assert not names_shared_with_keras(UsesItsOwn)
