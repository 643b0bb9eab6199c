"""Read files that may be damaged or malicious."""

from keras_policy_ext._input_files import (
    check_archive,
    damaged,
    json_in,
    within_memory_of,
)

__all__ = ["check_archive", "damaged", "json_in", "within_memory_of"]
