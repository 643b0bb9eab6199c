"""Plain policies: which dtypes a policy may compute in."""

import keras
import numpy as np
from keras import ops

from keras_policy_ext import _user_code

FLOATS = ("float16", "bfloat16", "float32", "float64")
FLOAT_NAMES = ", ".join(map(repr, FLOATS))


def is_plain(policy: object) -> bool:
    """True if a policy is a plain one: nothing but its name would be lost."""
    return type(policy) in (
        keras.DTypePolicy,
        keras.dtype_policies.FloatDTypePolicy,
    )


def name_of_dtypes(policy: keras.DTypePolicy) -> str:
    """The name of the plain policy with the dtypes of a policy."""
    compute, stored = policy.compute_dtype, policy.variable_dtype
    return str(compute if compute == stored else f"mixed_{compute}")


def named(policy: keras.DTypePolicy) -> keras.DTypePolicy:
    """The policy; a plain one without a name gets the one it was made with.

    `get_config` of a map without a default sets the names of the policies in
    it to None (keras 3.8 to 3.15).
    """
    if is_plain(policy) and policy.name is None:
        return keras.DTypePolicy(name_of_dtypes(policy))
    return policy


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


def actual_dtype(dtype: str) -> str:
    """The dtype that tensors get where a policy says `dtype`.

    JAX makes float32 of float64 unless `jax_enable_x64` is set.
    """
    if dtype != "float64" or keras.backend.backend() != "jax":
        return dtype
    made = ops.convert_to_tensor(np.zeros((), dtype))
    return str(keras.backend.standardize_dtype(made.dtype))


def warn_of_missing_float64(policy: keras.DTypePolicy) -> None:
    """Warn if a policy says float64 and JAX will make something else of it."""
    if "float64" not in (policy.compute_dtype, policy.variable_dtype):
        return
    actual = actual_dtype("float64")
    if actual == "float64":
        return
    _user_code.warn(
        f"Under the policy {policy.name!r} JAX will compute in {actual}: it "
        "has no float64 while jax_enable_x64 is off, though layers will "
        "report 'float64'. Call jax.config.update('jax_enable_x64', True) "
        f"before the first tensor is made, or choose the policy {actual!r}."
    )
