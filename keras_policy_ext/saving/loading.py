"""`load_model` and `load_weights`.

A block that creates its own layers creates stock layers when it is loaded. The
file records the policy of each layer in the layer's float8 state. So each layer
gets a state that captures its entries while Keras's own loader, which finds
them in the file, reads it. Then the layers are converted.
"""

from __future__ import annotations

import contextlib
import functools
import io
import pathlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_policy_ext import _extensions, policies, user_code
from keras_policy_ext._keras import (
    built_layers,
    optimizer_facts,
    quantization,
    walking,
)
from keras_policy_ext.conversion import (
    candidates,
    freezing,
    in_place,
    training,
)
from keras_policy_ext.conversion.candidates import Candidate, path_of
from keras_policy_ext.files import (
    input_files,
    keras_float8,
    model_files,
    own_weights,
    saved_layers,
)
from keras_policy_ext.files.entries import GROUP
from keras_policy_ext.files.model_files import WEIGHTS, Contents, PathLike
from keras_policy_ext.files.saved_layers import (
    SavedState,
    is_float8_layer,
    is_frozen,
)
from keras_policy_ext.layers.class_swap import to_float8_class
from keras_policy_ext.layers.mixin import Float8Mixin
from keras_policy_ext.layers.state import Float8State
from keras_policy_ext.layers.state_of import check_saved
from keras_policy_ext.layers.transaction import unchanged_on_error
from keras_policy_ext.policies import Float8DTypePolicy
from keras_policy_ext.policies.float8 import of_file
from keras_policy_ext.policies.of_layers import (
    float8_policy_of,
    layers_in_float8,
    policy_of,
    source_policy_of,
)
from keras_policy_ext.saving import frozen_files, keras_hooks, keras_loader
from keras_policy_ext.saving.keras_hooks import SavedPolicies


@user_code.once
def load_model(
    path: PathLike,
    custom_objects: dict[str, object] | None = None,
    compile: bool = True,
    safe_mode: bool = True,
) -> keras.Model:
    """Load a model with every layer in float8 as it was saved.

    Layers that their model recreates as stock layers get the policy and the
    state that they were saved with. Models get their saved policies, whatever
    the global policy is. A compiled model keeps its optimizer and can continue
    training, also on another backend than PyTorch if it was saved under
    PyTorch. If the loss was scaled, it is scaled again, with the saved loss
    scale, under any global policy. Layers that Keras quantized with
    `quantize("float8")` become layers of this package, with their saved scales
    and histories.

    Args:
        path: A `.keras` file, or the folder of `save(..., zipped=False)`.
            An older `.h5` file, and the folder of an Orbax checkpoint, are
            loaded as Keras loads them.
        custom_objects: As for `keras.saving.load_model`.
        compile: As for `keras.saving.load_model`.
        safe_mode: As for `keras.saving.load_model`.

    Returns:
        The model.

    Raises:
        ValueError: If the file is damaged, is no Keras model, or was written
            by a newer version of this package; and where Keras raises it.
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
    contents = model_files.check_model(path)
    options = {"compile": compile, "safe_mode": safe_mode}
    if model_files.lacks_config(path):  # Such as an Orbax checkpoint.
        return keras.saving.load_model(path, custom_objects, **options)
    load = keras.saving.load_model
    if contents.has_frozen_layers:
        load = frozen_files.load_model
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            input_files.within_memory_of(path, contents.numbers)
        )
        if contents.has_keras_float8 and not contents.has_frozen_layers:
            extension = keras_float8.needed(repr(str(path)))
            path = stack.enter_context(extension.rewritten(path, whole=True))
        return _load_model(load, path, custom_objects, **options)


@user_code.once
def load_for_keras(
    stock: Callable[..., keras.Model],
    source: Any,
    custom_objects: dict[str, object] | None,
    compile: bool,
    safe_mode: bool,
) -> keras.Model:
    """Load a model for Keras's loader, which would go on with `stock`.

    That fails on frozen layers. `copy.deepcopy` and `pickle` make bytes of a
    model: a copy should not lose float8. Other files are left to `stock`, after
    which `warn_of_lost_float8` warns. The source is a folder, an open `.keras`
    file, or the bytes of such a file.
    """
    options = custom_objects, compile, safe_mode
    in_memory = isinstance(source, io.BytesIO)
    file = source if in_memory else getattr(source, "name", source)
    if not in_memory and keras_hooks.is_loading(file):
        return stock(source, *options)
    if keras_hooks.names_keras_float8(file):
        _extensions.import_for("keras_float8_policy")

    def fails_in_keras(layer: Any) -> bool:
        """Return True if Keras would fail on, or lose, float8."""
        return is_frozen(layer) or (in_memory and is_float8_layer(layer))

    if not model_files.count(file, fails_in_keras):
        model = stock(source, *options)
        if not in_memory:
            keras_hooks.warn_of_lost_float8(model, file)
        return model
    with model_files.on_disk(source) as path:
        return load_model(path, *options)


def _load_model(
    load: Callable[..., keras.Model],
    path: PathLike,
    custom_objects: dict[str, object] | None,
    **options: Any,
) -> keras.Model:
    """Load a model by `load`, then restore its float8 policies and state."""
    legacy = str(path).endswith((".h5", ".hdf5"))
    config, saved = None, None
    if not legacy:
        text = model_files.content(path, model_files.CONFIG)
        config = input_files.json_in(text, path)
        if not isinstance(config, dict):
            raise input_files.damaged(path, "its config is no dict")
        saved = keras_hooks.read_policies(path)
    with (
        keras_hooks.loading(path),
        optimizer_facts.scope_of_optimizer_names(config),
        keras_loader.without_skip_warnings() as skipped,
        _policy_of_file(saved, config),
    ):
        model = load(path, custom_objects, **options)
    # In a legacy file no layer has a group, which would name its policy.
    differing = []  # Layers that have another policy than in the file.
    if saved is not None:
        keras_hooks.restore_policies(model, saved)
        places = _places(model)
        differing = [x for x in places if not _is_as_in_file(x.layer)]
    # Whether a changed optimizer was loaded, which Keras had skipped: a loss
    # scaler was put around it or taken off, or it has other variables.
    loaded_again = False
    if differing or training.may_differ_in_loss_scaler(model):
        with model_files.weights_of(path) as weights:
            loaded_again = training.restore(model, weights)
            if differing:
                was_twice = _load_as_saved(model, weights, differing)
                loaded_again = was_twice or loaded_again
            elif loaded_again:
                keras_loader.load(model, weights)
    if not loaded_again:
        keras_loader.warn_again(skipped)
    return model


def _policy_of_file(
    saved: SavedPolicies | None, config: Any
) -> AbstractContextManager[Any]:
    """In the block, the global policy is that of the model in a file."""
    policy = None if saved is None else keras_hooks.saved_under(saved, config)
    if policy is None:
        return contextlib.nullcontext()
    return policies.policy_scope(policy)


@user_code.once
def load_weights(
    model: keras.Layer,
    path: PathLike,
    *,
    as_saved: bool = False,
    dequantize: bool = False,
) -> None:
    """Load weights as `model.load_weights` does; on an error, undo all.

    If Keras fails after it has loaded the weights of some layers, these
    weights and the optimizer's variables are restored. This needs a copy of
    all of them in host memory.

    Args:
        model: A model whose layers with weights are built.
        path: A `.weights.h5`, `.weights.json` or `.keras` file.
        as_saved: Whether layers get the float8 policies that they had in the
            saved model, and frozen layers are frozen again. False: layers keep
            their present policies.
        dequantize: Whether to dequantize weights that are stored in float8,
            and load them into layers that are not frozen.

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
    model_files.check_exists(path)
    candidates.check(model, "can load weights")
    try:
        contents = model_files.check_weights(path)
        with (
            unchanged_on_error(training.parts(model), _variables(model)),
            _for_layers_of(model, path, contents) as weights,
        ):
            if dequantize and contents.has_frozen_layers:
                changed = model_files.rewritten(
                    weights, saved_layers.dequantize
                )
                with changed as weights:
                    keras_loader.load(model, weights)
            elif as_saved and not dequantize:
                with model_files.weights_of(weights) as weights:
                    was_frozen = freezing.frozen_layers(model)
                    if contents.has_frozen_layers or was_frozen:
                        frozen_files.freeze_as_saved(model, weights)
                    _load_as_saved(model, weights, _places(model))
            else:
                keras_loader.load(model, weights)
    except Exception as error:
        frozen = (  # What was passed already would be no help.
            "Those of frozen layers with `as_saved=True`, which freezes these, "
            "or `dequantize=True`. "
        )
        raise ValueError(
            f"The weights did not load into {model.name!r}, which is "
            f"unchanged. Received: {str(path)!r}. Cause: {error} Allowed: "
            "weights of a model with the same layers in the same order, with "
            f"any policies. {'' if as_saved or dequantize else frozen}Build "
            "the model as the saved one was, or load the model itself: "
            "`kpe.load_model`."
        ) from error


def _load_as_saved(
    model: keras.Layer, weights: PathLike, places: list[Candidate]
) -> bool:
    """Load weights and float8 policies; return True if it loaded them twice."""
    layers_in_file = _load_and_capture(model, weights, places)
    in_file = any(each.state.store for each in layers_in_file)
    if not in_file and not layers_in_float8(model):
        return False  # On any backend of Keras, also without float8 kernels.
    sizes = _optimizer_sizes(model)
    # The block updates an optimizer to the variables that the model has then.
    with training.continued(model), training.replicas(model):
        for each in layers_in_file:
            _restore_float8(each)
        # Then what has such layers in it: composites like LSTM, and backbones.
        for layer in candidates.survey(model).composites:
            in_place.enter_float8_with_children(layer)
        in_place.declare_policies(model)
    # Keras skips an optimizer whose number of variables is not the file's.
    sizes_changed = _optimizer_sizes(model) != sizes
    if sizes_changed:
        keras_loader.load(model, weights)
    return sizes_changed


def _for_layers_of(
    model: keras.Layer, path: PathLike, contents: Contents
) -> AbstractContextManager[PathLike]:
    """Return a block with a file that the layers of a model can read.

    It is a rewritten copy if the file has layers in Keras's own float8.
    """
    # Layers in Keras's own float8 read the file as Keras wrote it.
    layers = walking.layers_within(model)
    is_read_as_it_is = any(map(quantization.is_in_float8, layers))
    if is_read_as_it_is or not contents.has_keras_float8:
        return contextlib.nullcontext(path)
    extension = keras_float8.needed(repr(str(path)))
    return extension.rewritten(path, whole=False)


class _LayerInFile(NamedTuple):
    """A layer, and what a file says of its float8."""

    layer: Any
    state: SavedState
    policy: Float8DTypePolicy | None  # None if it was not in float8.
    attention: str  # The argument `attention` of an attention layer, or "".


def _load_and_capture(
    model: keras.Layer, weights: PathLike, places: list[Candidate]
) -> list[_LayerInFile]:
    """Load weights; return what the file says of the float8 of layers."""
    stores: list[dict[str, np.ndarray]] = [{} for _ in places]
    with contextlib.ExitStack() as stack:
        stack.enter_context(keras_loader.without_skip_warnings())
        for place, arrays in zip(places, stores, strict=True):
            stack.enter_context(_capturing(place.layer, arrays.update))
        keras_loader.load(model, weights)
    return [_read_layer(*each) for each in zip(places, stores, strict=True)]


def _read_layer(
    place: Candidate, arrays: dict[str, np.ndarray]
) -> _LayerInFile:
    """Read the float8 state of a layer from a file; raise if it is damaged."""
    # So all is checked before any layer is changed.
    layer = place.layer
    saved = SavedState.of(arrays, f"{path_of(layer)}/{GROUP}")
    policy = saved.policy(source_policy_of(layer))
    policy_to_follow = policy or float8_policy_of(layer)
    if policy_to_follow is not None:
        recipes = [policy_to_follow.recipe] * len(place.kernels)
        check_saved(saved, recipes)
    return _LayerInFile(layer, saved, policy, saved.attention)


@contextlib.contextmanager
def _capturing(
    layer: keras.Layer, take: Callable[[Mapping[str, np.ndarray]], None]
) -> Iterator[None]:
    """In the block, pass the float8 entries that a layer loads to `take`."""
    if isinstance(layer, Float8Mixin):
        with layer.float8_state.capture_entries(take):
            yield
        return
    # For the block a stock layer gets a state, which Keras's loader finds.
    with built_layers.unlocked(layer):
        layer.float8_state = Float8State()
    try:
        with layer.float8_state.capture_entries(take):
            yield
    finally:
        with built_layers.unlocked(layer):
            built_layers.detach(layer, "float8_state")


def _restore_float8(in_file: _LayerInFile) -> None:
    """Give a layer the policy and the float8 state that it was saved with."""
    layer, state, policy, attention = in_file
    if policy is not None and policy_of(layer) != policy:
        to_float8_class(layer, policy)
    elif policy is not None and not isinstance(layer, Float8Mixin):
        to_float8_class(layer)  # A stock layer, but under this policy.
    if isinstance(layer, Float8Mixin):
        layer.float8_state.load_own_variables(state.store)
        policy = float8_policy_of(layer)
        if policy is not None:
            own_weights.warn_of_formats(policy)
    if attention and hasattr(layer, "choose_attention"):
        try:
            layer.choose_attention(attention)
        except ValueError as reason:
            raise ValueError(
                f"Layer {path_of(layer)!r} cannot be what it was when saved. "
                f"Received: attention={attention!r} in the file, and "
                f"here {reason}. Allowed: a layer without flash attention. "
                "Make it without flash_attention=True, after "
                "keras.config.disable_flash_attention()."
            ) from reason


def _places(model: keras.Layer) -> list[Candidate]:
    """Return a model's convertible layers, and layers that create these.

    The latter, such as LSTM, have no kernels of their own.
    """
    survey = candidates.survey(model, attention=True)
    return [
        *survey.candidates,
        *(Candidate(layer, type(layer), ()) for layer in survey.composites),
    ]


def _is_as_in_file(layer: keras.Layer) -> bool:
    """Return True if a loaded layer has the policy that its file names."""
    if not isinstance(layer, Float8Mixin):
        return False
    state, policy = layer.float8_state, policy_of(layer)
    if state.policy_in_file is None:
        return True  # Said nothing, or was no layer of this package.
    if not isinstance(policy, Float8DTypePolicy):
        return False
    try:
        name = state.policy_in_file.tobytes().decode()
        return name == policy.full_name or policy == of_file(name)
    except ValueError:  # The checks of the whole file say what is wrong.
        return False


def _optimizer_sizes(model: keras.Layer) -> list[int]:
    """Return the number of variables of each optimizer of a model."""
    return [len(each.variables) for each in training.all_optimizers(model)]


def _variables(model: keras.Layer) -> list[keras.Variable]:
    """Return the variables of a model, its metrics and its optimizers."""
    return [
        *model.variables,
        *getattr(model, "metrics_variables", ()),
        *(v for x in training.all_optimizers(model) for v in x.variables),
    ]


# The files of a preset, besides `WEIGHTS`.
_SHARDED = "model.weights.json"  # The index of weights in several model_files.
_CONFIGS = ("config.json", "metadata.json", "task.json", "preprocessor.json")
_OF_TASK = "task.weights.h5"  # The weights around the backbone.


@user_code.once
def load_preset(cls: Any, preset: PathLike, **options: Any) -> keras.Model:
    """Load a KerasHub preset, and freeze the layers that were saved frozen.

    It calls `cls.from_preset(preset)`. At most one of the float kernels that
    KerasHub creates is in memory at a time.

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
    numbers = model_files.check_weights(weights).numbers
    for name in _CONFIGS:  # Keras reads these; they are checked here.
        if (folder / name).is_file():
            input_files.json_in((folder / name).read_bytes(), folder / name)
    with (
        keras_hooks.loading(folder),
        input_files.within_memory_of(folder, numbers),
    ):
        options["load_weights"] = False
        new_model = functools.partial(cls.from_preset, str(folder), **options)
        model = frozen_files.made_frozen(new_model, weights)
    backbone = getattr(model, "backbone", model)
    frozen_files.freeze_as_saved(backbone, weights)
    if model is not backbone and (folder / _OF_TASK).exists():
        model.load_task_weights(str(folder / _OF_TASK))
    keras_loader.load(backbone, weights)
    return model
