"""Each public name and module can be the first that a process uses."""

import os
import pathlib

import keras
import pytest

import keras_policy_ext as kpe
from processes import BACKENDS, run

pytestmark = [
    pytest.mark.any_backend,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="a child each by fork"),
]

ROOT = pathlib.Path(kpe.__file__).parent

# The children share the package, which the parent has imported, and no more.
EACH_IN_A_CHILD = """
import importlib, os, sys, warnings
warnings.simplefilter("ignore")  # JAX warns of a fork
import keras_policy_ext

for statement in sys.argv[1:]:
    sys.stdout.flush()
    child = os.fork()
    if not child:
        try:
            exec(statement, {"kpe": keras_policy_ext})
        except BaseException as error:
            print(statement, repr(error), flush=True)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        print(statement, "ended with status", status, flush=True)
"""


def names_within(module, home):
    return [f"{home}.{name}" for name in sorted(module.__all__)]


def failed(statements):
    return run(keras.backend.backend(), EACH_IN_A_CHILD, *statements)


def test_each_public_name_can_be_the_first_to_be_used():
    names = [
        *names_within(kpe, "kpe"),
        *names_within(kpe.conversion, "kpe.conversion"),
        *names_within(kpe.callbacks, "kpe.callbacks"),
        "kpe.filters.Auto",
        "kpe.loops.settle",
        "kpe.layers.LSTM",
    ]
    assert not failed(names)


@pytest.mark.full
def test_each_module_can_be_the_first_to_be_imported():
    others = {*BACKENDS} - {keras.backend.backend()}
    modules = [
        path.relative_to(ROOT.parent).with_suffix("")
        for path in sorted(ROOT.rglob("*.py"))
        if path.stem != "__main__" and not path.stem.startswith("triton")
    ]
    names = [".".join(x.parts) for x in modules if not others & {*x.parts}]
    assert not failed(
        f"import {name.removesuffix('.__init__')}" for name in names
    )
