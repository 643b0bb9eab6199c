"""What a kernel is asked for, and what it must answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from keras_policy_ext.kernels.contractions import Conv
    from keras_policy_ext.kernels.plan import Plan
    from keras_policy_ext.numerics.rules import Prior
    from keras_policy_ext.recipes import Recipe

Tensor = Any

HOPPER_OR_ADA = (8, 9)
"""Smallest compute capability of NVIDIA's devices with float8 matmuls."""


class Quantized(NamedTuple):
    """An operand: `values * scale` approximates it.

    Attributes:
        values: Numbers of a float8 format: in that dtype where the matmul
            reads float8 itself, in float32 where it is emulated.
        scale: Float32 scalar.
    """

    values: Tensor
    scale: Tensor


class Choice(NamedTuple):
    """Which kind of kernel runs a contraction, and why.

    Attributes:
        kind: `"native"` (the matmul reads float8 operands) or `"emulated"`
            (the same numbers, multiplied in float32 or, where that is no
            less exact, in bfloat16).
        reason: One sentence for the user.
    """

    kind: str
    reason: str

    @property
    def native(self) -> bool:
        """Whether the kind is `"native"`."""
        return self.kind == "native"


class Engine(Protocol):
    """The kernels of one framework: the surface that a new one must offer."""

    name: str

    def select(self, plan: Plan) -> Choice:
        """Native or emulated, for the contraction of a plan."""

    def is_compiling(self) -> bool:
        """Whether a compiler that cannot read context variables traces."""

    def traces_for_xla(self) -> bool:
        """Whether XLA compiles what is called now, if `select` asks that."""

    def quantize(
        self, x: Tensor, scale: Tensor, dtype: str, native: bool
    ) -> Quantized:
        """`cast(float32(x) / scale)`, stored as the matmul wants it."""

    def einsum(
        self,
        equation: str,
        a: Quantized,
        b: Quantized,
        dtype: str,
        fast: bool = False,
    ) -> Tensor:
        """The einsum of the values times both scales, accumulated in float32.

        `fast` allows Hopper's fast accumulation. Returns a tensor of dtype
        `dtype`.
        """

    def conv(
        self, conv: Conv, x: Quantized, w: Quantized, dtype: str
    ) -> Tensor:
        """The convolution, likewise."""

    def conv_inputs_grad(
        self, conv: Conv, g: Quantized, w: Quantized, shape: Any, dtype: str
    ) -> Tensor:
        """Its gradient for inputs of this shape."""

    def conv_kernel_grad(
        self, conv: Conv, x: Quantized, g: Quantized, shape: Any, dtype: str
    ) -> Tensor:
        """Its gradient for a kernel of this shape."""

    def prior(self, rule: Any, *state: Tensor) -> Prior:
        """What the state says before this step."""

    def settle(self, recipe: Recipe, value: Tensor, previous: Tensor) -> Tensor:
        """What a state becomes when `value` is assigned to it."""

    def combine_replicas(self, observation: Tensor) -> Tensor:
        """What all data-parallel replicas observed, in one matrix."""

    def step_by_step(self) -> AbstractContextManager[None]:
        """A block in which loops are run and not traced; no gradients."""

    def functions_step_by_step(self) -> AbstractContextManager[None]:
        """The same for what a layer has compiled itself, on all threads."""

    def runs_now(self) -> bool:
        """Whether what is called in such blocks is run and not traced."""

    def keep_observations(self, variable: Any, tensor: Tensor) -> None:
        """Keep observations apart from gradients that stay with a tensor."""

    def assigned(self, variable: Any, value: Tensor) -> Tensor:
        """What a state variable becomes when `value` is assigned to it."""

    def earlier_observation(self, variable: Any) -> Tensor | None:
        """What was observed in micro-batches before, beside gradients."""

    def put_earlier_observation(self, variable: Any, value: Any) -> None:
        """Put back what `earlier_observation` returned."""

    def known_value(self, variable: Any) -> Tensor | None:
        """What a state variable holds, where that can be read now."""

    def settle_observed(self, variables: Sequence[Any]) -> None:
        """Make what was observed of states part of them."""

    def on_all_replicas(self, flag: Tensor) -> Tensor:
        """Whether a bool scalar is true on every data-parallel replica."""

    def run_if(
        self,
        flag: Tensor,
        update: Callable[..., None],
        arguments: tuple[Any, ...],
        variables: Sequence[Any],
    ) -> None:
        """`update(*arguments)`, which assigns `variables`, if `flag` holds."""

    def known_integer(self, x: Tensor) -> int | None:
        """An integer scalar as a number; None while it is being compiled."""

    def run(
        self, plan: Plan, inputs: Tensor, kernel: Tensor, *state: Tensor
    ) -> Tensor:
        """`plan.forward`, differentiable by `plan.backward`."""
