"""Types that all modules share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from typing_extensions import override
else:  # `typing` has it from Python 3.12 on.

    def override(method):
        """Mark a method that replaces one of a base class."""
        return method


__all__ = ["Size", "Tensor", "override"]

Tensor: TypeAlias = Any
"""A tensor of TensorFlow, JAX or PyTorch."""

Size: TypeAlias = Any
"""An int, or a scalar tensor for a size that a graph does not know."""
