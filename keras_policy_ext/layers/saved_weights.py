"""The weights of a float8 layer: how Keras saves, loads and counts them."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np

from keras_policy_ext import _bases
from keras_policy_ext._keras import assignments, built_layers
from keras_policy_ext.layers import (
    other_formats,
    stock_state,
    stored_files,
    weight_lists,
)
from keras_policy_ext.layers.state_files import GIVEN_KEY, POLICY_KEY
from keras_policy_ext.layers.stored_variable import (
    in_place_of_codes,
    is_state,
    read_as_numbers,
)
from keras_policy_ext.policies import Float8DTypePolicy
from keras_policy_ext.policies.of_layers import policy_of


class SavedWeights(built_layers.ToldWhenBuilt, _bases.MixedInto):
    """The part of `Float8Mixin` that saves and loads weights."""

    float8_state: Any

    @property
    def is_frozen(self) -> bool:
        """See `Float8Mixin.is_frozen`."""
        raise NotImplementedError

    @property
    def weights(self) -> list[Any]:
        """`Layer.weights`; kernels that are stored are read as numbers."""
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
            other_formats.warn(policy)

    def set_weights(self, weights: list[np.ndarray]) -> None:
        """`Layer.set_weights`, all or nothing; see `weight_lists`.

        Raises:
            ValueError: If the arrays do not fit, one is no float8 state, or
                one is other numbers than a kernel that is frozen can have.
        """
        weight_lists.set_all(self, weights)

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
            with assignments.untold():
                super().load_own_variables(store)
            self.float8_state.layer_has_loaded()
            return
        entries: dict[str, np.ndarray] = {}
        if self.float8_state.matrices:
            entries = stock_state.checked(stock.state, self.path)
        with assignments.untold():
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
