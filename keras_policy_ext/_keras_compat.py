"""The one place that touches what Keras's public API does not offer.

Each function says what it is for, which Keras versions it was seen to work
on, and when it can go. Internals are feature-detected: where they are gone,
the public API does as much as it can.
"""

import sys
from typing import Any

import keras

try:
    from keras.src.backend.common import global_state as _global_state
except ImportError:  # Keras has moved it: the public API has to do.
    _global_state = None

try:
    from keras.src.backend import AutocastScope as _AutocastScope
except ImportError:  # Keras has moved it: see `value_without_autocast`.
    _AutocastScope = None


# --------------------------------------------------------------------------
# The global dtype policy (used by policies/)
# --------------------------------------------------------------------------


def stored_global_policy() -> Any:
    """The global policy as Keras stores it; None while there is none.

    Public `keras.config.dtype_policy()` stores the floatx policy on its first
    read, after which `set_floatx` is ignored (keras 3.8 to 3.15); reading
    must not have that effect. Where Keras has moved the store, the public
    function is used. Expires when `set_dtype_policy(None)` resets in Keras.
    """
    if _global_state is None:
        return keras.config.dtype_policy()
    return _global_state.get_global_attribute("dtype_policy", None)


def store_global_policy(policy: Any) -> None:
    """Store a global policy; None empties the store.

    `keras.config.set_dtype_policy(None)` raises (keras 3.8 to 3.15). Where
    Keras has moved the store, None stores the policy of today's floatx.
    """
    if _global_state is not None:
        _global_state.set_global_attribute("dtype_policy", policy)
    elif policy is None:
        keras.config.set_dtype_policy(keras.config.floatx())
    else:
        keras.config.set_dtype_policy(policy)


def layer_whose_policy_is_set(policy_map: Any) -> Any:
    """The layer whose `dtype_policy` setter is now writing into a policy map.

    To be called by `__setitem__` or `__delitem__` of the map. Keras's setter
    (layers/layer.py, keras 3.8 to 3.15) doesn't replace a map that a built
    layer holds but writes `map[layer.path] = policy` into it, although many
    layers hold the same object; the call names the path and not the layer,
    so the layer is taken from the setter's frame. None when the writer is
    anything else. Expires when Keras's setter copies the map.
    """
    frame = sys._getframe(2) if hasattr(sys, "_getframe") else None
    if frame is None or frame.f_code.co_name != "dtype_policy":
        return None
    layer = frame.f_locals.get("self")
    if not isinstance(layer, keras.Layer):
        return None
    held = getattr(layer, "_dtype_policy", None)
    return layer if held is policy_map else None


def replace_layer_policy(layer: Any, policy: Any) -> None:
    """Let one layer hold another policy, as Keras's setter does without map.

    Public `layer.dtype_policy = …` is the caller here and would recurse.
    """
    layer._dtype_policy = policy


# --------------------------------------------------------------------------
# Calls and variables (used by layers/)
# --------------------------------------------------------------------------


def training_of_call() -> bool | None:
    """The `training` argument of the layer call that is under way, or None.

    For layers whose `call` has no such argument; Keras keeps it in the call
    context (keras 3.0 to 3.15) and offers no public way to read it. Where the
    context is gone, None: amaxes are then observed where a gradient is taken.
    """
    if _global_state is None:
        return None
    context = _global_state.get_global_attribute("current_call_ctx")
    if context is None:
        return None
    if hasattr(context, "get_value"):  # keras >= 3.11
        return context.get_value("training")
    return getattr(context, "training", None)


def value_without_autocast(variable: Any) -> Any:
    """The tensor in a variable, in the variable's own dtype.

    Inside a mixed-precision layer Keras hands out a copy in the compute
    dtype; float8 is quantized from the variable itself. Tensors are returned
    as they are. There is no public way (keras 3.0 to 3.15).

    Raises:
        ImportError: If this Keras keeps its autocast scope elsewhere.
    """
    if not isinstance(variable, keras.Variable):
        return variable
    if _AutocastScope is None:
        raise ImportError(
            f"Keras {keras.__version__} has moved AutocastScope, which float8 "
            "layers need to read float32 kernels. Install a version of "
            "keras_policy_ext that names this Keras as supported."
        )
    with _AutocastScope(None):
        # On TensorFlow ops.convert_to_tensor would return the Keras variable,
        # to be read, and autocast, after this scope.
        return variable.value


def stored_kernel(layer: Any) -> Any:
    """The kernel variable of Dense, EinsumDense or a convolution.

    Public `layer.kernel` merges LoRA's adapters into a new tensor
    (keras 3.0 to 3.15).
    """
    return layer._kernel if hasattr(layer, "_kernel") else layer.kernel


def has_value(variable: Any) -> bool:
    """Whether a variable can be read now.

    The JAX trainer empties the variables while it trains, or leaves buffers
    in them which the training step has deleted (`train_on_batch`; both seen
    in keras 3.3 to 3.15), and assigns the results before it reads them again.
    """
    value = getattr(variable, "_value", variable)
    if value is not None and not _is_deleted(value):
        return True
    scope = _global_state and _global_state.get_global_attribute(
        "stateless_scope"
    )
    return bool(scope) and scope.get_current_value(variable) is not None


def _is_deleted(value: Any) -> bool:
    """Whether this is an array that JAX has donated to a computation."""
    is_deleted = getattr(value, "is_deleted", None)
    try:
        return callable(is_deleted) and bool(is_deleted())
    except TypeError:  # a tracer knows no buffers
        return False


class _OwnAverage:
    """Stands where an optimizer keeps the moving average of a variable.

    Reads as the variable itself and ignores what is assigned, so that to
    overwrite the variable with its average changes nothing.
    """

    def __init__(self, variable: Any):
        self._variable = variable

    def assign(self, value: Any) -> None:
        """Leave the variable as it is."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._variable, name)

    def __mul__(self, other: Any) -> Any:
        return self._variable.value * other

    def __jax_array__(self) -> Any:
        return self._variable.value

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> Any:
        return self._variable.__tf_tensor__(dtype, name)


def spare_from_averaging(variable: Any) -> None:
    """Keep an optimizer with `use_ema` from failing on a state variable.

    To be called where the optimizer asks a variable whether it is overwritten
    with its gradient. For such a variable the optimizer keeps None as the
    average and then fails: on TensorFlow at the end of `fit`, on TensorFlow
    and JAX with `ema_overwrite_frequency` (keras 3.12 to 3.15; torch skips
    None). The optimizer is taken from the frame of the question, since Keras
    tells a variable nothing about its optimizer. Expires when Keras skips
    None everywhere.
    """
    if keras.backend.backend() == "torch":
        return
    frame = sys._getframe(2) if hasattr(sys, "_getframe") else None
    optimizer = frame.f_locals.get("self") if frame is not None else None
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return
    averages = getattr(optimizer, "_model_variables_moving_average", None)
    find = getattr(optimizer, "_get_variable_index", None)
    if not averages or find is None:
        return
    index = find(variable)
    if averages[index] is None:
        averages[index] = _OwnAverage(variable)
