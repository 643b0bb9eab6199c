"""The weights of a float8 layer: how Keras saves, loads and counts them."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_policy_ext import (
    _bases,
    _user_code,
    backends,
    formats,
    stored_kernels,
)
from keras_policy_ext._keras import built_layers, variable_values
from keras_policy_ext._types import Tensor, override
from keras_policy_ext.layers import stock_state, stored_files
from keras_policy_ext.layers.state import GIVEN_KEY, POLICY_KEY
from keras_policy_ext.layers.state_variable import StateVariable
from keras_policy_ext.layers.stored_weights import (
    WIDENED,
    StoredConstant,
    StoredVariable,
    in_place_of_codes,
    is_state,
    read_as_numbers,
)
from keras_policy_ext.policies import Float8DTypePolicy
from keras_policy_ext.policies.of_layers import policy_of
from keras_policy_ext.recipes import MATMULS, Recipe
from keras_policy_ext.recipes.fields import counterpart

_OWN = (StateVariable, StoredConstant, StoredVariable)


def set_all(layer: keras.Layer, weights: Sequence[Any]) -> None:
    """Set the weights of a layer or model, once all of them are looked at.

    A kernel that is frozen takes codes, or the numbers that its codes mean
    with the scale that is set with them: those that `get_weights` returned.

    Args:
        layer: The layer or model.
        weights: An array for each of `layer.weights`.

    Raises:
        ValueError: If they do not fit, one is no float8 state, or one is
            other numbers than a frozen kernel can have. None is then set.
    """
    variables = layer.weights
    received = [np.shape(value) for value in weights]
    allowed = [tuple(variable.shape) for variable in variables]
    if received != allowed:
        raise ValueError(
            f"These arrays are not those of layer {layer.name!r}; none was "
            f"set. Received: shapes {received}. Allowed: {allowed}. To copy "
            "weights between two models, use "
            "`keras_policy_ext.loops.weights(model)`, which leaves the float8 "
            "state out. To change the history length, save the weights to a "
            "file and load it: histories are then shortened or padded."
        )
    for variable, value in zip(variables, weights, strict=True):
        _check_numbers(variable, value)
    given = {id(v): x for v, x in zip(variables, weights, strict=True)}
    values = [_checked(v, given) for v in variables]
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def watch() -> None:
    """Let `set_weights` of models that hold float8 layers be `set_all`."""
    built_layers.around_set_weights(_set)


def _set(stock: Any, layer: keras.Layer, weights: Sequence[Any]) -> None:
    if any(isinstance(each, _OWN) for each in layer.weights):
        set_all(layer, weights)
    else:
        stock(layer, weights)


def _checked(variable: keras.Variable, given: dict[int, Any]) -> Any:
    """Return the value that a variable is to hold; raise if it cannot."""
    value = given[id(variable)]
    if isinstance(variable, StateVariable):
        variable.check(value)
    if isinstance(variable, StoredConstant):
        _check_constant(variable, value)
    if isinstance(variable, StoredVariable):
        return _codes(variable, value, given)
    return value


def _check_numbers(variable: keras.Variable, value: Tensor) -> None:
    """Raise if this is an array of something else; tensors are of numbers."""
    dtype = getattr(value, "dtype", None)
    if isinstance(dtype, np.dtype) and dtype.kind not in "biufcV":
        raise ValueError(
            f"This array cannot be the value of {variable.path!r}; no weight "
            f"was set. Received: dtype {dtype}. Allowed: dtypes of numbers. "
            "Pass the arrays that `get_weights` returned."
        )


def _check_constant(variable: keras.Variable, value: Tensor) -> None:
    numbers = np.asarray(ops.convert_to_numpy(value))
    is_scale = not variable.name.endswith(WIDENED)
    if np.isfinite(numbers).all() and (not is_scale or (numbers > 0).all()):
        return
    raise ValueError(
        f"This array cannot be the scale of the frozen kernel "
        f"{variable.path!r}; no weight was set. Received: values that are "
        "NaN, infinite or <= 0. Allowed: finite values > 0. Pass the list "
        "that `get_weights` returned."
    )


def _codes(
    variable: StoredVariable, value: Tensor, given: dict[int, Any]
) -> np.ndarray:
    """The codes of a frozen kernel, given them or the numbers they mean."""
    array = np.asarray(ops.convert_to_numpy(value))
    if array.dtype == "uint8":
        variable.check(array)
        return array
    scale = given.get(id(variable.scale))
    if scale is None:
        scale = variable.scale.as_stored
    numbers = array.astype("float32")
    if np.isfinite(numbers).all():
        stored = stored_kernels.quantize(
            numbers,
            variable.axes,
            variable.granularity,
            variable.weights,
            np.asarray(ops.convert_to_numpy(scale), "float32"),
        )
        meant = stored.dequantized()
        if np.array_equal(meant.astype(array.dtype), array):
            return stored.codes
    variable.check(array)
    return array


def warn(policy: Float8DTypePolicy) -> None:
    """Warn where a policy is emulated for the family of its formats alone.

    A loaded model goes on in the formats that it was trained in, on any
    device: numbers and scales stay what they were.
    """
    native = backends.engine().device().float8
    families = {formats.get(name).family for name in _formats_of(policy.recipe)}
    if native is None or not families - {native, None}:
        return
    _user_code.warn(_text(policy, native))


def _formats_of(recipe: Recipe) -> list[str]:
    """The formats of all that a recipe quantizes, each once."""
    asked = (
        recipe.quantization(operand, matmul)
        for matmul, operands in MATMULS.items()
        for operand in operands
    )
    return list(dict.fromkeys(q.format for q in asked if q is not None))


def _text(policy: Float8DTypePolicy, native: str) -> str:
    own, others = _formats_of(policy.recipe), formats.FAMILIES[native]
    text = (
        f"This model was trained in {' and '.join(own)}; "
        f"{backends.engine().device().title} multiplies "
        f"{' and '.join(others)}. "
        "It stays in the formats that it has, with its numbers and scales, "
        "and its matmuls are emulated."
    )
    other = counterpart(policy.recipe)
    if other is None:
        return text
    name = Float8DTypePolicy(policy.default_policy, recipe=other).full_name
    return (
        f"{text} For native ones: kpe.convert(model, {name!r}), which keeps "
        "the histories that scales come from."
    )


class SavedWeights(built_layers.ToldWhenBuilt, _bases.MixedInto):
    """The part of `Float8Mixin` that saves and loads weights."""

    float8_state: Any

    @property
    @override
    def is_frozen(self) -> bool:
        raise NotImplementedError

    @property
    def weights(self) -> list[Any]:
        """Return `Layer.weights`; a frozen kernel reads as numbers."""
        found: list[Any] = super().weights
        return in_place_of_codes(self, found) if self.is_frozen else found

    def when_built(self) -> None:
        """Let attributes of a frozen layer be read as numbers."""
        if self.is_frozen:
            read_as_numbers(self)

    def save_own_variables(
        self, store: MutableMapping[str, np.ndarray]
    ) -> None:
        """`Layer.save_own_variables`, which merges LoRA's adapters."""
        if self.is_frozen:
            stored_files.save(self, store)
            return
        super().save_own_variables(store)

    @property
    def merges_adapters(self) -> bool:
        """Return True if the kernel in a file has LoRA's adapters merged in."""
        return bool(getattr(self, "lora_enabled", False)) and not self.is_frozen

    def texts_for_file(self) -> dict[str, str]:
        """Return the texts that a file holds about this layer."""
        policy = policy_of(self)
        if not isinstance(policy, Float8DTypePolicy):
            return {}
        texts = {POLICY_KEY: policy.full_name}
        if self.float8_state.given is not None:
            texts[GIVEN_KEY] = self.float8_state.given
        return texts

    def _warn_of_other_formats(self) -> None:
        policy = policy_of(self)
        if isinstance(policy, Float8DTypePolicy):
            warn(policy)

    def set_weights(self, weights: list[np.ndarray]) -> None:
        """`Layer.set_weights`, all or nothing; see `weight_lists`.

        Raises:
            ValueError: If the arrays do not fit, one is no float8 state, or
                one is other numbers than a kernel that is frozen can have.
        """
        set_all(self, weights)

    def load_own_variables(self, store: Mapping[str, np.ndarray]) -> None:
        """`Layer.load_own_variables`, and what Keras's own float8 wrote.

        The state notes whether the weights were loaded.

        Raises:
            ValueError: If the weights do not fit, or the state that Keras
                wrote is damaged; then nothing was changed.
        """
        self._warn_of_other_formats()
        self.float8_state.layer_loads(store)
        has_codes = stored_files.STORED in store
        if self.built and (self.is_frozen or has_codes):
            self._load_stored(store)
            self.float8_state.layer_has_loaded()
            return
        stock = self._stock_store(store)
        if stock is None:
            with variable_values.untold():
                super().load_own_variables(store)
            self.float8_state.layer_has_loaded()
            return
        entries: dict[str, np.ndarray] = {}
        if self.float8_state.matrices:
            entries = stock_state.checked(stock.state, self.path)
        with variable_values.untold():
            super().load_own_variables(stock.own)
        self.float8_state.layer_has_loaded()
        self.float8_state.load_stock(entries)

    def _load_stored(self, store: Mapping[str, np.ndarray]) -> None:
        """Load codes and scales, which a frozen layer has and no other."""
        if not self.is_frozen:
            stored_files.refuse(self)
        if stored_files.STORED not in store:
            stored_files.refuse_float(self)
        stored_files.load(self, store)

    def _stock_store(
        self, store: Mapping[str, np.ndarray]
    ) -> stock_state.StockStore | None:
        """What a file of Keras's own float8 has for this layer, if it is one.

        Only a layer whose stock form knows float8 can have been in it.
        """
        if "float8" not in self._stock_serialization_spec() or not self.built:
            return None
        if self.quantization_mode not in (None, "float8"):
            return None
        return stock_state.split(store, own=1 + (self.bias is not None))

    def count_params(self) -> int:
        """`Layer.count_params`, without the float8 state."""
        # Within a summary the stock method leaves it out itself.
        return sum(math.prod(v.shape) for v in self.weights if not is_state(v))

    @property
    def variable_serialization_spec(self) -> dict[str | None, list[str]] | None:
        """Which weights are saved: in float8 those of a float layer.

        None for a layer that Keras cannot quantize.
        """
        spec = self._stock_serialization_spec()
        return {**spec, "float8": spec[None]} if spec else None

    def _stock_serialization_spec(self) -> dict[str | None, list[str]]:
        """What the stock layer saves in each mode; empty if it has no modes.

        Keras's base class has None from 3.16 on, and had nothing before.
        """
        parent: Any = super()
        return getattr(parent, "variable_serialization_spec", None) or {}
