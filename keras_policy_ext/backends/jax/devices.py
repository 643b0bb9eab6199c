"""JAX: which device is here, and what XLA multiplies on it."""

from __future__ import annotations

from typing import Any

import jax

from keras_policy_ext.backends import devices
from keras_policy_ext.backends.devices import Device


def here() -> Device:
    """The device that JAX computes on, or the one that is pretended."""
    return devices.pretended() or _found()


def lacking(*formats: str) -> str | None:
    """Why XLA has no matmul of these formats for the device, or None."""
    device = here()
    if device.maker == "cpu":
        return "XLA has no float8 matmul for a CPU"
    return device.lacking(*formats)


def lacking_mx() -> str | None:
    """Why XLA has no matmul with scales of MX blocks, or None."""
    device = here()
    if device.maker == "cpu":
        return "XLA has no float8 matmul for a CPU"
    if "mx" in device.scales:
        return None
    return f"{device.title} is no Blackwell that scales MX blocks (10.x)"


def _found() -> Device:
    """The device here; a CPU is the `cpu` of the table, whatever it can do.

    XLA lacks some products of bfloat16 there: "Unsupported element type for
    DotThunk: BF16 x BF16 = F32" (JAX 0.10).
    """
    if jax.default_backend() == "cpu":
        return devices.KNOWN["cpu"]
    device = jax.devices()[0]
    if jax.default_backend() == "tpu":
        return devices.of_google(device.device_kind)
    # Numbers of NVIDIA, a name of AMD, nothing of others.
    capability = str(getattr(device, "compute_capability", None))
    title = f"{device.device_kind} (capability {capability})"
    if capability.startswith("gfx"):
        return devices.of_amd(capability, title)
    numbers = _numbers(capability)
    if numbers is None:
        return devices.unknown(title)
    return devices.of_nvidia(numbers, title)


def _numbers(capability: Any) -> tuple[int, ...] | None:
    """(9, 0) of `"9.0"`; None of what is no two numbers."""
    numbers = capability.split(".")
    if len(numbers) != 2 or not all(each.isdigit() for each in numbers):
        return None
    return tuple(map(int, numbers))
