"""PyTorch: functions with gradients that `torch.func` may transform."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from keras_policy_ext._types import Tensor

FORWARD_MODE = (
    "A layer in float8 has no derivative in forward mode. Received: "
    "torch.func.jvp, jacfwd or hessian, or torch.autograd.forward_ad. Allowed: "
    "derivatives in reverse mode: torch.func.grad, vjp, jacrev, and "
    "jacrev(jacrev(f)) for a Hessian."
)


def are_transforms_active() -> bool:
    """Return True if this is called inside of a transform of `torch.func`.

    `torch.autograd.Function` asks for the same, to refuse those functions that
    were not made for transforms. There is no public way to ask (torch 2.13).
    """
    return bool(torch._C._are_functorch_transforms_active())


def refuse_compiled_transforms() -> None:
    """Raise where a transform is being compiled.

    Where it was not asked for one graph, the compiler then runs the function
    around the transform as it is, if it can.
    """
    if are_transforms_active():
        raise NotImplementedError(
            "A layer in float8 is not compiled inside of a transform of "
            "torch.func. Received: torch.compile around one. Allowed: the same "
            "uncompiled, as behind torch.compiler.disable."
        )


class ReverseMode(torch.autograd.Function):
    """A function without a derivative in forward mode, which says so."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """There is none."""
        raise NotImplementedError(FORWARD_MODE)


class ByExample(ReverseMode):
    """A function that `torch.func.vmap` calls for one example after another.

    An example is quantized by its own scales then, as JAX's `vmap` does it,
    and everything may read the numbers in its tensors.

    A call outside of transforms takes 16 µs longer than one of a function
    whose `forward` has a context (torch 2.13, CPU).
    """

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, *arguments: Any) -> Any:
        """The outputs of all examples, and the axis that counts them."""
        leaves, structure = pytree.tree_flatten(arguments)
        axes = pytree.tree_leaves(in_dims, is_leaf=lambda axis: axis is None)
        found = []
        for number in range(info.batch_size):
            example = [
                x if axis is None else x.select(axis, number)
                for x, axis in zip(leaves, axes, strict=True)
            ]
            found.append(cls.apply(*pytree.tree_unflatten(example, structure)))
        if isinstance(found[0], torch.Tensor):
            return torch.stack(found), 0
        outputs = tuple(_stacked(each) for each in zip(*found, strict=True))
        return outputs, tuple(None if x is None else 0 for x in outputs)


def _stacked(outputs: tuple[Tensor | None, ...]) -> Tensor | None:
    """One output of all examples; None if it is None."""
    return None if outputs[0] is None else torch.stack(outputs)
