"""JAX: `lax.dot_general` on float8 operands, gradients by `custom_vjp`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax import lax

from keras_policy_ext.kernels.agnostic import AgnosticEngine
from keras_policy_ext.kernels.contract import HOPPER_OR_ADA, Choice, Quantized
from keras_policy_ext.kernels.contractions import Einsum
from keras_policy_ext.kernels.einsum import dot_form, matmul_form
from keras_policy_ext.kernels.plan import Plan, Residuals

Tensor = Any
State = tuple[Tensor, ...]


class JaxEngine(AgnosticEngine):
    """Float8 operands reach XLA, which has a kernel or converts them."""

    name = "jax"

    def select(self, plan: Plan) -> Choice:
        """Native for what `dot_general` can express."""
        if not isinstance(plan.contraction, Einsum):
            return Choice("emulated", "XLA has no float8 convolution")
        if matmul_form(plan.contraction.equation) is None:
            return Choice("emulated", "an axis of one operand is summed alone")
        if plan.prefer == "emulated":
            return Choice("emulated", "asked for by kernels.prefer")
        lacking = _lacking()
        if lacking is None:
            return Choice("native", "lax.dot_general on float8 operands")
        if plan.prefer == "native":
            return Choice("native", "lax.dot_general, converted by XLA")
        return Choice("emulated", lacking)

    def einsum(
        self,
        equation: str,
        a: Quantized,
        b: Quantized,
        dtype: str,
        fast: bool = False,
    ) -> Tensor:
        """See `Engine.einsum`.

        XLA takes any precision but the highest for leave to accumulate fast,
        in matmuls of float8 on a GPU; as in Flax's `fp8_ops`.
        """
        if matmul_form(equation) is None:
            return super().einsum(equation, a, b, dtype, fast)
        exact = not fast and a.values.dtype != jnp.float32
        precision = lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT
        product = _dot_general(equation, a.values, b.values, precision)
        return (product * (a.scale * b.scale)).astype(dtype)

    def transpose(self, function: Any, shape: Any, cotangent: Tensor) -> Tensor:
        """See `AgnosticEngine.transpose`."""
        like = jax.ShapeDtypeStruct(tuple(shape), jnp.float32)
        return jax.linear_transpose(function, like)(cotangent)[0]

    def step_by_step(self) -> AbstractContextManager[None]:
        """See `AgnosticEngine.step_by_step`."""
        return jax.disable_jit()

    def run_if(
        self,
        flag: Tensor,
        update: Callable[..., None],
        arguments: tuple[Any, ...],
        variables: Sequence[Any],
    ) -> None:
        """See `AgnosticEngine.run_if`.

        A branch of `lax.cond` must not assign: what it would assign is its
        result. Eagerly no branch is traced.
        """
        if not isinstance(flag, jax.core.Tracer):
            if flag:
                update(*arguments)
            return
        before = [variable.value for variable in variables]

        def updated() -> list[Tensor]:
            mapping = list(zip(variables, before, strict=True))
            with keras.StatelessScope(state_mapping=mapping) as scope:
                update(*arguments)
            return [scope.get_current_value(v) for v in variables]

        after = lax.cond(flag, updated, lambda: before)
        for variable, value in zip(variables, after, strict=True):
            variable.assign(value)

    def known_value(self, variable: Any) -> Tensor | None:
        """See `AgnosticEngine.known_value`."""
        value = variable.value
        return None if isinstance(value, jax.core.Tracer) else value

    def known_integer(self, x: Tensor) -> int | None:
        """See `AgnosticEngine.known_integer`."""
        return None if isinstance(x, jax.core.Tracer) else int(x)

    def run(
        self, plan: Plan, inputs: Tensor, kernel: Tensor, *state: Tensor
    ) -> Tensor:
        """See `Engine.run`."""
        return _run(plan, inputs, kernel, state)


ENGINE = JaxEngine()


def _lacking() -> str | None:
    """Why XLA has no float8 matmul for the device, or None if it has one."""
    if jax.default_backend() == "cpu":
        return "XLA has no float8 matmul for a CPU"
    device = jax.devices()[0]
    # "9.0" on a Hopper; on other makers' devices another text, or nothing.
    capability = str(getattr(device, "compute_capability", "none"))
    numbers = capability.split(".")
    if all(number.isdigit() for number in numbers) and (
        tuple(map(int, numbers)) >= HOPPER_OR_ADA
    ):
        return None
    return (
        f"{device.device_kind} (capability {capability}) has no float8 matmul"
    )


# Each pass is compiled as a whole, so that an eager call does not dispatch
# its operations one by one; inside a compiled function these are inlined.


@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward(
    plan: Plan, observe: bool, inputs: Tensor, kernel: Tensor, state: State
) -> tuple[Tensor, Residuals]:
    return plan.forward(ENGINE, inputs, kernel, state, observe)


@functools.partial(jax.jit, static_argnums=0)
def _backward(
    plan: Plan, residuals: Residuals, state: State, outputs_grad: Tensor
) -> tuple[Tensor | None, Tensor | None, State]:
    shapes = residuals.inputs.values.shape, residuals.kernel.values.shape
    return plan.backward(ENGINE, residuals, outputs_grad, shapes, state)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(plan: Plan, inputs: Tensor, kernel: Tensor, state: State) -> Tensor:
    # JAX calls this one only where no gradient is taken.
    return _forward(plan.first_use, False, inputs, kernel, state)[0]


def _run_forward(
    plan: Plan, inputs: Tensor, kernel: Tensor, state: State
) -> tuple[Tensor, tuple[Residuals, State]]:
    observe = plan.training is not False
    outputs, residuals = _forward(
        plan.first_use, observe, inputs, kernel, state
    )
    return outputs, (residuals, state)


def _run_backward(
    plan: Plan, saved: tuple[Residuals, State], outputs_grad: Tensor
) -> tuple[Tensor | None, Tensor | None, State]:
    return _backward(plan, *saved, outputs_grad)


_run.defvjp(_run_forward, _run_backward)


def _dot_general(
    equation: str, a: Tensor, b: Tensor, precision: lax.Precision
) -> Tensor:
    """The einsum as one `dot_general`, accumulated in float32."""
    form = dot_form(equation)
    product = lax.dot_general(
        a,
        b,
        (form.contracted, form.batch),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return jnp.transpose(product, form.transposed)
