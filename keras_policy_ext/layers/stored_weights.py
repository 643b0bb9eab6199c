"""Stored float8 kernels: create them, put them into layers, dequantize them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_policy_ext import backends, contractions, formats
from keras_policy_ext._keras import (
    built_layers,
    first_use,
    saving_hooks,
    variable_values,
    walking,
)
from keras_policy_ext._keras.built_layers import scope_of_path
from keras_policy_ext._types import Tensor, override
from keras_policy_ext.layers.operands import is_floating
from keras_policy_ext.layers.state_of import NoWeight, is_state
from keras_policy_ext.recipes import FrozenKernels
from keras_policy_ext.stored_kernels import (
    Axes,
    StoredKernel,
    are_codes,
    rounded_scales,
    scale_shape,
    tile_of,
)

SCALE = "_scale"
INPUTS_SCALE = "_inputs_scale"
WIDENED = "_widened"
"""The suffix of the name of a stored kernel's float16 variable."""


def on_every_device(rank: int) -> dict[str, Any]:
    """Return arguments that replicate a variable of this rank on JAX devices.

    Keras 3.12 searches a path for a pattern, so that the pattern of a kernel
    also matches what is stored beside it. Other patterns name whole layers.
    """
    distribution = keras.distribution.distribution()
    if keras.backend.backend() != "jax" or distribution is None:
        return {}
    mesh = distribution.device_mesh
    return {"layout": keras.distribution.TensorLayout((None,) * rank, mesh)}


class StoredConstant(NoWeight, keras.Variable):
    """A variable of a stored kernel: a scale in float32, or all its numbers.

    The numbers are those of the codes, in float16. It is no parameter.
    """

    scale_format: str = "float32"

    @override
    def check(self, value: Any) -> None:
        """Raise if a value is not finite, or as a scale not one of its format.

        Scales are positive.
        """
        numbers = np.asarray(ops.convert_to_numpy(value))
        is_scale = not self.name.endswith(WIDENED)  # Else a whole kernel.
        if np.isfinite(numbers).all() and (not is_scale or (numbers > 0).all()):
            rounded = rounded_scales(numbers, self.scale_format)
            if np.array_equal(rounded, numbers):
                return
        raise ValueError(
            f"This array cannot be the scale of the frozen kernel "
            f"{self.path!r}; no weight was set. Received: values that are "
            "NaN, infinite, <= 0 or rounded otherwise. Allowed: finite values "
            f"> 0 in {self.scale_format}. Pass the list that `get_weights` "
            "returned."
        )

    @property
    def as_stored(self) -> Any:
        """The tensor, detached; ValueError if it was cast."""
        value = variable_values.value_without_autocast(self)
        dtype = keras.backend.standardize_dtype(value.dtype)
        if dtype == self.dtype:
            # PyTorch lets anyone ask for gradients of a parameter.
            asks = getattr(value, "requires_grad", False)
            return value.detach() if asks else value
        raise ValueError(
            f"The constants {self.path!r} of a frozen layer were cast, which "
            f"rounds them. Received: {dtype}. Allowed: {self.dtype}. On "
            "PyTorch `half()`, `bfloat16()`, `float()`, `double()` and "
            "`to(dtype)` of a module cast them: load or freeze the model "
            "again, and do not call them. Set the compute dtype by a policy "
            "before `freeze`, such as 'mixed_bfloat16'."
        )


class StoredCodes(keras.Variable):
    """The variable of a stored kernel's codes, uint8, in the kernel's shape."""

    # The variable that dequantizes the codes, while the layer is being built.
    decoded_by: StoredVariable | None = None

    def __init__(self, shape: tuple[int, ...], name: str | None, codes: Any):
        """Make the variable, of zeros if `codes` is None."""
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
        """Do nothing: Keras sets this whenever `layer.trainable` is set."""


class StoredVariable(variable_values.ComputedVariable, keras.Variable):
    """A kernel that is stored as codes and reads as dequantized values."""

    scale: Any = None
    inputs_scale: Any = None  # The static one; None if there is none.
    widened: Any = None  # Numbers in float16; None if products read codes.
    decoded: Any = None  # In float32; see `decoded_once`.

    def __init__(
        self, codes: StoredCodes, axes: Axes, recipe: FrozenKernels, dtype: str
    ):
        """Read the kernel of these axes and recipe from its codes."""
        self.axes = axes
        self.recipe = recipe
        super().__init__(codes, dtype)

    @property
    def codes(self) -> StoredCodes:
        """The variable that holds the kernel's codes."""
        return self.held

    @property
    def value(self) -> Any:
        """The kernel's dequantized values, in the autocast dtype."""
        codes, scale, *_ = self._numbers_and_scales
        return contractions.dequantized(
            self.recipe, self.axes, codes, scale, self.dtype
        )

    def __getitem__(self, index: Any) -> Any:
        """Return a part of the dequantized kernel, such as an expert's matrix.

        With an index along the first axis, only the part is decoded.
        """
        is_first = type(index) is int or (
            ops.is_tensor(index) and _name_of(index.dtype) in ("int32", "int64")
        )
        if not is_first or tile_of(self.granularity) is not None:
            return self.value[index]
        codes, scale, *_ = self._numbers_and_scales
        scale = scale[0] if scale.shape[0] == 1 else scale[index]
        return contractions.dequantized(
            self.recipe, self.axes, codes[index], scale, self.dtype
        )

    def assign(self, value: Tensor) -> Any:
        """Assign codes, uint8; do nothing for the kernel's current values.

        Raises:
            ValueError: If it is any other value.
        """
        dtype = getattr(value, "dtype", None)
        if dtype is not None and _name_of(dtype) == "uint8":
            self.check(value)
            assigned = self.codes.assign(value)
            if self.widened is not None:
                self.widened.assign(self.stored.values.astype("float16"))
            return assigned
        if not self._has_numbers(value):
            self.check(value)  # It raises: these are no codes.
        return value

    def _has_numbers(self, value: Tensor) -> bool:
        """Return True if `value` equals the kernel's dequantized values."""
        try:
            numbers = np.asarray(ops.convert_to_numpy(value))
        # Each framework raises another error for a tensor of a compiled
        # function, which has no numbers yet.
        except Exception:
            return False
        return np.array_equal(numbers, ops.convert_to_numpy(self.value))

    @property
    def weights(self) -> str:
        """The name of the format of the kernel's codes."""
        return self.recipe.weights

    @property
    def granularity(self) -> str:
        """Return the granularity of the scales of this kernel."""
        return self.recipe.per

    @property
    def stored(self) -> StoredKernel:
        """A copy of the codes and scales on the host, a `StoredKernel`."""
        return StoredKernel(
            codes=np.array(ops.convert_to_numpy(self.codes.value)),
            scale=np.array(ops.convert_to_numpy(self.scale.as_stored)),
            weights=self.weights,
            granularity=self.granularity,
            axes=self.axes,
            scale_format=self.recipe.scale_format,
        )

    @property
    def constants(self) -> tuple[Any, ...]:
        """The tensors of codes and scales, and a fixed scale of the inputs.

        The latter only if the kernel has one.
        """
        codes = variable_values.value_without_autocast(self.codes)
        scales = (self.scale, self.inputs_scale)
        return codes, *(each.as_stored for each in scales if each is not None)

    @property
    def _numbers_and_scales(self) -> tuple[Any, ...]:
        """The constants, with floats in place of codes where these are kept."""
        codes, *scales = self.constants
        if self.decoded is not None:
            codes = self.decoded
        elif self.widened is not None:
            codes = self.widened.as_stored
        return codes, *scales

    @property
    def multiplied(self) -> tuple[Any, ...]:
        """The tensors for a matmul: codes gathered on all devices, scales."""
        # The codes are gathered, since XLA would gather the larger dequantized
        # kernel.
        codes, *scales = self._numbers_and_scales
        framework = backends.current
        gathering = framework.gathering_of(self.codes)
        if gathering is not None:
            codes = framework.gathered(codes, gathering, gathering.axes)
        return codes, *scales

    def check(self, value: Tensor) -> None:
        """Raise ValueError if a value is not uint8 codes of finite values."""
        name = _name_of(getattr(value, "dtype", "float32"))
        if name == "uint8":
            codes = np.asarray(ops.convert_to_numpy(value))
            if are_codes(codes, self.weights):
                return
        kind = f"other numbers ({name})"
        if name == "uint8":
            has_nan = formats.get(self.weights).nan_codes
            kind = "codes of NaN" if has_nan else "codes out of range"
        layer = self.path.rpartition("/")[0]
        raise ValueError(
            f"The kernel {self.path!r} is frozen; nothing was set. Received: "
            f"{kind}. Allowed: the values that the kernel has, or codes "
            f"(uint8) of finite values in {self.weights}. To set other "
            "values, call `keras_policy_ext.thaw(model)` first. If a method "
            "of your model assigns this kernel in each step, leave its layer "
            f"out: `keras_policy_ext.freeze(model, exclude={layer!r})`."
        )

    def take(self, stored: StoredKernel, inputs_scale: Any = None) -> None:
        """Assign the codes and scales of another kernel of the same shape.

        `inputs_scale` is the fixed scale of the inputs; for None it is
        unchanged.
        """
        self.codes.assign(stored.codes)
        self.scale.assign(stored.scale)
        if inputs_scale is not None and self.inputs_scale is not None:
            self.inputs_scale.assign(inputs_scale)
        if self.widened is not None:
            self.widened.assign(stored.values.astype("float16"))


def add_stored(
    layer: keras.Layer,  # Unlocked, with a `float8_state`.
    name: str | None,  # None for one that Keras chooses.
    shape: tuple[int, ...],
    recipe: FrozenKernels,
    axes: Axes,
    stored: StoredKernel | None = None,  # None for zeros.
    inputs_scale: float | None = None,  # The static one; None for 1.
) -> StoredVariable:
    """Create the variables of a stored kernel; return the `StoredVariable`.

    That reads as dequantized values. The caller puts its codes into an
    attribute of the layer; `read_as_numbers` later replaces them by the kernel.
    """
    # Imported here, and not in the first call, which a compiler may trace.
    _ = backends.engine
    codes = None if stored is None else stored.codes
    path = layer.path or layer.name
    with scope_of_path(path):
        held_codes = StoredCodes(shape, name, codes)
    variable = StoredVariable(held_codes, axes, recipe, layer.variable_dtype)
    state, name = layer.float8_state, variable.name
    with scope_of_path(path), keras.name_scope(state.name):
        variable.scale = _constant(
            scale_shape(shape, axes, recipe.per),
            name + SCALE,
            None if stored is None else stored.scale,
        )
        variable.scale.scale_format = recipe.scale_format
        setattr(state, name + SCALE, variable.scale)
        if recipe.activations == "static":
            variable.inputs_scale = _constant(
                (), name + INPUTS_SCALE, inputs_scale
            )
            setattr(state, name + INPUTS_SCALE, variable.inputs_scale)
    built_layers.register_parameters(state)
    return variable


def decoded_once(kernel: keras.Variable) -> keras.Variable:
    """Return a kernel for the steps of a loop: it is dequantized now, once.

    A kernel that is not stored, or that float8 matmuls read as codes, is
    unchanged.
    """
    if not isinstance(kernel, StoredVariable):
        return kernel
    if contractions.multiplies_codes(kernel.recipe):
        return kernel
    codes, scale, *_ = kernel.multiplied
    decoded = copy.copy(kernel)
    decoded.decoded = contractions.dequantized(
        kernel.recipe, kernel.axes, codes, scale, "float32"
    )
    return decoded


_MULTIPLY_MATRICES = (
    keras.layers.Dense,
    keras.layers.EinsumDense,
    keras.layers.ReversibleEmbedding,
)


def keep_widened(layer: keras.Layer, variable: StoredVariable) -> None:
    """Keep the numbers of a stored kernel in float16 too, for its products.

    Where the framework can pack the codes in a faster form, it does that
    instead.
    """
    codes, *_ = variable.constants
    if isinstance(layer, _MULTIPLY_MATRICES) and backends.current.pack(codes):
        return
    state, name = layer.float8_state, variable.name + WIDENED
    value = variable.stored.values.astype("float16")
    path = layer.path or layer.name
    with scope_of_path(path), keras.name_scope(state.name):
        variable.widened = _constant(value.shape, name, value, "float16")
    with built_layers.unlocked(state):
        setattr(state, name, variable.widened)


def read_as_numbers(layer: keras.Layer) -> None:
    """Replace codes in a layer's attributes by the kernels they stand for.

    Such a kernel reads as dequantized values.
    """
    # The layer still tracks the codes, since they were assigned first: behind
    # all weights, where a layer that is frozen later has them.
    for name, value in list(vars(layer).items()):
        if isinstance(value, StoredCodes) and value.decoded_by is not None:
            vars(layer)[name], value.decoded_by = value.decoded_by, None
            with built_layers.unlocked(layer):  # LoRA may have locked it.
                built_layers.untrack(layer, value)
                built_layers.track(layer, value)


def in_place_of_codes(
    layer: keras.Layer, variables: list[keras.Variable]
) -> list[Any]:
    """Return variables with codes replaced by the kernels they stand for."""
    kernels = {
        id(each.codes): each
        for each in vars(layer).values()
        if isinstance(each, StoredVariable)
    }
    return [kernels.get(id(each), each) for each in variables]


def held(variable: keras.Variable) -> Any:
    """Return the variable that Keras tracks for a weight, maybe codes."""
    return variable.codes if isinstance(variable, StoredVariable) else variable


first_use.wait(lambda: saving_hooks.leave_out_of_totals(is_state))


def _name_of(dtype: Any) -> str:
    """Return the name that Keras has for a dtype."""
    return str(keras.backend.standardize_dtype(dtype))


def _constant(
    shape: tuple[int, ...], name: str, value: Tensor, dtype: str = "float32"
) -> StoredConstant:
    """Create a variable of a stored kernel; ones for None."""
    if value is not None:
        value = np.asarray(value, dtype)
    return StoredConstant(
        initializer="ones" if value is None else value,
        shape=shape,
        dtype=dtype,
        trainable=False,
        autocast=False,
        name=name,
        **on_every_device(len(shape)),
    )


Frozen = tuple[Any, StoredKernel | Axes, Any]
"""A kernel; its stored form, or its axes for zeros; the scale of its inputs."""


class Weight(NamedTuple):
    """The name, shape and dtype of a weight that is not created yet."""

    name: str | None
    shape: tuple[int, ...]
    dtype: str


def codes_of_new_weight(
    layer: keras.Layer, stored: bool | None, *args: Any, **kwargs: Any
) -> StoredCodes | None:
    """Create a stored kernel for `add_weight`; None if it is not stored.

    The codes stand for it until the layer is built. If `stored` is None, the
    class of the layer says whether it is stored. The rest are the arguments of
    `keras.layers.Layer.add_weight`.
    """
    signature = inspect.signature(keras.layers.Layer.add_weight)
    given = signature.bind(layer, *args, **kwargs).arguments
    shape, name = given.get("shape"), given.get("name")
    dtype = keras.backend.standardize_dtype(
        given.get("dtype") or layer.variable_dtype
    )
    if stored is False or not is_floating(dtype) or shape is None:
        return None
    weight: Any = Weight(name, tuple(shape), dtype)
    if not (stored or layer.is_stored_kernel(layer, weight)):
        return None
    axes = layer.float8_axes(layer, weight)
    recipe = layer.float8_policy.recipe
    variable = add_stored(layer, name, weight.shape, recipe, axes)
    layer.float8_controller.kernel_paths += (variable.path,)
    codes = variable.codes
    codes.decoded_by = variable
    built_layers.track(layer, codes)
    return codes


def check_policy(layer: keras.Layer, policy: keras.DTypePolicy) -> None:
    """Raise ValueError if a policy needs kernels stored in another form.

    Kernels are floats, or codes in the format and with the scales of a recipe.
    """
    recipe = getattr(policy, "recipe", None)
    stores = recipe is not None and not recipe.trains
    # Any policy fits a layer without kernels, or float kernels that stay such.
    if not (
        layer.float8_controller.kernel_paths and (stores or layer.is_frozen)
    ):
        return
    if layer.is_frozen and recipe == layer.float8_policy.recipe:
        return
    raise ValueError(
        f"The policy of layer {layer.name!r} cannot be set: its kernels are "
        "stored in another form. Received: "
        f"{getattr(policy, 'full_name', policy.name)!r}; the layer has "
        f"{layer.dtype_policy!r}. Allowed: a policy that stores kernels in "
        "the form they have. `keras_policy_ext.freeze(model)` stores kernels "
        "in float8; `keras_policy_ext.thaw(model)` turns them back into "
        "floats."
    )


def kernels_to_store(layer: keras.Layer, form: Any) -> list[keras.Variable]:
    """Return the weights of a built layer that freezing it stores.

    `form` is the float8 class that the layer then has.
    """
    own = walking.own_weights(layer)
    # A class that does not name its kernels (`float8_kernels`) marks them by
    # `add_weight(..., float8=True)`.
    if layer.__class__ is form and form.float8_kernels is None:
        return list(layer.float8_contracted)
    return [
        each
        for each in own
        if is_floating(each.dtype) and form.is_stored_kernel(layer, each)
    ]


def stored_in(layer: keras.Layer) -> list[StoredVariable]:
    """Return the stored kernels of a layer."""
    own = walking.own_weights(layer)
    return [each for each in own if isinstance(each, StoredVariable)]


def store_all(layer: keras.Layer, kernels: Iterable[Frozen] | None) -> None:
    """Replace the float kernels of a frozen layer by stored ones.

    `kernels` has each kernel with its stored form; None stores zeros, to be
    loaded later.
    """
    if not layer.is_frozen:
        return
    if kernels is None:
        kernels = [
            (kernel, layer.float8_axes(layer, kernel), None)
            for kernel in kernels_to_store(layer, type(layer))
        ]
    kernels = list(kernels)
    if kernels:  # The order of the weights before, which files and `thaw` need.
        own = walking.own_weights(layer)
        layer.float8_controller.weight_names = tuple(each.name for each in own)
    for kernel, stored, scale in kernels:
        store(layer, kernel, stored, scale)
    paths = tuple(each.path for each in stored_in(layer))
    layer.float8_controller.kernel_paths = paths


def store(
    layer: keras.Layer,
    kernel: keras.Variable,
    stored: StoredKernel | Axes,
    scale: Any,
) -> StoredVariable:
    """Replace a layer's float kernel by a `StoredVariable`; return the latter.

    The layer is unlocked and follows `FrozenKernels`. `stored` is the stored
    kernel; or only its axes, for zeros. `scale` is that of its static inputs.
    """
    variable = add_stored(
        layer,
        kernel.name,
        tuple(kernel.shape),
        layer.float8_policy.recipe,
        axes=stored if isinstance(stored, Axes) else stored.axes,
        stored=None if isinstance(stored, Axes) else stored,
        inputs_scale=scale,
    )
    variable.codes.decoded_by = variable
    built_layers.replace_variable(layer, kernel, variable.codes)
    read_as_numbers(layer)
    return variable


def thaw_kernels(layer: keras.Layer) -> None:
    """Replace all stored kernels of a layer by dequantized float kernels."""
    for variable in stored_in(layer):
        _thaw(layer, variable)
    # Freezing appended codes; a stock layer has weights in order of creation.
    built_layers.order_variables(layer, layer.float8_controller.weight_names)


def _thaw(layer: keras.Layer, variable: StoredVariable) -> None:
    """Replace a stored kernel of an unlocked layer by a float kernel."""
    with scope_of_path(layer.path or layer.name):
        kernel = keras.Variable(
            variable.stored.dequantized(),
            dtype=layer.variable_dtype,
            name=variable.name,
            trainable=not getattr(layer, "lora_enabled", False),
        )
    codes = variable.codes
    built_layers.replace_variable(layer, variable, kernel, tracked=codes)
    # Tracked as trainable before, so that `layer.trainable = True` reaches it.
    kernel.trainable = kernel.trainable and layer.trainable


def float_value(kernel: keras.Variable) -> np.ndarray:
    """Return the value of a float kernel as a float32 NumPy array."""
    value = variable_values.value_without_autocast(kernel)
    return np.asarray(ops.convert_to_numpy(ops.cast(value, "float32")))
