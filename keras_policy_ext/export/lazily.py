"""A kernel that is quantized when it is written, and then let go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from keras_policy_ext.stored_kernels import StoredKernel

Array = np.ndarray[Any, Any]


class OneAtATime:
    """Hands out codes once, and keeps the scales, which are asked for next.

    Args:
        make: Makes the kernel.
    """

    def __init__(self, make: Callable[[], StoredKernel]) -> None:
        self._make = make
        self._kept: Array | None = None

    def kernel(self) -> StoredKernel:
        """The kernel, made anew."""
        stored = self._make()
        self._kept = np.array(stored.scale)
        return stored

    def scales(self) -> Array:
        """Its scales."""
        if self._kept is None:
            self.kernel()
        kept, self._kept = self._kept, None
        return np.asarray(kept)
