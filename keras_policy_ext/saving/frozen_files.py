"""Load files with frozen layers."""

from __future__ import annotations

import contextlib
import functools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_policy_ext._keras import calls, saving_hooks, walking
from keras_policy_ext.conversion import candidates, freezing, in_place, training
from keras_policy_ext.files import input_files, model_files, own_weights
from keras_policy_ext.files.model_files import CONFIG, PathLike
from keras_policy_ext.files.saved_layers import (
    FrozenWeights,
    is_frozen,
)
from keras_policy_ext.layers import stored_weights
from keras_policy_ext.layers.class_swap import to_float8_class, to_stock_class
from keras_policy_ext.policies import Float8DTypePolicy
from keras_policy_ext.policies.of_layers import (
    float8_policy_of,
    source_policy_of,
)
from keras_policy_ext.recipes import FrozenKernels
from keras_policy_ext.saving import keras_loader


def load_model(
    path: PathLike,
    custom_objects: dict[str, object] | None,
    compile: bool,
    safe_mode: bool,
) -> keras.Model:
    """Load a file with frozen layers as `keras.saving.load_model` would."""
    text = model_files.content(path, CONFIG)
    compile_config = input_files.json_in(text, path).get("compile_config")
    new_model = functools.partial(
        saving_hooks.model_of, text, custom_objects, safe_mode
    )
    with model_files.weights_of(path) as weights:
        # Layers whose class says that they are frozen, then all others.
        model = made_frozen(new_model, weights)
        freeze_as_saved(model, weights)
        if compile and compile_config:
            model.compile_from_config(compile_config)
        keras_loader.load(model, weights)  # Also of the optimizer.
    _load_assets(model, path)
    return model


def made_frozen(
    make: Callable[[], keras.Model], weights: PathLike
) -> keras.Model:
    """Return the model that `make` makes, each layer frozen once it is built.

    So its float kernels are never in memory all at once. If that fails, the
    model is made in floats.
    """
    # Keras may not tell of builds, or code of a layer may fail, by any error,
    # where it assigns or inverts a kernel. The model in floats raises its own.
    with contextlib.suppress(Exception):
        with _frozen_when_built(weights):
            model = make()
        if not freezing.shares_stored_kernels(model):
            return model
    # In floats: other holders of a stored kernel would read zeros.
    return make()


@contextlib.contextmanager
def _frozen_when_built(weights: PathLike) -> Iterator[None]:
    """In the block, freeze each layer as soon as Keras has built it.

    Their kernels are zeros, and the recipe is that of the first frozen layer in
    the file. `freeze_as_saved` later corrects which layers are frozen, and how.
    """
    recipe = model_files.first_recipe(weights)
    if recipe is None:
        yield
        return

    def freeze(layer: keras.Layer) -> None:
        """Freeze a layer that was just built, if it can be."""
        form = freezing.form_to_freeze(layer)
        if form is None:  # It has nothing of its own to freeze.
            _convert_composite(layer)
        elif stored_weights.kernels_to_store(layer, form):
            source = source_policy_of(layer).name
            to_float8_class(layer, Float8DTypePolicy(source, recipe=recipe))

    with calls.after_each_build(freeze, _is_to_be_frozen):
        yield


def freeze_as_saved(model: keras.Layer, weights: PathLike) -> None:
    """Freeze the layers that are frozen in a file, and thaw all others.

    Their kernels are then zeros, and the weights are still to be loaded. A
    ValueError says that the file is damaged, or a layer can't be frozen.
    """
    by_id = _frozen_in(model, weights)
    layers = walking.layers_within(model)
    if not by_id and not freezing.frozen_layers(model):
        return
    if any(id(x) in by_id and freezing.lacks_form(x) for x in layers):
        candidates.survey(model)  # It records their products.
    # The block updates an optimizer to the variables that the model has then.
    with training.continued(model), training.replicas(model):
        for layer in walking.layers_within(model):
            saved = by_id.get(id(layer))
            _freeze_as(layer, None if saved is None else saved.recipe)
            if saved is not None:  # Before an optimizer is built.
                own_weights.enable_saved_lora(layer, saved)
        # Then what has such layers in it: composites like LSTM, and backbones.
        for layer in candidates.survey(model).composites:
            in_place.enter_float8_with_children(layer)
        in_place.declare_policies(model)


def _is_to_be_frozen(layer: keras.Layer, name: str | None) -> bool:
    """Return True if a weight that a layer is about to add will be frozen."""
    form = freezing.form_to_freeze(layer)
    if form is None or name is None or form.float8_kernels is None:
        return False
    # The classes of layers tell kernels by name: any shape will do.
    weight: Any = stored_weights.Weight(name, (1, 1), "float32")
    return bool(form.is_stored_kernel(layer, weight))


def _convert_composite(layer: keras.Layer) -> None:
    """Give a layer with frozen layers in it, such as LSTM, its float8 class.

    Other layers are unchanged.
    """
    # The stock layer would read the codes of its cell as values. Composites are
    # layers without kernels that create layers with kernels.
    survey = candidates.survey(layer)
    if any(each is layer for each in survey.composites):
        in_place.enter_float8_with_children(layer)


def _freeze_as(layer: keras.Layer, recipe: FrozenKernels | None) -> None:
    """Freeze a layer by a recipe; give it floats if the recipe is None."""
    policy = float8_policy_of(layer)
    current = None if policy is None or policy.recipe.trains else policy.recipe
    if current == recipe:
        return
    if current is not None:
        to_stock_class(layer)
    if recipe is None:
        return
    source = source_policy_of(layer).name
    to_float8_class(layer, Float8DTypePolicy(source, recipe=recipe))


def _frozen_in(
    model: keras.Layer, weights: PathLike
) -> dict[int, FrozenWeights]:
    """Return what a file has of frozen layers, by `id` of the layer."""
    # Keras's loader finds each layer's place in the file. Nothing is loaded.
    by_id: dict[int, FrozenWeights] = {}
    layers = walking.layers_within(model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(keras_loader.without_skip_warnings())
        for layer in layers:
            stack.enter_context(_recording_frozen(layer, by_id))
        keras_loader.load(model, weights)
    return by_id


@contextlib.contextmanager
def _recording_frozen(
    layer: keras.Layer, by_id: dict[int, FrozenWeights]
) -> Iterator[None]:
    """In the block, a layer loads no weights, but records frozen ones.

    They go to `by_id`, so that the layer can be frozen before it loads them.
    """

    def record(store: Any) -> None:
        """Stand in for the layer's `load_own_variables`."""
        if is_frozen(store):
            saved = FrozenWeights.of(store, layer.path)
            own_weights.check_rank(saved)
            by_id[id(layer)] = saved

    vars(layer)["load_own_variables"] = record
    try:
        yield
    finally:
        del vars(layer)["load_own_variables"]


def _load_assets(model: keras.Model, path: PathLike) -> None:
    """Load the assets of a saved model, such as vocabularies, if any."""
    place = pathlib.Path(str(path))
    with contextlib.ExitStack() as stack:
        if not place.is_dir():
            unpacked = model_files.unpacked(path, "assets/")
            place = stack.enter_context(unpacked)
        if (place / "assets").is_dir():
            saving_hooks.load_assets(model, place / "assets")
