"""What Keras offers in public: its names, and what its objects hold."""

import types

import keras

_NOT_PUBLIC = {"api", "legacy", "src"}


def is_public(name):
    return not name.startswith("_") and name not in _NOT_PUBLIC


def public_modules(module=keras):
    """The modules below `keras` that are documented, itself first."""
    found, waiting = [], [module]
    while waiting:
        each = waiting.pop()
        found.append(each)
        waiting += [
            value
            for name, value in vars(each).items()
            if isinstance(value, types.ModuleType)
            and is_public(name)
            and value.__name__.startswith("keras.")
            and ".src" not in value.__name__
            and value not in [*found, *waiting]
        ]
    return found


def functions_about(*words):
    """Public names of modules of Keras that have one of the words in them."""
    return sorted(
        f"{module.__name__}.{name}"
        for module in public_modules()
        for name in vars(module)
        if is_public(name) and any(word in name.lower() for word in words)
    )


def members_about(cls, *words):
    """Public names of a class, as Keras and not a framework defines them."""
    return sorted(
        {
            name
            for base in cls.__mro__
            if base.__module__.startswith("keras.")
            for name in vars(base)
            if is_public(name) and any(word in name.lower() for word in words)
        }
    )


def public_lists(thing):
    """Lists and dicts in public attributes and properties, by their names."""
    names = [*members_about(type(thing), ""), *vars(thing)]
    found = {}
    for name in filter(is_public, names):
        try:
            value = getattr(thing, name)
        except (AttributeError, ValueError):  # `input` of an uncalled layer
            continue
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, (list, tuple, set)):
            found[name] = list(value)
    return found


def lists_with(thing, wanted):
    """Names of those lists that have an object in them."""
    return sorted(
        name
        for name, values in public_lists(thing).items()
        if any(value is wanted for value in values)
    )
