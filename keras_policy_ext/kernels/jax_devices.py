"""JAX: for which devices XLA has matmuls of float8."""

from __future__ import annotations

from typing import Any

import jax

from keras_policy_ext.kernels.contract import HOPPER_OR_ADA

BLACKWELL = 10
"""Major number of the compute capability of its data center cards."""


def lacking() -> str | None:
    """Why XLA has no float8 matmul for the device, or None if it has one."""
    if jax.default_backend() == "cpu":
        return "XLA has no float8 matmul for a CPU"
    device = jax.devices()[0]
    capability = _capability(device)
    if capability is not None and capability >= HOPPER_OR_ADA:
        return None
    return f"{_named(device)} has no float8 matmul"


def lacking_mx() -> str | None:
    """Why XLA has no matmul with scales of MX blocks, or None."""
    if jax.default_backend() == "cpu":
        return "XLA has no float8 matmul for a CPU"
    device = jax.devices()[0]
    capability = _capability(device)
    if capability is not None and capability[0] == BLACKWELL:
        return None
    return f"{_named(device)} is no Blackwell that scales MX blocks (10.x)"


def _capability(device: Any) -> tuple[int, ...] | None:
    """Of one of NVIDIA's devices: (9, 0) for a Hopper."""
    # Another text on other makers' devices, or nothing.
    numbers = str(getattr(device, "compute_capability", "none")).split(".")
    if all(number.isdigit() for number in numbers):
        return tuple(map(int, numbers))
    return None


def _named(device: Any) -> str:
    capability = getattr(device, "compute_capability", "none")
    return f"{device.device_kind} (capability {capability})"
