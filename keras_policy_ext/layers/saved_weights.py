"""Set and load the weights of a float8 layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_policy_ext import backends, formats, stored_kernels, user_code
from keras_policy_ext._keras import built_layers, first_use, variable_values
from keras_policy_ext._types import Tensor
from keras_policy_ext.layers import keras_float8, stored_files
from keras_policy_ext.layers.entries import GIVEN, POLICY
from keras_policy_ext.layers.saved_layers import is_frozen
from keras_policy_ext.layers.state_variable import GROWTH, StateVariable
from keras_policy_ext.layers.stored_weights import (
    WIDENED,
    StoredConstant,
    StoredVariable,
)
from keras_policy_ext.policies import Float8DTypePolicy
from keras_policy_ext.policies.of_layers import policy_of
from keras_policy_ext.recipes import MATMULS, Recipe
from keras_policy_ext.recipes.fields import counterpart

_CHECKED = (StateVariable, StoredConstant, StoredVariable)


def set_all(layer: keras.Layer, weights: Sequence[Any]) -> None:
    """Check one array for each of `layer.weights`; then set all of them.

    A frozen kernel takes codes, or the dequantized values that `get_weights`
    returned. The values must match the codes under the scale set.

    Raises:
        ValueError: If the arrays do not fit, one is not a float8 state, or one
            has values that a frozen kernel cannot have. No weight is set then.
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
    # By id: which codes a kernel gets also depends on the scale given for it.
    given = {id(v): x for v, x in zip(variables, weights, strict=True)}
    values = [_checked(v, given) for v in variables]
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
    for variable in variables:
        if isinstance(variable, StateVariable):
            variable.catch_up(GROWTH)  # Its kernel is here; none follows.


def _set_checked(
    stock: Any, layer: keras.Layer, weights: Sequence[Any]
) -> None:
    """Set the weights, all or none if some are of frozen kernels."""
    if any(isinstance(each, _CHECKED) for each in layer.weights):
        set_all(layer, weights)
    else:
        stock(layer, weights)


first_use.wait(lambda: built_layers.around_set_weights(_set_checked))


def _checked(variable: keras.Variable, given: dict[int, Any]) -> Any:
    """Return the value to assign to a variable; raise if it is invalid."""
    value = given[id(variable)]
    if isinstance(variable, StateVariable):
        variable.check(value)
    if isinstance(variable, StoredConstant):
        _check_constant(variable, value)
    if isinstance(variable, StoredVariable):
        return _codes(variable, value, given)
    return value


def _check_numbers(variable: keras.Variable, value: Tensor) -> None:
    """Raise if a NumPy array's dtype is not numeric."""
    dtype = getattr(value, "dtype", None)
    # The last kind, V, is that of bfloat16 and of float8.
    if isinstance(dtype, np.dtype) and dtype.kind not in "biufcV":
        raise ValueError(
            f"This array cannot be the value of {variable.path!r}; no weight "
            f"was set. Received: dtype {dtype}. Allowed: dtypes of numbers. "
            "Pass the arrays that `get_weights` returned."
        )


def _check_constant(variable: keras.Variable, value: Tensor) -> None:
    """Raise for NaN and infinities, and for a scale that is not positive."""
    numbers = np.asarray(ops.convert_to_numpy(value))
    is_scale = not variable.name.endswith(WIDENED)  # Else a whole kernel.
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
    """Return the codes of a frozen kernel, from codes or dequantized values."""
    # `given` has the values to set, by the id of the variable.
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
        values = stored.dequantized()
        if np.array_equal(values.astype(array.dtype), array):
            return stored.codes
    variable.check(array)  # It raises: these are no codes.
    return array


def warn_of_formats(policy: Float8DTypePolicy) -> None:
    """Warn if this device's matmuls do not read the formats of a policy."""
    # A loaded model keeps the formats that it was trained in, on any device,
    # so that values and scales do not change.
    native = backends.engine.device().float8
    # A format without a family, such as one of four bits, is not compared.
    families = {formats.get(name).family for name in _formats_of(policy.recipe)}
    if native is None or not families - {native, None}:
        return
    user_code.warn(_warning(policy, native))


def _formats_of(recipe: Recipe) -> list[str]:
    """List the formats that a recipe quantizes operands to, each once."""
    quantizations = (
        recipe.quantization(operand, matmul)
        for matmul, operands in MATMULS.items()
        for operand in operands
    )
    return list(dict.fromkeys(q.format for q in quantizations if q is not None))


def _warning(policy: Float8DTypePolicy, native: str) -> str:
    """Return the text of the warning of formats that are emulated."""
    own, others = _formats_of(policy.recipe), formats.FAMILIES[native]
    text = (
        f"This model was trained in {' and '.join(own)}; "
        f"{backends.engine.device().title} multiplies "
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


def texts_for_file(layer: keras.Layer) -> dict[str, str]:
    """Return the strings that a file stores about a float8 layer."""
    policy = policy_of(layer)
    if not isinstance(policy, Float8DTypePolicy):
        return {}
    texts = {POLICY: policy.full_name}
    if layer.float8_state.given is not None:
        texts[GIVEN] = layer.float8_state.given
    return texts


def load(
    layer: keras.Layer,
    store: Mapping[str, np.ndarray],
    stock: Callable[[Mapping[str, np.ndarray]], None],
) -> None:
    """Load all weights of a float8 layer from a file or, on an error, none.

    The group in the file is of a float layer, a frozen one, or one of Keras's
    own float8. `stock` is `load_own_variables` of the stock layer.

    Raises:
        ValueError: If the weights do not fit, or the state that Keras wrote
            is damaged; then nothing was changed.
    """
    policy = policy_of(layer)
    if isinstance(policy, Float8DTypePolicy):
        warn_of_formats(policy)
    layer.float8_state.note_layer_loading(store)
    # A frozen layer, or a group of one in the file.
    if layer.built and (layer.is_frozen or is_frozen(store)):
        _load_stored(layer, store)
        layer.float8_state.note_layer_loaded()
        return
    if not _is_in_keras_float8(layer, store):  # The group of a float layer.
        with variable_values.without_notifying():
            stock(store)
        layer.float8_state.note_layer_loaded()
        if layer.merges_adapters:
            user_code.warn(_MERGED)
        return
    extension = keras_float8.needed(f"a file for layer {layer.path!r}")
    has_state = bool(layer.float8_state.matrices)
    own, state = extension.split(store, layer.path, has_state)
    with variable_values.without_notifying():
        stock(own)
    layer.float8_state.note_layer_loaded()
    layer.float8_state.load_with_layer(state)


_MERGED = (
    "This file has no LoRA adapters: Keras adds them to the kernels that it "
    "saves. Those of the loaded layers are zeros, which get no gradients. To "
    "train adapters on, save them by `save_lora_weights` of KerasHub, or call "
    "`keras_policy_ext.freeze` before you save. To train new ones, assign "
    "random values to the first of each layer, such as `lora_kernel_a`."
)


def _load_stored(layer: keras.Layer, store: Mapping[str, np.ndarray]) -> None:
    """Load codes and scales; raise unless both layer and file are frozen."""
    if not layer.is_frozen:
        raise ValueError(
            f"The weights of layer {layer.path!r} in this file are stored in "
            "float8, and the layer is not frozen. Received: codes and scales. "
            "Allowed: float weights. `keras_policy_ext.load_model(path)` loads "
            "the frozen model, `keras_policy_ext.load_weights(model, path, "
            "as_saved=True)` freezes this model as the saved one was, and "
            "`keras_policy_ext.load_weights(model, path, dequantize=True)` "
            "loads the dequantized values."
        )
    if not is_frozen(store):
        raise ValueError(
            f"Layer {layer.path!r} is frozen, and its weights in this file are "
            "not. Received: float weights. Allowed: codes and scales, as a "
            "frozen model saves them. Load the file into a model that is not "
            "frozen, then call `keras_policy_ext.freeze(model)`."
        )
    stored_files.load(layer, store)


def _is_in_keras_float8(layer: keras.Layer, store: Mapping[str, Any]) -> bool:
    """Return True if a layer's group was saved in Keras's own float8."""
    # Only a layer whose stock form knows float8 can have been in such a file.
    if "float8" not in layer.stock_serialization_spec() or not layer.built:
        return False
    if layer.quantization_mode not in (None, "float8"):
        return False
    return keras_float8.is_store(store)
