"""Models that are as they were if what is done to them fails."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import keras

from keras_policy_ext._keras import walking
from keras_policy_ext.conversion import training
from keras_policy_ext.layers import transaction

_Function = TypeVar("_Function", bound=Callable[..., Any])


def unchanged_on_error(
    model: Any, variables: Iterable[Any] = ()
) -> AbstractContextManager[None]:
    """Put a model back as it was if the block fails.

    All layers in it, and the optimizers of all models in it: see
    `layers.transaction.unchanged_on_error`.

    Args:
        model: A model or layer.
        variables: Those whose values the block may change.
    """
    things = [
        *walking.layers_within(model),
        *training.all_optimizers(model),
    ]
    return transaction.unchanged_on_error(things, variables)


def all_or_nothing(change: _Function) -> _Function:
    """A function that changes a model, its first argument, whole or not."""

    @functools.wraps(change)
    def changed(model: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(model, keras.Layer):
            return change(model, *args, **kwargs)  # It says what is wrong.
        with unchanged_on_error(model):
            return change(model, *args, **kwargs)

    return cast(_Function, changed)
