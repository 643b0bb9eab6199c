"""What the user asks of kernel selection."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

KINDS = ("auto", "native", "emulated")

_preferred = ["auto"]


def preferred() -> str:
    """`"auto"`, or what the innermost `prefer` asks for."""
    return _preferred[-1]


@contextlib.contextmanager
def prefer(kind: str) -> Iterator[None]:
    """Ask for native or for emulated matmuls inside a `with` block.

    Both give the same quantized operands and, up to the order of summation,
    the same results. Asking for native where there is none still emulates;
    `select` says so. A compiled function keeps what it was traced with.

    Args:
        kind: `"auto"` (what is faster on this device), `"native"` or
            `"emulated"`.

    Raises:
        ValueError: If `kind` is something else.
    """
    if kind not in KINDS:
        raise ValueError(
            f"Unknown kind of kernel. Received: {kind!r}. Allowed: "
            f"{', '.join(KINDS)}."
        )
    _preferred.append(kind)
    try:
        yield
    finally:
        _preferred.pop()
