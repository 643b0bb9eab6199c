"""A linear layer under delayed scaling, step by step, in NumPy."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from keras_policy_ext.ext.reference.casting import quantize
from keras_policy_ext.ext.reference.scales import (
    amax,
    delayed_scale,
    update_history,
)

Array = np.ndarray[Any, Any]


class DelayedLinear:
    """A linear layer under delayed scaling, with the amax histories.

    `forward` and `backward` of one step use the scales from the histories
    before the step, and then observe amaxes. Matmuls accumulate in float64.
    Scales are computed by `scale_of_multiplier`, so that over many steps amaxes
    and scales equal those of Flax.

    Args:
        recipe: A `recipes.DelayedScaling`.

    Attributes:
        histories: float32 `(length,)` by operand.
        scales: The last used scales: a float32 scalar by operand.
    """

    def __init__(self, recipe: Any) -> None:
        self.recipe = recipe
        self.histories: dict[str, Array] = {}
        self.scales: dict[str, np.float32] = {}
        self._known: set[str] = set()
        self.quantized: dict[str, Array] = {}
        for operand in ("inputs", "kernel", "outputs_grad"):
            length = recipe.amax_history_length
            self.histories[operand] = np.zeros(length, np.float32)
            self.scales[operand] = np.float32(1)

    def forward(
        self, x: ArrayLike, kernel: ArrayLike, observe: bool = True
    ) -> Array:
        """Return the output `(..., out)` for x `(..., in)`, kernel `(in, out)`.

        With `observe=False` (a pass that is not training) the histories and
        scales are unchanged.
        """
        a, scale_a = self._quantize("inputs", x, observe)
        b, scale_b = self._quantize("kernel", kernel, observe)
        return _product(a, b, scale_a, scale_b)

    def backward(self, g: ArrayLike) -> tuple[Array, Array]:
        """Return (inputs_grad, kernel_grad) for the output gradient g.

        g is `(..., out)`, and inputs_grad `(..., in)`.
        """
        c, scale = self._quantize("outputs_grad", g, True)
        x, kernel = self.quantized["inputs"], self.quantized["kernel"]
        inputs_grad = _product(c, kernel.T, scale, self.scales["kernel"])
        kernel_grad = _product(
            _rows(x).T, _rows(c), self.scales["inputs"], scale
        )
        return inputs_grad, kernel_grad

    def _quantize(
        self, operand: str, x: ArrayLike, observe: bool
    ) -> tuple[Array, np.float32]:
        dtype = self.recipe.format_of(operand)
        observed = amax(x)
        scale = delayed_scale(
            self.histories[operand],
            dtype,
            current_amax=observed,
            previous=self.scales[operand] if operand in self._known else None,
            margin=self.recipe.margin,
            amax_compute=self.recipe.amax_compute,
            initial_scale=self.recipe.initial_scale,
        )
        codes = quantize(x, scale, dtype)
        if observe:
            history = update_history(self.histories[operand], observed)
            self.histories[operand] = history
            self.scales[operand] = scale
            self.quantized[operand] = codes
            if history.any():
                self._known.add(operand)
        return codes, scale


def _product(a: Array, b: Array, scale_a: Any, scale_b: Any) -> Array:
    """Return `(a·b) * scale_a * scale_b` in float64, rounded to float32."""
    product = a.astype(np.float64) @ b.astype(np.float64)
    product = product * np.float64(scale_a) * np.float64(scale_b)
    return product.astype(np.float32)


def _rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])
