"""What a rewriting met that it cannot, or should not silently, carry over."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any, Protocol

Config = Mapping[str, Any]
"""JSON of tf_keras as `json.loads` gives it; it is only read."""


@dataclasses.dataclass
class Problems:
    """Collected over a whole config, so that one error names everything."""

    unknown: list[str] = dataclasses.field(default_factory=list)
    """Classes and functions that neither Keras nor the caller knows."""
    unsupported: list[str] = dataclasses.field(default_factory=list)
    """Known things that Keras 3 has no counterpart of."""
    loss_scales: list[str] = dataclasses.field(default_factory=list)
    """Loss scales, and where they are."""
    code: list[str] = dataclasses.field(default_factory=list)
    """Bytecode of Python functions, and where it is."""
    notes: list[str] = dataclasses.field(default_factory=list)
    """What Keras 3 takes, but computes otherwise."""

    def check(self) -> None:
        """Raise one ValueError that names all that cannot be migrated."""
        parts = []
        if self.unknown:
            parts.append(
                f"Unknown: {_listed(self.unknown)}. Pass them in "
                "`custom_objects`, as Keras 3 classes and functions, or "
                "register them with "
                "keras.saving.register_keras_serializable."
            )
        if self.unsupported:
            parts.append(
                f"Without a counterpart in Keras 3: "
                f"{_listed(self.unsupported)}. Change these parts in tf_keras "
                "and save again."
            )
        if parts:
            raise ValueError("Cannot migrate this config. " + " ".join(parts))

    def refuse_code(self) -> None:
        """Raise a ValueError that names every place with bytecode."""
        if self.code:
            raise ValueError(
                "Loading this file would run Python bytecode that is stored "
                f"in it. Received: {_listed(self.code)}. Allowed: functions "
                "by name. If you trust who wrote the file, pass "
                "safe_mode=False; bytecode also needs the Python version "
                "that wrote it."
            )

    def report(self, on_loss_scale: str) -> None:
        """Warn the caller's caller of what was met and is no obstacle.

        Raises:
            ValueError: If `on_loss_scale` is `"error"` and there is a loss
                scale.
        """
        for note in self.notes:
            warnings.warn(note, stacklevel=3)
        if not self.loss_scales or on_loss_scale == "keep":
            return
        met = _listed(self.loss_scales)
        advice = "Pass on_loss_scale='keep' to keep it"
        if on_loss_scale == "error":
            raise ValueError(
                f"This model has a loss scale. Received: {met}. Allowed with "
                f"on_loss_scale='error': none. {advice} or 'drop' to go "
                "without."
            )
        warnings.warn(
            f"A loss scale was dropped. Received: {met}. {advice}, or wrap "
            "the optimizer in mixed_precision.LossScaleOptimizer before you "
            "train in float16.",
            stacklevel=3,
        )


class Rewriting(Protocol):
    """What the parts of a rewriting use of `configs.Rewriter`."""

    keeps_loss_scale: bool
    custom_objects: Config
    problems: Problems

    def rewrite(self, value: object, hint: str = ..., where: str = ...) -> Any:
        """Rewrite any part of a config."""

    def rewrite_function(self, name: str, where: str) -> object:
        """A function by its name, or by that of the caller's."""


def named(config: Config) -> str:
    """How problems name an object: `Dense 'head'`."""
    fields = config["config"]
    name = fields.get("name") if isinstance(fields, Mapping) else None
    kind = str(config["class_name"])
    return f"{kind} {name!r}" if isinstance(name, str) else kind


def _listed(entries: list[str]) -> str:
    return "; ".join(dict.fromkeys(entries))
