"""Trains in floats for kernels in few bits, and writes them for readers.

```python
kpe.convert(model, "int4(group=32)")
model.fit(...)
kpe.freeze(model)
```

`recipes` says on which grid of numbers kernels are, `rounding` puts them there
in each step. The gradient of a rounded kernel is that of the kernel (straight
through), in high precision.
"""
