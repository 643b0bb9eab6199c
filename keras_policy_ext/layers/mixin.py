"""The protocol of a float8 layer: policy, state, contraction, saving."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras import ops

from keras_policy_ext import _keras_compat, kernels, policies
from keras_policy_ext.kernels import einsum
from keras_policy_ext.layers.state import Float8State, StateVariable
from keras_policy_ext.policies import Float8DTypePolicy

Tensor = Any
Contraction = kernels.Einsum | kernels.Conv


# What the mixin is mixed into, to a type checker.
if TYPE_CHECKING:
    _Layer: Any
else:
    _Layer = object


class Float8Mixin(_Layer):
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
    """

    float8_kernels: tuple[str, ...] | None = None

    # No path: TensorFlow does not call the setter below for an equal value.
    _float8_policy_path: str | None = ""

    def __init__(self, *args: Any, **kwargs: Any):
        kwargs["dtype"] = policies.get(kwargs.get("dtype"))
        super().__init__(*args, **kwargs)
        self.float8_state = Float8State()
        self._float8_kernel_count = 0
        self.dtype_policy = policies.as_float8(self.dtype_policy)

    @property
    def dtype_policy(self) -> keras.DTypePolicy:
        """The dtype policy of this layer.

        Raises:
            ValueError: When it is set, once the layer has kernels, to a
                policy that needs another state than they have.
        """
        return super().dtype_policy

    @dtype_policy.setter
    def dtype_policy(self, value: Any) -> None:
        policy = policies.get(value)
        self._follow(policy)
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
        return super().quantization_mode

    def add_weight(
        self, *args: Any, float8: bool | None = None, **kwargs: Any
    ) -> keras.Variable:
        """`Layer.add_weight`, which also makes the state of a kernel.

        Args:
            *args: As for `keras.layers.Layer.add_weight`.
            float8: Whether this weight is contracted in float8. None: as
                `float8_kernels` says.
            **kwargs: As for `keras.layers.Layer.add_weight`.

        Returns:
            The variable.
        """
        variable = super().add_weight(*args, **kwargs)
        if self._is_float8_kernel(variable) if float8 is None else float8:
            self._float8_kernel_count += 1
            policy = self.float8_policy
            if policy is not None:
                with keras.name_scope(self.name, caller=self):
                    self.float8_state.add(variable, policy.recipe)
        return variable

    def get_build_config(self) -> dict[str, Any] | None:
        """`Layer.get_build_config`, and the path of this layer."""
        config = super().get_build_config()
        return {**config, "path": self.path} if config else config

    def build_from_config(self, config: dict[str, Any]) -> None:
        """`Layer.build_from_config`, under the path that was saved.

        Keras builds the layers of a saved Sequential one by one, outside of
        it, where a rule for `"model/dense"` would not match.
        """
        names = ((config or {}).get("path") or "").split("/")[:-1]
        with contextlib.ExitStack() as scopes:
            for name in names:
                scopes.enter_context(keras.name_scope(name))
            super().build_from_config(config)

    def save_own_variables(self, store: Any) -> None:
        """`Layer.save_own_variables`, which merges LoRA's adapters."""
        self.float8_state.merged = bool(getattr(self, "lora_enabled", False))
        super().save_own_variables(store)

    def set_weights(self, weights: list[Any]) -> None:
        """`Layer.set_weights`, where nothing is set if a state is wrong.

        Raises:
            ValueError: If the arrays do not fit, or one is no float8 state.
        """
        for variable, value in zip(self.weights, weights, strict=False):
            if isinstance(variable, StateVariable):
                variable.check(value)
        super().set_weights(weights)

    def load_own_variables(self, store: Any) -> None:
        """`Layer.load_own_variables`; the state hears how it ended."""
        self.float8_state.layer_loads(store)
        super().load_own_variables(store)
        self.float8_state.layer_has_loaded()

    def count_params(self) -> int:
        """The number of scalars in the weights; state does not count."""
        state = self.float8_state
        counted = super().count_params()
        return counted - (state.count_params() if state.weights else 0)

    def convert_input(self, x: Tensor) -> Tensor:
        """Cast a floating tensor to the compute dtype; leave any other.

        Args:
            x: Tensor of any shape and dtype.

        Returns:
            `x`, in the compute dtype if it is floating.
        """
        dtype = keras.backend.standardize_dtype(x.dtype)
        if dtype == self.compute_dtype or not _is_floating(dtype):
            return x
        return ops.cast(x, self.compute_dtype)

    def float8_matmul(
        self, inputs: Tensor, kernel: Any, training: bool | None = None
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
        kernel: Any,
        training: bool | None = None,
    ) -> Tensor:
        """`einsum(equation, inputs, kernel)` in float8.

        Args:
            equation: Of two operands with an explicit output; `...` is
                allowed; no axis twice in one term.
            inputs: The first operand, floating.
            kernel: The second one, a weight of this layer.
            training: True observes amaxes, False does not; None: what the
                call of the layer says, and if that says nothing, amaxes are
                observed where a gradient is taken.

        Returns:
            Tensor in the compute dtype.

        Raises:
            ValueError: If the equation is malformed, does not fit the
                operands, or the kernel is no weight of this layer.
        """
        inputs = ops.convert_to_tensor(inputs)
        ranks = len(inputs.shape), len(kernel.shape)
        explicit = einsum.explicit(equation, *ranks)
        _check_sizes(explicit, inputs.shape, kernel.shape)
        if self.float8_policy is None:
            return self._plain_einsum(explicit, inputs, kernel)
        contraction = kernels.Einsum(explicit)
        return self._contract(contraction, inputs, kernel, training)

    @property
    def kernel_choice(self) -> kernels.Choice | None:
        """Whether the last contraction was native or emulated, and why."""
        plan = self.__dict__.get("_last_plan")
        return None if plan is None else kernels.engine().select(plan)

    def quantized_call(self, *args: Any, **kwargs: Any) -> Tensor:
        """What Keras calls for a layer with a quantization mode."""
        return self.call(*args, **kwargs)

    def rematerialized_call(
        self, layer_call: Callable[..., Tensor], *args: Any, **kwargs: Any
    ) -> Callable[..., Tensor]:
        """Keras's, with the keyword arguments bound before.

        Keras would rematerialize a function of them: JAX then traces
        `training`, and TensorFlow refuses keyword arguments in a graph.
        """
        bound = functools.partial(layer_call, **kwargs)
        again = super().rematerialized_call(bound, *args)
        return lambda *args, **kwargs: again(*args)

    def quantized_build(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: `add_weight` makes the state of a float8 layer."""
        if self.quantization_mode != "float8":
            super().quantized_build(*args, **kwargs)

    @property
    def variable_serialization_spec(self) -> dict[str | None, list[str]]:
        """Which weights are saved: in float8 those of a float layer."""
        spec = dict(super().variable_serialization_spec)
        return {**spec, "float8": spec[None]}

    def _follow(self, policy: keras.DTypePolicy) -> None:
        """Let the state follow another policy, or raise if it cannot."""
        if isinstance(policy, Float8DTypePolicy):
            policy = policy.for_path(self.path)
        if not isinstance(policy, Float8DTypePolicy):
            return
        state, recipe = self.float8_state, policy.recipe
        lacks = self._float8_kernel_count > len(state.matrices)
        if (lacks and recipe.history_length) or not state.fits(recipe):
            raise ValueError(
                f"The kernels of layer {self.name!r} are made, and their "
                "float8 state does not fit this policy. Received: "
                f"{policy.full_name!r}. The layer has: "
                f"{self.dtype_policy!r}. Allowed now: a plain policy, a "
                "recipe without history, or the history length that the "
                "layer was made with. Make a new layer or model with the "
                "policy, save the weights of this one and load them there: "
                "a history of another length is cut or padded."
            )
        state.follow(recipe)

    def _resolve_float8_policy(self) -> None:
        # Kept, and not asked for in each call: torch.compile takes the class
        # of a mapping for another one and would leave float8 out (torch 2.13).
        policy = self.dtype_policy
        if isinstance(policy, Float8DTypePolicy):
            policy = policy.for_path(self.path)
        follows = isinstance(policy, Float8DTypePolicy)
        self._float8_policy = policy if follows else None
        self._float8_policy_path = self.path

    def _is_float8_kernel(self, variable: keras.Variable) -> bool:
        if self.float8_kernels is not None:
            return variable.name in self.float8_kernels
        return len(variable.shape) >= 2 and _is_floating(variable.dtype)

    def _plain_einsum(
        self, equation: str, inputs: Tensor, kernel: Any
    ) -> Tensor:
        dtype = self.compute_dtype
        kernel = ops.convert_to_tensor(kernel)
        return ops.einsum(
            equation, ops.cast(inputs, dtype), ops.cast(kernel, dtype)
        )

    def _contract(
        self,
        contraction: Contraction,
        inputs: Tensor,
        kernel: Any,
        training: bool | None,
    ) -> Tensor:
        policy: Any = self.float8_policy
        if keras.backend.standardize_dtype(inputs.dtype) != self.compute_dtype:
            inputs = ops.cast(inputs, self.compute_dtype)
        if training is None:
            training = _keras_compat.training_of_call()
        training = _static_flag(training)
        state, slot = self._state_of(kernel, policy, training)
        value = _keras_compat.value_without_autocast(kernel)
        plan = kernels.make_plan(
            contraction,
            policy.recipe,
            self.compute_dtype,
            keras.backend.standardize_dtype(value.dtype),
            training,
            slot,
            kernels.preferred(),
        )
        self.__dict__["_last_plan"] = plan
        return kernels.engine().run(plan, inputs, value, *state)

    def _state_of(
        self, kernel: Any, policy: Float8DTypePolicy, training: bool | None
    ) -> tuple[tuple[Tensor, ...], int]:
        if not policy.recipe.history_length:
            return (), 0
        variable = self.float8_state.of(kernel)
        if variable is None:
            raise ValueError(self._unknown_kernel(kernel))
        slot = 0 if training is False else variable.next_slot()
        return (_keras_compat.value_without_autocast(variable),), slot

    def _unknown_kernel(self, kernel: Any) -> str:
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


def _static_flag(training: Any) -> bool | None:
    """True, False, or None where the flag is traced and so not known."""
    known = isinstance(training, (bool, int, np.bool_))
    return bool(training) if known else None


def _is_floating(dtype: Any) -> bool:
    return "float" in keras.backend.standardize_dtype(dtype)


def _check_sizes(equation: str, first: Any, second: Any) -> None:
    """Raise if an axis has two sizes; einsum would broadcast a size of 1."""
    terms = einsum.split(equation)
    sizes = dict(zip(terms.first, first, strict=True))
    for axis, size in zip(terms.second, second, strict=True):
        other = sizes.get(axis, size)
        if None not in (size, other) and size != other:
            raise ValueError(
                f"The operands of {equation!r} differ in axis {axis!r}. "
                f"Received: shapes {tuple(first)} and {tuple(second)}. "
                "Allowed: equal sizes. Transpose or repeat the inputs first."
            )
