"""Recipes: how the numbers of a float8 layer are scaled.

A recipe is a small immutable value. It says what becomes of each operand in
each of the three matmuls (`Quantization`) and computes nothing. This room
imports neither Keras nor a framework.

To add a recipe, write one frozen keyword-only dataclass that derives from
`Recipe`, sets `name`, and says its `quantization`; defining it registers it,
and `get`, `parse`, `spec` and the policy names know it from then on. Field
values must be Python literals without `;` in their `repr`, since they appear
in policy names. A recipe with another way to find scales than from the tensor
itself registers a scale source (`numerics.scale_sources`).
"""

# In the order of the list of names, of which the default is the first.
from keras_policy_ext.recipes.delayed import LARGEST_MARGIN, DelayedScaling

# isort: split
from keras_policy_ext.recipes.current import CurrentScaling

# isort: split
from keras_policy_ext.recipes.rowwise import RowwiseScaling

# isort: split
from keras_policy_ext.recipes.block import BlockScaling

# isort: split
from keras_policy_ext.recipes.mxfp8 import MXFP8Scaling

# isort: split
from keras_policy_ext.recipes.nvfp4 import NVFP4Scaling

# isort: split
from keras_policy_ext.recipes.frozen import ACTIVATIONS, FrozenKernels

# isort: split
from keras_policy_ext.recipes.quantization import (
    MATMULS,
    OPERANDS,
    WHOLE,
    Quantization,
    Tile,
    matmuls_of,
    read_transposed,
)
from keras_policy_ext.recipes.recipe import REGISTRY, Recipe, check
from keras_policy_ext.recipes.spec import (
    deserialize,
    get,
    names,
    parse,
    serialize,
)

__all__ = [
    "ACTIVATIONS",
    "LARGEST_MARGIN",
    "MATMULS",
    "OPERANDS",
    "REGISTRY",
    "WHOLE",
    "BlockScaling",
    "CurrentScaling",
    "DelayedScaling",
    "FrozenKernels",
    "MXFP8Scaling",
    "NVFP4Scaling",
    "Quantization",
    "Recipe",
    "RowwiseScaling",
    "Tile",
    "check",
    "deserialize",
    "get",
    "matmuls_of",
    "names",
    "parse",
    "read_transposed",
    "serialize",
]
