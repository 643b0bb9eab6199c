"""`load_model` and `load_weights`.

A block that makes its layers itself makes stock ones when it is loaded. What
the file has for the state of such a layer says which policy it followed; so
each layer has a state that hands on what it is given, while Keras's own loader,
which knows where in the file a layer is, reads it; the layers are then
converted as they were.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import pathlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np

from keras_policy_ext import _input_files, _user_code, policies
from keras_policy_ext._keras import built_layers, stock_float8, walking
from keras_policy_ext.conversion import candidates, in_place, training
from keras_policy_ext.conversion.candidates import Candidate, path_of
from keras_policy_ext.layers import saved_weights, stock_state
from keras_policy_ext.layers.class_swap import to_float8_class
from keras_policy_ext.layers.mixin import Float8Mixin
from keras_policy_ext.layers.state import (
    ATTENTION_KEY,
    POLICY_KEY,
    Float8State,
    matrices_in,
    text_in,
)
from keras_policy_ext.layers.transaction import unchanged_on_error
from keras_policy_ext.mixed_precision import _arguments
from keras_policy_ext.policies import Float8DTypePolicy
from keras_policy_ext.policies.of_layers import (
    float8_policy_of,
    policy_of,
    source_policy_of,
)
from keras_policy_ext.saving import files, frozen_files, keras_hooks
from keras_policy_ext.saving.files import WEIGHTS, PathLike


@_user_code.once
def load_model(
    path: PathLike,
    custom_objects: dict[str, object] | None = None,
    compile: bool = True,
    safe_mode: bool = True,
) -> keras.Model:
    """`keras.saving.load_model`, and every layer as it was in float8.

    Layers that their model makes anew as stock layers follow the policy that
    they were saved under, with the state that they had. Models themselves
    have the policies that they had, whatever the global policy is. A compiled
    model has its optimizer, and goes on training where it was saved; one from
    PyTorch has it on any backend. Where the loss was scaled it is so again,
    with the scale it had, under any global policy. Layers that Keras had
    quantized with `quantize("float8")` come back as layers of this package,
    with the scales and histories that they had.

    Args:
        path: A `.keras` file, or the folder of `save(..., zipped=False)`.
            From an older `.h5` file comes what Keras makes of it.
        custom_objects: As for `keras.saving.load_model`.
        compile: As for `keras.saving.load_model`.
        safe_mode: As for `keras.saving.load_model`.

    Returns:
        The model.

    Raises:
        ValueError: If the file is damaged, is no Keras model, or was written
            by a newer version of this package, or as Keras does.
        OSError: If there is no such file, or the weights in a folder cannot
            be read.

    Examples:
        >>> layer = keras.layers.Dense(8)
        >>> model = keras.Sequential([keras.Input((32,)), layer])
        >>> report = kpe.convert(model)
        >>> model.save("model.keras")
        >>> kpe.load_model("model.keras").layers[0].quantization_mode
        'float8'
    """
    numbers = files.check_model(path)
    options = {"compile": compile, "safe_mode": safe_mode}
    with _input_files.within_memory_of(path, numbers):
        if frozen_files.has_frozen_layers(path):
            load = frozen_files.load_model
            return _load_model(load, path, custom_objects, **options)
        with frozen_files.rewritten_model(path) as rewritten:
            load = keras.saving.load_model
            return _load_model(load, rewritten, custom_objects, **options)


def load_whole(
    source: Any,
    custom_objects: dict[str, object] | None,
    compile: bool,
    safe_mode: bool,
) -> keras.Model | None:
    """`load_model` of a model that Keras's loader would bring back in part.

    Of files these are those with frozen layers: it fails at them. Of one that
    lost its float8 it leaves a warning, as Keras's own loader was asked for.

    Args:
        source: A folder, an open `.keras` file, or the bytes that a copy is
            made of.
        custom_objects: As for `load_model`.
        compile: Likewise.
        safe_mode: Likewise.

    Returns:
        The model; None to leave it to Keras.
    """
    in_memory = isinstance(source, io.BytesIO)
    found = source if in_memory else getattr(source, "name", source)
    in_float8 = in_memory and keras_hooks.states_in_file(found)
    if not in_float8 and not frozen_files.has_frozen_layers(found):
        return None
    with files.on_disk(source) as path:
        return load_model(path, custom_objects, compile, safe_mode)


def _load_model(
    load: Callable[..., keras.Model],
    path: PathLike,
    custom_objects: dict[str, object] | None,
    **options: Any,
) -> keras.Model:
    """`load_model` of a file that is whole, and no stock float8."""
    legacy = str(path).endswith((".h5", ".hdf5"))
    config = None
    if not legacy:
        config = _input_files.json_in(frozen_files.config_in(path), path)
        if not isinstance(config, dict):
            raise _input_files.damaged(path, "its config is no dict")
    with (
        keras_hooks.without_warning_of_lost_float8(),
        _arguments.for_private_names(config),
        files.without_skip_warnings() as skipped,
    ):
        model = load(path, custom_objects, **options)
    if not legacy:
        keras_hooks.restore_policies(model, path)
    places = [x for x in _places(model) if not _is_as_in_file(x.layer)]
    if legacy:
        places = []  # No layer has a group of its own there.
    if places or training.may_differ(model):
        with files.weights_of(path) as weights:
            again = training.restore(model, weights)
            if places:
                again = _load_as_saved(model, weights, places) or again
            elif again:
                files.load(model, weights)
        skipped = [] if again else skipped
    files.warn_again(skipped)
    return model


@_user_code.once
def load_weights(
    model: keras.Layer,
    path: PathLike,
    *,
    as_saved: bool = False,
    dequantize: bool = False,
) -> None:
    """`model.load_weights`, all or nothing.

    Where Keras finds something wrong after it has loaded the weights of some
    layers, those are put back, and so are the optimizer's variables. That
    takes a copy of all of them in the memory of the host.

    Args:
        model: A model whose layers with weights are built.
        path: A `.weights.h5`, `.weights.json` or `.keras` file.
        as_saved: Whether layers that were in float8 in the saved model are
            to be so in this one, under the policies that they had. False:
            layers keep the policies that they have. Layers that were frozen
            are frozen so.
        dequantize: Whether weights that were stored in float8 are loaded as
            what they stand for, into layers that are not frozen.

    Raises:
        ValueError: If the weights do not load, or the model or a part of it
            is not built. The model is then unchanged.
        FileNotFoundError: If there is no such file.

    Examples:
        >>> layer = keras.layers.Dense(8)
        >>> model = keras.Sequential([keras.Input((32,)), layer])
        >>> report = kpe.convert(model)
        >>> model.save_weights("model.weights.h5")
        >>> report = kpe.revert(model)
        >>> kpe.load_weights(model, "model.weights.h5", as_saved=True)
        >>> model.layers[0].quantization_mode
        'float8'
    """
    files.check_exists(path)
    candidates.check(model)
    try:
        files.check_weights(path)
        with (
            unchanged_on_error(training.parts(model), _variables(model)),
            _for_layers_of(model, path) as rewritten,
        ):
            if dequantize:
                with frozen_files.dequantized(rewritten) as weights:
                    files.load(model, weights)
            elif as_saved:
                with files.weights_of(rewritten) as weights:
                    frozen_files.freeze_as_saved(model, weights)
                    _load_as_saved(model, weights, _places(model))
            else:
                files.load(model, rewritten)
    except Exception as error:
        raise ValueError(
            f"The weights did not load into {model.name!r}, which is "
            f"unchanged. Received: {str(path)!r}. Cause: {error} Allowed: "
            "weights of a model with the same layers in the same order, with "
            "any policies; of frozen layers with `as_saved=True`, which "
            "freezes these, or `dequantize=True`. Build the model as the "
            "saved one was, or load the model itself: `kpe.load_model`."
        ) from error


@dataclasses.dataclass(frozen=True)
class _Found:
    """What a file has for the state of a layer.

    Attributes:
        layer: The layer.
        policy: The policy it was saved under; None where the file has none.
        entries: The entries of its state.
        attention: As for `convert`.
    """

    layer: Any
    policy: Float8DTypePolicy | None
    entries: dict[str, np.ndarray]
    attention: str | None


def _load_as_saved(
    model: keras.Layer, weights: PathLike, places: list[Candidate]
) -> bool:
    """Load weights, and let layers be what they were when saved.

    Returns:
        Whether the optimizer has other variables for that, and so was loaded
        with them.

    Raises:
        ValueError: If something is wrong with the file. No layer was then
            converted, while weights may have been loaded.
    """
    found = _read(model, weights, places)
    before = _optimizer_sizes(model)
    with training.continued(model), training.replicas(model):
        for each in found:
            _restore_float8(each)
        for layer in candidates.survey(model).composites:
            in_place.enter_float8_with_children(layer)
        in_place.declare_policies(model)
    again = _optimizer_sizes(model) != before
    if again:
        files.load(model, weights)
    return again


def _for_layers_of(
    model: keras.Layer, path: PathLike
) -> AbstractContextManager[PathLike]:
    """The file as the layers of a model read it.

    Layers in Keras's own float8 read it as Keras has written it.
    """
    layers = walking.layers_within(model)
    if any(stock_float8.stock_float8(layer) for layer in layers):
        return contextlib.nullcontext(path)
    return frozen_files.rewritten_weights(path)


def _read(
    model: keras.Layer, weights: PathLike, places: list[Candidate]
) -> list[_Found]:
    """Load weights, and all that is said in the file about layers' states."""
    found: list[dict[str, np.ndarray]] = [{} for _ in places]
    with contextlib.ExitStack() as stack:
        stack.enter_context(files.without_skip_warnings())
        for place, entries in zip(places, found, strict=True):
            stack.enter_context(_handing_on(place.layer, entries.update))
        files.load(model, weights)
    return [_checked(*each) for each in zip(places, found, strict=True)]


@contextlib.contextmanager
def _handing_on(
    layer: keras.Layer, take: Callable[[dict[str, np.ndarray]], None]
) -> Iterator[None]:
    """Have the state of a layer hand on its entries; make one if need be."""
    if isinstance(layer, Float8Mixin):
        with layer.float8_state.capture_entries(take):
            yield
        return
    with built_layers.unlocked(layer):
        layer.float8_state = Float8State()
    try:
        with layer.float8_state.capture_entries(take):
            yield
    finally:
        with built_layers.unlocked(layer):
            built_layers.detach(layer, "float8_state")


def _checked(place: Candidate, entries: dict[str, np.ndarray]) -> _Found:
    """What was found, if it can be used."""
    layer = place.layer
    path = f"{path_of(layer)}/float8_state"
    name = text_in(entries, POLICY_KEY, path)
    policy = _policy(name, path_of(layer)) if name else None
    if stock_state.LENGTH_KEY in entries:
        policy = Float8DTypePolicy(
            source_policy_of(layer),
            amax_history_length=int(entries[stock_state.LENGTH_KEY]),
        )
    follows = policy or float8_policy_of(layer)
    if follows is not None:
        matrices_in(entries, follows.recipe, len(place.kernels), path)
    attention = text_in(entries, ATTENTION_KEY, path)
    if attention not in ("", "float8"):
        raise ValueError(
            _unknown(path_of(layer), "attention mode", attention, "float8")
        )
    return _Found(layer, policy, entries, attention or None)


def _policy(name: str, path: str) -> Float8DTypePolicy:
    cause = ""
    try:
        policy = policies.get(name)
    except (TypeError, ValueError) as error:
        cause = f" Cause: {error}"
    else:
        if isinstance(policy, Float8DTypePolicy):
            return policy
    allowed = "full names of float8 policies, as in `policy.full_name`"
    raise ValueError(_unknown(path, "policy", name, allowed) + cause)


def _unknown(path: str, what: str, value: str, allowed: str) -> str:
    return (
        f"Layer {path!r} was saved under a {what} that this version of "
        f"keras_policy_ext does not know. Received: {value!r}. Allowed: "
        f"{allowed}. Update keras_policy_ext, or load the weights without "
        "float8, as Keras does: `keras.saving.load_model` or "
        "`model.load_weights`."
    )


def _restore_float8(found: _Found) -> None:
    """Let a layer follow the policy it was saved under, with its state."""
    layer, policy = found.layer, found.policy
    if policy is not None and policy_of(layer) != policy:
        to_float8_class(layer, policy)
    elif policy is not None and not isinstance(layer, Float8Mixin):
        to_float8_class(layer)
    if isinstance(layer, Float8Mixin):
        layer.float8_state.load_own_variables(found.entries)
        policy = float8_policy_of(layer)
        if policy is not None:
            saved_weights.warn(policy)
    if found.attention and hasattr(layer, "choose_attention"):
        try:
            layer.choose_attention(found.attention)
        except ValueError as reason:
            raise ValueError(
                f"Layer {path_of(layer)!r} cannot be what it was when saved. "
                f"Received: attention={found.attention!r} in the file, and "
                f"here {reason}. Allowed: a layer without flash attention. "
                "Make it without flash_attention=True, after "
                "keras.config.disable_flash_attention()."
            ) from reason


def _places(model: keras.Layer) -> list[Candidate]:
    """The layers that can be in float8, or make layers that are."""
    found = candidates.survey(model)
    return [
        *found.candidates,
        *(Candidate(layer, type(layer), ()) for layer in found.composites),
    ]


def _is_as_in_file(layer: keras.Layer) -> bool:
    """True if a layer of a model just loaded is what it was when saved."""
    if not isinstance(layer, Float8Mixin):
        return False
    state, policy = layer.float8_state, policy_of(layer)
    if state.policy_in_file is None:
        return True  # Said nothing, or was no layer of this package.
    name = state.policy_in_file.tobytes()
    return (
        isinstance(policy, Float8DTypePolicy)
        and policy.full_name.encode() == name
    )


def _optimizer_sizes(model: keras.Layer) -> list[int]:
    return [len(each.variables) for each in training.all_optimizers(model)]


def _variables(model: keras.Layer) -> list[keras.Variable]:
    """All that a file may have a value for."""
    return [
        *model.variables,
        *getattr(model, "metrics_variables", ()),
        *(v for x in training.all_optimizers(model) for v in x.variables),
    ]


_SHARDED = "model.weights.json"
_CONFIGS = ("config.json", "metadata.json", "task.json", "preprocessor.json")
_OF_TASK = "task.weights.h5"


@_user_code.once
def load_preset(cls: Any, preset: PathLike, **options: Any) -> keras.Model:
    """`cls.from_preset(preset)`, with every layer frozen as it was saved.

    There is never more than one of the float kernels that KerasHub makes.

    Args:
        cls: A class of KerasHub, such as `keras_hub.models.CausalLM` or
            `keras_hub.models.Backbone`.
        preset: A local folder, as `save_to_preset` writes it.
        **options: As for `cls.from_preset`, such as `dtype`.

    Returns:
        The model.

    Raises:
        FileNotFoundError: If there are no weights in such a folder.
        ValueError: If the weights are damaged or do not fit.
    """
    folder = pathlib.Path(str(preset))
    weights = next(
        (x for n in (WEIGHTS, _SHARDED) if (x := folder / n).exists()), None
    )
    if weights is None:
        raise FileNotFoundError(
            "There are no weights of a preset here. Received: "
            f"{str(preset)!r}. Allowed: a local folder with {WEIGHTS} or "
            f"{_SHARDED}. A preset that is elsewhere is loaded by "
            "`cls.from_preset`; then call `keras_policy_ext.freeze`."
        )
    numbers = files.check_weights(weights)
    for name in _CONFIGS:
        if (folder / name).is_file():
            _input_files.json_in((folder / name).read_bytes(), folder / name)
    with (
        keras_hooks.without_warning_of_lost_float8(),
        _input_files.within_memory_of(folder, numbers),
        frozen_files.frozen_when_built(weights),
    ):
        model = cls.from_preset(str(folder), load_weights=False, **options)
    backbone = getattr(model, "backbone", model)
    frozen_files.freeze_as_saved(backbone, weights)
    if model is not backbone and (folder / _OF_TASK).exists():
        model.load_task_weights(str(folder / _OF_TASK))
    files.load(backbone, weights)
    return model
