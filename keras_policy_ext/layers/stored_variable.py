"""A kernel of one byte a number, as variables of its layer.

| variable | shape | dtype | new | changes |
|---|---|---|---|---|
| its codes | of the kernel | uint8 | zeros | when it is loaded |
| its scale | `stored_kernels.scale_shape` | float32 | ones | likewise |
| the scale of the inputs | () | float32 | one | likewise |
| the kernel, widened | of the kernel | float32 | its numbers | likewise |

The scale of the inputs is there for static scales only, and the widened kernel
once it is asked for. None of them is trained. All but the first are in the
sub-layer `float8_state`, so that patterns for kernels, such as those of a
`LayoutMap`, do not match them by their names.

The codes are in `layer.variables`, which trainers and frameworks hold and give
back. Attributes of the layer and `layer.weights` have a `StoredVariable` in
their place: who multiplies with that reads numbers, and it takes no memory.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from keras_policy_ext import backends, contractions, formats
from keras_policy_ext._keras import (
    built_layers,
    summaries,
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
"""The suffix of their names, after the name of the kernel."""


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


class StoredCodes(keras.Variable):
    """The codes of a kernel, uint8, in the shape of the kernel.

    Attributes:
        read: The variable that reads them as numbers, while a layer that is
            being built has the codes in an attribute.
    """

    read: StoredVariable | None = None

    def __init__(self, shape: tuple[int, ...], name: str | None, codes: Any):
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


class StoredVariable(variable_values.ComputedVariable, keras.Variable):
    """A kernel that is stored as codes, read as the numbers that they mean.

    Attributes:
        codes: The variable of the codes.
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
        self, codes: StoredCodes, axes: Axes, recipe: FrozenKernels, dtype: str
    ):
        self.axes = axes
        self.recipe = recipe
        super().__init__(codes, dtype)

    @property
    def codes(self) -> StoredCodes:
        """The variable of the codes."""
        held: StoredCodes = self.held
        return held

    @property
    def value(self) -> Any:
        """The numbers, computed anew, in the dtype in which they are read."""
        if self.widened is not None:
            return ops.cast(self.widened.as_stored, self.dtype)
        codes, scale, *_ = self.constants
        return contractions.dequantized(
            self.recipe, self.axes, codes, scale, self.dtype
        )

    def assign(self, value: Any) -> Any:
        """Set the codes; the numbers that it has stay.

        Args:
            value: Codes, uint8; or these numbers.

        Raises:
            ValueError: If it is anything else.
        """
        dtype = getattr(value, "dtype", None)
        if dtype is not None and _name_of(dtype) == "uint8":
            self.check(value)
            return self.codes.assign(value)
        if not self._has_numbers(value):
            self.check(value)
        return value

    def _has_numbers(self, value: Any) -> bool:
        """Return True if these are the numbers that it has already."""
        try:
            asked = np.asarray(ops.convert_to_numpy(value))
        # Each framework raises another error for a tensor of a compiled
        # function, which has no numbers yet.
        except Exception:
            return False
        return np.array_equal(asked, ops.convert_to_numpy(self.value))

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
            codes=np.array(ops.convert_to_numpy(self.codes.value)),
            scale=np.array(ops.convert_to_numpy(self.scale.as_stored)),
            weights=self.weights,
            granularity=self.granularity,
            axes=self.axes,
        )

    @property
    def constants(self) -> tuple[Any, ...]:
        """The tensors that a product reads."""
        codes = variable_values.value_without_autocast(self.codes)
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
        framework = backends.current()
        gathering = framework.gathering_of(self.codes)
        if gathering is not None:
            codes = framework.gathered(codes, gathering, gathering.axes)
        return codes, *scales

    def check(self, value: Any) -> None:
        """Raise if an array is no codes of finite numbers.

        Raises:
            ValueError: If so.
        """
        name = _name_of(getattr(value, "dtype", "float32"))
        if name == "uint8":
            codes = np.asarray(ops.convert_to_numpy(value))
            numbers = codes.view(formats.get(self.weights).dtype)
            if np.all(np.isfinite(numbers.astype("float32"))):
                return
        kind = "codes of NaN" if name == "uint8" else f"other numbers ({name})"
        raise ValueError(
            f"The kernel {self.path!r} is frozen; nothing was set. Received: "
            f"{kind}. Allowed: the numbers that a frozen kernel has, or codes "
            f"(uint8) of finite numbers in {self.weights}. Call "
            "`keras_policy_ext.thaw(model)` to set float weights, or leave "
            "the layer out with `keras_policy_ext.freeze(model, exclude=...)`."
        )

    def take(self, stored: StoredKernel, inputs_scale: Any = None) -> None:
        """Hold another kernel, one of the same shapes.

        Args:
            stored: The kernel.
            inputs_scale: That of the inputs; None to leave it.
        """
        self.codes.assign(stored.codes)
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
        The kernel. The caller keeps its codes in an attribute of the layer,
        and then itself: see `read_as_numbers`.
    """
    # Loaded here, and not in the first call, which a compiler may trace.
    backends.engine()
    backends.current()
    codes = None if stored is None else stored.codes
    path = layer.path or layer.name
    with scope_of_path(path):
        made = StoredCodes(shape, name, codes)
    variable = StoredVariable(made, axes, recipe, layer.variable_dtype)
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


def read_as_numbers(layer: Any) -> None:
    """Let attributes that hold codes hold the kernels that read them.

    The layer tracks the codes, which it was given first.
    """
    for name, value in list(vars(layer).items()):
        if isinstance(value, StoredCodes) and value.read is not None:
            vars(layer)[name], value.read = value.read, None


def in_place_of_codes(layer: Any, variables: list[Any]) -> list[Any]:
    """A list of variables of a layer, with its kernels in place of codes."""
    found = {
        id(each.codes): each
        for each in vars(layer).values()
        if isinstance(each, StoredVariable)
    }
    return [found.get(id(each), each) for each in variables]


def held(variable: Any) -> Any:
    """The variable in `layer.variables` of one in `layer.weights`."""
    return variable.codes if isinstance(variable, StoredVariable) else variable


def is_state(variable: object) -> bool:
    """True if a variable says how numbers are scaled, and is no parameter."""
    return isinstance(variable, (StateVariable, StoredConstant))


summaries.leave_out_of_totals(is_state)


def _name_of(dtype: Any) -> str:
    return str(keras.backend.standardize_dtype(dtype))


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
