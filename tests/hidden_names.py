"""Names of Keras that this package does not find, and Keras does.

As if Keras had given them other names: what the package looks up is not there,
and what it finds otherwise works on.
"""

import contextlib
import sys

_NONE = object()


def _asks_from_outside_of_keras(name):
    """Whether this package looks an attribute up, and does not define it."""
    frame = sys._getframe(2)
    module = frame.f_globals.get("__name__", "")
    of_ours = module.startswith("keras_policy_ext")
    return of_ours and frame.f_code.co_name != name


class _Hidden:
    """Stands in a class where an attribute was, or is put by instances."""

    def __init__(self, name, stock):
        self.name, self.stock = name, stock
        self.key = f"renamed{name}"

    def __get__(self, instance, cls=None):
        if _asks_from_outside_of_keras(self.name):
            raise AttributeError(f"{self.name} is hidden")
        if instance is not None and not isinstance(self.stock, property):
            for key in (self.key, self.name):
                if key in vars(instance):
                    return vars(instance)[key]
        if self.stock is _NONE:
            raise AttributeError(self.name)
        if hasattr(type(self.stock), "__get__"):
            return self.stock.__get__(instance, cls)
        return self.stock

    def __set__(self, instance, value):
        if isinstance(self.stock, property):
            self.stock.__set__(instance, value)
        else:
            vars(instance)[self.key] = value

    def __delete__(self, instance):
        held = vars(instance)
        held.pop(self.key if self.key in held else self.name)


@contextlib.contextmanager
def hidden(cls, name):
    """Hide an attribute of a class, or of its instances, from the package."""
    cls = next((base for base in cls.__mro__ if name in vars(base)), cls)
    own = vars(cls).get(name, _NONE)
    setattr(cls, name, _Hidden(name, own))
    try:
        yield
    finally:
        if own is _NONE:
            delattr(cls, name)
        else:
            setattr(cls, name, own)
