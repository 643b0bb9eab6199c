"""Traced calls of a model, and the programs that frameworks make of them."""

from keras_policy_ext.backends.traced_programs import layer_of, scope_name
from keras_policy_ext.conversion.model_calls import ModelCall
from keras_policy_ext.conversion.model_calls import trace as trace_model
from keras_policy_ext.conversion.traced_calls import (
    Call,
    Tracer,
    einsum_of,
    keras_class,
    multiplies_in_float8,
    stock_multiplies,
)
from keras_policy_ext.conversion.traced_calls import trace as trace_calls
from keras_policy_ext.conversion.work import (
    ModelWork,
    Work,
    register_counter,
    scalars,
    work_of,
)
from keras_policy_ext.conversion.work import stored_kernels as stored_kernels_of
from keras_policy_ext.layers.by_operation import counting as counting_products

__all__ = [
    "Call",
    "ModelCall",
    "ModelWork",
    "Tracer",
    "Work",
    "counting_products",
    "einsum_of",
    "keras_class",
    "layer_of",
    "multiplies_in_float8",
    "register_counter",
    "scalars",
    "scope_name",
    "stock_multiplies",
    "stored_kernels_of",
    "trace_calls",
    "trace_model",
    "work_of",
]
