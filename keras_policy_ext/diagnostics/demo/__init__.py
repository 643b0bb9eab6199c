"""`keras-policy-ext demo`: one transformer in three precisions."""

from keras_policy_ext.diagnostics.demo.session import prepare, run
from keras_policy_ext.diagnostics.demo.settings import Settings, Size

__all__ = ["Settings", "Size", "prepare", "run"]
