"""Read and write models, including what a file says about each layer."""

from keras_policy_ext.saving.loading import (
    load_model,
    load_preset,
    load_weights,
)

__all__ = ["load_model", "load_preset", "load_weights"]
