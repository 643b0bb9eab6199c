"""Read and write models: what a file says of a layer, in one place."""

from keras_policy_ext.saving.loading import (
    load_model,
    load_preset,
    load_weights,
)

__all__ = ["load_model", "load_preset", "load_weights"]
