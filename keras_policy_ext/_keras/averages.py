"""Moving averages that optimizers keep of variables."""

from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_policy_ext._keras.around import put_around
from keras_policy_ext._types import Tensor


class _AverageStandIn(keras.Variable):
    """Stands where an optimizer keeps the moving average of a variable.

    It ignores what is assigned. It holds zeros, which leave the variable as it
    is when Keras assigns them. On TensorFlow Keras writes into the
    tensors behind the variables: there it holds what the variable holds, so
    that to overwrite the one with the other, or to swap the two, changes
    nothing.
    """

    def __init__(self, variable: keras.Variable):
        self._copies = keras.backend.backend() == "tensorflow"

        def initial(shape: Sequence[int], dtype: str | None = None) -> Tensor:
            if self._copies:
                return keras.ops.copy(variable.value)
            return keras.ops.zeros(shape, dtype)

        # As Keras makes slots: on JAX a LayoutMap may match the name.
        layout = getattr(variable, "_layout", None)
        super().__init__(
            initial,
            shape=variable.shape,
            dtype=variable.dtype,
            trainable=False,
            autocast=False,
            aggregation="only_first_replica",
            name=f"{variable.name}_average",
            **({} if layout is None else {"layout": layout}),
        )

    def assign(self, value: Tensor) -> None:
        """Ignore the assigned value."""

    def follow(self, variable: keras.Variable) -> None:
        """Hold what the variable holds now, where that is due."""
        if self._copies:
            super().assign(variable.value)


class NotAveraged:
    """A variable that moving averages leave as it is.

    For a variable that is overwritten with its gradient, optimizers with
    `use_ema` keep None as the average and then fail on it: on TensorFlow at
    the end of `fit`, on TensorFlow and JAX with `ema_overwrite_frequency`, on
    all three with the callback `SwapEMAWeights` (keras 3.12 to 3.15). See
    `leave_out_of_averages`. Zeros, assigned to such a variable, must leave it
    as it is.
    """

    _stand_in: _AverageStandIn | None = None

    def stand_in(self) -> keras.Variable:
        """Return the stand-in that optimizers get for an average."""
        if self._stand_in is None:
            self._stand_in = _AverageStandIn(self)
        return self._stand_in

    def is_stand_in(self, value: Any) -> bool:
        """True if a value is what this variable gave out for its average."""
        return value is not None and value is self._stand_in

    def assign(self, value: Tensor) -> Tensor:
        """Assign, and let the stand-in follow."""
        parent: Any = super()
        assigned = parent.assign(value)
        if self._stand_in is not None:
            self._stand_in.follow(self)
        return assigned


def fill_averages(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]
) -> None:
    """Put the stand-ins of variables where a built optimizer has None."""
    averages = getattr(optimizer, "_model_variables_moving_average", None) or []
    for index, average in enumerate(averages):
        variable = variables[index]
        if average is None and isinstance(variable, NotAveraged):
            averages[index] = variable.stand_in()


def leave_out_of_averages() -> None:
    """Have all optimizers treat variables as `NotAveraged` says.

    Nothing public tells a variable which optimizer it is given to. So the
    public method `Optimizer.build`, which is given the variables, is put into
    another one that fills the list of averages when it has made it
    (`_model_variables_moving_average`, keras 3.12 to 3.15). Where that list is
    gone, optimizers fail as Keras's do. Expires when Keras skips None
    everywhere.
    """

    def build(
        stock: Callable[..., None],
        optimizer: keras.optimizers.Optimizer,
        variables: Sequence[keras.Variable],
    ) -> None:
        stock(optimizer, variables)
        fill_averages(optimizer, list(variables))

    put_around(keras.optimizers.Optimizer, "build", build)
