"""Access to Keras internals, where the public API is not enough.

Each file has one subject. Each function says what it is for, with which Keras
versions it works, and when it can be removed. Internals are feature-detected:
if they are missing, the public API is used as far as possible. For each use, a
test in `tests/core/keras_contacts` shows the behaviour of Keras that makes it
necessary, and fails when Keras changes it.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

_MARK = "_keras_policy_ext"
"""An attribute of wrapped functions: the names of their wrappers."""


def put_around(owner: Any, name: str, function: Callable[..., Any]) -> bool:
    """Replace `owner.name` by `function`, which gets the original as well.

    A class method stays one: the class comes after the original. Each pair of
    functions is combined only once. If `owner` has no function of this name,
    nothing happens.

    Args:
        owner: The class or module of the original.
        name: The name of the original there.
        function: Called with the original first, then with its arguments.

    Returns:
        Whether there is a function of this name.
    """
    stock = getattr(owner, name, None)
    if stock is None:
        return False
    of_class = inspect.ismethod(stock)
    stock = getattr(stock, "__func__", stock)
    given = f"{function.__module__}.{function.__qualname__}"
    before = getattr(stock, _MARK, ())
    if given in before:
        return True

    @functools.wraps(stock)
    def around(*args: Any, **kwargs: Any) -> Any:
        return function(stock, *args, **kwargs)

    vars(around)[_MARK] = (*before, given)
    setattr(owner, name, classmethod(around) if of_class else around)
    return True
