"""Convert any built Keras model to float8 in place, and back.

```python
report = kpe.convert(model)
model.fit(...)
kpe.revert(model)
```
"""

from typing import TYPE_CHECKING, Any

from keras_policy_ext import _extensions
from keras_policy_ext.conversion import filters
from keras_policy_ext.conversion.freezing import freeze, thaw, widen
from keras_policy_ext.conversion.in_place import convert, revert
from keras_policy_ext.conversion.report import (
    Converted,
    FrozenReport,
    Report,
    Skipped,
)

if TYPE_CHECKING:
    from keras_policy_ext.ext.calibrate.calibration import calibrate
    from keras_policy_ext.ext.smoothing.eight_bits import eight_bit_rules
    from keras_policy_ext.ext.smoothing.smoothing import Smoothed, smooth_swiglu

__all__ = [
    "Converted",
    "FrozenReport",
    "Report",
    "Skipped",
    "Smoothed",
    "calibrate",
    "convert",
    "eight_bit_rules",
    "filters",
    "freeze",
    "revert",
    "smooth_swiglu",
    "thaw",
    "widen",
]


def __getattr__(name: str) -> Any:
    """Import a name of an extension; raise if that is not installed."""
    if name in __all__:
        # Raises AttributeError if the extension is not installed.
        return _extensions.get(f"conversion.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
