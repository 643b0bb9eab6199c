"""How fast matmuls in bfloat16 are on this machine."""

from __future__ import annotations

import time
from typing import Any

from keras import ops

from keras_policy_ext import backends

SLOW = 4.0
"""A matmul that takes so many times as long as in float32 is called slow."""

SIZE = 256
ROUNDS = 3


def slowdown() -> float:
    """How many times as long as in float32 a matmul takes in bfloat16.

    CPUs without instructions for bfloat16 take up to 50 times as long on
    PyTorch. On other devices nothing is measured, and it is 1.
    """
    if backends.engine().device().maker != "cpu":
        return 1.0
    return _seconds("bfloat16") / _seconds("float32")


def _seconds(dtype: str) -> float:
    """The time of the fastest of some matmuls, after one to warm up."""
    matrix = ops.ones((SIZE, SIZE), dtype)
    return min([timed(matrix) for _ in range(ROUNDS + 1)][1:])


def timed(matrix: Any) -> float:
    """Return the seconds that the product of a matrix with itself takes."""
    began = time.perf_counter()
    product = ops.matmul(matrix, matrix)
    # When one number of it is on the host, the product was computed.
    ops.convert_to_numpy(ops.cast(product[0, 0], "float32"))
    return time.perf_counter() - began
