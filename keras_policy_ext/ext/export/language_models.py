"""Language models: their parts, checks, and the output path."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import keras

from keras_policy_ext.ext.export import _keras as hub

PathLike = str | os.PathLike[str]

_REPLACED = "replaced"


@contextlib.contextmanager
def whole(
    path: PathLike, *, folder: bool, overwrite: bool
) -> Iterator[pathlib.Path]:
    """In the block, write to the yielded path; it is then moved to `path`.

    It is beside `path`, on the same disk. It is removed after an error. If the
    process is killed, it remains, under a name that begins with a dot and ends
    with `.partial`. Anything at `path` is kept until the move.

    Args:
        path: The final path of the output.
        folder: Whether it is a folder.
        overwrite: Whether to replace something at `path`.

    Yields:
        The path to write to: an empty folder, or a file that does not exist.

    Raises:
        FileExistsError: If something is at `path` and may not be replaced.
        FileNotFoundError: If the folder for it does not exist.
    """
    target = pathlib.Path(path).absolute()
    check(target, folder=folder, overwrite=overwrite)
    beside = tempfile.mkdtemp(
        prefix=f".{target.name}.", suffix=".partial", dir=target.parent
    )
    staging = pathlib.Path(beside)
    try:
        made = staging / target.name
        if folder:
            made.mkdir()
        yield made
        # What came there meanwhile is not replaced either.
        check(target, folder=folder, overwrite=overwrite)
        _move(made, target, staging / _REPLACED)
    finally:
        # What was replaced is kept, if nothing has taken its place.
        if os.path.lexists(target) or not (staging / _REPLACED).exists():
            shutil.rmtree(staging, ignore_errors=True)


def check(target: pathlib.Path, *, folder: bool, overwrite: bool) -> None:
    """Raise if an export must not, or cannot, be written at `target`."""
    if not target.parent.is_dir():
        raise FileNotFoundError(
            "There is no folder to write to. Received: "
            f"{str(target)!r}. Allowed: a path in a folder that exists. Make "
            "the folder first."
        )
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise FileExistsError(
            "There is something at this path already. Received: "
            f"{str(target)!r}. Allowed: a path that is free. Pass another "
            "one, or overwrite=True."
        )
    if (folder and not _is_export(target)) or (not folder and target.is_dir()):
        raise FileExistsError(
            "This path holds something other than an earlier export; it is "
            f"not replaced. Received: {str(target)!r}. Allowed: "
            + (
                "a folder with a config.json and no folders"
                if folder
                else "a file"
            )
            + ". Pass another path."
        )


def _is_export(target: pathlib.Path) -> bool:
    """Return True if a folder is empty, or holds a model without subfolders."""
    if not target.is_dir() or target.is_symlink():
        return False
    within = list(target.iterdir())
    flat = not any(each.is_dir() for each in within)
    return not within or (flat and (target / "config.json").is_file())


def _move(
    made: pathlib.Path, target: pathlib.Path, aside: pathlib.Path
) -> None:
    """Move a written file or folder to `target`; an old folder is replaced."""
    if not (made.is_dir() and target.exists()):
        os.replace(made, target)
        return
    os.replace(target, aside)
    try:
        os.replace(made, target)
    except OSError:
        os.replace(aside, target)
        raise


_TEXT = {"vision_encoder": None, "audio_encoder": None}

_SOFT_CAPS = {"attention_logit_soft_cap": None, "final_logit_soft_cap": None}

# What a model of a family has to be, by the attributes of its backbone
# (keras_hub 0.32, transformers 5.23). Of Gemma's keys and values the map has
# those of the first head.
_FIXED: dict[str, dict[str, Any]] = {
    "GemmaBackbone": {
        "num_key_value_heads": 1,
        "query_head_dim_normalize": True,
        "use_post_attention_norm": False,
        "use_post_ffw_norm": False,
        "use_sliding_window_attention": False,
        **_SOFT_CAPS,
    },
    "Gemma3Backbone": {
        "is_embedding_model": False,
        "use_post_attention_norm": True,
        "use_post_ffw_norm": True,
        "use_query_key_norm": True,
        **_SOFT_CAPS,
    },
    "QwenBackbone": {"use_sliding_window_attention": False},
}


def parts(model: keras.Layer, format: str) -> tuple[keras.Layer, Any]:
    """Return (backbone, tokenizer or None) of a KerasHub language model.

    Raises:
        TypeError: If it is no model of KerasHub, or another task.
        ValueError: If KerasHub cannot write it correctly.
    """
    if not hub.is_hub_model(model):
        raise _not_one(model, format, type(model).__name__)
    backbone = getattr(model, "backbone", model)
    if backbone is not model and not hub.is_causal_language_model(model):
        raise _not_one(
            model, format, f"{type(model).__name__}, whose head has no place"
        )
    family = hub.family(backbone)
    if family is None:
        raise _not_one(model, format, type(backbone).__name__)
    _check_can_be_written(backbone, family, format)
    preprocessor = getattr(model, "preprocessor", None)
    return backbone, getattr(preprocessor, "tokenizer", None)


def _check_can_be_written(backbone: Any, family: str, format: str) -> None:
    """Raise if transformers has no model that computes as this backbone."""
    for name, value in {**_TEXT, **_FIXED.get(family, {})}.items():
        has = getattr(backbone, name, value)
        if has != value:
            raise ValueError(
                f"A {family} with {name}={has!r} cannot be written as "
                f"{format!r}: {_why_not(name)}. Received: {name}={has!r}. "
                f"Allowed: {value!r}. Write it as format='safetensors', "
                "which takes any model."
            )
    types = getattr(backbone, "layer_types", None)
    if family == "Gemma4Backbone" and types and types[-1] != "full_attention":
        raise ValueError(
            "The last layer of this model does not attend to all tokens, but "
            "that of Gemma4 in transformers does. Received: "
            f"layer_types={types}. Allowed: 'full_attention' at the end. Write "
            "it as format='safetensors'."
        )


def _why_not(name: str) -> str:
    """Return why a backbone's setting cannot be written, as text."""
    if name == "num_key_value_heads":
        return "KerasHub writes only the first head of keys and values"
    if name in _TEXT:
        return "only models of text can be written"
    return "transformers has no model of this family with that value"


def _not_one(model: keras.Layer, format: str, received: str) -> Exception:
    known = (
        ", ".join(hub.families())
        if hub.is_hub_model(model)
        else ("those of KerasHub")
    )
    return TypeError(
        f"This model cannot be written as {format!r}. Received: {received}. "
        f"Allowed: a causal language model, or the backbone of one: {known}. "
        "Write it as format='safetensors', which takes any model, or 'onnx', "
        "which takes Functional and Sequential ones."
    )
