"""Warn about a limit of skipped steps that nothing checks."""

from __future__ import annotations

import warnings
import weakref

import keras

from keras_policy_ext import user_code

#: Optimizers whose limit is looked at, or was warned of.
_SETTLED: weakref.WeakSet[keras.optimizers.Optimizer] = weakref.WeakSet()


def mark_checked(optimizer: keras.optimizers.Optimizer) -> None:
    """Record that `max_skipped_steps` of an optimizer is enforced."""
    _SETTLED.add(optimizer)


def warn_unless_checked(
    optimizer: keras.optimizers.Optimizer, limit: int
) -> None:
    """Warn once that nothing enforces an optimizer's `max_skipped_steps`.

    Without `LossScaleMonitor` or calls of `check_skipped_steps`, training would
    continue to its end even if it skips every step.
    """
    if optimizer in _SETTLED:
        return
    mark_checked(optimizer)
    warnings.warn(
        "`max_skipped_steps` has no effect here, because a compiled step "
        f"cannot raise an error. Received: max_skipped_steps={limit} of "
        f"{optimizer.name!r}, and nothing that checks it between the steps. "
        "Allowed: the callback "
        "`keras_policy_ext.mixed_precision.LossScaleMonitor()` in `fit`; or, "
        "in a loop of your own, calls of `optimizer.check_skipped_steps()` "
        "from before the first step on. Add one of the two.",
        stacklevel=user_code.stacklevel(),
    )
