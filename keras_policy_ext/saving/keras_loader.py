"""Load weights by Keras's own loader."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Iterator

import keras

from keras_policy_ext.files.model_files import PathLike

_SKIPPED = "Skipping variable loading for optimizer"

Warnings = list[warnings.WarningMessage]

# Warnings are held back for all threads at once: two that do so at a time
# would give back to each other what they found.
_WARNING_FILTERS = threading.RLock()


def load(model: keras.Layer, weights: PathLike) -> None:
    """Load weights as `model.load_weights` does, even if `built` is False."""
    # Keras refuses a model that does not say it is built, even if all its
    # parts are. Layers without this method load as models do.
    own = getattr(model, "load_weights", None)
    load_weights = own or functools.partial(keras.Model.load_weights, model)
    built = model.built
    model.built = True
    try:
        load_weights(weights)
    finally:
        model.built = built


@contextlib.contextmanager
def without_skip_warnings() -> Iterator[Warnings]:
    """In the block, hold back Keras's warnings of unloaded optimizers.

    They are in the yielded list once the block has ended. Show them with
    `warn_again` if the variables are not loaded later either.
    """
    held: Warnings = []
    with _WARNING_FILTERS, warnings.catch_warnings(record=True) as caught:
        # Where a user makes errors of warnings, one would end the loading.
        warnings.filterwarnings("always", message=_SKIPPED)
        yield held
    for each in caught:
        skipped = str(each.message).startswith(_SKIPPED)
        held.append(each) if skipped else warn_again([each])


def warn_again(held: Warnings) -> None:
    """Show the warnings that `without_skip_warnings` held back."""
    for each in held:
        warnings.warn_explicit(
            each.message, each.category, each.filename, each.lineno
        )
