"""What a rewriting met that it cannot, or should not silently, carry over."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol


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
        """Raise one error that names all that cannot be migrated.

        Raises:
            ValueError: If anything was found.
        """
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
        """Raise if there is bytecode.

        Raises:
            ValueError: Naming every place.
        """
        if self.code:
            raise ValueError(
                "Loading this file would run Python bytecode that is stored "
                f"in it. Received: {_listed(self.code)}. Allowed: functions "
                "by name. If you trust who wrote the file, pass "
                "safe_mode=False; bytecode also needs the Python version "
                "that wrote it."
            )


class Rewriting(Protocol):
    """What the parts of a rewriting use of `configs.Rewriter`."""

    custom_objects: Mapping[str, Any]
    problems: Problems

    def rewrite(self, value: Any, hint: str = ..., where: str = ...) -> Any:
        """Rewrite any part of a config."""

    def rewrite_function(self, name: str, where: str) -> Any:
        """A function by its name, or by that of the caller's."""


def place(kind: str, name: Any) -> str:
    """How problems name a place: `Dense 'head'`."""
    return f"{kind} {name!r}" if isinstance(name, str) else kind


def _listed(entries: list[str]) -> str:
    return "; ".join(dict.fromkeys(entries))
