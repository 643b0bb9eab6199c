"""JAX: run Pallas kernels on the shards of a matrix, on several devices.

XLA cannot partition a Pallas kernel: it would gather the whole matrix on each
device. So it is told here how to: each device runs the kernel on its own
shard, and amaxes and sums are reduced over the devices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from keras_policy_ext._types import Tensor
from keras_policy_ext.numerics import casting

Names = tuple[str, ...]


class Shards(NamedTuple):
    """The mesh axes that shard a matrix; none of them on one device.

    Attributes:
        every: All axes of the mesh.
        rows: Those that shard the rows.
        columns: Those that shard the columns.
    """

    every: Names = ()
    rows: Names = ()
    columns: Names = ()

    @property
    def cut(self) -> Names:
        """The axes that shard the rows or the columns."""
        return self.rows + self.columns

    def amax(self, amax: Tensor, early: bool = False) -> Tensor:
        """Return the amax of all shards from that of each, a float32 scalar.

        `early` says that a scale waits for it. Otherwise all devices exchange
        it, for XLA to reduce the amaxes of many operands at once.
        """
        axes = self.cut if early or not self.cut else self.every
        return self.largest(amax, axes)

    def largest(self, amaxes: Tensor, axes: Names) -> Tensor:
        """Return the maximum of float32 amaxes over mesh axes; NaN wins."""
        if not axes:
            return amaxes
        # Collectives on GPUs drop NaN from a maximum of floats.
        bits = lax.bitcast_convert_type(amaxes, jnp.int32)
        bits = lax.pmax(bits & np.int32(casting.MAGNITUDE_BITS), axes)
        return lax.bitcast_convert_type(bits, jnp.float32)

    def column_sums(self, sums: Tensor) -> Tensor:
        """Add up the sums of columns over the devices that share columns."""
        return lax.psum(sums, self.rows) if self.rows else sums


WHOLE = Shards()
"""The shards of a matrix that is on one device."""


class Kernel(Protocol):
    """A kernel that reads a matrix; hashable."""

    @property
    def results(self) -> tuple[str | None, ...]:
        """The axes of each result; None for a result that is None.

        `"i"` stands for the rows of the matrix and `"j"` for its columns:
        `"ji"` is a transpose, `""` a scalar.
        """

    @property
    def of_xla(self) -> Kernel:
        """The same kernel without Pallas."""

    def __call__(
        self, shards: Shards, x: Tensor, *scalars: Tensor | None
    ) -> tuple[Any, ...]:
        """Compute the results of a shard.

        `x`, (m, k), is the matrix or the shard of this device; `shards` has the
        mesh axes to reduce over. `scalars` are equal on all devices.
        """


def lacking() -> str | None:
    """Return why kernels cannot run on shards here; None if they can."""
    if jax.device_count() == 1:
        return None
    mesh = jax.sharding.get_abstract_mesh()
    kinds = set() if mesh.empty else set(mesh.axis_types)
    # In a `jax.shard_map` over all axes a kernel gets the shard of a device.
    if kinds - {AxisType.Auto} and kinds != {AxisType.Manual}:
        return "Pallas's casts are not for explicit or partly manual shardings"
    return None


def run(kernel: Kernel, x: Tensor, *scalars: Tensor | None) -> tuple[Any, ...]:
    """Run a kernel on a matrix (m, k), on each shard if it has several."""
    if jax.device_count() == 1:
        return kernel(WHOLE, x, *scalars)

    @jax.custom_batching.custom_vmap
    def of_one(*operands: Any) -> tuple[Any, ...]:
        results: tuple[Any, ...] = _on_shards(kernel, *operands)
        return results

    @of_one.def_vmap
    def _(size: int, batched: Sequence[Any], *operands: Any) -> Any:
        """Run a batch of matrices without Pallas."""
        # JAX has no `vmap` of what is partitioned, so XLA does the work.
        axes = jax.tree.map(lambda flag: 0 if flag else None, batched)
        of_xla = functools.partial(kernel.of_xla, WHOLE)
        results = jax.vmap(of_xla, tuple(axes), axis_size=size)(*operands)
        return results, jax.tree.map(lambda _: True, results)

    return of_one(x, *scalars)


def _whole(
    kernel: Kernel, x: Tensor, *scalars: Tensor | None
) -> tuple[Any, ...]:
    """Run a kernel on a whole matrix, as a program for one device does."""
    return kernel(WHOLE, x, *scalars)


class _Partition:
    """The partition of a kernel along the shards of its matrix."""

    def __init__(self, mesh: Mesh, x: Any):
        """Read from a matrix's sharding which mesh axes shard it."""
        spec: list[Any] = [None, None]
        if mesh.empty:  # Neither axis is sharded; JAX needs some mesh.
            mesh = Mesh(np.array(list(x.sharding.device_set)), ("devices",))
        else:  # A spec may end before the last axes.
            spec[: len(x.sharding.spec)] = x.sharding.spec
        self.mesh, self.sizes = mesh, x.shape
        rows, columns = map(names_of, spec)
        self.shards = Shards(every=mesh.axis_names, rows=rows, columns=columns)

    def of(self, axes: str | None) -> NamedSharding | None:
        """Return the sharding of what has these axes; see `Kernel`."""
        if axes is None:
            return None
        names = {"i": self.shards.rows, "j": self.shards.columns}
        spec = PartitionSpec(*(names[axis] or None for axis in axes))
        return NamedSharding(self.mesh, spec)

    def only_inside(self, x: Tensor) -> Tensor:
        """Put zeros where this device's shard reaches beyond the matrix."""
        cut = self.shards.rows, self.shards.columns
        for axis, (size, names) in enumerate(zip(self.sizes, cut, strict=True)):
            # Shards that do not divide an axis evenly are padded.
            if size % math.prod(self.mesh.shape[name] for name in names):
                start = lax.axis_index(names) * x.shape[axis]
                place = lax.broadcasted_iota(jnp.int32, x.shape, axis) + start
                x = jnp.where(place < size, x, jnp.zeros_like(x))
        return x


# JAX calls this function and the next two, which need not read `results`.
def _shardings(
    kernel: Kernel, mesh: Mesh, operands: Sequence[Any], results: Any
) -> tuple[Any, ...]:
    """Return how the results are sharded: as the matrix is."""
    partition = _Partition(mesh, operands[0])
    return tuple(map(partition.of, kernel.results))


def _partition(
    kernel: Kernel, mesh: Mesh, operands: Sequence[Any], results: Any
) -> tuple[Any, ...]:
    """Return mesh, kernel for a shard, shardings of results and operands."""
    partition = _Partition(mesh, operands[0])

    def on_shard(x: Tensor, *scalars: Tensor | None) -> tuple[Any, ...]:
        x = partition.only_inside(x)
        return kernel(partition.shards, x, *scalars)

    scalars = jax.tree.map(lambda _: partition.of(""), operands[1:])
    shardings = tuple(map(partition.of, kernel.results))
    return partition.mesh, on_shard, shardings, (partition.of("ij"), *scalars)


def _rule(kernel: Kernel, mesh: Mesh, operands: Any, results: Any) -> str:
    """Return the axes of operands and results, as Shardy reads them."""
    read = ["i j", *("" for _ in operands[1:])]  # A matrix, then scalars.
    written = [" ".join(axes) for axes in kernel.results if axes is not None]
    return f"{', '.join(read)} -> {', '.join(written)}"


def names_of(entry: str | Names | None) -> Names:
    """Return the mesh axes in one `PartitionSpec` entry, as a tuple."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


_on_shards = custom_partitioning(_whole, static_argnums=(0,))
_on_shards.def_partition(
    _partition, infer_sharding_from_operands=_shardings, sharding_rule=_rule
)
