"""Select the kernel of a matmul, and report why it was selected."""

from keras_policy_ext.backends import engine
from keras_policy_ext.backends.matmuls import Choice
from keras_policy_ext.contractions import (
    Conv,
    ConvTranspose,
    Einsum,
    prefer,
    preferred,
    select,
)

__all__ = [
    "Choice",
    "Conv",
    "ConvTranspose",
    "Einsum",
    "engine",
    "prefer",
    "preferred",
    "select",
]
