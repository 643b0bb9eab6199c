"""Read safetensors files that `kpe.export` wrote, in NumPy."""

from keras_policy_ext.ext.export.plain import read

__all__ = ["read"]
