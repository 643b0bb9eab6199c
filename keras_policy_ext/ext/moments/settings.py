"""Which slots of an optimizer are stored in one byte a number, and how."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import keras

from keras_policy_ext.ext.moments.codes import BLOCKS, KINDS

#: What the slots of Keras's optimizers hold. A second moment is an average of
#: squares or magnitudes. All other slots stay as they are: running maxima,
#: averages of weights, and accumulated gradients.
SLOTS = {
    "momentum": "first",
    "velocity": "second",
    "norm": "second",
    "accumulator": "second",
    "accumulated_grad": "second",
    "accumulated_delta_var": "second",
}

#: Slots whose names end like those above.
OTHERS = ("gradient_accumulator", "average")

#: The slots of classes for which they are something else.
OF_CLASS: dict[str, dict[str, str]] = {
    # Ftrl divides `linear` by the root of `accumulator` to compute a weight.
    # Rounding `accumulator` would change the weight, and not only a step.
    "Ftrl": {"accumulator": "float32"},
    # The point that is trained.
    "ScheduleFreeAdamW": {"momentum": "float32"},
}

KEPT = "float32"


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings for the stored state of an optimizer, from `quantize_state`."""

    moments: str = "float8"
    slots: tuple[tuple[str, str], ...] = ()
    exclude: tuple[str, ...] = ()
    minimum_size: int = 4096

    @classmethod
    def read(
        cls,
        moments: object,
        slots: Mapping[str, str] | Iterable[Any] | None,
        exclude: str | Iterable[str],
        minimum_size: object,
    ) -> Settings:
        """Check the arguments of `quantize_state`.

        Raises:
            TypeError: If one has the wrong type.
            ValueError: If a value is not allowed.
        """
        if moments not in BLOCKS:
            raise ValueError(
                "There is no such form for moments. Received: moments="
                f"{moments!r}. Allowed: {', '.join(map(repr, BLOCKS))}. Pass "
                "one of them."
            )
        try:
            pairs = dict(slots or {})
        except (TypeError, ValueError):
            raise TypeError(
                f"`slots` is no dict. Received: {slots!r}. Allowed: a dict. "
                "Write for instance slots={'momentum': 'first'}."
            ) from None
        allowed = (*KINDS, KEPT)
        for name, kind in pairs.items():
            if not isinstance(name, str) or kind not in allowed:
                raise ValueError(
                    "`slots` does not say what a slot holds. Received: "
                    f"{name!r}: {kind!r}. Allowed: the name of a slot, with "
                    f"one of {', '.join(map(repr, allowed))}. Write for "
                    "instance slots={'momentum': 'first'}."
                )
        parts: Any = (exclude,) if isinstance(exclude, str) else exclude
        parts = tuple(parts) if isinstance(parts, Iterable) else (parts,)
        if not all(isinstance(each, str) for each in parts):
            raise TypeError(
                f"`exclude` has no parts of paths. Received: {exclude!r}. "
                "Allowed: strings. Write for instance exclude='embedding'."
            )
        whole = isinstance(minimum_size, int) and not isinstance(
            minimum_size, bool
        )
        if not whole or minimum_size < 0:  # type: ignore[operator]
            raise ValueError(
                "`minimum_size` is no count of numbers. Received: "
                f"{minimum_size!r}. Allowed: an integer >= 0. Leave it out "
                "for 4096."
            )
        return cls(str(moments), tuple(pairs.items()), parts, minimum_size)  # type: ignore[arg-type]

    def config(self) -> dict[str, Any]:
        """Return the settings as JSON types."""
        return {
            "moments": self.moments,
            "slots": dict(self.slots),
            "exclude": list(self.exclude),
            "minimum_size": self.minimum_size,
        }

    def for_optimizer(self, optimizer: keras.optimizers.Optimizer) -> Settings:
        """Return the settings with what some of Keras's optimizers need."""
        own: dict[str, str] = {}
        for base in type(optimizer).__mro__:
            own = {**OF_CLASS.get(base.__name__, {}), **own}
        if getattr(optimizer, "centered", False):
            # A square that is subtracted from it could become larger than it.
            own = {"velocity": KEPT, **own}
        return dataclasses.replace(
            self, slots=tuple({**own, **dict(self.slots)}.items())
        )

    def kind_of(self, name: str | None, shape: Any, dtype: Any) -> str | None:
        """Return how a variable of an optimizer is stored; None for as it is.

        Args:
            name: The path of the weight with `_`, then `_` and the name of
                the slot.
            shape: The shape of the slot.
            dtype: Its dtype.
        """
        named = {**SLOTS, **dict.fromkeys(OTHERS, KEPT), **dict(self.slots)}
        ends = [
            slot
            for slot in named
            if name == slot or str(name).endswith(f"_{slot}")
        ]
        if not ends or math.prod(shape) < max(self.minimum_size, 1):
            return None
        kind = named[max(ends, key=len)]
        name_of_dtype = keras.backend.standardize_dtype(dtype)
        if kind == KEPT or not keras.backend.is_float_dtype(name_of_dtype):
            return None
        if any(each.replace("/", "_") in str(name) for each in self.exclude):
            return None
        return kind
