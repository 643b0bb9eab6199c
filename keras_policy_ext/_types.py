"""Types that all modules share."""

from __future__ import annotations

from typing import Any, TypeAlias

Tensor: TypeAlias = Any
"""A tensor of TensorFlow, JAX or PyTorch."""
