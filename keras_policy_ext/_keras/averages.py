"""Moving averages that optimizers keep of variables."""

import sys
from typing import Any

import keras


class _OwnAverage(keras.Variable):
    """Stands where an optimizer keeps the moving average of a variable.

    Reads as the variable itself and ignores what is assigned, so that to
    overwrite the variable with its average, or to swap the two, changes
    nothing. Has nothing of its own: all else is that of the variable.
    """

    def __init__(self, variable: Any):
        self._variable = variable

    @property
    def value(self) -> Any:
        return self._variable.value

    def assign(self, value: Any) -> None:
        """Leave the variable as it is."""

    def __getattr__(self, name: str) -> Any:
        if "_variable" not in vars(self):  # while it is being copied
            raise AttributeError(name)
        return getattr(self._variable, name)


class _EqualAverage(keras.Variable):
    """The same for TensorFlow, where it is a number of its own.

    There `SwapEMAWeights` adds and subtracts the two in place, which swaps
    them only if they are two.
    """

    def __init__(self, variable: Any):
        super().__init__(
            lambda shape, dtype=None: keras.ops.copy(variable.value),
            shape=tuple(map(int, variable.shape)),
            dtype=variable.dtype,
            trainable=False,
            autocast=False,
            aggregation="only_first_replica",
            name=f"{variable.name}_average",
        )

    def assign(self, value: Any) -> None:
        """Stay what `follow` made of it."""

    def follow(self, variable: Any) -> None:
        """Become what the variable is now."""
        super().assign(variable.value)


def spare_from_averaging(variable: Any) -> None:
    """Keep an optimizer with `use_ema` from failing on a state variable.

    To be called where the optimizer asks a variable whether it is overwritten
    with its gradient. For such a variable the optimizer keeps None as the
    average and then fails: on TensorFlow at the end of `fit`, on TensorFlow
    and JAX with `ema_overwrite_frequency`, on all three with the callback
    `SwapEMAWeights` (keras 3.12 to 3.15). The optimizer is taken from the
    frame of the question, since Keras tells a variable nothing about its
    optimizer. Expires when Keras skips None everywhere.
    """
    frame = sys._getframe(2) if hasattr(sys, "_getframe") else None
    optimizer = frame.f_locals.get("self") if frame is not None else None
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return
    if not getattr(optimizer, "use_ema", False):
        return
    # Asked first while the optimizer makes its own variables, as is due.
    if "_average" not in vars(variable):
        tensorflow = keras.backend.backend() == "tensorflow"
        make = _EqualAverage if tensorflow else _OwnAverage
        variable._average = make(variable)
    averages = getattr(optimizer, "_model_variables_moving_average", None)
    find = getattr(optimizer, "_get_variable_index", None)
    if not averages or find is None:
        return
    index = find(variable)
    if averages[index] is None:
        averages[index] = variable._average


def keep_average_equal(variable: Any) -> None:
    """Have what `spare_from_averaging` made follow an assigned variable."""
    average = vars(variable).get("_average")
    if isinstance(average, _EqualAverage):
        average.follow(variable)
