"""The command `keras-policy-ext migrate`."""

from __future__ import annotations

import dataclasses
import pathlib
import warnings

import keras

from keras_policy_ext.ext.migration.loading import load_legacy_model
from keras_policy_ext.ext.output_files import check_output, whole


@dataclasses.dataclass(frozen=True)
class Migration:
    """A loaded tf_keras model, and the path where to save it for Keras 3."""

    model: keras.Model
    source: pathlib.Path
    output: pathlib.Path
    notes: list[str]
    """The warnings of loading."""

    def run(self) -> None:
        """Save the model as a Keras 3 file, and print what was migrated."""
        with whole(self.output) as path:
            keras.saving.save_model(self.model, path)
        print(f"{self.source} -> {self.output}")
        print(
            f"{type(self.model).__name__} {self.model.name!r}: "
            f"{len(self.model.layers)} layers, {len(self.model.weights)} "
            f"weights, {_policies(self.model)}"
        )
        print(_compiled(self.model))
        for note in self.notes:
            print(f"note: {note}")


def prepare(
    source: str, output: str, *, on_loss_scale: str, force: bool
) -> Migration:
    """Load a tf_keras file as a model that can be saved at `output`.

    Raises:
        ValueError: If the source cannot be loaded or the output not written.
    """
    read, written = pathlib.Path(source), pathlib.Path(output)
    check_output(read, written, force)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            model = load_legacy_model(read, on_loss_scale)
        except (OSError, TypeError) as error:
            raise ValueError(f"cannot load {source}: {error}") from error
        except ValueError as error:  # Keras has some of many lines
            raise ValueError(" ".join(str(error).split())) from error
    notes = [str(w.message) for w in caught if w.category is UserWarning]
    return Migration(model, read, written, list(dict.fromkeys(notes)))


def _policies(model: keras.Model) -> str:
    names = {x.dtype_policy.name for x in model.layers if x.weights}
    return ", ".join(sorted(names)) or "no layer with a policy"


def _compiled(model: keras.Model) -> str:
    if not model.compiled:
        return "not compiled"
    optimizer = model.optimizer
    inner = getattr(optimizer, "inner_optimizer", None)
    name = type(optimizer).__name__
    if inner is not None:
        name = f"{name} of {type(inner).__name__}"
    return f"compiled with {name}, {int(optimizer.iterations)} iterations"
