"""`keras-policy-ext demo`: one transformer in three precisions."""

from keras_policy_ext.ext.demo.session import prepare, run
from keras_policy_ext.ext.demo.settings import (
    DESCRIPTION,
    Settings,
    Size,
    add_arguments,
    settings_of,
)

__all__ = [
    "DESCRIPTION",
    "Settings",
    "Size",
    "add_arguments",
    "prepare",
    "run",
    "settings_of",
]
