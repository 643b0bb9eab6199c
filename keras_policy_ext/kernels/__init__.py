"""Float8 kernels: the only room that imports a framework.

One file for each framework, in one contract (`contract.Engine`), over one
written in `keras.ops`. `plan` holds the three matmuls that they share.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import keras

from keras_policy_ext.kernels import einsum
from keras_policy_ext.kernels.contract import Choice, Engine, Quantized
from keras_policy_ext.kernels.contractions import Conv, Einsum
from keras_policy_ext.kernels.plan import Plan, plan_of
from keras_policy_ext.kernels.preference import prefer, preferred
from keras_policy_ext.recipes import Recipe
from keras_policy_ext.recipes import get as get_recipe

__all__ = [
    "Choice",
    "Conv",
    "Einsum",
    "Engine",
    "Plan",
    "Quantized",
    "engine",
    "make_plan",
    "prefer",
    "preferred",
    "select",
]

FRAMEWORKS = ("tensorflow", "jax", "torch")

COMPUTE_DTYPES = ("float16", "bfloat16", "float32", "float64")


_engines: dict[str, Engine] = {}


def engine() -> Engine:
    """The kernels of Keras's backend.

    Raises:
        NotImplementedError: If the backend is not one of the three.
    """
    backend = keras.backend.backend()
    # A plain look-up, which torch.compile follows; it breaks on an import.
    if backend not in _engines:
        _engines[backend] = _load(backend)
    return _engines[backend]


def _load(backend: str) -> Engine:
    if backend not in FRAMEWORKS:
        raise NotImplementedError(
            f"No float8 kernels for the Keras backend {backend!r}. Allowed: "
            f"{', '.join(FRAMEWORKS)}. Set KERAS_BACKEND to one of them."
        )
    module = importlib.import_module(f"keras_policy_ext.kernels.{backend}")
    return module.ENGINE


def make_plan(
    contraction: Einsum | Conv,
    recipe: Recipe,
    inputs_dtype: str,
    kernel_dtype: str,
    training: bool | None = None,
    slot: int = 0,
) -> Plan:
    """The plan of a contraction that is called here and now.

    The arguments are the first attributes of `Plan`.
    """
    kind = None if engine().is_compiling() else preferred()
    return plan_of(
        contraction,
        recipe,
        inputs_dtype,
        kernel_dtype,
        training,
        slot,
        kind,
        engine().traces_for_xla(),
    )


def select(
    contraction: Einsum | Conv | str,
    recipe: Recipe | str | None = None,
    dtype: str = "float32",
) -> Choice:
    """Which kind of kernel a contraction gets, and why.

    Args:
        contraction: An `Einsum`, a `Conv`, or an explicit einsum equation.
        recipe: A recipe, its name, or None for delayed scaling.
        dtype: The compute dtype.

    Returns:
        The choice, `(kind, reason)`, on this backend and device.

    Raises:
        ValueError: If there is no such contraction, recipe or dtype.
    """
    if isinstance(contraction, str):
        einsum.split(contraction)
        contraction = Einsum(contraction)
    if not isinstance(contraction, (Einsum, Conv)):
        raise ValueError(
            "This is no contraction. Received: "
            f"{contraction!r}. Allowed: an explicit einsum equation such as "
            "'ab,bc->ac', kernels.Einsum, or kernels.Conv. Pass one of them."
        )
    plan = make_plan(
        contraction, get_recipe(recipe), _compute_dtype(dtype), "float32"
    )
    return engine().select(plan)


def _compute_dtype(dtype: Any) -> str:
    with contextlib.suppress(ValueError, TypeError):
        name: str = keras.backend.standardize_dtype(dtype)
        if name in COMPUTE_DTYPES:
            return name
    raise ValueError(
        f"Nothing is computed in this dtype. Received: dtype={dtype!r}. "
        f"Allowed: {', '.join(COMPUTE_DTYPES)}. Pass the compute dtype of "
        "the layer; the format of the operands comes from the recipe."
    )
