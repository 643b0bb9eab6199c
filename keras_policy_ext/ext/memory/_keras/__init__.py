"""Variables that say to have other dtypes than their tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import keras


@contextlib.contextmanager
def dtypes_replaced(
    dtypes: Sequence[tuple[keras.Variable, str]],
) -> Iterator[None]:
    """In the block, variables say to have other dtypes than their tensors.

    In a stateless scope they then read as variables of these dtypes, since
    Keras casts the values that are passed to the scope. A variable cannot get
    another dtype publicly (`_dtype`, keras 3.0 to 3.16). If Keras stores it
    elsewhere, nothing changes.
    """
    known = [pair for pair in dtypes if hasattr(pair[0], "_dtype")]
    before = [variable._dtype for variable, _ in known]
    try:
        for variable, dtype in known:
            variable._dtype = dtype
        yield
    finally:
        for (variable, _), dtype in zip(known, before, strict=True):
            variable._dtype = dtype
