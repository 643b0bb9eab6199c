"""The preference of the user for native or emulated matmuls."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

KINDS = ("auto", "native", "emulated")

_preferred = contextvars.ContextVar("preferred kind of kernel", default="auto")


def preferred() -> str:
    """`"auto"`, or what the innermost `prefer` asks for.

    A plan keeps it, so that a backward pass, which a framework may run on
    another thread, has no need to ask.
    """
    return _preferred.get()


@contextlib.contextmanager
def prefer(kind: str) -> Iterator[None]:
    """Ask for native or for emulated matmuls inside a `with` block.

    Both give the same quantized operands and, up to the order of summation,
    the same results. Asking for native where there is none still emulates;
    `select` says so. A compiled function keeps what it was traced with.

    The block is one of its thread and of its asyncio task. Tasks that are
    started in it are in it too; threads are not, and neither are the replicas
    of a `tf.distribute` strategy, which are threads: enter it in the function
    that they run, or start them with `contextvars.copy_context().run`.

    Args:
        kind: `"auto"` (what is faster on this device), `"native"` or
            `"emulated"`.

    Raises:
        ValueError: If `kind` is something else.

    Examples:
        >>> with kpe.kernels.prefer("emulated"):
        ...     kpe.kernels.select("ab,bc->ac").kind
        'emulated'
    """
    if kind not in KINDS:
        raise ValueError(
            f"Unknown kind of kernel. Received: {kind!r}. Allowed: "
            f"{', '.join(KINDS)}."
        )
    token = _preferred.set(kind)
    try:
        yield
    finally:
        _preferred.reset(token)
