"""Whether the gradients that an optimizer gets were unscaled before."""

from __future__ import annotations

from typing import Any

Tensor = Any


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
        self.start_step()

    def start_step(self) -> None:
        """The loss is scaled, and no gradient is unscaled yet."""
        self._by_caller = False
        self._scaled: list[Tensor | None] = []

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
        """Whether these gradients, which are applied now, are unscaled ones."""
        scaled = {id(x) for x in self._scaled}
        if any(id(x) in scaled for x in gradients):
            self.start_step()
        # Tensors of a step are not kept until the next.
        self._scaled = []
        return self._by_caller
