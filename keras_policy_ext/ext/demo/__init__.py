"""`keras-policy-ext demo`: one transformer in three precisions."""

from keras_policy_ext.ext.demo.runs import prepare, run
from keras_policy_ext.ext.demo.train import Settings

__all__ = ["Settings", "prepare", "run"]
