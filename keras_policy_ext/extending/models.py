"""The layers of a model: which there are, and what each follows."""

from keras_policy_ext._keras.walking import (
    layers_within,
    own_weights,
    tracked_variables,
)
from keras_policy_ext.conversion.candidates import check as check_convertible
from keras_policy_ext.conversion.candidates import (
    check_is_layer,
    has_call,
    path_of,
    survey,
    why_code_differs,
)
from keras_policy_ext.conversion.layers_report import LayersReport
from keras_policy_ext.conversion.requested import (
    LayerFilter,
    PathPatterns,
    PolicyLike,
    Selection,
)
from keras_policy_ext.conversion.saved_input_bytes import itemsize
from keras_policy_ext.layers.state import Float8State, has_state
from keras_policy_ext.layers.state_variable import StateVariable
from keras_policy_ext.layers.stored_weights import is_state
from keras_policy_ext.policies.of_layers import (
    float8_policy_of,
    is_frozen,
    layers_in_float8,
    source_policy_of,
    stock_policy_of,
)

__all__ = [
    "Float8State",
    "LayerFilter",
    "LayersReport",
    "PathPatterns",
    "PolicyLike",
    "Selection",
    "StateVariable",
    "check_convertible",
    "check_is_layer",
    "float8_policy_of",
    "has_call",
    "has_state",
    "is_frozen",
    "is_state",
    "itemsize",
    "layers_in_float8",
    "layers_within",
    "own_weights",
    "path_of",
    "source_policy_of",
    "stock_policy_of",
    "survey",
    "tracked_variables",
    "why_code_differs",
]
