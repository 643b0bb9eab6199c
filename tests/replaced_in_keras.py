"""Prints which functions of Keras other code has replaced; see the test.

`python tests/replaced_in_keras.py CODE...` runs each of the programs in turn.
It prints a list for each: what it has replaced, and no one before it.
"""

import inspect
import json
import sys

import keras


def owners():
    """Keras's modules, and the classes that they define, with their contents.

    They come by `id`, each with its name.
    """
    found = {}
    for home, module in sorted(sys.modules.items()):
        if home.partition(".")[0] != "keras":
            continue
        found[id(module)] = module, home, dict(vars(module))
        for value in list(vars(module).values()):
            if inspect.isclass(value) and value.__module__.startswith("keras."):
                name = f"{value.__module__}.{value.__qualname__}"
                found[id(value)] = value, name, dict(vars(value))
    return found


def held(owner, name, contents):
    """What an owner held by a name, itself or by a class that it inherits."""
    for base in getattr(owner, "__mro__", [owner]):
        if name in contents.get(id(base), (0, 0, {}))[2]:
            return contents[id(base)][2][name]
    return None


def replaced(before, now):
    """The names of the functions that are others now."""
    kinds = classmethod, staticmethod, property
    return sorted(
        f"{home}.{name}".removeprefix("keras.").removeprefix("src.")
        for key, (owner, home, contents) in now.items()
        for name, value in contents.items()
        if key in before
        and (inspect.isfunction(value) or isinstance(value, kinds))
        and held(owner, name, before) not in (None, value)
    )


def main(programs):
    """Run the programs, and print what each has replaced."""
    now, found = owners(), []
    for program in programs:
        before = now
        exec(program, {"keras": keras})
        now = owners()
        found.append(replaced(before, now))
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
