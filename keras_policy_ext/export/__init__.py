"""Models with float8 kernels in the forms of other readers, and back.

```python
kpe.freeze(model)
kpe.export(model, "folder", format="compressed-tensors")
```
"""

from keras_policy_ext.export.exporting import FORMATS, export
from keras_policy_ext.export.plain import read
from keras_policy_ext.export.report import ExportReport, Written

__all__ = ["FORMATS", "ExportReport", "Written", "export", "read"]
