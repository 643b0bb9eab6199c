"""The protocol of a float8 layer: policy, state, contraction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras import ops

from keras_policy_ext import _bases, backends, contractions, policies
from keras_policy_ext._keras import (
    built_layers,
    calls,
    global_policy,
    stock_float8,
    variable_values,
)
from keras_policy_ext._types import Tensor
from keras_policy_ext.layers import (
    contracted_weights,
    saved_weights,
    stored_weights,
)
from keras_policy_ext.layers.contracted_weights import ContractedWeights
from keras_policy_ext.layers.operands import (
    call_hooks,
    contraction_of,
    has_contraction_hooks,
    is_floating,
    known_contraction_of,
    no_operands,
    static_flag,
)
from keras_policy_ext.layers.paths import BuiltUnderSavedPath
from keras_policy_ext.layers.saved_weights import SavedWeights
from keras_policy_ext.layers.state import Float8State, has_state
from keras_policy_ext.layers.stock_calls import StockCalls
from keras_policy_ext.layers.stored_weights import StoredVariable
from keras_policy_ext.policies import Float8DTypePolicy
from keras_policy_ext.policies.of_layers import (
    of_path,
    policy_of,
    source_policy_of,
)


class Float8Mixin(
    built_layers.QuantizedAsLeaf,
    stock_float8.TakesAdapters,
    BuiltUnderSavedPath,
    ContractedWeights,
    SavedWeights,
    StockCalls,
    _bases.MixedInto,
):
    """Makes a layer's contractions follow a float8 policy.

    ```python
    class MyDense(kpe.layers.Float8Mixin, keras.layers.Layer):
        def build(self, input_shape):
            shape = (input_shape[-1], 8)
            self.kernel = self.add_weight(name="kernel", shape=shape)

        def call(self, inputs):
            return self.float8_matmul(inputs, self.kernel)
    ```

    Put it before the Keras class. Under any other policy `float8_matmul` and
    `float8_einsum` compute like `keras.ops`; under a float8 policy a rule may
    take a layer out by its path. A layer that follows float8 reports
    `quantization_mode == "float8"`.

    Attributes:
        float8_kernels: Names of the weights that are contracted in float8;
            None for every floating weight of two axes or more.

    Raises:
        TypeError: By the `class` statement, if the Keras class comes first.

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
    """Attributes of the Keras class that a float8 call does without: a
    subclass that changes one of them computes something else."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _bases.check_before(cls, Float8Mixin, keras.Layer, "keras.Layer")

    # No path: TensorFlow does not call the setter below for an equal value.
    _float8_policy_path: str | None = ""

    # Type checkers see the constructor of the stock layer.
    if not TYPE_CHECKING:

        def __init__(self, *args, **kwargs):
            kwargs["dtype"] = policies.get(kwargs.get("dtype"))
            super().__init__(*args, **kwargs)
            self.float8_state = _new_state(self)
            self.dtype_policy = policies.as_float8(self.dtype_policy)

    # The getter is Keras's: torch.compile does not follow `super` into one.
    @keras.layers.Layer.dtype_policy.setter
    def dtype_policy(self, value: Tensor) -> None:
        """The dtype policy of this layer.

        Raises:
            ValueError: When it is set, once the layer has kernels, to a
                policy that needs another state than they have.
        """
        policy = policies.get(value)
        self._follow(policy)
        if isinstance(self.dtype_policy, keras.dtype_policies.DTypePolicyMap):
            # Keras would write into it, and many layers share it.
            global_policy.replace_layer_policy(self, source_policy_of(self))
        keras.layers.Layer.dtype_policy.fset(self, policy)
        self._resolve_float8_policy()

    @property
    def float8_policy(self) -> Float8DTypePolicy | None:
        """The float8 policy that this layer follows, None if it does not."""
        if self._float8_policy_path != self.path:
            self._resolve_float8_policy()
        return self._float8_policy

    @property
    def quantization_mode(self) -> str | None:
        """`"float8"` for a layer that follows it."""
        if self.float8_policy is not None:
            return "float8"
        return stock_float8.other_mode(self)

    def follow_policy(self, policy: keras.DTypePolicy) -> None:
        """Follow a policy with the kernels that are made, and unlocked.

        The states are made anew for it, and keep the amaxes that they had.
        See `layers.class_swap`; `dtype_policy` is what users set.
        """
        contracted = self._kernels_to_contract()
        entries: dict[str, np.ndarray] = {}
        if hasattr(self, "float8_state"):
            self.float8_state.save_own_variables(entries)
            built_layers.detach(self, "float8_state")
        self.float8_state = _new_state(self)
        self._float8_kernel_paths = tuple(kernel.path for kernel in contracted)
        global_policy.replace_layer_policy(self, policy)
        self._resolve_float8_policy()
        if self._float8_policy is None:
            return
        for kernel in contracted:
            self.float8_state.add(kernel, self._float8_policy.recipe)
        if entries:
            self.float8_state.load_own_variables(entries)

    def convert_input(self, x: Tensor) -> Tensor:
        """Cast a floating tensor to the compute dtype; leave any other.

        Args:
            x: Tensor of any shape and dtype.

        Returns:
            `x`, in the compute dtype if it is floating.
        """
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
        """`inputs @ kernel` in float8.

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
        """`einsum(equation, inputs, kernel)` in float8.

        Args:
            equation: Of two operands with an explicit output; `...` is
                allowed; no axis twice in one term.
            inputs: The first operand, floating; one that is sparse is made
                dense.
            kernel: The second one, a weight of this layer.
            training: True observes amaxes, False does not; None: what the
                call of the layer says, and if that says nothing, amaxes are
                observed where a gradient is taken.
            dtype: Of the result; inputs are cast to it before they are
                quantized. None: the compute dtype.
            bias: To be added to the result, in its dtype; None for none. A
                kernel of a GPU may add it before it rounds.

        Returns:
            Tensor in `dtype`.

        Raises:
            ValueError: If the equation is malformed, does not fit the
                operands, the kernel is no weight of this layer, or `dtype`
                is not floating.
        """
        if inputs is None or getattr(kernel, "shape", None) is None:
            raise ValueError(no_operands(inputs, kernel))
        dtype = None if dtype is None else contractions.compute_dtype(dtype)
        inputs = ops.convert_to_tensor(inputs, sparse=False)
        contraction = _contraction_of(equation, inputs, kernel)
        if self.float8_policy is None:
            explicit = contraction.equation
            return _sum(
                self._plain_einsum(explicit, inputs, kernel, dtype), bias
            )
        operands = contraction, inputs, kernel
        return self._contract(*operands, training, dtype, bias)

    def float8_activations_einsum(
        self,
        equation: str,
        first: Tensor,
        second: Tensor,
        dtype: str | None = None,
    ) -> Tensor:
        """`einsum(equation, first, second)` of two activations in float8.

        Forward and both gradients, in the formats of the policy's recipe.
        What is no weight has no state: each operand is scaled by its own
        amax, as in `recipes.CurrentScaling`, under any recipe.

        Args:
            equation: As for `float8_einsum`.
            first: The first operand, floating.
            second: The second operand, floating.
            dtype: Of the outputs; None: the compute dtype. In float16 what is
                beyond 65504 is infinite: `"float32"` keeps it.

        Returns:
            Tensor of dtype `dtype`.

        Raises:
            ValueError: If the equation is malformed or does not fit the
                operands.
        """
        first, second = (ops.convert_to_tensor(x) for x in (first, second))
        contraction = _contraction_of(equation, first, second)
        if self.float8_policy is None:
            explicit = contraction.equation
            return self._plain_einsum(explicit, first, second, dtype)
        dtype = dtype or self.compute_dtype
        plan = contractions.make_plan(
            contraction,
            self._recipe_of_activations,
            dtype,
            dtype,
            training=False,
        )
        self.float8_state.last_call.plan = plan
        operands = ops.cast(first, dtype), ops.cast(second, dtype)
        return contractions.run(plan, *operands)

    @property
    def kernel_choice(self) -> contractions.Choice | None:
        """Whether the last forward matmul was native, and why."""
        plan = self.float8_state.last_call.plan
        return None if plan is None else plan.choice

    def _follow(self, policy: keras.DTypePolicy) -> None:
        """Let the state follow another policy, or raise if it cannot."""
        policy = policies.as_float8(of_path(policy, self.path))
        if isinstance(policy, Float8DTypePolicy):
            policy = policy.for_path(self.path)
        stored_weights.check_policy(self, policy)
        if not isinstance(policy, Float8DTypePolicy):
            return
        if stock_float8.is_quantized(self):
            raise ValueError(
                f"Layer {self.name!r} is quantized by Keras, and its kernel "
                "has no floating-point values to be scaled. Received: "
                f"{policy.full_name!r}. Allowed: the policy of the layer, "
                f"{self.dtype_policy.name!r}. Make a new layer with the float8 "
                "policy, and load the weights from before `quantize`."
            )
        state, recipe = self.float8_state, policy.recipe
        lacks = len(self._float8_kernel_paths) > len(state.matrices)
        if (lacks and has_state(recipe)) or not state.fits(recipe):
            raise ValueError(
                f"The policy of layer {self.name!r} cannot be set: its float8 "
                "state does not fit the new policy. Received: "
                f"{policy.full_name!r}; the layer has {self.dtype_policy!r}. "
                "Allowed: a plain policy, a recipe without state, or a recipe "
                "with the same state: amax histories of the same length, or a "
                "counter. Call `keras_policy_ext.convert` with the policy, "
                "which makes a new, empty state. To keep a history, save the "
                "weights, make a new model with the policy, and load them "
                "there; a history of another length is shortened or padded."
            )
        state.follow(recipe)

    def _resolve_float8_policy(self) -> None:
        # Kept, and not asked for in each call: torch.compile takes the class
        # of a mapping for another one and would leave float8 out (torch 2.13).
        policy = policy_of(self)
        follows = isinstance(policy, Float8DTypePolicy) and (
            self.float8_trains or not policy.recipe.trains
        )
        self._float8_policy = policy if follows else None
        self._recipe_of_activations: Any = (
            policy.recipe.for_activations if follows else None
        )
        self._has_state = follows and has_state(policy.recipe)
        self._float8_policy_path = self.path

    def _plain_einsum(
        self,
        equation: str,
        inputs: Tensor,
        kernel: keras.Variable,
        dtype: Any = None,
    ) -> Tensor:
        dtype = dtype or self.compute_dtype
        kernel = ops.convert_to_tensor(kernel)
        return ops.einsum(
            equation, ops.cast(inputs, dtype), ops.cast(kernel, dtype)
        )

    def _contract(
        self,
        contraction: contractions.Contraction,
        inputs: Tensor,
        kernel: keras.Variable,
        training: bool | None,
        dtype: Any = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        policy: Any = self._float8_policy
        dtype = keras.backend.standardize_dtype(dtype or self.compute_dtype)
        if keras.backend.standardize_dtype(inputs.dtype) != dtype:
            inputs = ops.cast(inputs, dtype)
        if isinstance(kernel, StoredVariable):
            return _sum(
                self._contract_stored(contraction, inputs, kernel, dtype), bias
            )
        if training is None:
            training = calls.training_of_call()
        training = static_flag(training)
        framework = backends.current()
        compiling = framework.is_compiling()
        value = variable_values.value_without_autocast(kernel)
        state, slot = self._state_of(kernel, value, training, compiling)
        plan = contractions.make_plan(
            contraction,
            policy.recipe,
            dtype,
            keras.backend.standardize_dtype(value.dtype),
            training,
            slot,
            framework.gathering_of(kernel),
            self._has_stored_gradient,
        )
        self.float8_state.last_call.plan = plan
        if not compiling and has_contraction_hooks():
            call_hooks(self.float8_state.of(kernel), inputs)
        return contractions.run(plan, inputs, value, *state, bias=bias)

    def _contract_stored(
        self,
        contraction: contractions.Contraction,
        inputs: Tensor,
        kernel: StoredVariable,
        dtype: str,
    ) -> Tensor:
        plan = contractions.frozen_plan(
            contraction, kernel.recipe, kernel.axes, dtype
        )
        self.float8_state.last_call.plan = plan
        return contractions.run_frozen(plan, inputs, *kernel.multiplied)

    @property
    def _has_stored_gradient(self) -> bool:
        """Return True if XLA stores the gradient of what is contracted.

        Or has reason to, as several kernels read it: see
        `Plan.cast_before_amax`.
        """
        return False

    def _state_of(
        self,
        kernel: keras.Variable,
        value: Tensor,
        training: bool | None,
        compiling: bool,
    ) -> tuple[tuple[Tensor, ...], int]:
        if not self._has_state:
            return (), 0
        variable = self.float8_state.of(kernel)
        if variable is None:
            raise ValueError(self._unknown_kernel(kernel))
        framework = backends.current()
        if not compiling:
            variable.look_at(value)
        matrix = variable.matrix()
        variable.warn_if_moved()
        if variable.left_out and framework.keeps_values_apart:
            matrix = variable.kept_up(value, matrix)
        observes = framework.may_take_gradients()
        observes = observes and training is not False
        if not observes:
            return (matrix,), 0
        if variable.counts_steps:
            matrix = contracted_weights.numbered(variable, matrix)
        return (matrix,), variable.next_slot()

    def _unknown_kernel(self, kernel: keras.Variable) -> str:
        known = ", ".join(self.float8_state.owners) or "none"
        got = getattr(
            kernel, "path", f"a tensor of shape {tuple(kernel.shape)}"
        )
        return (
            f"Layer {self.name!r} has no float8 state for this kernel, which "
            f"the policy {self.dtype_policy!r} needs. Received: "
            f"{got}. Weights with state: {known}. Pass a weight which this "
            "layer made with `add_weight(..., float8=True)`, not a tensor "
            "computed from it; for a transposed kernel change the equation."
        )


def _contraction_of(
    equation: str, first: Tensor, second: Tensor
) -> contractions.Einsum:
    """The contraction of an equation for two operands."""
    # torch.compile leaves caches out, and sizes that it traces have no hash.
    compiling = backends.current().is_compiling()
    is_plain = compiling or not isinstance(equation, str)
    found = contraction_of if is_plain else known_contraction_of
    return found(equation, tuple(first.shape), tuple(second.shape))


def _sum(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else ops.add(x, bias)


def _new_state(layer: keras.Layer) -> Float8State:
    saved_weights.watch()
    state = Float8State(layer.trainable)
    state.belong_to(layer)
    built_layers.skip_in_quantize(state)
    return state
