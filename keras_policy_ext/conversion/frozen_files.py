"""Files of frozen models.

Their layers are made without values, frozen as the file says, and only then
loaded: the float kernels, which Keras makes first, never have memory.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from typing import Any

import h5py
import keras

from keras_policy_ext._keras import (
    built_layers,
    deferred_values,
    saving_hooks,
    walking,
)
from keras_policy_ext.conversion import (
    candidates,
    composites,
    files,
    freezing,
    lost_float8,
    stock_files,
    training,
    weight_files,
)
from keras_policy_ext.conversion.weight_files import PathLike
from keras_policy_ext.layers import stored_files
from keras_policy_ext.layers.class_swap import enter_float8
from keras_policy_ext.layers.mixin import Float8Mixin
from keras_policy_ext.mixed_precision import public_classes
from keras_policy_ext.policies import Float8DTypePolicy
from keras_policy_ext.policies.of_layers import source_policy_of
from keras_policy_ext.recipes import FrozenKernels
from keras_policy_ext.stored_kernels import StoredKernel

_ASSETS = "assets"


def has_frozen_layers(path: PathLike) -> bool:
    """Whether layers of a file are frozen; False if it cannot be read."""
    return bool(weight_files.count(path, _is_frozen))


def load_model(
    path: PathLike,
    custom_objects: dict[str, object] | None,
    compile: bool,
    safe_mode: bool,
) -> keras.Model:
    """`conversion.load_model` of a file with frozen layers."""
    config = json.loads(stock_files.config_in(path))
    compiled = config.pop("compile_config", None)
    with lost_float8.silent(), public_classes.for_private_names():
        with deferred_values.without_values():
            model = saving_hooks.model_of(config, custom_objects, safe_mode)
        with files.weights_of(path) as weights:
            make_as_saved(model, weights)
            if compile and compiled:
                model.compile_from_config(compiled)
            files.load(model, weights)
        _load_assets(model, path)
    return model


def make_as_saved(model: keras.Layer, weights: PathLike) -> None:
    """Freeze a model that was made without values, and give it the others."""
    kernels = {
        id(kernel)
        for candidate in freezing.freezable(model)[0]
        for kernel in candidate.kernels
    }
    deferred_values.give_values(
        v for v in model.variables if id(v) not in kernels
    )
    freeze_as_saved(model, weights)
    deferred_values.give_values(model.variables)
    built_layers.track_again(reversed(walking.layers_within(model)))


def freeze_as_saved(model: keras.Layer, weights: PathLike) -> None:
    """Freeze the layers that were so when the weights were saved.

    Their kernels are zeros then, for the weights to be loaded.

    Raises:
        ValueError: If the file is damaged, or a layer can't be frozen.
    """
    recipes = _recipes_in(model, weights)
    if not recipes:
        return
    with training.continued(model), training.replicas(model):
        for layer, recipe in recipes:
            source = source_policy_of(layer).name
            enter_float8(layer, Float8DTypePolicy(source, recipe=recipe))
        for layer in candidates.survey(model).composites:
            composites.enter_float8_with_children(layer)
        composites.declare_policies(model)


@contextlib.contextmanager
def dequantized(path: PathLike) -> Iterator[PathLike]:
    """A file of weights, as that of the model that `thaw` gives.

    Yields:
        `path`, or the path of a copy, where layers in it are frozen.
    """
    if not has_frozen_layers(path):
        yield path
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        files.weights_of(path) as weights,
    ):
        copy = pathlib.Path(folder) / weight_files.WEIGHTS
        shutil.copyfile(weights, copy)
        with h5py.File(copy, "a") as file:
            for group in weight_files.groups(file):
                if _is_frozen(group):
                    _dequantize(group)
        yield copy


def _is_frozen(group: h5py.Group) -> bool:
    return stored_files.STORED in group


def _dequantize(group: h5py.Group) -> None:
    """Write float weights as a stock layer has them: numbered, merged."""
    found = stored_files.stored_kernels_in(group, group.name)
    lora = stored_files.header_in(group, group.name)["lora"]
    values: list[Any] = []
    rest: list[Any] = []
    adapters: list[Any] = []
    for name, value in found.items():
        if isinstance(value, StoredKernel):
            values.append(value.dequantized())
        else:
            kept = adapters if name.startswith("lora_") else rest
            kept.append(value)
    if lora:
        a, b = adapters
        values[0] = values[0] + (lora["alpha"] / lora["rank"]) * (a @ b)
    for key in list(group):
        del group[key]
    for number, value in enumerate([*values, *rest]):
        group[str(number)] = value


def _recipes_in(
    model: keras.Layer, weights: PathLike
) -> list[tuple[Any, FrozenKernels]]:
    """The layers that are frozen in a file and not yet here, and how.

    Keras's own loader, which knows where in the file a layer is, is asked;
    meanwhile no layer loads.
    """
    found: dict[int, FrozenKernels] = {}
    layers = walking.layers_within(model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(files.without_skip_warnings())
        for layer in layers:
            stack.enter_context(_noting(layer, found))
        files.load(model, weights)
    return [(x, found[id(x)]) for x in layers if id(x) in found]


@contextlib.contextmanager
def _noting(layer: Any, found: dict[int, FrozenKernels]) -> Iterator[None]:
    """Have a layer note how it was frozen, in place of loading."""

    def note(store: Any) -> None:
        if stored_files.STORED not in store:
            return
        header = stored_files.header_in(store, layer.path)
        recipe = stored_files.recipe_of(header, layer.path)
        if not (isinstance(layer, Float8Mixin) and layer.is_frozen):
            found[id(layer)] = recipe

    vars(layer)["load_own_variables"] = note
    try:
        yield
    finally:
        del vars(layer)["load_own_variables"]


def _load_assets(model: keras.Model, path: PathLike) -> None:
    """Load vocabularies and the like, where a saved model has them."""
    place = pathlib.Path(str(path))
    if place.is_dir():
        if (place / _ASSETS).is_dir():
            saving_hooks.load_assets(model, place / _ASSETS)
        return
    with zipfile.ZipFile(place) as archive:
        names = [x for x in archive.namelist() if x.startswith(f"{_ASSETS}/")]
        if not names:
            return
        with tempfile.TemporaryDirectory() as folder:
            archive.extractall(folder, names)
            saving_hooks.load_assets(model, pathlib.Path(folder) / _ASSETS)
