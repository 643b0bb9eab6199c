"""Whether the gradients that an optimizer gets were unscaled before."""

from __future__ import annotations

from typing import Any


class Handover:
    """Pairs a call of `get_unscaled_gradients` with the next `apply`.

    tf_keras lets the caller unscale gradients and change them, by clipping
    for instance, before they are applied; Keras applies scaled ones. Nothing
    in a tensor tells the two apart, so the order of the calls does.
    """

    def __init__(self) -> None:
        self._scaled: list[Any] | None = None

    def give(self, scaled: list[Any]) -> None:
        """These gradients have been unscaled."""
        self._scaled = scaled

    def forget(self) -> None:
        """A new step has begun."""
        self._scaled = None

    def taken(self, gradients: list[Any]) -> bool:
        """Whether these are the unscaled ones; each handover counts once."""
        scaled, self._scaled = self._scaled, None
        if scaled is None or len(scaled) != len(gradients):
            return False
        before = {id(x) for x in scaled if x is not None}
        return not any(id(x) in before for x in gradients)
