"""Descriptions of traced programs, and the name scopes of marked calls."""

from __future__ import annotations

import re
from typing import Any, NamedTuple


class TracedProgram(NamedTuple):
    """A traced function: its outputs and its program.

    Attributes:
        outputs: The outputs, with a `keras.KerasTensor` for each tensor.
        program: The program, in the form of the framework: on JAX a jaxpr, on
            TensorFlow a graph, on PyTorch a list with a `ProductCall` for each
            call of a function that multiplies.
        chooses: Whether the function looks for the largest or smallest entries
            of a tensor, by a top-k, an argmax or a sort.
    """

    outputs: Any
    program: Any
    chooses: bool = False


_SCOPE = "kpe_layer_"


def scope_name(number: int) -> str:
    """Return the name scope of a layer's operations, for `layer_of`."""
    return f"{_SCOPE}{number}"


def layer_of(name: str) -> int | None:
    """Return the number of the innermost layer in a name scope, or None."""
    found = re.findall(rf"{_SCOPE}(\d+)", name)
    return int(found[-1]) if found else None
