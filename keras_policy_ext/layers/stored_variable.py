"""A kernel of one byte a number, as a variable of its layer.

| variable | shape | dtype | new | changes |
|---|---|---|---|---|
| the kernel | of the kernel | uint8 | zeros | when it is loaded |
| its scale | `stored_kernels.scale_shape` | float32 | ones | likewise |
| the scale of the inputs | () | float32 | one | likewise |
| the kernel, widened | of the kernel | float32 | its numbers | likewise |

The scale of the inputs is there for static scales only, and the widened kernel
once it is asked for. None of them is trained. All but the first are in the
sub-layer `float8_state`, so that patterns for kernels, such as those of a
`LayoutMap`, do not match them by their names.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from keras_policy_ext import formats, frameworks, kernels
from keras_policy_ext._keras import (
    built_layers,
    keras_hub_export,
    variable_values,
)
from keras_policy_ext.layers.paths import scope_of_path
from keras_policy_ext.layers.state_variable import (
    StateVariable,
    on_every_device,
)
from keras_policy_ext.recipes import FrozenKernels
from keras_policy_ext.stored_kernels import Axes, StoredKernel, scale_shape

SCALE = "_scale"
INPUTS_SCALE = "_inputs_scale"
WIDENED = "_widened"
"""What these variables are called after the name of the kernel."""


class StoredConstant(keras.Variable):
    """A scale of a stored kernel or of its inputs, or the kernel widened.

    Float32, and no parameter.
    """

    @property
    def as_stored(self) -> Any:
        """The tensor, which has no gradient.

        Raises:
            ValueError: If it was cast, and so is not what was stored.
        """
        value = variable_values.value_without_autocast(self)
        dtype = keras.backend.standardize_dtype(value.dtype)
        if dtype == "float32":
            # PyTorch lets anyone ask for gradients of a parameter.
            asks = getattr(value, "requires_grad", False)
            return value.detach() if asks else value
        raise ValueError(
            f"The constants {self.path!r} of a frozen layer were cast, which "
            f"rounds them. Received: {dtype}. Allowed: float32. On PyTorch "
            "`half()`, `bfloat16()`, `double()` and `to(dtype)` of a module "
            "cast them: load or freeze the model anew and leave them out. "
            "What products compute in is said by a policy before `freeze`, "
            "such as 'mixed_bfloat16'."
        )


class StoredVariable(keras.Variable):
    """The codes of a kernel, uint8, in the shape of the kernel.

    Attributes:
        recipe: How it is stored.
        axes: Which of its axes are summed.
        scale: The variable of its scales.
        inputs_scale: The variable of the scale of the inputs; None where they
            have none that is known before.
        widened: The variable of the kernel in float32; None where it is
            widened in each product.
    """

    scale: Any = None
    inputs_scale: Any = None
    widened: Any = None

    def __init__(
        self,
        shape: tuple[int, ...],
        axes: Axes,
        recipe: FrozenKernels,
        name: str | None,
        codes: Any = None,
    ):
        self.axes = axes
        self.recipe = recipe
        super().__init__(
            initializer="zeros" if codes is None else codes,
            shape=shape,
            dtype="uint8",
            trainable=False,
            autocast=False,
            name=name,
        )

    @property
    def trainable(self) -> bool:
        """Never: codes have no gradient."""
        return False

    @trainable.setter
    def trainable(self, value: bool) -> None:
        """Ignored: Keras sets it with that of the layer."""

    @property
    def weights(self) -> str:
        """The format of the numbers."""
        return self.recipe.weights

    @property
    def granularity(self) -> str:
        """What has a scale: see `FrozenKernels.per`."""
        return self.recipe.per

    @property
    def stored(self) -> StoredKernel:
        """A copy on the host."""
        return StoredKernel(
            codes=np.array(ops.convert_to_numpy(self.value)),
            scale=np.array(ops.convert_to_numpy(self.scale.as_stored)),
            weights=self.weights,
            granularity=self.granularity,
            axes=self.axes,
        )

    @property
    def constants(self) -> tuple[Any, ...]:
        """The tensors that a product reads."""
        codes = variable_values.value_without_autocast(self)
        scales = (self.scale, self.inputs_scale)
        return codes, *(each.as_stored for each in scales if each is not None)

    @property
    def multiplied(self) -> tuple[Any, ...]:
        """`constants`, with the codes on every device that multiplies them.

        As they are stored: XLA would gather what they are widened to. In
        place of codes the widened kernel, where there is one.
        """
        codes, *scales = self.constants
        if self.widened is not None:
            return self.widened.as_stored, *scales
        framework = frameworks.current()
        gathering = framework.gathering_of(self)
        if gathering is not None:
            codes = framework.gathered(codes, gathering, gathering.axes)
        return codes, *scales

    def check(self, value: Any) -> None:
        """Raise if an array is no codes of finite numbers.

        Raises:
            ValueError: If so.
        """
        codes = np.asarray(value)
        if codes.dtype == "uint8":
            numbers = codes.view(formats.get(self.weights).dtype)
            if np.all(np.isfinite(numbers.astype("float32"))):
                return
        kind = "codes of NaN" if codes.dtype == "uint8" else codes.dtype
        raise ValueError(
            "This is no stored kernel; nothing was set. Received: "
            f"{kind} for {self.path!r}. Allowed: codes (uint8) of finite "
            f"numbers in {self.weights}. Call `keras_policy_ext.thaw(model)` "
            "to set float weights."
        )

    def take(self, stored: StoredKernel, inputs_scale: Any = None) -> None:
        """Hold another kernel, one of the same shapes.

        Args:
            stored: The kernel.
            inputs_scale: That of the inputs; None to leave it.
        """
        self.assign(stored.codes)
        self.scale.assign(stored.scale)
        if inputs_scale is not None and self.inputs_scale is not None:
            self.inputs_scale.assign(inputs_scale)
        if self.widened is not None:
            self.widened.assign(stored.dequantized())


def add_stored(
    layer: Any,
    name: str | None,
    shape: tuple[int, ...],
    recipe: FrozenKernels,
    axes: Axes,
    stored: StoredKernel | None = None,
    inputs_scale: float | None = None,
) -> StoredVariable:
    """Make the variables of a stored kernel.

    Args:
        layer: The layer, with its `float8_state`; unlocked.
        name: Of the kernel; None for one that Keras chooses.
        shape: Of the kernel.
        recipe: How it is stored.
        axes: Which of its axes are summed.
        stored: What it holds; None for zeros.
        inputs_scale: That of the inputs, for static scales; None for one.

    Returns:
        The codes. The caller keeps them in an attribute of the layer.
    """
    # Loaded here, and not in the first call, which a compiler may trace.
    kernels.engine()
    frameworks.current()
    keras_hub_export.before_stock_export(_check_stock_export)
    codes = None if stored is None else stored.codes
    path = layer.path or layer.name
    with scope_of_path(path):
        variable = StoredVariable(shape, axes, recipe, name, codes)
    state, name = layer.float8_state, variable.name
    with scope_of_path(path), keras.name_scope(state.name):
        variable.scale = _constant(
            scale_shape(shape, axes, recipe.per),
            name + SCALE,
            None if stored is None else stored.scale,
        )
        setattr(state, name + SCALE, variable.scale)
        if recipe.activations == "static":
            variable.inputs_scale = _constant(
                (), name + INPUTS_SCALE, inputs_scale
            )
            setattr(state, name + INPUTS_SCALE, variable.inputs_scale)
    built_layers.track_again([state])
    return variable


def keep_widened(layer: Any, variable: StoredVariable) -> None:
    """Hold a stored kernel in float32 too, as products read it.

    Args:
        layer: Its layer.
        variable: The kernel.
    """
    state, name = layer.float8_state, variable.name + WIDENED
    value = variable.stored.dequantized()
    path = layer.path or layer.name
    with scope_of_path(path), keras.name_scope(state.name):
        variable.widened = _constant(value.shape, name, value)
    with built_layers.unlocked(state):
        setattr(state, name, variable.widened)


def _check_stock_export(model: Any) -> None:
    """Raise if KerasHub would write codes for numbers."""
    stored = [x for x in model.variables if isinstance(x, StoredVariable)]
    if stored:
        raise NotImplementedError(
            "KerasHub cannot export a frozen model: it would write the codes "
            "of the kernels as numbers; nothing was written. Received: a "
            f"model with {len(stored)} stored kernels, the first of them "
            f"{stored[0].path!r}. Allowed: a model that is not frozen. Call "
            "`keras_policy_ext.export(model, path)` for a folder of Hugging "
            "Face in float8, or `keras_policy_ext.thaw(model)` before."
        )


def is_state(variable: object) -> bool:
    """Whether a variable says how numbers are scaled, and is no parameter."""
    return isinstance(variable, (StateVariable, StoredConstant))


def _constant(shape: tuple[int, ...], name: str, value: Any) -> StoredConstant:
    if value is not None:
        value = np.asarray(value, "float32")
    return StoredConstant(
        initializer="ones" if value is None else value,
        shape=shape,
        dtype="float32",
        trainable=False,
        autocast=False,
        name=name,
        **on_every_device(len(shape)),
    )
