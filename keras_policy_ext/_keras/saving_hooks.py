"""Hooks where Keras saves, loads, exports or summarizes models."""

from __future__ import annotations

import contextvars
import inspect
import json
from collections.abc import Callable, Iterable
from typing import Any

import keras

from keras_policy_ext._keras import Stock, put_around, versions

try:
    from keras.src.utils import summary_utils as _summary_utils
except ImportError:  # Keras has moved it: totals then count every weight.
    _summary_utils = None

_printing = contextvars.ContextVar("a summary is printed", default=False)


def leave_out_of_totals(is_left_out: Callable[[Any], bool]) -> None:
    """Leave variables out of the totals that `model.summary()` prints."""

    # The totals are sums over all weights of the model, computed by two
    # functions of `summary_utils` (keras 3.0 to 3.15). These are wrapped here,
    # and are unchanged outside of a summary.
    def print_summary(stock: Stock, *args: Any, **kwargs: Any) -> Any:
        """Print as Keras does, and note that it prints."""
        token = _printing.set(True)
        try:
            return stock(*args, **kwargs)
        finally:
            _printing.reset(token)

    def count_unless_left_out(stock: Stock, weights: Iterable[Any]) -> Any:
        """Count weights; fewer while a summary is printed."""
        if _printing.get():
            weights = [v for v in weights if not is_left_out(v)]
        return stock(weights)

    put_around(_summary_utils, "print_summary", print_summary)
    put_around(_summary_utils, "count_params", count_unless_left_out)
    put_around(_summary_utils, "weight_memory_size", count_unless_left_out)


try:
    from keras.src.saving import saving_lib as _saving_lib
except ImportError:  # Keras has moved it: see `around_loading`.
    _saving_lib = None


def around_loading(load: Callable[..., keras.Model]) -> None:
    """Make Keras's loader call `load`, with what Keras would do as `stock`.

    After that it gets a folder, an open file or bytes, `custom_objects`,
    `compile` and `safe_mode`. Files, folders, and the bytes that
    `copy.deepcopy` and `pickle` make of a model are read by two functions of
    `saving_lib` (keras 3.0 to 3.15), which are wrapped here. If they are
    missing, a warning says so.
    """
    for name in ("_load_model_from_fileobj", "_load_model_from_dir"):
        if not put_around(_saving_lib, name, load):
            _warn_of_files(name)


def _warn_of_files(name: str) -> None:
    """Warn that Keras's loader has no function of this name to wrap."""
    home = "keras.src.saving.saving_lib"
    versions.warn_of_missing(
        home if _saving_lib is None else f"{home}.{name}",
        "`keras.saving.load_model` may load float8 layers as plain ones, "
        "without a word. Load with `keras_policy_ext.load_model`.",
    )


def add_to_metadata(describe: Callable[[keras.Model], dict[str, Any]]) -> None:
    """Make Keras add the JSON entries of `describe(model)` to metadata.

    Keras makes the JSON of `config.json` and `metadata.json` in one function
    of `saving_lib` (`_serialize_model_as_json`, keras 3.0 to 3.15), and its
    loader does not read the second. If the function is missing, or returns
    something else, files are as Keras writes them.
    """

    def serialize_with_entries(
        stock: Stock, model: keras.Layer, *args: Any, **kwargs: Any
    ) -> Any:
        """Return Keras's JSON texts with the entries added."""
        written = stock(model, *args, **kwargs)
        try:
            config, metadata = written
            entries = dict(json.loads(metadata))
        except (TypeError, ValueError):
            return written
        return config, json.dumps({**entries, **describe(model)})

    put_around(_saving_lib, "_serialize_model_as_json", serialize_with_entries)


def model_of(config: bytes, custom_objects: Any, safe_mode: bool) -> Any:
    """Create the model that a JSON config describes, without its weights."""
    # As Keras's loader does, in `saving_lib` (keras 3.12 to 3.15); it is not
    # compiled.
    make = getattr(_saving_lib, "_model_from_config", None)
    if make is None:
        home = "keras.src.saving.saving_lib._model_from_config"
        raise versions.missing(home, "loading a frozen model")
    return make(config, custom_objects, False, safe_mode)


def load_assets(model: keras.Model, folder: Any) -> None:
    """Load the assets of a model's layers, such as vocabularies.

    Keras does so while it loads weights, in `_load_state` of the module
    `saving_lib` (keras 3.0 to 3.15). That function takes None for no weights,
    except in 3.13, and in all versions a store that is falsy.

    Raises:
        ValueError: If the assets of a layer do not load.
    """
    from keras.src.saving import saving_lib

    class NoWeights(saving_lib.H5IOStore):
        """An empty store of weights, which has no file."""

        def __init__(self) -> None:
            pass

        def __bool__(self) -> bool:
            return False

        def has_path(self, path: str) -> bool:
            return False

    failed: set[int] = set()
    errors: dict[int, Any] = {}
    saving_lib._load_state(
        model,
        weights_store=NoWeights(),
        assets_store=saving_lib.DiskIOStore(str(folder), mode="r"),
        inner_path="",
        visited_saveables=set(),
        # A layer that is found in two places has assets in one of them.
        failed_saveables=failed,
        error_msgs=errors,
    )
    for layer, error in (errors[each] for each in failed):
        raise ValueError(
            f"The assets of {layer.name!r} did not load. Cause: {error}"
        ) from error


def before_export(check: Callable[[keras.Model, str], None]) -> None:
    """Make `Model.export` call `check` with the model and the format's name.

    It raises to refuse. All formats except PyTorch's are made from the same
    traced call, so a layer cannot tell for which one it is traced (keras 3.12
    to 3.15). Expires when a layer can say in which formats it can be written.
    """
    signature = inspect.signature(keras.Model.export)

    def check_and_export(stock: Stock, *args: Any, **kwargs: Any) -> Any:
        """Check the model and format, then export as Keras does."""
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError:  # Keras says what is wrong.
            return stock(*args, **kwargs)
        given.apply_defaults()
        check(given.arguments["self"], str(given.arguments.get("format")))
        token = _exporting.set(True)
        try:
            return stock(*args, **kwargs)
        finally:
            _exporting.reset(token)

    put_around(keras.Model, "export", check_and_export)


_exporting = contextvars.ContextVar("exporting", default=False)


def is_exporting() -> bool:
    """Return True inside a call of `Model.export`."""
    return _exporting.get()


def serialize_as(cls: type, original: type) -> None:
    """Save layers of class `cls` under the name of class `original`."""
    # A file must name a class that can be imported, and `cls` is created at
    # run time. Keras has the names in a table (keras 3.0 to 3.15). Without it,
    # the class is found by module and name, which are those of the original.
    try:
        from keras.src.saving import object_registration
    except ImportError:
        return
    names = getattr(object_registration, "GLOBAL_CUSTOM_NAMES", None)
    if isinstance(names, dict) and original in names:
        names[cls] = names[original]
