"""Keep the state of a model's optimizers in step with `convert`, `revert`."""

from __future__ import annotations

from typing import ClassVar

from keras_policy_ext import seams
from keras_policy_ext.ext.moments.codes import BLOCKS
from keras_policy_ext.ext.moments.conversion import (
    check_state,
    dequantize,
    quantize,
)
from keras_policy_ext.ext.moments.settings import Settings


class Moments(seams.Follower):
    """Quantizes moments in `convert`, and dequantizes them in `revert`."""

    takes_optimizer_option: ClassVar[bool] = True

    def before(self, change: seams.ModelChange) -> None:
        """Check that the moments of the model's optimizers can be quantized.

        Raises:
            ValueError: If there is no such form, or no optimizer, or
                `quantize_state` refuses one.
        """
        moments = change.optimizer_option
        if moments is None:
            return
        if moments not in BLOCKS:
            raise ValueError(
                "There is no such form for the state of optimizers. Received: "
                f"optimizer={moments!r}. Allowed: "
                f"{', '.join(map(repr, BLOCKS))}, or None. Pass one of them."
            )
        found = change.find_optimizers()
        if not found:
            raise ValueError(
                f"{change.model.name!r} has no optimizer whose state could be "
                "stored in one byte a number. Received: "
                f"optimizer={moments!r} for a model that is not compiled. "
                "Allowed: a compiled model. Call `model.compile` first, or "
                "`kpe.optimizers.quantize_state(optimizer)` for an optimizer "
                "of your own loop."
            )
        for each in found:
            check_state(each, moments)

    def after(self, change: seams.ModelChange, known: None) -> None:
        """Quantize the moments of all optimizers, or dequantize them."""
        if not change.to_float8:
            for each in change.find_optimizers():
                dequantize(each)
        elif change.optimizer_option is not None:
            for each in change.find_optimizers():
                quantize(each, Settings(change.optimizer_option))


seams.register_follower(Moments())
