"""Load files with frozen layers."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import h5py
import keras

from keras_policy_ext._keras import calls, saving_hooks, walking
from keras_policy_ext.conversion import candidates, freezing, in_place, training
from keras_policy_ext.files import input_files, model_files, own_weights
from keras_policy_ext.files.model_files import PathLike, Source
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

_CONFIG = "config.json"


def lacks_config(path: PathLike) -> bool:
    """Return True for a folder that Keras has not written as a model file."""
    # A folder with others of its files has lost its config.
    place = pathlib.Path(str(path))
    names = _CONFIG, "metadata.json", "model.weights.h5"
    return place.is_dir() and not any((place / each).exists() for each in names)


def config_in(path: PathLike) -> bytes:
    """Return the JSON config in a model's file or folder, as bytes."""
    place = pathlib.Path(str(path))
    if place.is_dir():
        return (place / _CONFIG).read_bytes()
    with zipfile.ZipFile(place) as archive:
        return archive.read(_CONFIG)


def has_frozen_layers(path: Source) -> bool:
    """Return True if a file has frozen layers; False if it is unreadable."""
    return bool(model_files.count(path, is_frozen))


def load_model(
    path: PathLike,
    custom_objects: dict[str, object] | None,
    compile: bool,
    safe_mode: bool,
) -> keras.Model:
    """Load a file with frozen layers as `keras.saving.load_model` would."""
    text = config_in(path)
    compile_config = input_files.json_in(text, path).get("compile_config")
    given = text, custom_objects, safe_mode
    new_model = functools.partial(saving_hooks.model_of, *given)
    with model_files.weights_of(path) as weights:
        model = made_frozen(new_model, weights)
        freeze_as_saved(model, weights)
        if compile and compile_config:
            model.compile_from_config(compile_config)
        model_files.load(model, weights)  # Also of the optimizer.
    _load_assets(model, path)
    return model


def made_frozen(
    make: Callable[[], keras.Model], weights: PathLike
) -> keras.Model:
    """Return the model that `make` makes, frozen layer by layer if it can be.

    Its float kernels are then never in memory at the same time.
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
    recipe = _first_recipe(weights)
    if recipe is None:
        yield
        return

    def freeze(layer: keras.Layer) -> None:
        form = freezing.form_to_freeze(layer)
        if form is None:  # It has nothing of its own to freeze.
            _enter_composite(layer)
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


@contextlib.contextmanager
def dequantized(path: PathLike) -> Iterator[PathLike]:
    """Yield a weights file whose float8 kernels are dequantized, in a copy.

    They are those of `thaw`. Without frozen layers: the file itself.
    """
    if not has_frozen_layers(path):
        yield path
        return
    with model_files.copied(path) as copy:
        with h5py.File(copy, "a") as file:
            for group in model_files.groups(file):
                if is_frozen(group):
                    _dequantize(group)
        yield copy


def _dequantize(group: h5py.Group) -> None:
    """Rewrite a frozen layer's group with float weights, LoRA merged in."""
    frozen = FrozenWeights.of(group, group.name)
    kernels: list[Any] = []
    others: list[Any] = []
    adapters: list[Any] = []
    for name in frozen.names:
        if name in frozen.summed:  # The header has axes of kernels alone.
            kernels.append(frozen.kernel(name).dequantized())
        else:
            into = adapters if name.startswith("lora_") else others
            into.append(frozen.array(name))
    if frozen.lora:  # It adapts the first kernel, or the embeddings.
        a, b = adapters
        scale = frozen.lora["alpha"] / frozen.lora["rank"]
        kernels[0] = kernels[0] + scale * (a @ b)
    for key in list(group):
        del group[key]
    # As Keras saves a layer: weights by number, the kernels first.
    for number, value in enumerate([*kernels, *others]):
        group[str(number)] = value


def _is_to_be_frozen(layer: keras.Layer, name: str | None) -> bool:
    """Return True if a weight that a layer is adding will be frozen."""
    form = freezing.form_to_freeze(layer)
    if form is None or name is None or form.float8_kernels is None:
        return False
    # The classes of layers tell kernels by name: any shape will do.
    weight: Any = stored_weights.Weight(name, (1, 1), "float32")
    return bool(form.is_stored_kernel(layer, weight))


def _enter_composite(layer: keras.Layer) -> None:
    """Convert a composite layer such as LSTM if its cell is frozen."""
    # The stock layer would read the codes of the cell as values.
    survey = candidates.survey(layer)
    if any(each is layer for each in survey.composites):
        in_place.enter_float8_with_children(layer)


def _freeze_as(layer: keras.Layer, recipe: FrozenKernels | None) -> None:
    """Freeze a layer by a recipe; thaw it if the recipe is None."""
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


def _first_recipe(weights: PathLike) -> FrozenKernels | None:
    """Return the recipe of the first frozen layer in a file, or None."""
    with model_files.opened(weights) as file:
        listed = [] if file is None else model_files.groups(file)
        first = next(filter(is_frozen, listed), None)
        return first and FrozenWeights.of(first, first.name).recipe


def _frozen_in(
    model: keras.Layer, weights: PathLike
) -> dict[int, FrozenWeights]:
    """Return what a file has of frozen layers, by `id` of the layer."""
    # Keras's loader finds each layer's place; `_noting` loads no weights.
    by_id: dict[int, FrozenWeights] = {}
    layers = walking.layers_within(model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(model_files.without_skip_warnings())
        for layer in layers:
            stack.enter_context(_noting(layer, by_id))
        model_files.load(model, weights)
    return by_id


@contextlib.contextmanager
def _noting(
    layer: keras.Layer, by_id: dict[int, FrozenWeights]
) -> Iterator[None]:
    """In the block, a layer that loads weights only records what it finds."""

    def note(store: Any) -> None:  # In place of the method.
        if is_frozen(store):
            saved = FrozenWeights.of(store, layer.path)
            own_weights.check_rank(saved)
            by_id[id(layer)] = saved

    vars(layer)["load_own_variables"] = note
    try:
        yield
    finally:
        del vars(layer)["load_own_variables"]


def _load_assets(model: keras.Model, path: PathLike) -> None:
    """Load the assets of a saved model, such as vocabularies, if any."""
    place = pathlib.Path(str(path))
    with tempfile.TemporaryDirectory() as folder:
        if not place.is_dir():
            with zipfile.ZipFile(place) as archive:
                names = archive.namelist()
                found = [x for x in names if x.startswith("assets/")]
                archive.extractall(folder, found)
            place = pathlib.Path(folder)
        if (place / "assets").is_dir():
            saving_hooks.load_assets(model, place / "assets")
