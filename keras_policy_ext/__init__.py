"""Float8 dtype policies for Keras 3, on TensorFlow, JAX and PyTorch.

```python
import keras_policy_ext as kpe

policy = kpe.Float8DTypePolicy("mixed_bfloat16")
model = keras.Sequential([kpe.layers.Dense(512, dtype=policy), ...])
```

Importing this package imports Keras and registers the classes which saved
files name. The rooms load on first use.
"""

import importlib
from typing import Any

from keras_policy_ext._version import __version__

_ROOMS = (
    "formats",
    "kernels",
    "layers",
    "numerics",
    "policies",
    "recipes",
    "reference",
)
_POLICY_NAMES = (
    "Float8DTypePolicy",
    "carry_policy",
    "deserialize",
    "dtype_policy",
    "get",
    "policy_scope",
    "serialize",
    "set_dtype_policy",
)

__all__ = ["__version__", *_ROOMS, *_POLICY_NAMES]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _POLICY_NAMES:
        policies = importlib.import_module(f"{__name__}.policies")
        return getattr(policies, name)
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}. It has: "
        f"{', '.join(__all__)}."
    )


def __dir__() -> list[str]:
    return sorted(__all__)
