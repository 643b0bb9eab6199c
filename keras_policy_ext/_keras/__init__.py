"""Access to Keras internals, where the public API is not enough.

Each file has one subject. Each function says what it is for, which private
name it uses, and with which Keras versions it works. If the name is missing,
the public API is used as far as possible, or the function raises the
ImportError of `versions.missing`. Unless it says otherwise, it expires when
Keras has a public way to do the same. For each use, a test in
`tests/core/keras_contacts` shows the behaviour of Keras that makes it
necessary, and fails when Keras changes it.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

Stock = Callable[..., Any]
"""A function of Keras, which its wrapper gets as the first argument."""

_MARK = "_keras_policy_ext"
"""An attribute of wrapped functions: the names of their wrappers."""


def put_around(owner: Any, name: str, function: Callable[..., Any]) -> bool:
    """Replace `owner.name` by `function`, which gets the original first.

    The owner is a class or module. A class method stays one: the class comes
    after the original. Each pair of functions is combined only once. Return
    False, and do nothing, if there is no function of this name.
    """
    stock = getattr(owner, name, None)
    if stock is None:
        return False
    is_class_method = inspect.ismethod(stock)
    stock = getattr(stock, "__func__", stock)
    own_name = f"{function.__module__}.{function.__qualname__}"
    wrappers = getattr(stock, _MARK, ())
    if own_name in wrappers:
        return True

    @functools.wraps(stock)
    def around(*args: Any, **kwargs: Any) -> Any:
        """Call `function` with the original and the arguments."""
        return function(stock, *args, **kwargs)

    vars(around)[_MARK] = (*wrappers, own_name)
    setattr(owner, name, classmethod(around) if is_class_method else around)
    return True
