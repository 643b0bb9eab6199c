"""`keras-policy-ext demo`: one transformer in three precisions."""

from keras_policy_ext.diagnostics.demo.arguments import (
    DESCRIPTION,
    add_arguments,
    settings_of,
)
from keras_policy_ext.diagnostics.demo.session import prepare, run
from keras_policy_ext.diagnostics.demo.settings import Settings, Size

__all__ = [
    "DESCRIPTION",
    "Settings",
    "Size",
    "add_arguments",
    "prepare",
    "run",
    "settings_of",
]
