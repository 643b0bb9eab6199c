"""Set the scales of a float8 model that was not trained in float8."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_policy_ext import backends, numerics, seams
from keras_policy_ext.conversion.candidates import (
    check_is_layer,
    has_call,
    path_of,
)
from keras_policy_ext.conversion.training import parts as parts_of
from keras_policy_ext.ext.sampling.symbolic_batches import map_arrays
from keras_policy_ext.layers.transaction import unchanged_on_error
from keras_policy_ext.policies.of_layers import is_frozen, layers_in_float8

BATCH = 32

Run = Callable[[Any], object]
"""A function that is called with a batch."""


def calibrate(
    model: keras.Layer,
    data: object,
    *,
    steps: int | None = None,
    call: Run | None = None,
) -> tuple[str, ...]:
    """Set the scales of a float8 model from a few batches, without training.

    The model is called on each batch as for prediction. The amaxes of the
    inputs of its float8 layers enter their histories, one entry per batch. So
    do the amaxes of kernels that changed since they were observed, for example
    because weights were copied into the model. Output gradients are not
    observed: their scales come with the first training step.

    A model without a `call` needs `call=`, or is calibrated part by part:

    ```python
    kpe.calibrate(vae, images, call=lambda x: vae.decoder(vae.encoder(x)))
    kpe.calibrate(gan.generator, noise)
    ```

    Recipes without state have nothing to fill. If layers are inside a
    `tf.function` of the model, all functions of the process run eagerly during
    the call, because TensorFlow has one switch for all.

    Args:
        model: A model with float8 layers.
        data: Inputs as for `model.predict`: an array or a structure of them,
            taken in batches of 32; or an iterable of batches, each of inputs
            or of `(inputs, targets)`, such as a list, a
            `keras.utils.PyDataset` or a `tf.data.Dataset`. A list or tuple
            of arrays counts as inputs if the model's inputs have the same
            structure.
        steps: The most batches to take; None for all.
        call: What to do with a batch in place of `model(inputs)`. It gets
            arrays cut into batches, and otherwise each batch as `data` has
            it, targets included.

    Returns:
        Paths of the layers whose scales were filled.

    Raises:
        ValueError: If no layer of the model has float8 state, the model has
            no `call` and none is given, there is no batch, or a list or
            tuple of arrays could be either inputs or batches. The state is
            then unchanged.
        TypeError: If `model` is not a Keras layer, `steps` is not a positive
            int, or `call` is not a function.

    Examples:
        >>> layer = keras.layers.Dense(8)
        >>> model = keras.Sequential([keras.Input((32,)), layer])
        >>> report = kpe.convert(model, "delayed")
        >>> len(kpe.calibrate(model, np.ones((16, 32), "float32")))
        1
    """
    _check_steps(steps)
    layers = _layers_with_state(model)
    _check_call(model, call)
    matrices = [v for layer in layers for v in layer.float8_state.matrices]
    states = [variable for variable in matrices if variable.observes_amaxes]
    variables = [*states, *model.non_trainable_variables]
    batches = itertools.islice(_batches(model, data, call is None), steps)
    with unchanged_on_error(parts_of(model), variables):
        seen = _seen(functools.partial(_run, model, call), batches, states)
        if seen is None:
            raise ValueError(_no_data(data))
        return tuple(path_of(layer) for layer in layers if _fill(layer, seen))


def _run(model: keras.Layer, call: Run | None, batch: Any) -> None:
    """Call `call` on a batch; without `call`, call the model for inference."""
    if call is None:
        model(batch, training=False)
    else:
        call(keras.tree.map_structure(_as_tensor, batch))


def _seen(
    run: Run, batches: Iterable[Any], states: list[Any]
) -> dict[int, list[np.ndarray]] | None:
    """Return, by state id, the amax of each batch; None without a batch."""
    seen: dict[int, list[np.ndarray]] | None = None
    functions_too = False
    for batch in batches:
        found = _amaxes(run, batch, functions_too)
        if seen is None and not {id(v) for v in states} <= found.keys():
            # Some are in functions that were compiled, or are not used.
            less, found = found, _amaxes(run, batch, functions_too=True)
            functions_too = less.keys() != found.keys()
        seen = {} if seen is None else seen
        for key, amax in found.items():
            seen.setdefault(key, []).append(amax)
    return seen


class _TracedError(Exception):
    """Raised where a compiler traces, so that an amax has no value yet."""


def _amaxes(run: Run, batch: Any, functions_too: bool) -> dict[int, np.ndarray]:
    """Run one batch; return input amaxes by state id, {} if one is unread."""
    found: dict[int, np.ndarray] = {}
    framework = backends.current

    def observe(call: seams.ContractionCall) -> Any:
        layer: Any = call.layer
        has_state = call.weight is not None and not call.planned.is_frozen
        # What torch.compile traces has no values.
        if not has_state or framework.is_compiling():
            return call.run()
        state = layer.float8_state.of(call.weight)
        if state is not None:
            if not framework.runs_now():
                raise _TracedError
            amax = ops.convert_to_numpy(numerics.amax(call.planned.inputs))
            found[id(state)] = max(found.get(id(state), amax), amax)
        return call.run()

    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(seams.on_contraction(observe))
            stack.enter_context(framework.step_by_step())
            if functions_too:  # Those that layers have compiled themselves.
                stack.enter_context(framework.functions_step_by_step())
            run(batch)
    except _TracedError:
        return {}
    return found


def _layers_with_state(model: keras.Layer) -> list[keras.Layer]:
    check_is_layer(model, "are calibrated")
    in_float8 = layers_in_float8(model)
    layers = [layer for layer in in_float8 if not is_frozen(layer)]
    if in_float8 and not layers:
        raise ValueError(
            f"All float8 layers of {model.name!r} are frozen, and their "
            "scales stay. Received: a frozen model. Allowed: one whose layers "
            "keep float weights. For scales of other data call, in this "
            "order, `kpe.thaw(model)`, `kpe.convert(model, 'delayed')`, "
            "`kpe.calibrate(model, data)` and "
            "`kpe.freeze(model, activations='static')`."
        )
    if not layers:
        raise ValueError(
            f"No layer of {model.name!r} is in float8. Received: a model "
            "without float8 layers. Allowed: one that was made or converted "
            "with a float8 policy. Call `kpe.convert(model, 'delayed')` first."
        )
    return layers


def _as_tensor(x: Any) -> Any:
    """Convert a NumPy array to a tensor; return other objects unchanged."""
    return ops.convert_to_tensor(x) if isinstance(x, np.ndarray) else x


def _fill(layer: keras.Layer, seen: dict[int, list[np.ndarray]]) -> bool:
    """Add observed amaxes to a layer's state; return True if any was added."""
    state, filled = layer.float8_state, False
    for kernel in layer.float8_contracted:
        variable = state.of(kernel)
        if variable is None or not variable.observes_amaxes:
            continue
        if id(variable) not in seen:
            continue
        for amax in seen[id(variable)]:
            variable.observe("inputs", amax)
        if variable.newest("kernel") != state.states.amax(kernel).max():
            state.states.settle([kernel])
        filled = True
    return filled


def _batches(model: keras.Layer, data: Any, inputs_only: bool) -> Iterator[Any]:
    """Split data into batches; with `inputs_only`, drop the targets."""
    # Another function than the model may take another structure.
    structure = _input_structure(model) if inputs_only else None
    if _is_inputs(data, structure):
        arrays = [x for x in keras.tree.flatten(data) if x is not None]
        count = len(arrays[0])
        for start in range(0, count, BATCH):
            window = slice(start, start + BATCH)
            yield map_arrays(lambda x: x[window], data)  # noqa: B023
        return
    if not isinstance(data, Iterable) and not hasattr(data, "__getitem__"):
        raise TypeError(_no_data(data))
    several = data
    if isinstance(data, keras.utils.PyDataset):
        several = (data[index] for index in range(data.num_batches))
    for batch in several:
        if not inputs_only:
            yield batch
            continue
        inputs = keras.utils.unpack_x_y_sample_weight(batch)[0]
        # A tuple is (inputs, targets), unless only as a whole it is inputs.
        whole = _alike(batch, structure) and not _alike(inputs, structure)
        yield batch if whole else inputs


def _is_inputs(data: object, structure: Any) -> bool:
    """Return True if `data` is inputs, False if batches; raise if unknown."""
    if not _is_structure_of_arrays(data):
        return False
    if not isinstance(data, (list, tuple)) or _alike(data, structure):
        return True
    batches = all(isinstance(batch, tuple) for batch in data)
    known = structure is not None and isinstance(data, list)
    if not batches and not known:
        raise ValueError(_ambiguous(data))
    return False


def _is_structure_of_arrays(data: object) -> bool:
    structures = (np.ndarray, dict, list, tuple)
    if not isinstance(data, structures) and not ops.is_tensor(data):
        return False
    leaves = [x for x in keras.tree.flatten(data) if x is not None]
    return bool(leaves) and all(
        isinstance(leaf, np.ndarray) or ops.is_tensor(leaf) for leaf in leaves
    )


def _alike(data: object, structure: Any) -> bool:
    """Return True if data nest as `structure` does; a list equals a tuple."""
    if structure is None:
        return False
    try:
        keras.tree.assert_same_structure(
            keras.tree.lists_to_tuples(data),
            keras.tree.lists_to_tuples(structure),
        )
    except (TypeError, ValueError):
        return False
    return True


def _input_structure(model: keras.Layer) -> Any:
    """Return the nesting of a model's inputs, 0 for each array, or None."""
    tensors = getattr(model, "inputs", None)
    if isinstance(model, keras.Sequential):
        return None if tensors is None else 0
    if tensors and all(isinstance(x, keras.KerasTensor) for x in tensors):
        return keras.tree.map_structure(lambda x: 0, model.input)
    config = model.get_build_config() or {}
    return _structure_of_shape(config.get("input_shape"))


def _structure_of_shape(shape: object) -> Any:
    """Replace each shape in nested shapes by 0; None if one is missing."""
    if isinstance(shape, dict):
        parts = {k: _structure_of_shape(v) for k, v in shape.items()}
        return None if None in parts.values() else parts
    if not isinstance(shape, (list, tuple)):
        return None
    if all(size is None or isinstance(size, int) for size in shape):
        return 0
    several = [_structure_of_shape(each) for each in shape]
    return None if None in several else several


def _check_call(model: keras.Layer, call: object) -> None:
    if call is not None and not callable(call):
        raise TypeError(
            f"`call` is not a function. Received: {call!r} (of type "
            f"{type(call).__name__}). Allowed: a function of one batch, or "
            "None to call the model."
        )
    if call is None and not has_call(model):
        raise ValueError(
            f"{type(model).__name__} {model.name!r} cannot be called on data. "
            "Received: a model without a `call` of its own. Allowed: a model "
            "with a `call`, or `call=`, a function of one batch. Pass for "
            "instance `call=lambda x: model.decoder(model.encoder(x))`, or "
            "calibrate the parts one after the other."
        )


def _check_steps(steps: object) -> None:
    if steps is None or (
        isinstance(steps, (int, np.integer))
        and not isinstance(steps, bool)
        and steps > 0
    ):
        return
    raise TypeError(
        f"`steps` is not a number of batches. Received: {steps!r} (of type "
        f"{type(steps).__name__}). Allowed: an int >= 1, the most batches to "
        "take, or None for all."
    )


def _no_data(data: object) -> str:
    return (
        "`data` has no inputs to calibrate with. Received: "
        f"{type(data).__name__}. Allowed: an array, a list or dict of arrays, "
        "or an iterable of batches, with at least one example. Pass some "
        "batches like those that the model will get."
    )


def _ambiguous(data: Sequence[object]) -> str:
    parts = ", ".join(type(part).__name__ for part in data)
    kind = type(data).__name__
    return (
        "`data` is ambiguous: it may be the inputs of one call, batches, or "
        f"inputs and targets. Received: a {kind} of {parts}. Allowed: an "
        "array or a dict of arrays; a list or tuple with the structure of the "
        "model's inputs; a list of `(inputs, targets)`; a list of batches for "
        "a Sequential or Functional model; an iterator of batches. Pass the "
        "inputs without targets, or `iter([...])` of the batches."
    )
