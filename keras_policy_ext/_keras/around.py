"""Functions of Keras and KerasHub that others are put around."""

import functools
from collections.abc import Callable
from typing import Any

_MARK = "_keras_policy_ext"
"""An attribute of the functions that this package has put around others: the
names of those that were given for it."""


def put_around(owner: Any, name: str, function: Callable[..., Any]) -> bool:
    """Have a function called in the place of another one.

    Once for each pair of functions, however often it is asked for. Where there
    is none of this name, nothing happens.

    Args:
        owner: The class or module that has the other one.
        name: Its name there.
        function: Called with the other one first, and then its arguments.

    Returns:
        Whether there is one of this name.
    """
    stock = getattr(owner, name, None)
    if stock is None:
        return False
    given = f"{function.__module__}.{function.__qualname__}"
    before = getattr(stock, _MARK, ())
    if given in before:
        return True

    @functools.wraps(stock)
    def around(*args: Any, **kwargs: Any) -> Any:
        return function(stock, *args, **kwargs)

    vars(around)[_MARK] = (*before, given)
    setattr(owner, name, around)
    return True
