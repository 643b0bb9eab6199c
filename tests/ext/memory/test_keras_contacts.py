"""Why `ext/memory/_keras/` is needed."""

import keras
import numpy as np

from keras_policy_ext.ext.memory._keras import dtypes_replaced
from public_api import members_about


def dtype_of(variable):
    return keras.backend.standardize_dtype(variable.value.dtype)


def test_a_scope_reads_variables_in_the_dtype_that_they_say_to_have():
    variable = keras.Variable(np.ones(2, "float32"))
    with (
        dtypes_replaced([(variable, "bfloat16")]),
        keras.StatelessScope([(variable, keras.ops.zeros((2,)))]),
    ):
        assert variable.dtype == "bfloat16"
        assert dtype_of(variable) == "bfloat16"
    assert variable.dtype == dtype_of(variable) == "float32"
    assert members_about(keras.Variable, "dtype") == ["dtype"]
    assert keras.Variable.dtype.fset is None
