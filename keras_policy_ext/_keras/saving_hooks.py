"""Functions that Keras calls when it saves, loads, exports or summarizes."""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import json
from collections.abc import Callable, Iterable
from typing import Any

import keras

from keras_policy_ext import _user_code
from keras_policy_ext._keras import versions
from keras_policy_ext._keras.around import put_around

try:
    from keras.src.utils import summary_utils as _summary_utils
except ImportError:  # Keras has moved it: totals then count every weight.
    _summary_utils = None

_printing = contextvars.ContextVar("a summary is printed", default=False)


def leave_out_of_totals(is_left_out: Callable[[Any], bool]) -> None:
    """Have the totals of `model.summary()` leave out some variables.

    They are sums over all weights of the model, by two functions of
    `summary_utils` (keras 3.0 to 3.15), which are put into others here, and
    do what they did outside of a summary. Where they are gone, all weights
    are counted. Expires when Keras adds up the rows, or has a mark for
    variables that are no parameters.

    Args:
        is_left_out: Of a variable.
    """

    def print_summary(stock: Any, *args: Any, **kwargs: Any) -> Any:
        token = _printing.set(True)
        try:
            return stock(*args, **kwargs)
        finally:
            _printing.reset(token)

    def counted(stock: Any, weights: Iterable[Any]) -> Any:
        if _printing.get():
            weights = [v for v in weights if not is_left_out(v)]
        return stock(weights)

    put_around(_summary_utils, "print_summary", print_summary)
    put_around(_summary_utils, "count_params", counted)
    put_around(_summary_utils, "weight_memory_size", counted)


try:
    from keras.src.saving import saving_lib as _saving_lib
except ImportError:  # Keras has moved it: see `after_loading`.
    _saving_lib = None


def after_loading(tell: Callable[[keras.Model, Any], None]) -> None:
    """Have each model that Keras's loader returns shown to a function.

    `keras.saving.load_model` gives `.keras` files and folders to one function
    of the module `saving_lib` (keras 3.0 to 3.15), which is put into another
    one here; there is no public way to see a file that was loaded. What is
    loaded stays as it is. Where that function is gone, a warning says so.
    Expires when Keras warns of groups in a file that no layer has read.

    Args:
        tell: Of the model and the path that it was loaded from.
    """

    @_user_code.once
    def load_model(stock: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        model = stock(path, *args, **kwargs)
        tell(model, path)
        return model

    if not put_around(_saving_lib, "load_model", load_model):
        _warn_of_files("load_model")


def before_loading(load: Callable[..., keras.Model | None]) -> None:
    """Have a function asked before Keras's loader makes a model.

    Files, folders, and the bytes that `copy.deepcopy` and `pickle` make of a
    model are read by two functions of `saving_lib` (keras 3.0 to 3.15), which
    are put into others here. Where they are gone, it is not asked, and a
    warning says so. Expires with a public way to load a kind of file.

    Args:
        load: Of a folder, an open file or bytes, `custom_objects`, `compile`
            and `safe_mode`. It returns the model, or None to leave it to
            Keras.
    """

    def loaded(stock: Any, *args: Any, **kwargs: Any) -> Any:
        model = load(*args, **kwargs)
        return stock(*args, **kwargs) if model is None else model

    for name in ("_load_model_from_fileobj", "_load_model_from_dir"):
        if not put_around(_saving_lib, name, loaded):
            _warn_of_files(name)


def _warn_of_files(name: str) -> None:
    home = "keras.src.saving.saving_lib"
    versions.warn_of_missing(
        home if _saving_lib is None else f"{home}.{name}",
        "`keras.saving.load_model` may load float8 layers as plain ones, "
        "without a word. Load with `keras_policy_ext.load_model`.",
    )


def add_to_metadata(describe: Callable[[keras.Model], dict[str, Any]]) -> None:
    """Have a function asked what else the metadata of a model's file says.

    Keras makes the JSON of `config.json` and `metadata.json` in one function
    of `saving_lib` (`_serialize_model_as_json`, keras 3.0 to 3.15), and its
    loader does not read the second. Where that is gone, or returns something
    else, files are as Keras writes them. Expires when the config of a model
    has the policy of the model itself, or can have more.

    Args:
        describe: Of the model; returns entries, which are JSON types.
    """

    def serialized(
        stock: Any, model: keras.Layer, *args: Any, **kwargs: Any
    ) -> Any:
        written = stock(model, *args, **kwargs)
        with contextlib.suppress(TypeError, ValueError):
            config, metadata = written
            entries = {**json.loads(metadata), **describe(model)}
            return config, json.dumps(entries)
        return written

    put_around(_saving_lib, "_serialize_model_as_json", serialized)


def model_of(
    config: dict[str, Any], custom_objects: Any, safe_mode: bool
) -> keras.Model:
    """The model of a config, as Keras's loader makes it, without weights.

    What layers share is made once inside of a scope that is not public
    (`ObjectSharingScope`, keras 3.0 to 3.15); where that is gone, each has
    its own. Expires when Keras can load a model and leave its weights.
    """
    scope: Any = contextlib.nullcontext
    with contextlib.suppress(ImportError):
        from keras.src.saving import serialization_lib

        scope = getattr(serialization_lib, "ObjectSharingScope", scope)
    with scope():
        return keras.saving.deserialize_keras_object(
            config, custom_objects, safe_mode=safe_mode
        )


def load_assets(model: keras.Model, folder: Any) -> None:
    """Let the layers of a model read their assets, such as vocabularies.

    Keras does so while it loads weights, by `_load_state` of the module
    `saving_lib` (keras 3.0 to 3.15). It takes None for no weights, but not in
    3.13, and in all versions a store that is false. Expires with a public
    function that reads assets.

    Args:
        model: The model.
        folder: That of the assets.

    Raises:
        ValueError: If those of a layer do not load.
    """
    from keras.src.saving import saving_lib

    class NoWeights(saving_lib.H5IOStore):
        """A store of weights without a file."""

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
    """Have a function asked before `Model.export` writes anything.

    All formats but that of PyTorch are made of the same traced call, so that
    a layer cannot tell for which it is traced; there is no public way to be
    asked. So the public method is put into another one (keras 3.12 to 3.15).
    Expires when a layer can say in which formats it can be written.

    Args:
        check: Of the model and the name of the format; raises to refuse.
    """
    signature = inspect.signature(keras.Model.export)

    def checked(stock: Any, *args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(TypeError):  # Keras says what is wrong.
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            format = given.arguments.get("format")
            check(given.arguments["self"], str(format))
        return stock(*args, **kwargs)

    put_around(keras.Model, "export", checked)


def serialize_as(cls: type, original: type) -> None:
    """Let files name a class as they name another.

    For a class made while the program runs: a file must name the one that a
    program which loads it can import. Keras has the names in a table
    (keras 3.0 to 3.15); where that is gone, the class is found by its module
    and name, which are those of the original.
    """
    try:
        from keras.src.saving import object_registration
    except ImportError:
        return
    names = getattr(object_registration, "GLOBAL_CUSTOM_NAMES", None)
    if isinstance(names, dict) and original in names:
        names[cls] = names[original]


def is_default(method: object) -> bool:
    """Return True if a method is marked as one that Keras's base classes have.

    `_is_default`, keras 3.0 to 3.15. A marked `get_config` is answered by
    the arguments of the constructor. Where the mark is gone, False.
    """
    return bool(getattr(method, "_is_default", False))


def amend_compile_config(model: keras.Model, changes: dict[str, Any]) -> None:
    """Let a compiled model be saved as compiled with other arguments.

    `get_compile_config` returns what `compile` was given, except for
    `auto_scale_loss` (`_compile_config`, keras 3.0 to 3.15): a model that
    was compiled with False would be wrapped when it is loaded. Where it is
    gone, nothing: files then say what Keras says. Expires when Keras saves
    the argument, and public classes on torch.
    """
    kept = getattr(model, "_compile_config", None)
    arguments = getattr(kept, "config", None)
    if isinstance(arguments, dict):
        arguments.update(changes)
