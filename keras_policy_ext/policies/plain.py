"""Plain dtype policies, and the arguments of policy constructors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_policy_ext import backends, recipes, user_code
from keras_policy_ext.recipes.fields import is_open, settled
from keras_policy_ext.recipes.recipe import quantizations_of

RecipeLike = recipes.Recipe | str | Mapping[str, Any] | None
"""An identifier that `recipes.get` takes."""


class DefaultLength(int):
    """An int type that marks the default history length as not given."""


DEFAULT_LENGTH = DefaultLength(1024)


def mode_first(
    source: object, args: tuple[Any, ...], mode: object, length: int
) -> tuple[object, int]:
    """Return a policy's source and history length, from its arguments.

    Keras's older form has the mode first. Then `source` is the mode, and `args`
    are the source and perhaps the length.
    """
    explicit_length = not isinstance(length, DefaultLength)
    if len(args) > 2 or (args and mode) or (args[1:] and explicit_length):
        raise TypeError(
            "Float8DTypePolicy got too many arguments. Received: "
            f"{(source, *args)!r}. Allowed: (source_name), or Keras's older "
            "form ('float8', source_name, amax_history_length). Pass the "
            "rest as keywords, each once."
        )
    if args:
        mode, (source, *lengths) = source, args
        length = lengths[0] if lengths else length
    elif isinstance(source, str) and source == "float8" and mode is None:
        mode, source = source, None
    if mode not in (None, "float8"):
        raise ValueError(
            f"Wrong mode of a Float8DTypePolicy. Received: {mode!r}. "
            "Allowed: 'float8', as the first of two positional arguments or "
            "as `mode`. Pass recipe and history length as keywords, and use "
            "keras.dtype_policies for other quantization modes."
        )
    return source, length


def merge_recipes(
    named: recipes.Recipe | None, recipe: RecipeLike, length: int
) -> recipes.Recipe:
    """Return the recipe that all arguments of a policy agree on, or raise."""
    given = [named] if named is not None else []
    explicit_length = not isinstance(length, DefaultLength)
    if explicit_length:
        of_keras: Any = recipes.of_keras(amax_history_length=length)
        length = of_keras.amax_history_length
        # A length alone, or with the name of this recipe, means this recipe.
        if recipe == of_keras.name or (recipe is None and named is None):
            recipe = of_keras
    if recipe is not None:
        # A recipe that leaves `power_of_two` open gets that of the named one.
        power_of_two = getattr(named, "power_of_two", None)
        other = recipes.get(recipe)
        if power_of_two is not None:
            other = settled(other, power_of_two)
        given.append(other)
    given = [for_this_device(each) for each in given]
    if not given:
        return recipes.of_keras()
    # The named recipe, the argument `recipe`, or both.
    first, last = given[0], given[-1]
    if explicit_length and length_of(last) != length:
        raise ValueError(_conflict(given, length))
    if first != last:
        raise ValueError(_conflict(given, None))
    return first


def length_of(recipe: recipes.Recipe) -> int | None:
    """Return a recipe's `amax_history_length`; None if it has none."""
    return getattr(recipe, "amax_history_length", None)


def for_this_device(recipe: recipes.Recipe) -> recipes.Recipe:
    """Return a recipe that says whether its scales are powers of two.

    If its `power_of_two` is None, the device decides: some compute faster with
    powers of two, unless bfloat16 holds the scaled values exactly.
    """
    if not is_open(recipe):
        return recipe
    not_rounded = settled(recipe, power_of_two=False)
    quantizations = quantizations_of(not_rounded)
    if all(each is None or each.exact_in_bfloat16 for each in quantizations):
        return not_rounded
    try:
        device = backends.engine.device()
    except NotImplementedError:  # Another backend, on which nothing runs.
        return not_rounded
    return settled(recipe, power_of_two=device.asks_for_powers_of_two)


def _conflict(given: list[recipes.Recipe], length: int | None) -> str:
    """Return the message for arguments that disagree."""
    parts = [repr(recipe) for recipe in given]
    if length is not None:
        parts.append(f"amax_history_length={length}")
    return (
        "Name, recipe and history length of a Float8DTypePolicy disagree. "
        f"Received: {' and '.join(parts)}. Allowed: one of them, or values "
        "that agree. Give each setting once."
    )


FLOATS = ("float16", "bfloat16", "float32", "float64")
FLOAT_NAMES = ", ".join(map(repr, FLOATS))


def is_plain(policy: object) -> bool:
    """Return True if a policy is plain: Keras can rebuild it from its name."""
    return type(policy) in (
        keras.DTypePolicy,
        keras.dtype_policies.FloatDTypePolicy,
    )


def name_of_dtypes(policy: keras.DTypePolicy) -> str:
    """Return the name of the plain policy with a policy's two dtypes."""
    compute, stored = policy.compute_dtype, policy.variable_dtype
    return str(compute if compute == stored else f"mixed_{compute}")


def named(policy: keras.DTypePolicy) -> keras.DTypePolicy:
    """Return the policy, or a named copy of a plain policy without a name."""
    # `get_config` of a map without a default sets the names of the policies in
    # it to None (keras 3.8 to 3.15).
    if is_plain(policy) and policy.name is None:
        return keras.DTypePolicy(name_of_dtypes(policy))
    return policy


def floating(policy: keras.DTypePolicy, role: str) -> keras.DTypePolicy:
    """Return the policy if it computes in floating point.

    Raises:
        ValueError: If a dtype is not; `role` begins the message.
    """
    dtypes = (policy.compute_dtype, policy.variable_dtype)
    if all(dtype in FLOATS for dtype in dtypes):
        return policy
    way = "Give integer and complex dtypes to single layers, by `dtype=`."
    if policy.name.startswith("float8"):
        way = "For matmuls in float8 use 'float8_from_mixed_bfloat16'."
    raise ValueError(
        f"{role} must compute in floating point, in 16 bits or more. "
        f"Received: {policy.name!r}. Allowed: 'mixed_bfloat16', "
        "'mixed_float16', and policies whose dtypes are among "
        f"{FLOAT_NAMES}. {way}"
    )


def actual_dtype(dtype: str) -> str:
    """Return the dtype that tensors created with `dtype` really have.

    JAX replaces float64 by float32 unless `jax_enable_x64` is set.
    """
    if dtype != "float64" or keras.backend.backend() != "jax":
        return dtype
    made = ops.convert_to_tensor(np.zeros((), dtype))
    return str(keras.backend.standardize_dtype(made.dtype))


def warn_of_missing_float64(policy: keras.DTypePolicy) -> None:
    """Warn if a policy has float64 and JAX would use float32 instead."""
    if "float64" not in (policy.compute_dtype, policy.variable_dtype):
        return
    actual = actual_dtype("float64")
    if actual == "float64":
        return
    user_code.warn(
        f"Under the policy {policy.name!r} JAX will compute in {actual}: it "
        "has no float64 while jax_enable_x64 is off, though layers will "
        "report 'float64'. Call jax.config.update('jax_enable_x64', True) "
        f"before the first tensor is made, or choose the policy {actual!r}."
    )
