"""The controller of a float8 layer: its float8 policy, kernels and states."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_policy_ext import backends, contractions, formats, policies, seams
from keras_policy_ext._keras import (
    built_layers,
    calls,
    first_use,
    global_policy,
    quantization,
    variable_values,
    walking,
)
from keras_policy_ext._types import Tensor
from keras_policy_ext.contractions.weighted_sum import (
    WeightedSum,
    weighted_sum_of,
)
from keras_policy_ext.layers import stored_weights
from keras_policy_ext.layers.operands import MovedKernel, on_grid
from keras_policy_ext.layers.state import Float8State
from keras_policy_ext.layers.state_of import StateOf
from keras_policy_ext.layers.stored_weights import StoredVariable
from keras_policy_ext.policies import Float8DTypePolicy
from keras_policy_ext.policies.of_layers import of_path, policy_of
from keras_policy_ext.recipes import Recipe, scales_whole_tensors
from keras_policy_ext.recipes.recipe import tiles_along_columns
from keras_policy_ext.stored_kernels import Grid


class Float8Controller:
    """The float8 policy and kernels of a layer, which Keras does not see.

    The layer has one, `float8_controller`; the mixin hands on to it what Keras
    calls. The state is a sub-layer, `float8_state`, to have a group in files.
    """

    def __init__(self, layer: keras.Layer) -> None:
        """Begin without policy and kernels."""
        self.layer = layer
        # Paths of the weights that are contracted in float8.
        self.kernel_paths: tuple[str, ...] = ()
        # Weights of other layers that this layer contracts.
        self.foreign: tuple[keras.Variable, ...] = ()
        # Names of all weights in the order of their creation, if frozen.
        self.weight_names: tuple[str, ...] = ()
        # Products of two activations that are in float8; see `by_operation`.
        self.attention: Any = None
        # The policy for `_path`; `current_policy` looks whether that changed.
        # Its recipe and compute dtype, which each call needs, are found once.
        self.policy: Float8DTypePolicy | None = None
        self.recipe: Any = None
        self._compute_dtype = ""
        # For operands that are no weights; None outside of float8.
        self.recipe_of_activations: Any = None
        # For attention's probabilities times values. If each key has a scale,
        # it multiplies the probabilities, at most to this limit: the largest
        # number of the format of the values.
        self.recipe_of_weighted_sum: Any = None
        self.limit_of_values: float | None = None
        # Of the recipe: whether each matrix of a bank may have a scale, and
        # whether kernels have a state.
        self._scales_each_matrix = self._remembers = False
        # The sizes of the recipe's tiles along the columns of a kernel.
        self.tiles_along_columns: tuple[int, ...] = ()
        # The grid on which operands are rounded before they are multiplied.
        self._grid: Grid | None = None
        # The layer's path when `policy` was looked for; "" is that of none.
        self._path: str | None = ""

    @classmethod
    def join(cls, layer: keras.Layer) -> None:
        """Create the `float8_controller` of a layer, if it has none yet."""
        # By `vars`: PyTorch refuses attributes before its constructor has run.
        vars(layer).setdefault("float8_controller", cls(layer))

    @property
    def current_policy(self) -> Float8DTypePolicy | None:
        """The layer's float8 policy or None; looked up if its path changed."""
        if self._path != self.layer.path:
            self.layer._resolve_float8_policy()
        return self.policy

    def resolve_policy(self) -> None:
        """Look up and store the float8 policy for the layer's path."""
        # Not done in each step: torch.compile takes a policy, a mapping,
        # for one of another class, and would leave float8 out (torch 2.13).
        policy = policy_of(self.layer)
        # A layer that cannot train in float8 follows policies that freeze it.
        follows = isinstance(policy, Float8DTypePolicy) and (
            self.layer.float8_trains or not policy.recipe.trains
        )
        self.policy = policy if follows else None
        recipe: Any = policy.recipe if follows else None
        self.recipe = recipe
        self._compute_dtype = policy.compute_dtype if follows else ""
        (
            self.recipe_of_activations,
            self.recipe_of_weighted_sum,
            self.limit_of_values,
        ) = recipes_of_activations(recipe) if follows else (None, None, None)
        self._remembers = follows and recipe.remembers
        self._grid = recipe.grid if follows else None
        self._scales_each_matrix = follows and scales_whole_tensors(recipe)
        self.tiles_along_columns = (
            tiles_along_columns(recipe) if follows else ()
        )
        self._path = self.layer.path

    def adapt_state(self, policy: keras.DTypePolicy) -> None:
        """Prepare the state for another policy, or raise ValueError."""
        layer = self.layer
        # Looked up in a map of Keras, and in the rules of a float8 policy.
        policy = policies.as_float8(of_path(policy, layer.path))
        if isinstance(policy, Float8DTypePolicy):
            policy = policy.for_path(layer.path)
        stored_weights.check_policy(layer, policy)
        if not isinstance(policy, Float8DTypePolicy):
            return
        if quantization.is_quantized(layer):
            raise ValueError(
                f"Layer {layer.name!r} is quantized by Keras, and its kernel "
                "has no floating-point values to be scaled. Received: "
                f"{policy.full_name!r}. Allowed: the policy of the layer, "
                f"{layer.dtype_policy.name!r}. Make a new layer with the "
                "float8 policy, and load the weights from before `quantize`."
            )
        state, recipe = layer.float8_state, policy.recipe
        lacks = len(self.kernel_paths) > len(state.matrices)
        if (lacks and recipe.remembers) or not state.fits(recipe):
            raise ValueError(
                f"The policy of layer {layer.name!r} cannot be set: its float8 "
                "state does not fit the new policy. Received: "
                f"{policy.full_name!r}; the layer has {layer.dtype_policy!r}. "
                "Allowed: a plain policy, a recipe without state, or a recipe "
                "with the same state: amax histories of the same length, or a "
                "counter. Call `keras_policy_ext.convert` with the policy, "
                "which makes a new, empty state. To keep a history, save the "
                "weights, make a new model with the policy, and load them "
                "there; a history of another length is shortened or padded."
            )
        if state.states is not None:
            state.states.follow(recipe)

    def replace_policy(self, policy: keras.DTypePolicy) -> None:
        """Set another policy on an unlocked layer; states keep their amaxes.

        See `layers.class_swap`. Users set `dtype_policy` instead.
        """
        layer = self.layer
        contracted = self._kernels_to_contract()
        entries: dict[str, np.ndarray] = {}  # Amaxes, as a file has them.
        if hasattr(layer, "float8_state"):
            layer.float8_state.save_own_variables(entries)
            built_layers.detach(layer, "float8_state")
        layer.float8_state = new_state(layer)
        self.kernel_paths = tuple(kernel.path for kernel in contracted)
        global_policy.replace_layer_policy(layer, policy)
        layer._resolve_float8_policy()
        if self.policy is None:
            return
        for kernel in contracted:
            self._add_state(kernel, self.policy.recipe)
        if entries:
            layer.float8_state.load_own_variables(entries)

    @property
    def contracted(self) -> list[keras.Variable]:
        """The weights that the layer contracts in float8."""
        return self._weights_where(lambda v: v.path in self.kernel_paths)

    def _weights_where(
        self, is_wanted: Callable[[keras.Variable], bool]
    ) -> list[Any]:
        """Return the wanted weights: those of the layer, then those of others.

        A layer may multiply with weights that other layers own.
        """
        weights = self.layer.weights
        if self.foreign:
            ids = {id(v) for v in weights}
            others = [v for v in self.foreign if id(v) not in ids]
            weights = [*weights, *others]
        return [v for v in weights if is_wanted(v)]

    def has_kernel(self, variable: object) -> bool:
        """Return True if a variable is a kernel that the layer contracts."""
        return getattr(variable, "path", None) in self.kernel_paths

    def add_kernel(self, variable: keras.Variable) -> None:
        """Register a new kernel, and create its state if that is needed."""
        self.kernel_paths += (variable.path,)
        # Not `self.policy`: attention follows it only for its own products.
        policy = self.layer.float8_policy
        if policy is not None:
            self._add_state(variable, policy.recipe)

    def _add_state(self, kernel: keras.Variable, recipe: Recipe) -> None:
        """Add the state of a kernel, one per matrix if it is a bank."""
        axis = self.layer.float8_bank_axis(self.layer, kernel)
        self.layer.float8_state.add(kernel, recipe, axis)

    def _kernels_to_contract(self) -> list[keras.Variable]:
        """Return `contracted`; of a layer before float8, what it would be."""
        if self.kernel_paths:
            return self.contracted
        layer = self.layer
        own = walking.own_weights(layer)
        kernels = [v for v in own if layer.is_float8_kernel(layer, v)]
        ids = {id(v) for v in (*kernels, *self.foreign)}
        return self._weights_where(lambda v: id(v) in ids)

    def contract(
        self,
        contraction: contractions.Contraction,
        inputs: Tensor,
        kernel: keras.Variable,
        training: bool | None,
        dtype: str | None = None,
        bias: Tensor | None = None,
        moved: MovedKernel | None = None,
        run: Callable[..., Any] | None = None,
    ) -> Any:
        """Contract inputs with a kernel of the layer in float8; add a bias.

        Arguments and errors are those of `Float8Mixin.float8_einsum`. `moved`
        says how the kernel is moved before. `run` is called with the plan and
        what it multiplies, in place of `contractions.run` and of handlers: so
        a handler of `seams.on_contraction` gets them by `seams.Planned.of`.
        """
        layer = self.layer
        dtype = keras.backend.standardize_dtype(dtype or self._compute_dtype)
        framework = backends.current
        compiling = framework.is_compiling()
        if not compiling:  # A frozen kernel stands for the codes that it holds.
            held = getattr(kernel, "held", kernel)
            framework.look_for_other_parameter(held)
        # `compiling` first, or torch.compile's graph would guard `open_count`.
        may_be_handled = run is None and not compiling
        if may_be_handled and seams.blocks.open_count and seams.handlers():
            contract = functools.partial(
                self.contract,
                contraction,
                inputs,
                kernel,
                training,
                dtype,
                bias,
                moved,
            )
            return seams.through_handlers(
                layer,
                name=getattr(kernel, "name", "kernel"),
                weight=kernel,
                contraction=contraction,
                operands=(inputs, kernel),
                second_shape=(kernel if moved is None else moved).shape,
                dtype=dtype,
                contract=contract,
            )
        if keras.backend.standardize_dtype(inputs.dtype) != dtype:
            inputs = ops.cast(inputs, dtype)
        if bias is not None:  # PyTorch takes no gradient of a variable.
            bias = ops.convert_to_tensor(bias)
            if keras.backend.standardize_dtype(bias.dtype) != dtype:
                bias = ops.cast(bias, dtype)
        if isinstance(kernel, StoredVariable):
            return self._contract_stored(
                contraction, inputs, kernel, dtype, bias, run
            )
        if training is None:
            training = calls.training_of_call()
        # A traced tensor has no value here: it is unknown, as None is.
        is_known = isinstance(training, (bool, int, np.bool_))
        training = bool(training) if is_known else None
        value = variable_values.value_without_autocast(kernel)
        states = layer.float8_state.states if self._remembers else None
        if self._scales_each_matrix and (states is None or states.have_banks):
            contraction = self._of_bank(contraction, kernel, states, compiling)
        # What a state adds to the operands, and the number of this use of the
        # kernel in the step.
        remembered, slot = (), 0
        if states is not None:
            remembered, slot = states.operands(
                kernel, value, training, compiling
            )
        if self._grid is not None:
            axes = layer.float8_axes(layer, kernel)
            inputs, value = on_grid(
                self._grid, contraction, inputs, value[...], axes, remembered
            )
        if moved is not None:
            # Read: on TensorFlow the value is a variable, without `ndim`.
            value = moved.move(value[...])
        is_as_held = moved is None and self._grid is None
        plan = contractions.make_plan(
            contraction,
            self.recipe,
            dtype,
            kernel_dtype=keras.backend.standardize_dtype(value.dtype),
            training=training,
            slot=slot,
            gathering=framework.gathering_of(kernel) if is_as_held else None,
        )
        layer.float8_state.last_call.plan = plan
        run = run or contractions.run
        return run(plan, inputs, value, *remembered, bias=bias)

    def scales_each_matrix(self, kernel: keras.Variable) -> bool:
        """Return True if each matrix of a bank may have a scale."""
        if not (self._scales_each_matrix and self._remembers):
            return self._scales_each_matrix
        states = self.layer.float8_state.states
        return states is not None and states.scales_each_matrix(kernel)

    def _of_bank(
        self,
        contraction: contractions.Contraction,
        kernel: keras.Variable,
        states: StateOf | None,
        compiling: bool,
    ) -> Any:
        """Return a contraction with a bank of matrices, as of experts.

        It is unchanged if the kernel is not a bank.
        """
        if not self.scales_each_matrix(kernel):
            return contraction
        matrices = 1 if states is None else states.matrices_of(kernel)
        # torch.compile leaves caches out, and would warn.
        with_bank = contractions.with_bank if compiling else _known_with_bank
        product: Any = with_bank(contraction, matrices)
        if states is not None:
            states.check_bank(kernel, product)
        return product

    def _contract_stored(
        self,
        contraction: contractions.Contraction,
        inputs: Tensor,
        kernel: StoredVariable,
        dtype: str,
        bias: Tensor | None,
        run: Callable[..., Any] | None,
    ) -> Any:
        """Contract inputs with a kernel that is stored as codes."""
        plan = contractions.frozen_plan(
            contraction, kernel.recipe, kernel.axes, dtype
        )
        self.layer.float8_state.last_call.plan = plan
        run = run or contractions.run_frozen
        return run(plan, inputs, *kernel.multiplied, bias=bias)

    def contract_activations(
        self,
        contraction: contractions.Einsum,
        first: Tensor,
        second: Tensor,
        dtype: str,
    ) -> Tensor:
        """Contract two activations in float8, scaled by their own amaxes."""
        return self._contract_two_activations(
            seams.SCORES,
            self.recipe_of_activations,
            contraction,
            first,
            second,
            dtype,
        )

    def contract_weighted_sum(
        self,
        contraction: contractions.Einsum,
        weights: Tensor,
        values: Tensor,
        dtype: str,
    ) -> Tensor:
        """Contract weights and values of attention in float8.

        No scale covers two keys, unless the recipe has one scale per tensor.
        """
        recipe, limit = self.recipe_of_weighted_sum, self.limit_of_values
        # A product of a probability and a scale can be too small for float16.
        is_narrow = limit is not None and dtype == "float16"
        outputs = self._contract_two_activations(
            seams.WEIGHTED_SUM,
            recipe,
            contraction,
            weights,
            values,
            "float32" if is_narrow else dtype,
            limit,
        )
        return ops.cast(outputs, dtype) if is_narrow else outputs

    def _contract_two_activations(
        self,
        name: str,
        recipe: Recipe,
        contraction: contractions.Einsum,
        first: Tensor,
        second: Tensor,
        dtype: str,
        limit: float | None = None,
        run: Callable[..., Any] | None = None,
    ) -> Any:
        """Contract two operands that are no weights of the layer.

        With `limit`, they are weights and values of attention. Before these are
        quantized, `contractions.fold` divides the values of each key by a
        scale, so that they are at most `limit`, and multiplies the weights by
        it. `name` says which product it is, as for `seams.through_handlers`;
        a handler may call this again, with `run` as for `contract`.
        """
        compiling = backends.current.is_compiling()
        may_be_handled = run is None and not compiling
        if may_be_handled and seams.blocks.open_count and seams.handlers():
            contract = functools.partial(
                self._contract_two_activations,
                name,
                recipe,
                contraction,
                first,
                second,
                dtype,
                limit,
            )
            return seams.through_handlers(
                self.layer,
                name=name,
                weight=None,
                contraction=contraction,
                operands=(first, second),
                second_shape=second.shape,
                dtype=dtype,
                contract=contract,
            )
        if limit is not None:
            first, second = contractions.fold(
                contraction.equation,
                ops.cast(first, dtype),
                ops.cast(second, dtype),
                limit,
            )
        plan = contractions.make_plan(
            contraction, recipe, dtype, kernel_dtype=dtype, training=False
        )
        self.layer.float8_state.last_call.plan = plan
        run = run or contractions.run
        return run(plan, ops.cast(first, dtype), ops.cast(second, dtype))


_known_with_bank = functools.lru_cache(maxsize=4096)(contractions.with_bank)


@functools.cache
def recipes_of_activations(recipe: Recipe) -> tuple[Any, Any, float | None]:
    """Return the recipes for activations and weighted sums, and the limit.

    The limit is the largest number of the format of the values; None if these
    do not have a scale per key.
    """
    activations = recipe.for_activations
    weighted_sum, limit = weighted_sum_of(activations), None
    if isinstance(weighted_sum, WeightedSum):
        limit = formats.get(weighted_sum.format_of("kernel")).max
    return activations, weighted_sum, limit


def new_state(layer: keras.Layer) -> Float8State:
    """Return an empty `Float8State` for a layer."""
    first_use.begin()
    state = Float8State(layer.trainable)
    state.belong_to(layer)
    built_layers.skip_in_quantize(state)
    return state


def with_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x` plus a bias, in its dtype; `x` itself if the bias is None."""
    return x if bias is None else ops.add(x, ops.cast(bias, x.dtype))
