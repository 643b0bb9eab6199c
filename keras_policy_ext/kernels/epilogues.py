"""What a kernel may do with a product before it writes it, if it says so."""

from __future__ import annotations

from typing import Any

from keras_policy_ext.kernels.contract import Choice, Shapes
from keras_policy_ext.kernels.contractions import Einsum

Tensor = Any
Chosen = dict[str, tuple[Any, Choice]]


def writes(kernel: Any, dtype: str) -> bool:
    """Whether it may write the gradient of a kernel in the dtype of that.

    A pass that widens what is rounded to 16 bits moves 6 bytes for a number.
    """
    return dtype == "float32" and getattr(kernel, "writes_float32", False)


def adding(
    contraction: Any, chosen: Chosen, bias: Tensor | None, shapes: Shapes
) -> Chosen | None:
    """What multiplies in the forward pass and adds a bias; None if nothing.

    Args:
        contraction: What is multiplied.
        chosen: What multiplies in each matmul.
        bias: To be added to the outputs, in their dtype; None for none.
        shapes: Of the inputs and the kernel.
    """
    kernel, choice = chosen["forward"]
    may_add = bias is not None and hasattr(kernel, "adding")
    if not may_add or not isinstance(contraction, Einsum):
        return None
    columns = contraction.of_columns(bias, shapes)
    found = None if columns is None else kernel.adding(columns)
    return None if found is None else {"forward": (found, choice)}
