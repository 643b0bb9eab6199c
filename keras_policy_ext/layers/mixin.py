"""The base class of float8 layers: the methods that Keras and users call."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras import ops

from keras_policy_ext import (
    backends,
    bases,
    contractions,
    policies,
    policy_names,
)
from keras_policy_ext._keras import built_layers, global_policy, quantization
from keras_policy_ext._keras.built_layers import BuiltUnderSavedPath
from keras_policy_ext._types import Tensor
from keras_policy_ext.files import own_weights
from keras_policy_ext.layers import (
    stock_calls,
    stored_weights,
    weight_lists,
)
from keras_policy_ext.layers.controller import (
    Float8Controller,
    new_state,
    with_bias,
)
from keras_policy_ext.layers.drop_in import drop_ins
from keras_policy_ext.layers.operands import (
    contraction_of_tensors,
    is_floating,
    no_operands,
)
from keras_policy_ext.layers.state_of import is_state
from keras_policy_ext.layers.stored_weights import (
    in_place_of_codes,
    read_as_numbers,
)
from keras_policy_ext.policies import Float8DTypePolicy
from keras_policy_ext.policies.of_layers import source_policy_of
from keras_policy_ext.stored_kernels import Axes

_STOCK_WEIGHTS: Any = keras.layers.Layer.weights.fget
"""Keras's own: torch.compile does not follow `super` into a property."""


class Float8Mixin(
    built_layers.QuantizedAsLeaf,
    quantization.TakesAdapters,
    built_layers.ToldWhenBuilt,
    BuiltUnderSavedPath,
    bases.MixedInto,
):
    """A mixin for layers whose contractions follow a float8 policy.

    Put it before the Keras class. Under any other policy `float8_matmul` and
    `float8_einsum` compute like `keras.ops`. A rule of a float8 policy can
    exclude a layer by its path. A layer in float8 has `quantization_mode ==
    "float8"`.

    Attributes:
        float8_kernels: Names of the weights that are contracted in float8;
            None for every floating weight of two axes or more.

    Raises:
        TypeError: Raised by the `class` statement if the Keras class comes
            first.

    Examples:
        >>> class Square(kpe.layers.Float8Mixin, keras.layers.Layer):
        ...     def build(self, input_shape):
        ...         size = input_shape[-1]
        ...         self.kernel = self.add_weight(shape=(size, size))
        ...
        ...     def call(self, inputs):
        ...         return self.float8_matmul(inputs, self.kernel)
        >>> layer = Square(dtype="mixed_float8")
        >>> tuple(layer(np.ones((2, 16))).shape), layer.quantization_mode
        ((2, 16), 'float8')
    """

    float8_replaces: tuple[str, ...] = ("call", "kernel", "convolution_op")
    """Attributes of the Keras class that a float8 call does not use.

    A subclass that overrides one of them may compute something else.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raise if a subclass lists the mixin after a Keras class."""
        super().__init_subclass__(**kwargs)
        bases.check_before(cls, Float8Mixin, keras.Layer, "keras.Layer")

    float8_controller: Float8Controller
    float8_state: Any

    float8_kernels: tuple[str, ...] | None = None

    float8_trains: bool = True
    """Whether the layer can train in float8. If not, it can only be frozen."""

    # Type checkers see the constructor of the stock layer.
    if not TYPE_CHECKING:

        def __init__(self, *args, **kwargs):
            """Make the stock layer under its policy, with a controller.

            The controller comes first, since Keras's constructor sets
            `dtype_policy`, whose setter asks it.
            """
            Float8Controller.join(self)
            kwargs["dtype"] = policies.get(kwargs.get("dtype"))
            super().__init__(*args, **kwargs)
            self.float8_state = new_state(self)
            # A subclass may have set Keras's own float8 policy meanwhile.
            self.dtype_policy = policies.as_float8(self.dtype_policy)

    # The getter is Keras's: torch.compile does not follow `super` into one.
    @keras.layers.Layer.dtype_policy.setter
    def dtype_policy(self, value: Any) -> None:
        """Set the dtype policy, and with it the float8 policy, of this layer.

        Raises:
            ValueError: If it is set after the layer has kernels, to a policy
                that needs another state.
        """
        policy = policies.get(value)
        self.float8_controller.adapt_state(policy)
        if isinstance(self.dtype_policy, keras.dtype_policies.DTypePolicyMap):
            # Keras would write into it, and many layers share it.
            global_policy.replace_layer_policy(self, source_policy_of(self))
        keras.layers.Layer.dtype_policy.fset(self, policy)
        self._resolve_float8_policy()

    @property
    def float8_policy(self) -> Float8DTypePolicy | None:
        """The float8 policy of this layer; None if it is not in float8."""
        return self.float8_controller.current_policy

    @property
    def quantization_mode(self) -> str | None:
        """The mode of the policy that this layer follows, or Keras's mode.

        It is `"float8"`; or `"qat"` for a layer that is trained for integers,
        and `"integers"` for one whose kernels are stored so.
        """
        policy = self.float8_policy
        return quantization.other_mode(self) if policy is None else policy.mode

    def convert_input(self, x: Tensor) -> Tensor:
        """Cast a floating tensor to the compute dtype; leave others unchanged.

        Args:
            x: Tensor of any shape and dtype.

        Returns:
            `x`, in the compute dtype if it is floating.
        """
        # A variable may tell another dtype than its tensor has (autocasting).
        x = ops.convert_to_tensor(x)
        dtype = keras.backend.standardize_dtype(x.dtype)
        if dtype == self.compute_dtype or not is_floating(dtype):
            return x
        return ops.cast(x, self.compute_dtype)

    def float8_matmul(
        self,
        inputs: Tensor,
        kernel: keras.Variable,
        training: bool | None = None,
    ) -> Tensor:
        """Compute `inputs @ kernel` in float8.

        Args:
            inputs: (..., in), floating.
            kernel: (in, out), a weight of this layer.
            training: As for `float8_einsum`.

        Returns:
            (..., out), in the compute dtype.

        Raises:
            ValueError: As for `float8_einsum`.
        """
        return self.float8_einsum("...x,xy->...y", inputs, kernel, training)

    def float8_einsum(
        self,
        equation: str,
        inputs: Tensor,
        kernel: keras.Variable,
        training: bool | None = None,
        dtype: Any = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Compute `einsum(equation, inputs, kernel)` in float8.

        Args:
            equation: An equation of two operands with an explicit output.
                `...` is allowed; no axis may occur twice in one term.
            inputs: The first operand, floating. A sparse one is converted to
                dense.
            kernel: The second operand, a weight of this layer.
            training: True observes amaxes, False does not. None uses the
                `training` argument of the layer's call; without one, amaxes
                are observed if a gradient is taken.
            dtype: The dtype of the result. Inputs are cast to it before they
                are quantized. None for the compute dtype.
            bias: A weight, tensor or array, added to the result in its dtype;
                None for no bias. A GPU kernel may add it before rounding.

        Returns:
            A tensor of dtype `dtype`.

        Raises:
            ValueError: If the equation is malformed, does not fit the
                operands, the kernel is not a weight of this layer, or `dtype`
                is not floating.
        """
        if inputs is None or getattr(kernel, "shape", None) is None:
            raise ValueError(no_operands(inputs, kernel))
        dtype = None if dtype is None else contractions.compute_dtype(dtype)
        inputs = ops.convert_to_tensor(inputs, sparse=False)
        contraction = contraction_of_tensors(equation, inputs, kernel)
        if self.float8_policy is None:
            outputs = self._plain_einsum(contraction, inputs, kernel, dtype)
            return with_bias(outputs, bias)
        return self.float8_controller.contract(
            contraction, inputs, kernel, training, dtype, bias
        )

    def float8_activations_einsum(
        self,
        equation: str,
        first: Tensor,
        second: Tensor,
        dtype: str | None = None,
    ) -> Tensor:
        """Compute `einsum(equation, first, second)` of activations in float8.

        Forward and both gradients use the formats of the policy's recipe.
        Activations have no state, so their scales are from their own amaxes.
        Under `rowwise`, `block` and `mxfp8` both operands have a scale per row
        or block of the contracted axis: in attention scores of each query and
        each key. Otherwise each operand has one scale, as in
        `recipes.CurrentScaling`. For a sum over keys use
        `float8_weighted_sum`.

        Args:
            equation: As for `float8_einsum`.
            first: The first operand, floating.
            second: The second operand, floating.
            dtype: The dtype of the outputs; None for the compute dtype. In
                float16 values beyond 65504 become infinite; `"float32"` keeps
                them.

        Returns:
            A tensor of dtype `dtype`.

        Raises:
            ValueError: If the equation is malformed or does not fit the
                operands.
        """
        first, second = (ops.convert_to_tensor(x) for x in (first, second))
        contraction = contraction_of_tensors(equation, first, second)
        if self.float8_policy is None:
            return self._plain_einsum(contraction, first, second, dtype)
        return self.float8_controller.contract_activations(
            contraction, first, second, dtype or self.compute_dtype
        )

    def float8_weighted_sum(
        self,
        equation: str,
        weights: Tensor,
        values: Tensor,
        dtype: str | None = None,
    ) -> Tensor:
        """Compute `einsum(equation, weights, values)`, a sum over keys.

        Under `rowwise`, `block` and `mxfp8` each row of weights has its own
        scales, and so have the values of each key. A power of two per key
        divides the values and multiplies the weights before both are
        quantized. A key whose weight is 0, such as a masked one, is in no
        scale. Under other recipes it is `float8_activations_einsum`.

        ```python
        scores = self.float8_activations_einsum("bqd,bkd->bqk", query, key)
        weights = keras.ops.softmax(scores + mask)
        return self.float8_weighted_sum("bqk,bkv->bqv", weights, value)
        ```

        Args:
            equation: As for `float8_einsum`.
            weights: The first operand, floating, such as probabilities.
            values: The second operand, floating. Its axes are those of keys,
                which the weights have too, and those that only the outputs
                have.
            dtype: As for `float8_activations_einsum`.

        Returns:
            A tensor of dtype `dtype`; NaN if any value is not finite.

        Raises:
            ValueError: As for `float8_activations_einsum`; or if an axis of
                the values is in no other term.
        """
        weights, values = (ops.convert_to_tensor(x) for x in (weights, values))
        contraction = contraction_of_tensors(equation, weights, values)
        if self.float8_policy is None:
            return self._plain_einsum(contraction, weights, values, dtype)
        return self.float8_controller.contract_weighted_sum(
            contraction, weights, values, dtype or self.compute_dtype
        )

    @property
    def kernel_choice(self) -> contractions.Choice | None:
        """The kind of kernel of the last forward matmul, and the reason."""
        plan = self.float8_state.last_call.plan
        return None if plan is None else plan.choice

    def _resolve_float8_policy(self) -> None:
        """Look up the policy for the layer's path; subclasses add to it."""
        self.float8_controller.resolve_policy()

    def _plain_einsum(
        self,
        contraction: contractions.Einsum,
        inputs: Tensor,
        kernel: keras.Variable,
        dtype: Any = None,
    ) -> Tensor:
        """Compute an einsum as `keras.ops` does, in `dtype`; no float8."""
        dtype = dtype or self.compute_dtype
        kernel = ops.convert_to_tensor(kernel)
        operands = ops.cast(inputs, dtype), ops.cast(kernel, dtype)
        return ops.einsum(contraction.equation, *operands)

    # What a subclass says of its weights

    @classmethod
    def is_float8_kernel(
        cls, layer: keras.Layer, variable: keras.Variable
    ) -> bool:
        """Return True if this class contracts a weight of a layer in float8.

        Args:
            layer: A layer of this class, or of the stock class.
            variable: One of its own weights.

        Returns:
            Whether `float8_kernels` has its name. If that is None: whether it
            is floating with at least two axes.
        """
        names = getattr(layer, "float8_kernels", cls.float8_kernels)
        if names is not None:
            return variable.name in names
        return len(variable.shape) >= 2 and is_floating(variable.dtype)

    @classmethod
    def is_stored_kernel(
        cls, layer: keras.Layer, variable: keras.Variable
    ) -> bool:
        """Return True if freezing a layer stores a weight of it in float8.

        Args:
            layer: A layer of this class, or of the stock class.
            variable: One of its own weights, or a description of a future one.

        Returns:
            Whether it is contracted; subclasses may differ.
        """
        return cls.is_float8_kernel(layer, variable)

    @classmethod
    def float8_axes(cls, layer: keras.Layer, kernel: keras.Variable) -> Axes:
        """Return a kernel's axes: those that the matmul sums, and the others.

        Args:
            layer: A layer of this class, or of the stock class.
            kernel: One of its contracted weights.

        Returns:
            All axes but the last are summed over; subclasses may differ.
        """
        *summed, free = range(len(kernel.shape))
        return Axes(summed=tuple(summed), free=(free,))

    @classmethod
    def float8_bank_axis(
        cls, layer: keras.Layer, kernel: keras.Variable
    ) -> int | None:
        """Return the axis of a kernel that tells the matrices of a bank apart.

        Under delayed scaling each of these matrices, such as those of experts,
        has a history. All products with the kernel then have this axis in
        their inputs and outputs.

        Args:
            layer: A layer of this class, or of the stock class.
            kernel: One of its contracted weights.

        Returns:
            None, for one history; subclasses may differ.
        """
        return None

    # What Keras calls

    def add_weight(
        self, *args: Any, float8: bool | None = None, **kwargs: Any
    ) -> keras.Variable:
        """Add a weight; if it is a float8 kernel, create its state too.

        Args:
            *args: As for `keras.layers.Layer.add_weight`.
            float8: Whether this weight is contracted in float8; None to decide
                by `float8_kernels`.
            **kwargs: As for `keras.layers.Layer.add_weight`.

        Returns:
            The variable.
        """
        variable = None
        if self.is_frozen:
            variable = stored_weights.codes_of_new_weight(
                self, float8, *args, **kwargs
            )
        if variable is None:
            variable = super().add_weight(*args, **kwargs)
        if self.is_frozen:
            self.float8_controller.weight_names += (variable.name,)
            return variable
        if float8 is None:
            float8 = self.is_float8_kernel(self, variable)
        if float8:
            self.float8_controller.add_kernel(variable)
        return variable

    @property
    def is_frozen(self) -> bool:
        """True if this layer's kernels are stored in float8 and not trained."""
        policy = self.float8_policy
        return policy is not None and not policy.recipe.trains

    @property
    def float8_contracted(self) -> list[keras.Variable]:
        """The weights of this layer that are contracted in float8."""
        return self.float8_controller.contracted

    @property
    def weights(self) -> list[Any]:
        """The layer's weights; stored kernels read as dequantized values."""
        weights: list[Any] = _STOCK_WEIGHTS(self)
        return in_place_of_codes(self, weights) if self.is_frozen else weights

    def when_built(self) -> None:
        """Replace stored codes in attributes by kernels that decode them."""
        if self.is_frozen:
            read_as_numbers(self)

    def count_params(self) -> int:
        """Return the number of parameters, without float8 state."""
        # Keras's method counts state too, except while it prints a summary.
        return sum(math.prod(v.shape) for v in self.weights if not is_state(v))

    def set_weights(self, weights: list[np.ndarray]) -> None:
        """Set all weights of this layer or, on an error, none.

        Raises:
            ValueError: If the arrays do not fit, one is no float8 state, or
                one has other values than a frozen kernel can have.
        """
        weight_lists.set_all(self, weights)

    def save_own_variables(
        self, store: MutableMapping[str, np.ndarray]
    ) -> None:
        """Write this layer's weights to a file; codes, if it is frozen.

        As in Keras, LoRA adapters are merged into a float kernel.
        """
        if self.is_frozen:
            own_weights.save_frozen(self, store)
        else:
            super().save_own_variables(store)

    def load_own_variables(self, store: Mapping[str, np.ndarray]) -> None:
        """Load this layer's weights, also from a file of Keras's own float8.

        `float8_state` notes whether that worked: it loads its entries later.

        Raises:
            ValueError: If the weights do not fit, or the state that Keras
                wrote is damaged; then nothing was changed.
        """
        self.float8_state.note_layer_loading(store)
        stock = super().load_own_variables
        keras_state = own_weights.load(self, store, stock)
        self.float8_state.note_layer_loaded()
        if keras_state is not None:
            self.float8_state.load_with_layer(keras_state)

    @property
    def merges_adapters(self) -> bool:
        """True if files get the kernel with the LoRA adapters added to it."""
        return bool(getattr(self, "lora_enabled", False)) and not self.is_frozen

    def texts_for_file(self) -> dict[str, str]:
        """Return the strings to save with this layer, such as a policy."""
        return own_weights.texts_for_file(self)

    @property
    def variable_serialization_spec(self) -> dict[str | None, list[str]] | None:
        """The names of the weights that files get, by quantization mode.

        None for a layer that Keras cannot quantize.
        """
        spec = self.stock_serialization_spec()
        if not spec:
            return None
        return {**spec, **dict.fromkeys(policy_names.MODES, spec[None])}

    def stock_serialization_spec(self) -> dict[str | None, list[str]]:
        """Return which weights the stock layer saves in each mode, or {}."""
        # Keras's base class has None from 3.16 on, and had nothing before.
        parent: Any = super()
        return getattr(parent, "variable_serialization_spec", None) or {}

    def quantize(
        self,
        mode: str | None = None,
        type_check: bool = True,
        config: Any = None,
    ) -> None:
        """Quantize this layer by Keras; raise if it follows a float8 policy.

        `Model.quantize` warns with the text of the error, and goes on.

        Args:
            mode: As for the stock layer, but not `"float8"`.
            type_check: As for the stock layer: whether to refuse subclasses.
            config: As for the stock layer.

        Raises:
            NotImplementedError: If the layer follows float8 or is to, or the
                stock layer has no quantization.
        """
        layer: Any = self
        # Keras 3.12 has no `config`.
        kwargs = {} if config is None else {"config": config}
        if not isinstance(layer, Float8Mixin):
            # `revert` has changed the class of the layer, while Keras went on
            # with the method that it had bound before.
            type(layer).quantize(layer, mode, type_check=type_check, **kwargs)
            return
        self.quantize_after(super().quantize, mode, type_check, **kwargs)

    def quantize_after(
        self,
        stock: Callable[..., None],
        mode: str | None = None,
        type_check: bool = True,
        **kwargs: Any,
    ) -> None:
        """Call `stock` to quantize this layer; raise if it is in float8."""
        stock_calls.refuse_quantize(self, mode)
        # The check refuses subclasses of the stock layer, which a drop-in is.
        type_check = type_check and type(self) not in drop_ins().values()
        stock(mode, type_check=type_check, **kwargs)

    def quantized_call(self, *args: Any, **kwargs: Any) -> Tensor:
        """Call the layer for Keras, which calls this in a quantization mode."""
        policy = self.float8_controller.policy
        if policy is None and quantization.is_quantized(self):
            return super().quantized_call(*args, **kwargs)
        return self.call(*args, **kwargs)

    def rematerialized_call(
        self, layer_call: Callable[..., Tensor], *args: Any, **kwargs: Any
    ) -> Callable[..., Tensor]:
        """Return a rematerialized call, as a function of floats only."""
        # Other arguments are bound: JAX would trace `training`, and TensorFlow
        # refuses keyword arguments in a graph. Tensors stay arguments, since
        # TensorFlow has no gradient for others.
        bound, tensors = stock_calls.of_floating_tensors(
            layer_call, args, kwargs
        )
        recomputed = super().rematerialized_call(bound, *args, **kwargs)
        return lambda *_args, **_kwargs: recomputed(*tensors)

    def quantized_build(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing in float8: `add_weight` has created the state."""
        if self.float8_policy is None:
            super().quantized_build(*args, **kwargs)


_RECOMPUTED = (
    keras.activations.gelu,
    keras.activations.silu,
    keras.activations.mish,
    keras.activations.hard_silu,
)
"""Activations whose own gradient saves more than their inputs."""


def activated(activation: Any, x: Tensor) -> Tensor:
    """Return `activation(x)`, or `x` for None; save little for the gradient."""
    if activation is None:
        return x
    if activation is keras.activations.relu:
        return backends.current.relu(x)
    if activation in _RECOMPUTED:
        return backends.current.recomputed(activation, x)
    return activation(x)
