"""JAX: branches without side effects, and arithmetic safe from XLA."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_policy_ext import backends
from keras_policy_ext._types import Tensor, override
from keras_policy_ext.backends import parts
from keras_policy_ext.backends.interface import (
    Backend,
    FrozenOperation,
    Operation,
    Shape,
)
from keras_policy_ext.backends.jax import gradients, traced_programs
from keras_policy_ext.backends.jax.partitioned import Names, names_of
from keras_policy_ext.backends.parts import LARGE, StoredMatrix
from keras_policy_ext.backends.traced_programs import scope_name
from keras_policy_ext.formats import INTEGERS
from keras_policy_ext.numerics import casting
from keras_policy_ext.numerics.primitives import FLOAT4


class Gathering(NamedTuple):
    """The sharding of a kernel, and the mesh axis it is gathered along.

    Attributes:
        mesh: The devices.
        axes: For each axis of the kernel, the mesh axes that shard it.
        batch: The mesh axis that shards the batch.
        is_quantized: Whether it arrives quantized; on JAX a matmul does that.
    """

    mesh: Mesh
    axes: tuple[Names, ...]
    batch: str
    is_quantized: bool = False


def _shard_along(x: Tensor, mesh: Mesh, axes: list[Names | None]) -> Tensor:
    """Have each axis sharded along these mesh axes; None leaves it to XLA."""
    spec = [PartitionSpec.UNCONSTRAINED if a is None else a for a in axes]
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return lax.with_sharding_constraint(x, sharding)


class JaxBackend(Backend):
    """The backend for JAX."""

    name = "jax"
    trace = staticmethod(traced_programs.trace)
    steps = staticmethod(traced_programs.steps)

    @override
    def in_scope(self, number: int) -> AbstractContextManager[object]:
        # `traced_programs` reads the number from the name of the scope.
        return jax.named_scope(scope_name(number))

    @override
    def step_by_step(self) -> AbstractContextManager[None]:
        return jax.disable_jit()

    @override
    def is_traced(self, x: Tensor) -> bool:
        # An eager gradient makes tracers as well. But only while JAX compiles
        # is an operation on a plain number recorded.
        is_tracer = isinstance(x, jax.core.Tracer)
        return is_tracer and isinstance(lax.neg(0.0), jax.core.Tracer)

    @override
    def is_compiled(self, function: object) -> bool:
        """Return True for what `jax.jit` or `jax.pmap` returns."""
        return callable(getattr(function, "clear_cache", None)) and callable(
            getattr(function, "lower", None)
        )

    @override
    def forget_traces(self, function: Any, owner: Any) -> None:
        # `owner` is not needed: the traces of a method are those of all owners.
        function.clear_cache()

    @override
    def known_integer(self, x: Tensor) -> int | None:
        return None if isinstance(x, jax.core.Tracer) else int(x)

    @override
    def abs_or_inf(self, x: Tensor) -> Tensor:
        """Return absolute values; on a CPU, infinity for NaN."""
        # XLA on a CPU drops NaN from a maximum of 4096 numbers and more (JAX
        # 0.10). On a GPU the comparison would be a pass over memory.
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.abs(x)
        return lax.platform_dependent(
            x,
            cpu=lambda x: jnp.where(jnp.isnan(x), jnp.inf, jnp.abs(x)),
            default=jnp.abs,
        )

    @override
    def before_cast(self, x: Tensor, dtype: str) -> Tensor:
        """Return traced values rounded to a format, unless on a CPU."""
        # XLA for a GPU replaces casts from float32 to float8 and back by
        # nothing (JAX 0.10 to 0.11). An eager cast is compiled alone and stays.
        if not isinstance(x, jax.core.Tracer):
            return x
        return lax.platform_dependent(
            x,
            cpu=lambda x: x,
            default=functools.partial(casting.round_to_format, dtype=dtype),
        )

    @override
    def divided(self, x: Tensor, y: Tensor) -> Tensor:
        """Return `x / y` of normal float32 numbers, correctly rounded."""
        # XLA divides on a GPU with an error of up to 2 ulp (JAX 0.11).
        if self.on_cpu(y):
            return super().divided(x, y)
        x, y = jnp.broadcast_arrays(jnp.asarray(x, jnp.float32), y)
        return lax.platform_dependent(
            x, y, cuda=_correctly_divided, default=lax.div
        )

    @override
    def broadcast_guard(self, x: Tensor, scale: Tensor) -> Tensor:
        """Return `scale` in a form that XLA does not see as a scalar."""
        # On CUDA the scale is clipped to itself, which XLA does not undo. So a
        # cast that is transposed is one kernel: with `isnan` XLA would write
        # the transposed mask (JAX 0.10). On a CPU clipping takes 1/3 longer.
        return lax.platform_dependent(
            x,
            scale,
            cuda=lambda x, s: jnp.maximum(jnp.minimum(x, s), s),
            default=super().broadcast_guard,
        )

    @override
    def run_if(
        self,
        flag: Tensor,
        update: Callable[..., None],
        arguments: tuple[Any, ...],
        variables: Sequence[keras.Variable],
    ) -> None:
        """Call `update(*arguments)` if a flag is set, also in a trace."""
        # A branch of `lax.cond` must not assign: what it would assign is its
        # result. Eagerly no branch is traced.
        if not isinstance(flag, jax.core.Tracer):
            if flag:
                update(*arguments)
            return
        before = [variable.value for variable in variables]

        def values_after_update() -> list[Tensor]:
            """Return the variables' values after `update`."""
            mapping = list(zip(variables, before, strict=True))
            with keras.StatelessScope(state_mapping=mapping) as scope:
                update(*arguments)
            return [scope.get_current_value(v) for v in variables]

        after = lax.cond(flag, values_after_update, lambda: before)
        for variable, value in zip(variables, after, strict=True):
            variable.assign(value)

    @override
    def transpose(
        self,
        function: Callable[[Tensor], Tensor],
        shape: Shape,
        cotangent: Tensor,
    ) -> Tensor:
        like = jax.ShapeDtypeStruct(tuple(shape), jnp.float32)
        return jax.linear_transpose(function, like)(cotangent)[0]

    @override
    def on_cpu(self, x: Tensor) -> bool:
        # A traced tensor is on the default device.
        return jax.default_backend() == "cpu"

    @override
    def kept_dtype(self, x: Tensor, format_name: str) -> str:
        """Return the dtype that saves values like `x`: uint8 on a CPU."""
        # Codes on a CPU, where arithmetic of integers is faster than casts. A
        # step of an MLP 512-2048-512 takes 8 to 12 % longer than with float32
        # for 256 rows, and 2 to 7 % less for 2048 (JAX 0.10, 2 cores).
        saves_codes = self.on_cpu(x)
        return "uint8" if saves_codes else super().kept_dtype(x, format_name)

    @override
    def gathering_of(self, variable: keras.Variable) -> Gathering | None:
        """Return how a kernel sharded along the batch's axis is gathered."""
        # A device with a shard of the batch needs all of a kernel that is
        # sharded along the same mesh axis. Matmuls of kernels that are sharded
        # along other mesh axes are left to XLA.
        distribution = keras.distribution.distribution()
        if distribution is None or not isinstance(variable, keras.Variable):
            return None
        layout = distribution.get_variable_layout(variable)
        sharding = getattr(layout, "backend_layout", layout)
        if not isinstance(sharding, NamedSharding):
            return None
        axes = [names_of(entry) for entry in sharding.spec]
        # A spec may end before the last axes, which are not sharded.
        axes += [()] * (len(variable.shape) - len(axes))
        batch = distribution.batch_dim_name
        is_sharded = any(batch in names for names in axes)
        if not is_sharded or sharding.mesh.shape[batch] == 1:
            return None
        return Gathering(sharding.mesh, tuple(axes), batch)

    @override
    def gathered(
        self, x: Tensor, gathering: Gathering, axes: Sequence[Names | None]
    ) -> Tensor:
        """Gather `x` along the mesh axis that shards the batch (FSDP).

        `axes` has the mesh axes that shard each axis of `x`; None leaves an
        axis to XLA.
        """
        # The first constraint keeps XLA from gathering the tensors that `x` is
        # computed from. Float8 is gathered as bytes: XLA gathers it as float16
        # if the device has no float8 (JAX 0.10, CPU).
        axes_after = [
            names and tuple(n for n in names if n != gathering.batch)
            for names in axes
        ]
        bits = x if x.itemsize > 1 else lax.bitcast_convert_type(x, jnp.uint8)
        bits = _shard_along(bits, gathering.mesh, list(axes))
        bits = _shard_along(bits, gathering.mesh, axes_after)
        return lax.bitcast_convert_type(bits, x.dtype)

    @override
    def run(
        self,
        operation: Operation,
        bias: Tensor | None,
        inputs: Tensor,
        kernel: Tensor,
        *state: Tensor,
    ) -> Tensor:
        """Run an operation and add a bias, inside of it if it can."""
        # The operation adds the bias only if its backward pass can sum the
        # gradient of the bias as well.
        bias_inside = None
        if bias is not None:
            can_sum = operation.bound.takes_bias(bias, inputs, kernel)
            bias_inside = bias if can_sum else None
        outputs = gradients.run(operation, inputs, kernel, state, bias_inside)
        return outputs if bias is bias_inside else keras.ops.add(outputs, bias)

    @override
    def run_frozen(
        self, operation: FrozenOperation, inputs: Tensor, *constants: Tensor
    ) -> Tensor:
        return gradients.run_frozen(operation, inputs, constants)

    @override
    def relu(self, x: Tensor) -> Tensor:
        return _relu(x)

    @override
    def recomputed(
        self, activation: Callable[[Tensor], Tensor], x: Tensor
    ) -> Tensor:
        """Compute `activation(x)`; compute it again for its gradient."""
        # On a CPU only a GELU in 16 bits: 12 blocks take 110 MiB in place of
        # 206, in no more time. Other functions, and a GELU in float32, XLA for
        # a CPU fuses otherwise if recomputed: last bits change (JAX 0.10).
        if not isinstance(x, jax.core.Tracer):
            return activation(x)  # No gradient is taken: nothing is saved.
        is_gelu = activation is keras.activations.gelu
        if self.on_cpu(x) and not (is_gelu and x.dtype.itemsize == 2):
            return activation(x)
        return jax.checkpoint(activation)(x)

    @override
    def cuts(self, numbers: int) -> bool:
        """Return True if products decode a stored kernel part by part.

        `numbers` is how many it has; a small one is decoded as a whole.
        """
        # Of a kernel that is sharded XLA would gather each part.
        is_whole = keras.distribution.distribution() is None
        reads_codes = jax.default_backend() in ("cpu", "gpu") and is_whole
        return reads_codes and numbers > LARGE

    @override
    def gains_from_float16(self, numbers: int) -> bool:
        """Return True if `kpe.widen` speeds up a kernel of so many elements."""
        # For a GPU without float8 XLA writes the kernel in floats, unless it is
        # in float16: see `_product_with_cast`.
        if jax.default_backend() == "gpu":
            return not backends.engine.device().float8
        return super().gains_from_float16(numbers)

    @override
    def product_by_parts(
        self, x: Tensor, kernel: StoredMatrix, dtype: str
    ) -> Tensor | None:
        """Multiply rows by a stored kernel; None to decode it first."""
        if jax.default_backend() == "gpu":
            return _product_with_cast(x, kernel, dtype)
        if not isinstance(x.shape[1], int):
            return None  # Symbolic, in an export with open sizes.
        size = kernel.size(x.shape[1], parts.cores())
        y = parts.in_loops(x, kernel, size, lax.fori_loop)
        return y * kernel.factor

    @override
    def as_float8(self, codes: Tensor, format_name: str) -> Tensor:
        return lax.bitcast_convert_type(codes, jnp.dtype(format_name))

    @override
    def as_dtype(self, x: Tensor, dtype: str) -> Tensor:
        return jnp.asarray(x).astype(dtype)


BACKEND = JaxBackend()


def _product_with_cast(
    x: Tensor, kernel: StoredMatrix, dtype: str
) -> Tensor | None:
    """Multiply on a GPU; see `Arithmetic.product_by_parts`."""
    # A cast from float8, with no scale behind it, is part of XLA's matmul on a
    # GPU that has float8, and one from float16 on any (JAX 0.10). Integer
    # operations never are.
    if kernel.blocks is not None or kernel.format == FLOAT4:
        return None
    values = kernel.codes.reshape(kernel.shape)
    if values.dtype != jnp.float16:
        is_integer = kernel.format in INTEGERS
        dtype_of_codes = "int8" if is_integer else kernel.format
        values = lax.bitcast_convert_type(values, jnp.dtype(dtype_of_codes))
    x = jnp.broadcast_to(x, (len(values), *x.shape[1:]))
    equation = "brm,bmn->brn" if kernel.sums else "brn,bmn->brm"
    operands = x.astype(dtype), values.astype(dtype)
    return jnp.einsum(equation, *operands, preferred_element_type=jnp.float32)


@jax.custom_vjp
def _relu(x: Tensor) -> Tensor:
    return jax.nn.relu(x)


def _relu_forward(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return `relu(x)`, and its mask packed into bits for the gradient."""
    mask = x > 0
    can_pack = x.ndim and 0 not in x.shape
    saved = jnp.packbits(mask, axis=-1) if can_pack else mask
    # Behind a barrier, so that XLA saves the bits and not the outputs.
    return jax.nn.relu(x), lax.optimization_barrier(saved)


def _relu_backward(mask: Tensor, outputs_grad: Tensor) -> tuple[Tensor]:
    """Pass the gradient where the mask, perhaps packed, is set."""
    if mask.dtype == jnp.uint8:  # It is packed into bits.
        count = outputs_grad.shape[-1]
        mask = jnp.unpackbits(mask, axis=-1, count=count).astype(bool)
    return (jnp.where(mask, outputs_grad, jnp.zeros_like(outputs_grad)),)


_relu.defvjp(_relu_forward, _relu_backward)


def _correctly_divided(x: Tensor, y: Tensor) -> Tensor:
    """Return `x / y` of normal numbers, with the rounding of IEEE 754."""
    # The error of a first quotient q is exact: halves of 12 bits have exact
    # products, and each difference has at most 24 bits. So a compiler may join
    # a product and a difference into one operation.
    q = x / y
    (q_high, q_low), (y_high, y_low) = map(_halves, (q, y))
    error = x - q_high * y_high - q_high * y_low - q_low * y_high
    error = error - q_low * y_low
    return q + error / y


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split float32 numbers into one of 12 significant bits and the rest.

    Products of such halves are exact in float32.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32) & ~0xFFF
    high = lax.bitcast_convert_type(bits, jnp.float32)
    return high, x - high
