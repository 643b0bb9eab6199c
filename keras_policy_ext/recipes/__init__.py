"""Recipes: how the values of a float8 layer are scaled.

A recipe is a small immutable object. It defines how each operand is quantized
in each of the three matmuls (`Quantization`), and computes nothing. This
package imports neither Keras nor a framework.

To add a recipe, write one frozen keyword-only dataclass that derives from
`Recipe`, sets `name` and defines `quantization`. Its definition registers it,
so that `get`, `parse`, `spec` and the policy names accept it. Field values
must be Python literals without `;` in their `repr`, since they appear in
policy names. A recipe that does not compute its scales from the tensor itself
registers a scale source (`numerics.scale_sources`).
"""

from typing import TYPE_CHECKING, Any

from keras_policy_ext import _extensions

if TYPE_CHECKING:
    from keras_policy_ext.ext.delayed.recipe import (
        LARGEST_MARGIN,
        DelayedScaling,
    )
    from keras_policy_ext.ext.nvfp4.recipe import NVFP4Scaling

# In the order of the list of names, of which the default is the first.
from keras_policy_ext.recipes.current import CurrentScaling

# isort: split
from keras_policy_ext.recipes.rowwise import RowwiseScaling

# isort: split
from keras_policy_ext.recipes.block import BlockScaling

# isort: split
from keras_policy_ext.recipes.mxfp8 import MXFP8Scaling

# isort: split
from keras_policy_ext.recipes.frozen import ACTIVATIONS, FrozenKernels

# isort: split
from keras_policy_ext.recipes.quantization import (
    EACH_MATRIX,
    MATMULS,
    OPERANDS,
    WHOLE,
    Quantization,
    Tile,
    matmuls_of,
    read_transposed,
)
from keras_policy_ext.recipes.recipe import (
    REGISTRY,
    Recipe,
    check,
    scales_whole_tensors,
)
from keras_policy_ext.recipes.spec import (
    DEFAULT,
    deserialize,
    get,
    is_spec,
    names,
    of_keras,
    parse,
    serialize,
)

__all__ = [
    "ACTIVATIONS",
    "DEFAULT",
    "EACH_MATRIX",
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
    "is_spec",
    "matmuls_of",
    "names",
    "of_keras",
    "parse",
    "read_transposed",
    "scales_whole_tensors",
    "serialize",
]


def __getattr__(name: str) -> Any:
    """Import a name of an extension; raise if that is not installed."""
    if _extensions.has(f"recipes.{name}") or name in __all__:
        return _extensions.get(f"recipes.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *globals()})
