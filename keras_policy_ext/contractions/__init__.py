"""Contractions in float8: compute the outputs and the gradients.

`kinds` defines the contractions, `equations` turns them into matmuls, and a
`Plan` defines how the operands are quantized; `run` computes it.
"""

from __future__ import annotations

import contextlib

import keras

from keras_policy_ext.backends.matmuls import (
    Choice,
    Engine,
    MatmulKernel,
    Request,
)
from keras_policy_ext.contractions import equations
from keras_policy_ext.contractions.frozen import (
    FrozenPlan,
    dequantized,
    frozen_plan,
    multiplies_codes,
    run_frozen,
)
from keras_policy_ext.contractions.kinds import (
    Contraction,
    Conv,
    ConvTranspose,
    Einsum,
    EinsumOfBank,
    bank_axis,
    with_bank,
)
from keras_policy_ext.contractions.plan import (
    Plan,
    make_plan,
    prefer,
    preferred,
    run,
    unrounded,
)
from keras_policy_ext.contractions.weighted_sum import fold
from keras_policy_ext.numerics.quantized import Quantized
from keras_policy_ext.recipes import Recipe
from keras_policy_ext.recipes import get as get_recipe

__all__ = [
    "Choice",
    "Contraction",
    "Conv",
    "ConvTranspose",
    "Einsum",
    "EinsumOfBank",
    "Engine",
    "FrozenPlan",
    "MatmulKernel",
    "Plan",
    "Quantized",
    "Request",
    "bank_axis",
    "compute_dtype",
    "dequantized",
    "fold",
    "frozen_plan",
    "make_plan",
    "multiplies_codes",
    "prefer",
    "preferred",
    "run",
    "run_frozen",
    "select",
    "unrounded",
    "with_bank",
]

COMPUTE_DTYPES = ("float16", "bfloat16", "float32", "float64")


def select(
    contraction: Einsum | Conv | str,
    recipe: Recipe | str | None = None,
    dtype: str = "float32",
) -> Choice:
    """Return how a contraction's forward matmul would run here, and the reason.

    Args:
        contraction: An `Einsum`, a `Conv`, or an explicit einsum equation.
        recipe: A recipe, its name, or None for `"current"`.
        dtype: The compute dtype.

    Returns:
        The choice, `(kind, reason)`, on this backend and device.

    Raises:
        ValueError: If there is no such contraction, recipe or dtype.

    Examples:
        >>> kind, reason = kpe.kernels.select("ab,bc->ac", "current")
        >>> kind in ("native", "emulated")
        True
    """
    if isinstance(contraction, str):
        equations.split(contraction)  # Raises if it is no equation.
        contraction = Einsum(contraction)
    if not isinstance(contraction, (Einsum, Conv)):
        raise ValueError(
            f"`contraction` is not a contraction. Received: {contraction!r}. "
            "Allowed: an explicit einsum equation such as 'ab,bc->ac', "
            "kernels.Einsum, or kernels.Conv. Pass one of them."
        )
    dtypes = compute_dtype(dtype), "float32"
    return make_plan(contraction, get_recipe(recipe), *dtypes).choice


def compute_dtype(dtype: object) -> str:
    """Return a dtype's name; raise if matmuls cannot compute in the dtype."""
    with contextlib.suppress(ValueError, TypeError):
        name: str = keras.backend.standardize_dtype(dtype)
        if name in COMPUTE_DTYPES:
            return name
    raise ValueError(
        "`dtype` is not a dtype that a matmul can compute in. Received: "
        f"dtype={dtype!r}. Allowed: {', '.join(COMPUTE_DTYPES)}. Pass one of "
        "them: the format of the operands comes from the recipe, and the "
        "result can be cast to any other dtype."
    )
