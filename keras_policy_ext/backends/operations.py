"""Protocols of functions that define their own gradient."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

from keras_policy_ext._types import Tensor

Shape = tuple[Any, ...]


class SavedTensors(Protocol):
    """The tensors that are saved for the backward pass.

    Attributes:
        shapes: Of the inputs and the kernel.
    """

    shapes: tuple[Shape, Shape]

    def leaves(self, narrow: bool = True) -> list[Tensor]:
        """The tensors, in a fixed order.

        Args:
            narrow: Whether in as few bytes as may be.
        """


class Operation(Hashable, Protocol):
    """A function of tensors that defines its own gradient; hashable data.

    Equal operations compute the same, so that what a framework has compiled
    for one serves the other.
    """

    @property
    def kernel_dtype(self) -> str:
        """Dtype of the kernel and of its gradient."""

    @property
    def training(self) -> bool | None:
        """True observes; False does not; None: where a gradient is taken."""

    @property
    def first_use(self) -> Operation:
        """One that has the same forward pass, for all that share it."""

    @property
    def another_use(self) -> Operation:
        """The same computation, whose observations are told apart."""

    def resolved(self) -> Operation:
        """This operation, when what it leaves open can be known."""

    @property
    def bound(self) -> BoundOperation:
        """This operation with the kernels for the device that is here."""


class BoundOperation(Protocol):
    """The passes of an `Operation`, on a device."""

    def forward(
        self,
        inputs: Tensor,
        kernel: Tensor,
        state: Shape,
        observe: bool,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """The outputs, with a bias added, and the residuals."""

    def residuals(
        self, leaves: Sequence[Tensor], shapes: tuple[Shape, Shape]
    ) -> Any:
        """Residuals of these tensors, as their `leaves` lists them."""

    def observed(self, residuals: Any, inputs: Tensor, kernel: Tensor) -> Any:
        """The residuals of a forward pass that did not observe, observed."""

    def caught_up(self, kernel: Tensor, state: Shape) -> Any:
        """The state, large enough for the kernel as it is.

        For a pass whose observations nobody takes.
        """

    def backward(
        self,
        residuals: Any,
        outputs_grad: Tensor,
        state: Shape,
        needed: tuple[bool, bool] = (True, True),
    ) -> tuple[Tensor | None, Tensor | None, Shape]:
        """The gradients of inputs, kernel and state."""

    def second_derivatives(
        self,
        residuals: Any,
        outputs_grad: Tensor,
        inputs_grad_grad: Tensor | None,
        kernel_grad_grad: Tensor | None,
        needed: tuple[bool, bool, bool] = (True, True, True),
    ) -> tuple[Tensor | None, ...]:
        """The gradients of what `backward` makes its gradients of.

        Args:
            residuals: As for `backward`.
            outputs_grad: Likewise.
            inputs_grad_grad: The gradient of the gradient of the inputs; None
                for zeros.
            kernel_grad_grad: That of the gradient of the kernel, likewise.
            needed: Which results are wanted.

        Returns:
            The gradients of the gradient of the outputs, of the inputs and of
            the kernel; None for one that is not wanted, or zero.
        """


class FrozenOperation(Hashable, Protocol):
    """A function of inputs and of constants, which get no gradient."""

    @property
    def only_widens(self) -> bool:
        """True if nothing is rounded, so that a compiler may look into it."""

    def resolved(self) -> FrozenOperation:
        """This operation, when what it leaves open can be known."""

    def forward(self, inputs: Tensor, constants: tuple[Tensor, ...]) -> Tensor:
        """The outputs."""

    def inputs_grad(
        self, outputs_grad: Tensor, constants: tuple[Tensor, ...], shape: Shape
    ) -> Tensor:
        """The gradient of inputs of this shape."""
