"""Load and save models with the float8 policy and state of each layer."""

from keras_policy_ext.saving.loading import (
    load_model,
    load_preset,
    load_weights,
)

__all__ = ["load_model", "load_preset", "load_weights"]
