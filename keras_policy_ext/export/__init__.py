"""Export models with float8 kernels to other programs, and load exports.

```python
kpe.freeze(model)
kpe.export(model, "folder", format="compressed-tensors")
```

`kpe.export` is the function, not this module.
"""

from keras_policy_ext.ext.export import FORMATS, export, load_quantized

__all__ = ["FORMATS", "export", "load_quantized"]
