"""Layers that are changed as soon as they are built."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras

_HOOK = "_post_build"
# The hook is one attribute of one class.
_HOOKED = threading.RLock()


@contextlib.contextmanager
def after_each_build(change: Callable[[keras.Layer], None]) -> Iterator[None]:
    """Call a function with each layer that this thread builds, inner first.

    A model that is made inside then never holds more than one layer as it was
    built. Keras calls `_post_build` once a layer has its weights (keras 3.12
    to 3.15); where it does not, nothing is called. Expires with a public hook.
    """
    cls: Any = keras.Layer
    thread = threading.get_ident()
    with _HOOKED:
        before = getattr(cls, _HOOK, None)
        own = vars(cls).get(_HOOK)

        def post_build(layer: Any, *args: Any, **kwargs: Any) -> None:
            if before is not None:
                before(layer, *args, **kwargs)
            if threading.get_ident() == thread:
                change(layer)

        setattr(cls, _HOOK, post_build)
        try:
            yield
        finally:
            if own is None:
                delattr(cls, _HOOK)
            else:
                setattr(cls, _HOOK, own)
