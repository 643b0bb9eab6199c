"""Select the kernel of a matmul, and report why it was selected."""

from keras_policy_ext import backends
from keras_policy_ext.backends.matmuls import Choice, Engine
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


def engine() -> Engine:
    """Return the `Engine` (matmul and cast kernels) of Keras's backend.

    Raises:
        NotImplementedError: If it is not TensorFlow, JAX or PyTorch.
    """
    return backends.engine
