"""Whether the loss was scaled, and its gradients were unscaled before."""

from __future__ import annotations

import warnings
from typing import Any

from keras_policy_ext import _user_code
from keras_policy_ext._types import Tensor


class Unscaling:
    """Who unscales: the caller, by `get_unscaled_gradients`, or `apply`.

    tf_keras lets the caller unscale gradients and change them, by clipping
    for instance, before they are applied; Keras applies scaled ones. Nothing
    in a tensor tells the two apart, so the calls do: once the caller has
    unscaled, `apply` does not, until the loss is scaled again or one of the
    scaled gradients themselves is applied. That outlasts a step, because of
    steps whose first part is compiled: its calls are seen once only.
    """

    def __init__(self) -> None:
        self.states_too = False
        """Whether the caller unscaled observations of float8 state too, since
        it was not known which they were."""
        self._scale_used = False
        self._used_in_trace = False
        self._updated: set[int] = set()
        self._warned = False
        self.start_step()

    def start_step(self) -> None:
        """The loss is scaled, and no gradient is unscaled yet."""
        self._by_caller = False
        self._scaled: list[Tensor | None] = []

    def use_scale(self, traced: bool) -> None:
        """The loss is multiplied by the scale, or the scale is read for that.

        Args:
            traced: Whether a compiler records this call, which it then does
                not make again in each step.
        """
        self._scale_used = True
        self._used_in_trace = self._used_in_trace or traced
        self._updated.clear()

    def check_scaled(self, variable: Any, traced: bool, name: str) -> None:
        """Warn once if gradients are divided by a scale that was not used.

        Where no compiler is at work the scale is to be used in each step:
        between two updates of the same variable. Otherwise, once.

        Args:
            variable: The first variable that is updated.
            traced: Whether a compiler records this call.
            name: That of the optimizer.
        """
        if self._by_caller or self._used_in_trace:
            return
        seen = not traced and id(variable) in self._updated
        if not traced:
            self._updated.add(id(variable))
        if self._scale_used and not seen:
            return
        self._warn(
            "The loss is not scaled, but its gradients are divided by the "
            "loss scale: weights hardly change. Received: gradients for "
            f"{name!r}, whose scale_loss was not called for this step. "
            "Allowed: gradients of the scaled loss. Write "
            "`loss = optimizer.scale_loss(loss)` before gradients are taken "
            "(in a train_step: `self.optimizer.scale_loss(loss)`). To train "
            "without loss scaling, compile with auto_scale_loss=False or use "
            "`optimizer.inner_optimizer`."
        )

    def warn_of_constant(self, name: str) -> None:
        """Warn once that a compiled function reads a scale that moves."""
        self._warn(
            "The loss scale is a constant in this compiled function, and "
            "does not follow when the optimizer changes it. Received: "
            f"scale_loss of {name!r} where JAX compiles, with the value of "
            "its variable. Allowed: the scale as an argument of the function. "
            "Pass the values of `optimizer.variables` to the function, and "
            "call scale_loss within `keras.StatelessScope("
            "zip(optimizer.variables, values))`."
        )

    def _warn(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(message, stacklevel=_user_code.stacklevel())

    def by_caller(
        self,
        scaled: list[Tensor | None],
        unscaled: list[Tensor | None],
        states_too: bool,
    ) -> None:
        """The caller has made the second of the first of these gradients."""
        self.states_too = states_too
        self._by_caller = True
        pairs = zip(scaled, unscaled, strict=True)
        self._scaled = [a for a, b in pairs if a is not b]

    def is_done(self, gradients: list[Tensor | None]) -> bool:
        """True if these gradients, which are applied now, are unscaled ones."""
        scaled = {id(x) for x in self._scaled}
        if any(id(x) in scaled for x in gradients):
            self.start_step()
        # Tensors of a step are not kept until the next.
        self._scaled = []
        return self._by_caller
