"""TensorFlow: which device is here."""

from __future__ import annotations

import functools

import tensorflow as tf

from keras_policy_ext.backends import devices
from keras_policy_ext.backends.devices import Device


def here() -> Device:
    """The GPU that is best at float8, a CPU, or the one that is pretended."""
    return devices.pretended() or found()


def lacking(*formats: str) -> str | None:
    """Why XLA has no matmul of these formats for the device, or None.

    What AMD's and Google's devices can do is not seen from TensorFlow.
    """
    device = here()
    if device.maker == "nvidia":
        return device.lacking(*formats)
    if device.maker == "cpu":
        return "no GPU here has a float8 matmul"
    return (
        f"TensorFlow has float8 matmuls for NVIDIA's GPUs, not {device.title}"
    )


@functools.cache
def found() -> Device:
    """The device of this machine, asked once for a process.

    Of a CPU no more is asked than that it is one: products of bfloat16 took
    0.8 to 1.14 of the time of float32 in steps of six layers (TF 2.21).
    """
    gpus = [_described(each) for each in tf.config.list_physical_devices("GPU")]
    able = [each for each in gpus if each.float8]
    return [*able, *gpus, devices.KNOWN["cpu"]][0]


def _described(gpu: object) -> Device:
    details = tf.config.experimental.get_device_details(gpu)
    name = details.get("device_name", "a GPU")
    capability = details.get("compute_capability")
    if capability is None:
        return devices.unknown(name)
    return devices.of_nvidia(capability, f"{name} (capability {capability})")
