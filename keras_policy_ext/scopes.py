"""Scopes over state that Keras stores per thread.

All asyncio tasks of a thread share that state. If a task is suspended inside a
scope, other tasks see its state, and Keras cannot know which task reads. So a
second task cannot open a scope while the first is inside one. If a scope is
closed while a later one is open, the later one gets the state to restore, so
that the last scope to close restores the state before the first.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Any


class _Scope:
    """An open scope, with the state to restore when it is closed."""

    def __init__(self, to_restore: Any):
        self.to_restore = to_restore


class _OfThread(threading.local):
    """The list of scopes that are open in a thread, the innermost last."""

    def __init__(self) -> None:
        self.scopes: list[_Scope] = []


class Scopes:
    """Manages nested scopes that set and restore a state of the thread.

    Users know such a scope by `name`. `snapshot` returns the state of this
    thread, and `restore` sets it.
    """

    def __init__(
        self,
        name: str,
        snapshot: Callable[[], Any],
        restore: Callable[[Any], None],
    ):
        """Begin without open scopes, in any thread or task."""
        self._name, self._snapshot, self._restore = name, snapshot, restore
        self._of_thread = _OfThread()
        # Tasks that are started inside of a scope are in it too.
        self._of_task: contextvars.ContextVar[tuple[_Scope, ...]] = (
            contextvars.ContextVar(name, default=())
        )

    def check(self) -> None:
        """Raise RuntimeError if another task of this thread is in a scope."""
        scopes = self._of_thread.scopes
        if scopes and scopes[-1] not in self._of_task.get():
            raise RuntimeError(
                self._overlap("a block inside of another task's")
            )

    @contextlib.contextmanager
    def opened(self, state: Any) -> Iterator[None]:
        """In the block, `state` is set; on exit, the earlier state is restored.

        Raises:
            RuntimeError: If another task of this thread is inside a scope.
                At the end of the block, if another scope was opened in it and
                is still open.
        """
        self.check()
        scope, scopes = _Scope(self._snapshot()), self._of_thread.scopes
        self._restore(state)
        scopes.append(scope)
        self._of_task.set((*self._of_task.get(), scope))
        try:
            yield
        finally:
            was_last = scopes[-1] is scope
            self._close(scope, scopes)
        if not was_last:
            raise RuntimeError(
                self._overlap("the end of one within a later one")
            )

    def _close(self, scope: _Scope, scopes: list[_Scope]) -> None:
        """Close a scope.

        If a scope that was opened later is still open, that one gets the state
        to restore.
        """
        place = scopes.index(scope)
        if place + 1 < len(scopes):
            scopes[place + 1].to_restore = scope.to_restore
        # A coroutine may be collected, and so closed, in another thread.
        elif scopes is self._of_thread.scopes:
            self._restore(scope.to_restore)
        del scopes[place]
        of_task = self._of_task.get()
        self._of_task.set(tuple(each for each in of_task if each is not scope))

    def _overlap(self, got: str) -> str:
        """Return the message for scopes that overlap."""
        return (
            f"Blocks of `{self._name}` cannot overlap: Keras stores one state "
            "for all asyncio tasks of a thread, and each would read that of "
            f"another. Received: {got}. Allowed: blocks that are left before "
            "their task awaits, or in which it awaits only tasks that are "
            "started in the block. Make and call layers in the block, and "
            "await outside of it."
        )
