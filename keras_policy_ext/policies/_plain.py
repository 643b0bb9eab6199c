"""Plain policies: which dtypes a policy may compute in."""

from typing import Any

import keras

FLOATS = ("float16", "bfloat16", "float32", "float64")
FLOAT_NAMES = ", ".join(map(repr, FLOATS))


def is_plain(policy: Any) -> bool:
    """Whether a policy is a plain one: nothing but its name would be lost."""
    return type(policy) in (
        keras.DTypePolicy,
        keras.dtype_policies.FloatDTypePolicy,
    )


def floating(policy: keras.DTypePolicy, role: str) -> keras.DTypePolicy:
    """The policy, if it computes and stores in floating point.

    Raises:
        ValueError: If it doesn't; `role` begins the sentence.
    """
    dtypes = (policy.compute_dtype, policy.variable_dtype)
    if all(dtype in FLOATS for dtype in dtypes):
        return policy
    raise ValueError(
        f"{role} must compute in floating point. Received: {policy.name!r}. "
        "Allowed: 'mixed_bfloat16', 'mixed_float16', and policies whose "
        f"dtypes are among {FLOAT_NAMES}. Give integer and "
        "complex dtypes to single layers, by `dtype=`."
    )
