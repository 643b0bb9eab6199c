"""What the checks of a device have in common."""

import keras
import measuring
from steps_of_layers import COMPILED

import keras_policy_ext as kpe

BACKEND = keras.backend.backend()


class Broken(Exception):
    """A promise that does not hold."""


class NotHere(Exception):
    """There is nothing to look at on this device."""


def require(holds, message):
    """Raise `Broken` with a message unless something holds."""
    if not holds:
        raise Broken(message)


def capability():
    """The compute capability of the GPU; None on a CPU or another maker's."""
    if not measuring.on_gpu():
        return None
    if BACKEND == "torch":
        import torch

        nvidia = torch.version.cuda is not None
        return torch.cuda.get_device_capability() if nvidia else None
    if BACKEND == "jax":
        import jax

        text = str(getattr(jax.devices()[0], "compute_capability", ""))
        numbers = text.split(".")
        if all(number.isdigit() for number in numbers):
            return tuple(map(int, numbers))
        return None
    import tensorflow as tf

    gpu = tf.config.list_physical_devices("GPU")[0]
    details = tf.config.experimental.get_device_details(gpu)
    return details.get("compute_capability")


def ways():
    """Whether layers are compiled: both on a GPU, the usual on a CPU."""
    return {False, COMPILED} if measuring.on_gpu() else {COMPILED}


def dense(inputs, units, recipe, source, use_bias=False):
    """A model of one Dense in float8.

    Args:
        inputs: Their number, or the shape of one sample.
        units: Of the layer.
        recipe: Of the float8 policy.
        source: Its source policy.
        use_bias: Whether it has a bias.
    """
    policy = kpe.Float8DTypePolicy(source, recipe=recipe)
    layer = kpe.layers.Dense(units, use_bias=use_bias, dtype=policy)
    shape = (inputs,) if isinstance(inputs, int) else inputs
    return keras.Sequential([keras.Input(shape), layer])
