"""What a float8 form of a layer derives from, and says of itself."""

from keras_policy_ext._bases import MixedInto, check_before
from keras_policy_ext._keras.built_layers import BuiltUnderSavedPath
from keras_policy_ext.layers.controller import Float8Controller
from keras_policy_ext.layers.drop_in import drop_in, drop_in_of, original_of
from keras_policy_ext.layers.mixin import Float8Mixin

__all__ = [
    "BuiltUnderSavedPath",
    "Float8Controller",
    "Float8Mixin",
    "MixedInto",
    "check_before",
    "drop_in",
    "drop_in_of",
    "original_of",
]
