"""Read files that others wrote, and write files that are whole."""

from keras_policy_ext._input_files import (
    check_archive,
    damaged,
    json_in,
    within_memory_of,
)
from keras_policy_ext._output_files import check_output, whole

__all__ = [
    "check_archive",
    "check_output",
    "damaged",
    "json_in",
    "whole",
    "within_memory_of",
]
