"""PyTorch: `fully_shard`, and amaxes that a backward pass has observed."""

from keras_policy_ext.ext.delayed.torch.observations import (
    enter as enter_observed,
)

__all__ = ["enter_observed"]
