"""JAX: kernels that are cut into parts, each on devices of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
import keras
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_policy_ext._types import Tensor

Names = tuple[str, ...]


class Gathering(NamedTuple):
    """How a kernel is cut, and along which axis of the mesh it is gathered.

    Attributes:
        mesh: The devices.
        axes: For each axis of the kernel, those of the mesh that cut it.
        batch: The axis of the mesh that cuts the batch.
    """

    mesh: Mesh
    axes: tuple[Names, ...]
    batch: str


def gathering_of(variable: Any) -> Gathering | None:
    """How a kernel is gathered; None where it is multiplied as it is cut.

    A device that has a part of the batch needs all of a kernel that is cut
    along the same axis of the mesh. What is cut along another axis can be
    multiplied in parts, and is left to XLA.

    Args:
        variable: The kernel.
    """
    distribution = keras.distribution.distribution()
    if distribution is None or not isinstance(variable, keras.Variable):
        return None
    layout = distribution.get_variable_layout(variable)
    sharding = getattr(layout, "backend_layout", layout)
    if not isinstance(sharding, NamedSharding):
        return None
    cut = [_names(entry) for entry in sharding.spec]
    cut += [()] * (len(variable.shape) - len(cut))
    batch = distribution.batch_dim_name
    is_cut = any(batch in names for names in cut)
    if not is_cut or sharding.mesh.shape[batch] == 1:
        return None
    return Gathering(sharding.mesh, tuple(cut), batch)


def gathered(
    x: Tensor, gathering: Gathering, axes: Iterable[Names | None]
) -> Tensor:
    """A tensor that is cut, and no longer along the axis of the batch.

    The first constraint keeps XLA from gathering what `x` is computed from.
    Float8 is gathered as bytes: XLA gathers it as float16 where the device
    has no float8 (JAX 0.10, CPU).

    Args:
        x: The tensor.
        gathering: From `gathering_of`.
        axes: For each axis of `x`, those of the mesh that cut it; None to
            leave that to XLA.
    """
    cut = list(axes)
    whole = [
        names and tuple(n for n in names if n != gathering.batch)
        for names in cut
    ]
    bits = x if x.itemsize > 1 else lax.bitcast_convert_type(x, jnp.uint8)
    for axes in (cut, whole):
        bits = _lying(bits, gathering.mesh, axes)
    return lax.bitcast_convert_type(bits, x.dtype)


def _lying(x: Tensor, mesh: Mesh, axes: list[Names | None]) -> Tensor:
    """A tensor cut along these axes of the mesh."""
    spec = [PartitionSpec.UNCONSTRAINED if a is None else a for a in axes]
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return lax.with_sharding_constraint(x, sharding)


def _names(entry: Any) -> Names:
    """The axes of a mesh in one entry of a partition."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)
