"""Change a model for a while or for good, and what belongs to it."""

from keras_policy_ext.conversion.in_place import (
    converted,
    declare_policies,
    enter_float8_with_children,
    reverted,
)
from keras_policy_ext.conversion.training import (
    all_optimizers,
    changing,
    replicas,
)
from keras_policy_ext.conversion.training import optimizers as optimizers_of
from keras_policy_ext.conversion.training import parts as parts_of
from keras_policy_ext.layers.class_swap import to_float8_class, to_stock_class
from keras_policy_ext.layers.transaction import unchanged_on_error, undone

__all__ = [
    "all_optimizers",
    "changing",
    "converted",
    "declare_policies",
    "enter_float8_with_children",
    "optimizers_of",
    "parts_of",
    "replicas",
    "reverted",
    "to_float8_class",
    "to_stock_class",
    "unchanged_on_error",
    "undone",
]
