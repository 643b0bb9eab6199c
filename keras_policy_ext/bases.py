"""Check the order of mixins and Keras classes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import keras

# The base of mixins, which come before a Keras class.
if TYPE_CHECKING:

    class MixedInto(keras.Layer):
        """A base class of mixins that makes type checkers see a layer."""

else:
    # Python assigns `__class__` only where both classes add the `__dict__` of
    # instances to the same class. It is `object`, or with NNX one of Flax.
    MixedInto = next(x for x in keras.Layer.__mro__ if not x.__dictoffset__)


def check_before(cls: type, mixin: type, base: type, name: str) -> None:
    """Raise TypeError if a class lists a mixin after the Keras class `base`."""
    # In that order Python finds the methods of that class first, and the mixin
    # silently does nothing. `name` is that of `base` for users.
    order = cls.__mro__
    if base not in order or order.index(mixin) < order.index(base):
        return
    bases = cls.__bases__
    in_order = sorted(bases, key=lambda each: not issubclass(each, mixin))
    received = _class_statement(cls, bases)
    raise TypeError(
        f"{mixin.__name__} has to come before {name}, or it changes "
        f"nothing. Received: {received}. Allowed: the mixin, or "
        "a class with it, before all Keras classes. Write "
        f"{_class_statement(cls, in_order)}."
    )


def _class_statement(cls: type, bases: Iterable[type]) -> str:
    """Return a class statement, such as `class Mine(Dense)`."""
    names = ", ".join(base.__name__ for base in bases)
    return f"class {cls.__name__}({names})"
