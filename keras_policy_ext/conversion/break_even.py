"""From which size on float8 is faster than bfloat16, device by device.

The table is data, `break_even.json`, and each row says where its size comes
from: measured, estimated from counts of bytes and kernels, or assumed.
`integration/benchmarks/break_even.py` writes it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json

from keras_policy_ext import backends, contractions, recipes
from keras_policy_ext.backends import devices


@dataclasses.dataclass(frozen=True)
class BreakEven:
    """What is known of one device under one framework.

    Attributes:
        backend: The name of the framework, or `"any"`.
        device: What the name of the device contains, or `"any"`.
        size: A training step with square matrices of this size takes as long
            in float8 as in bfloat16. None: float8 never gains there.
        origin: Where the size comes from.
    """

    backend: str
    device: str
    size: int | None
    origin: str

    def is_for(self, backend: str, device: str) -> bool:
        """Return True if it is about this framework on this device."""
        return self.backend in ("any", backend) and (
            self.device == "any" or self.device.lower() in device.lower()
        )


@functools.cache
def table() -> tuple[BreakEven, ...]:
    """All rows; of those that are for a device the first one holds."""
    package = importlib.resources.files("keras_policy_ext.conversion")
    text = package.joinpath("break_even.json").read_text(encoding="utf-8")
    return tuple(BreakEven(**row) for row in json.loads(text))


def here() -> BreakEven:
    """The row for this machine, or for the device that is pretended.

    Where float8 matmuls are emulated nothing is won, whatever the table says.
    """
    framework, pretended = backends.current(), devices.pretended()
    backend = framework.name
    device = pretended.title if pretended else framework.device_name()
    row = next(row for row in table() if row.is_for(backend, device))
    choice = choice_for(contractions.Einsum("ab,bc->ac"))
    if choice.native or row.size is None:
        return row
    reason = f"matmuls are emulated: {choice.reason}"
    return BreakEven(backend, device, None, reason)


def choice_for(
    contraction: contractions.Einsum | contractions.Conv,
) -> contractions.Choice:
    """Which kernel a contraction gets in a compiled step of training.

    Scales are those of whole tensors.
    """
    recipe = recipes.get("current")
    plan = contractions.make_plan(contraction, recipe, "bfloat16", "float32")
    # `fit` compiles for a GPU on TensorFlow, and a model is converted before.
    return dataclasses.replace(plan, for_xla=True).resolved().choice
