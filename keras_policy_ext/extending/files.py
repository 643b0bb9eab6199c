"""Read files that others wrote, and write files that are whole."""

from keras_policy_ext._input_files import (
    check_archive,
    damaged,
    json_in,
    within_memory_of,
)

__all__ = ["check_archive", "damaged", "json_in", "within_memory_of"]
