"""What multiplies in each matmul of a plan, asked once for a device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from keras_policy_ext.kernels import engines
from keras_policy_ext.kernels.contract import Choice
from keras_policy_ext.recipes import MATMULS


class Choices:
    """The choices of a plan; an eager layer asks five times in a step.

    Args:
        plan: A `Plan`.
    """

    def __init__(self, plan: Any):
        self._plan = plan
        # In one piece, for threads that pretend different devices.
        self._known: tuple[Any, Any, dict[str, tuple[Any, Choice]]]
        self._known = None, None, {}

    def of(self, matmul: str) -> tuple[Any, Choice]:
        """What multiplies in a matmul, and why."""
        return self.of_all((matmul,))[matmul]

    def of_all(self, matmuls: Iterable[str]) -> dict[str, tuple[Any, Choice]]:
        """Return, for each matmul, its kernel and the reason for it."""
        engine = engines.engine()
        device = engine.device()
        known_engine, known_device, found = self._known
        if known_engine is not engine or known_device is not device:
            found = {}
            self._known = engine, device, found
        for matmul in matmuls:
            if matmul not in found:
                found[matmul] = self._choose(engine, matmul)
        return found

    def _choose(self, engine: Any, matmul: str) -> tuple[Any, Choice]:
        plan = self._plan
        a, b = (plan.asked[operand, matmul] for operand in MATMULS[matmul])
        how = {"prefer": plan.prefer, "for_xla": plan.for_xla}
        found: tuple[Any, Choice] = plan.contraction.choose(
            engine, matmul, a, b, **how
        )
        return found
