"""Trace the call of a model without data: on guesses of its arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras

from keras_policy_ext.conversion import traced_calls
from keras_policy_ext.conversion.traced_calls import Call, Tracer

SAMPLES = 2
"""The size of the batch that is traced."""


class ModelCall(NamedTuple):
    """A model's call, traced with shapes only.

    Attributes:
        model: The model.
        arguments: The arguments that it has accepted.
        calls: The call on each number of samples.
    """

    model: keras.Layer
    arguments: Arguments
    calls: list[Call]

    @property
    def chooses(self) -> bool:
        """True if the call looks for the largest entries of a tensor."""
        return self.calls[0].chooses

    def followed(self) -> Call | None:
        """Return the call with what reaches which choice; None if unknown."""
        with contextlib.suppress(Exception):  # The user's code may raise any.
            arguments, tracer = self.arguments.of(SAMPLES), Tracer(follows=True)
            (call,) = traced_calls.trace(self.model, [arguments], tracer)
            return call
        return None


def trace(
    model: keras.Layer,
    samples: Sequence[int] = (SAMPLES,),
    tracer: Callable[[], Tracer] = Tracer,
) -> ModelCall | None:
    """Trace a model's call; None if it accepts none of the guesses.

    Args:
        model: A built model.
        samples: The sizes of the batches.
        tracer: Makes what traces the call on batches of all sizes.
    """
    for arguments in _guesses(model):
        with contextlib.suppress(Exception):  # The model refuses the guess.
            batches = map(arguments.of, samples)
            calls = traced_calls.trace(model, batches, tracer())
            return ModelCall(model, arguments, calls)
    return None


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Arguments with which a model may be called, as symbolic tensors.

    Attributes:
        args: A structure with a `keras.KerasTensor` for each tensor.
        kwargs: The keyword arguments, in the same form.
        dtype: The dtype of all tensors; None for that of each tensor.
        filler: The size that replaces unknown sizes.
    """

    args: Any
    kwargs: Any
    dtype: str | None
    filler: int

    def of(self, samples: int) -> tuple[Any, Any]:
        """Return symbolic arguments for a batch of this many samples."""

        def filled(x: Any) -> Any:
            if not isinstance(x, keras.KerasTensor):
                return x
            sizes = [self.filler if n is None else n for n in x.shape[1:]]
            shape = (samples, *sizes) if x.shape else ()
            return keras.KerasTensor(shape, self.dtype or x.dtype)

        return keras.tree.map_structure(filled, (self.args, self.kwargs))

    @property
    def are_sizes_known(self) -> bool:
        """True if all sizes except the batch are known."""
        arguments = keras.tree.flatten((self.args, self.kwargs))
        return not any(
            None in x.shape[1:]
            for x in arguments
            if isinstance(x, keras.KerasTensor)
        )


# Tried in place of a size that is not known. A model may refuse small ones:
# its layers shorten images by a factor of 32, and audio by hundreds.
_FILLERS = (1, 32, 1024)


def _guesses(model: keras.Layer) -> Iterator[Arguments]:
    """Yield guesses of a model's call arguments, the likeliest first."""
    if getattr(model, "inputs", None):
        structure = model.inputs
        if isinstance(model, keras.Sequential):
            structure = model.inputs[0]
        elif hasattr(model, "input"):
            structure = model.input
        args: Any = (structure,)
        kwargs: Any = {}
        dtypes: tuple[str | None, ...] = (None,)
    else:
        found = _arguments_of_build(model)
        if found is None:
            return
        args, kwargs = found
        # Shapes are recorded without dtypes; int32 is that of indices.
        dtypes = (None, "int32")
    if "training" in inspect.signature(model.call).parameters:
        kwargs = {**kwargs, "training": False}
    for filler in _FILLERS:
        for dtype in dtypes:
            inputs = Arguments(args, kwargs, dtype, filler)
            yield inputs
        if inputs.are_sizes_known:  # No filler makes a difference.
            return


def _arguments_of_build(layer: keras.Layer) -> tuple[Any, Any] | None:
    """Return call arguments of the shapes on which a layer was built."""
    config = keras.Layer.get_build_config(layer) or {}
    shapes = config.get("shapes_dict")
    if shapes is None:  # Of one input.
        shape = config.get("input_shape")
        return None if shape is None else ((_symbolic(layer, shape),), {})
    named = {
        name.removesuffix("_shape"): _symbolic(layer, shape)
        for name, shape in shapes.items()
        # The path is added by `BuiltUnderSavedPath`.
        if shape is not None and name != "path"
    }
    if list(named) == ["input"]:  # Its argument may have another name.
        return (named["input"],), {}
    return (), named


def _symbolic(layer: keras.Layer, shapes: Any) -> Any:
    """Replace each shape by a symbolic tensor; TypeError for anything else."""
    if not isinstance(shapes, (dict, list, tuple)):
        raise TypeError(f"{shapes!r} is no shape")
    if isinstance(shapes, dict):
        return {name: _symbolic(layer, each) for name, each in shapes.items()}
    if all(size is None or isinstance(size, int) for size in shapes):
        return keras.KerasTensor(tuple(shapes), layer.compute_dtype)
    return [_symbolic(layer, each) for each in shapes]
