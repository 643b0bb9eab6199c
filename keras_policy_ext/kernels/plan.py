"""The three matmuls of a float8 contraction, the same for every engine."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

from keras import ops

from keras_policy_ext.kernels.contract import Engine, Quantized
from keras_policy_ext.kernels.contractions import Conv, Einsum
from keras_policy_ext.numerics import scaling
from keras_policy_ext.numerics.rules import Prior, rule_of
from keras_policy_ext.recipes import Recipe

Tensor = Any


class Residuals(NamedTuple):
    """What the backward pass needs of the forward pass.

    Attributes:
        inputs: The quantized inputs.
        kernel: The quantized kernel.
        prior: What the state said, None for a recipe without.
        amaxes: Of inputs and kernel, float32 scalars; None if not observed.
    """

    inputs: Quantized
    kernel: Quantized
    prior: Prior | None
    amaxes: tuple[Tensor, Tensor] | None


@dataclasses.dataclass(frozen=True)
class Plan:
    """One float8 contraction, ready to run; hashable.

    Attributes:
        contraction: What is multiplied.
        recipe: How the operands are scaled.
        inputs_dtype: Dtype of the inputs, of their gradient and of the
            outputs: the compute dtype.
        kernel_dtype: Dtype of the kernel and of its gradient.
        training: True observes; False does not; None observes where a
            gradient is taken.
        slot: Which use of the kernel in this step this is.
        prefer: `"auto"`, `"native"` or `"emulated"`; None where that is not
            known before it runs.
        for_xla: Whether XLA is going to compile it, where an engine asks.
    """

    contraction: Einsum | Conv
    recipe: Recipe
    inputs_dtype: str
    kernel_dtype: str
    training: bool | None = None
    slot: int = 0
    prefer: str | None = "auto"
    for_xla: bool = False

    @functools.cached_property
    def first_use(self) -> Plan:
        """This plan in slot 0: the forward pass is the same in every slot."""
        return dataclasses.replace(self, slot=0)

    @functools.cached_property
    def kernel_grad_dtype(self) -> str:
        """What `kernel_grad` is rounded to: the compute dtype.

        Not float16, in which the gradient of a float32 kernel could overflow.
        """
        half = self.inputs_dtype == "float16"
        return self.kernel_dtype if half else self.inputs_dtype

    @functools.cached_property
    def rule(self) -> Any:
        """The arithmetic of the recipe."""
        return rule_of(self.recipe)

    def forward(
        self,
        engine: Engine,
        inputs: Tensor,
        kernel: Tensor,
        state: tuple[Tensor, ...],
        observe: bool,
    ) -> tuple[Tensor, Residuals]:
        """The outputs, and what the backward pass needs.

        Args:
            engine: Whose kernels run.
            inputs: Of dtype `inputs_dtype`.
            kernel: Of dtype `kernel_dtype`.
            state: The state matrix of the recipe, or nothing.
            observe: Whether amaxes are needed for the state.

        Returns:
            Outputs of dtype `inputs_dtype`, and residuals.
        """
        prior = engine.prior(self.rule, *state) if state else None
        observe = observe and bool(state)
        native = engine.select(self).native
        x, x_amax = self._quantize(
            engine, "inputs", inputs, prior, observe, native
        )
        w, w_amax = self._quantize(
            engine, "kernel", kernel, prior, observe, native
        )
        outputs = self.contraction.forward(engine, x, w, self.inputs_dtype)
        amaxes = (x_amax, w_amax) if observe else None
        # The outputs are those of saturated operands; the gradients tell.
        x, w = self._guarded(x, x_amax), self._guarded(w, w_amax)
        return outputs, Residuals(x, w, prior, amaxes)

    def observed(
        self, residuals: Residuals, inputs: Tensor, kernel: Tensor
    ) -> Residuals:
        """Residuals of a forward pass that did not observe, observed."""
        if residuals.prior is None:
            return residuals
        amaxes = scaling.amax(inputs), scaling.amax(kernel)
        return residuals._replace(amaxes=amaxes)

    def backward(
        self,
        engine: Engine,
        residuals: Residuals,
        outputs_grad: Tensor,
        shapes: tuple[Any, Any],
        state: tuple[Tensor, ...],
        needed: tuple[bool, bool] = (True, True),
    ) -> tuple[Tensor | None, Tensor | None, tuple[Tensor, ...]]:
        """The gradients of inputs, kernel and state.

        Args:
            engine: Whose kernels run.
            residuals: From `forward`.
            outputs_grad: Of dtype `inputs_dtype`.
            shapes: Of the inputs and of the kernel.
            state: As for `forward`.
            needed: Whether the gradients of inputs and kernel are wanted.

        Returns:
            The three; None for a gradient that is not needed.
        """
        x, w, prior, amaxes = residuals
        native = engine.select(self).native
        g, g_amax = self._quantize(
            engine,
            "outputs_grad",
            outputs_grad,
            prior,
            amaxes is not None,
            native,
        )
        g = self._guarded(g, g_amax)
        inputs_grad = kernel_grad = None
        if needed[0]:
            inputs_grad = self.contraction.inputs_grad(
                engine, g, w, shapes[0], self.inputs_dtype
            )
        if needed[1]:
            kernel_grad = self.contraction.kernel_grad(
                engine, x, g, shapes[1], self.kernel_grad_dtype
            )
            kernel_grad = ops.cast(kernel_grad, self.kernel_dtype)
        if not state:
            return inputs_grad, kernel_grad, ()
        if amaxes is None:
            return inputs_grad, kernel_grad, (ops.zeros_like(state[0]),)
        observed = self.rule.observation([*amaxes, g_amax], self.slot)
        return inputs_grad, kernel_grad, (observed,)

    def _guarded(self, operand: Quantized, amax: Tensor | None) -> Quantized:
        """An operand that spoils a gradient if it was not finite."""
        guard = self.rule.guard(amax)
        if guard is None:
            return operand
        return Quantized(operand.values, operand.scale * guard)

    def _quantize(
        self,
        engine: Engine,
        operand: str,
        x: Tensor,
        prior: Prior | None,
        observe: bool,
        native: bool,
    ) -> tuple[Quantized, Tensor | None]:
        scale, amax = self.rule.scale(operand, x, prior, observe)
        dtype = self.recipe.format_of(operand)
        return engine.quantize(x, scale, dtype, native), amax


@functools.lru_cache(maxsize=4096)
def plan_of(*fields: Any) -> Plan:
    """A plan with these fields; the same object for equal ones."""
    return Plan(*fields)


@functools.lru_cache(maxsize=4096)
def preferring(plan: Plan, kind: str) -> Plan:
    """A plan with this preference; the same object for equal ones."""
    return dataclasses.replace(plan, prefer=kind)
