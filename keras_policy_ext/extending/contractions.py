"""Contractions as plans, and operands as they are quantized."""

from keras_policy_ext.backends.interface import saved_dtype
from keras_policy_ext.contractions.equations import (
    explicit as explicit_equation,
)
from keras_policy_ext.contractions.equations import split as terms_of
from keras_policy_ext.contractions.frozen import FrozenPlan, frozen_plan
from keras_policy_ext.contractions.kinds import (
    EinsumOfBank,
    in_one_scale,
    with_bank,
)
from keras_policy_ext.contractions.plan import Plan, make_plan, unrounded
from keras_policy_ext.contractions.weighted_sum import fold
from keras_policy_ext.layers.controller import recipes_of_activations
from keras_policy_ext.numerics.quantized import Quantized, hadamard, padded
from keras_policy_ext.numerics.quantized import quantize as quantize_matrix
from keras_policy_ext.numerics.scale_sources import Amax, ScaleSource, source_of

__all__ = [
    "Amax",
    "EinsumOfBank",
    "FrozenPlan",
    "Plan",
    "Quantized",
    "ScaleSource",
    "explicit_equation",
    "fold",
    "frozen_plan",
    "hadamard",
    "in_one_scale",
    "make_plan",
    "padded",
    "quantize_matrix",
    "recipes_of_activations",
    "saved_dtype",
    "source_of",
    "terms_of",
    "unrounded",
    "with_bank",
]
