"""The parameter counts of `model.summary()`."""

import contextvars
from collections.abc import Callable, Iterable
from typing import Any

from keras_policy_ext._keras.around import put_around

try:
    from keras.src.utils import summary_utils as _summary_utils
except ImportError:  # Keras has moved it: totals then count every weight.
    _summary_utils = None

_printing = contextvars.ContextVar("a summary is printed", default=False)


def leave_out_of_totals(is_left_out: Callable[[Any], bool]) -> None:
    """Have the totals of `model.summary()` leave out some variables.

    They are sums over all weights of the model, by two functions of
    `summary_utils` (keras 3.0 to 3.15), which are put into others here, and
    do what they did outside of a summary. Where they are gone, all weights
    are counted. Expires when Keras adds up the rows, or has a mark for
    variables that are no parameters.

    Args:
        is_left_out: Of a variable.
    """

    def print_summary(stock: Any, *args: Any, **kwargs: Any) -> Any:
        token = _printing.set(True)
        try:
            return stock(*args, **kwargs)
        finally:
            _printing.reset(token)

    def counted(stock: Any, weights: Iterable[Any]) -> Any:
        if _printing.get():
            weights = [v for v in weights if not is_left_out(v)]
        return stock(weights)

    put_around(_summary_utils, "print_summary", print_summary)
    put_around(_summary_utils, "count_params", counted)
    put_around(_summary_utils, "weight_memory_size", counted)
