"""Policies under the names of tf_keras."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from keras_policy_ext import policies, user_code


class _PlainPolicies(type):
    """A metaclass: `Policy(name)` and its instances are Keras's policies."""

    def __call__(cls, name: str) -> keras.DTypePolicy:
        if not isinstance(name, str):
            raise TypeError(
                f"`name` is not a string. Received: {name!r} (of type "
                f"{type(name).__name__}). Allowed: a string such as "
                "'mixed_float16' or 'float32'. Use kpe.get for dtypes and "
                "configs."
            )
        return policies.get(name)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, keras.DTypePolicy)


class Policy(metaclass=_PlainPolicies):
    """The tf_keras name of `keras.DTypePolicy`.

    `Policy(name)` returns a `keras.DTypePolicy`, and every policy of Keras
    or of this package is an instance of `Policy`.

    Args:
        name: `"mixed_float16"`, `"mixed_bfloat16"`, a dtype such as
            `"float32"`, or any other name that `kpe.get` takes.

    Raises:
        TypeError: If it is not a string.
        ValueError: If it names no policy.
    """

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        custom_objects: Mapping[str, object] | None = None,
    ) -> keras.DTypePolicy:
        """Return the dtype policy of a config, and drop a loss scale.

        A dropped loss scale causes a warning, because a plain policy cannot
        store it. `kpe.get` and `LossScaleDTypePolicy.from_config` keep it.
        """
        fields = dict(config)
        loss_scale = fields.pop("loss_scale", "auto")
        if loss_scale != "auto":
            user_code.warn(
                "The loss scale in this config is dropped: a plain policy has "
                f"none. Received: {dict(config)!r}. Read it with kpe.get or "
                "kpe.LossScaleDTypePolicy.from_config, or give the loss scale "
                "to a LossScaleOptimizer."
            )
        return cls(**fields)


global_policy = policies.dtype_policy
"""Return the global policy of this thread; the tf_keras name."""

set_global_policy = policies.set_dtype_policy
"""Set the global policy of this thread; the tf_keras name."""
