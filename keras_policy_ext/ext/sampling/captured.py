"""The operands of all float8 contractions of a model, from one batch."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import keras
import numpy as np
from keras import ops

from keras_policy_ext import backends
from keras_policy_ext._keras.walking import layers_within
from keras_policy_ext._types import Tensor
from keras_policy_ext.contractions.kinds import EinsumOfBank, with_bank
from keras_policy_ext.contractions.plan import Plan
from keras_policy_ext.contractions.weighted_sum import fold
from keras_policy_ext.conversion.candidates import path_of
from keras_policy_ext.ext.sampling.figures import Figures
from keras_policy_ext.layers.controller import recipes_of_activations
from keras_policy_ext.layers.state import Float8State
from keras_policy_ext.layers.transaction import undone
from keras_policy_ext.policies.of_layers import layers_in_float8
from keras_policy_ext.recipes import Recipe
from keras_policy_ext.seams import WEIGHTED_SUM, ContractionCall, on_contraction

Loss = Callable[[Any, Any], Tensor]


@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch of a model: inputs, targets and weights of examples.

    Attributes:
        x: The inputs, as the model is called on.
        y: The targets; None for none.
        sample_weight: The weights of the examples; None for none.
    """

    x: Any
    y: Any = None
    sample_weight: Any = None

    @classmethod
    def read(cls, data: Any) -> Batch:
        """Return the first batch of `data`.

        Args:
            data: Arrays: `x`, `(x, y)` or `(x, y, sample_weight)`; or what has
                such batches, such as a `tf.data.Dataset` or a list of tuples.

        Raises:
            TypeError: If it is something else.
            ValueError: If no batch is left.
        """
        if isinstance(data, list) and data and isinstance(data[0], tuple):
            data = data[0]  # Several inputs are arrays, and batches tuples.
        elif not isinstance(data, (tuple, list, dict)) and not _is_array(data):
            if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
                data = data[0]  # a keras.utils.PyDataset
            else:
                data = _first(data)
            data = as_parts(data)
        parts = data if isinstance(data, tuple) else (data,)
        if not 1 <= len(parts) <= 3:
            raise TypeError(
                f"`data` is not a batch. Received: {len(parts)} parts. "
                f"{_ALLOWED}"
            )
        return cls(*keras.tree.map_structure(as_tensor, parts))


def as_parts(batch: Any) -> Any:
    """Return a batch of a data loader, which may be a list, as a tuple."""
    # Keras's `fit` reads such a list so. Elsewhere a list is several inputs.
    return tuple(batch) if isinstance(batch, list) else batch


_ALLOWED = (
    "Allowed: arrays x, (x, y) or (x, y, sample_weight), or what has such "
    "batches. Several inputs are a list or a dict in the place of x."
)


class NoBatchLeft(ValueError):
    """Raised for an iterator of batches that was read to its end."""


def _first(data: Any) -> Any:
    if not hasattr(data, "__iter__"):
        raise TypeError(
            f"`data` is not a batch. Received: {data!r} (of type "
            f"{type(data).__name__}). {_ALLOWED}"
        )
    for batch in data:
        return batch
    raise NoBatchLeft(
        f"`data` has no batch left. Received: {data!r} (of type "
        f"{type(data).__name__}), which is empty or was read to its end. "
        "Allowed: an iterator with a batch for each sample. Pass a batch, or "
        "itertools.cycle of some."
    )


def _is_array(x: Any) -> bool:
    return isinstance(x, np.ndarray) or bool(ops.is_tensor(x))


def as_tensor(x: Any) -> Any:
    """Return an array or a number as a tensor, as `fit` would; None as None."""
    if x is None:
        return None
    if not hasattr(x, "shape") and not isinstance(x, (bool, int, float)):
        raise TypeError(
            f"`data` is not arrays. Received: {x!r} (of type "
            f"{type(x).__name__}). {_ALLOWED}"
        )
    # Tensors of another framework too, as a data loader may return.
    x = x if ops.is_tensor(x) else np.asarray(x)
    if isinstance(x, np.ndarray) and x.dtype == np.float64:
        x = x.astype(keras.config.floatx())  # as Keras converts it
    return ops.convert_to_tensor(x)


@dataclasses.dataclass(frozen=True)
class Product:
    """A product of two activations: the first is called `inputs`.

    Attributes:
        name: `"scores"` or `"weighted sum"`.
    """

    name: str
    trainable: ClassVar[bool] = True


@dataclasses.dataclass
class Use:
    """A use of a kernel in a float8 contraction, with its operands.

    Attributes:
        layer: The layer.
        kernel: The weight that it contracts; a `Product` for two activations,
            of which the second is in the place of the kernel.
        plan: The `Plan`.
        inputs: The inputs, in the compute dtype.
        weights: The values of the kernel.
        state: The state matrix of the recipe, or nothing.
        outputs_grad: The gradient of the outputs; None if the loss does not
            depend on them.
    """

    layer: keras.Layer
    kernel: keras.Variable | Product
    plan: Plan
    inputs: Tensor
    weights: Tensor
    state: tuple[Tensor, ...]
    outputs_grad: Tensor | None = None

    def operand(self, name: str) -> Tensor | None:
        """Return one of the three operands by its name."""
        if name == "kernel":
            return self.weights
        return self.inputs if name == "inputs" else self.outputs_grad

    def recipe_of(self, recipe: Recipe) -> tuple[Recipe, float | None]:
        """Return how a recipe computes it, and a limit for `folded`."""
        if not isinstance(self.kernel, Product):
            return recipe, None
        scores, weighted_sum, limit = recipes_of_activations(recipe)
        is_sum = self.kernel.name == WEIGHTED_SUM
        return (weighted_sum, limit) if is_sum else (scores, None)

    def folded(self, name: str, limit: float | None) -> Tensor | None:
        """Return an operand; of a weighted sum, as `contractions.fold` does.

        Args:
            name: The name of the operand.
            limit: The largest value of the format of the values; None for
                operands that are not folded.
        """
        if limit is None or name == "outputs_grad":
            return self.operand(name)
        contraction: Any = self.plan.contraction
        weights, values = fold(
            contraction.equation,
            ops.cast(self.inputs, "float32"),
            ops.cast(self.weights, "float32"),
            limit,
        )
        return weights if name == "inputs" else values


@dataclasses.dataclass(frozen=True)
class Captured:
    """The uses of all float8 kernels of a model in one step.

    Attributes:
        uses: In the order in which they ran.
        unexamined: The paths of float8 layers without a use, and why.
        loss: The words for the loss whose gradients were taken.
        value: The value of the loss, as a float.
    """

    uses: tuple[Use, ...]
    unexamined: dict[str, str]
    loss: str
    value: float


def captured(model: keras.Layer, batch: Batch, loss: Loss | None) -> Captured:
    """Run a forward and a backward pass; return the operands of contractions.

    The model, its states, its random seeds and its optimizer stay unchanged.

    Args:
        model: A model or layer with float8 layers.
        batch: What it is called on.
        loss: Computes a scalar from the targets and the outputs. None for the
            loss that the model was compiled with, or if there is none for the
            sum of squares of the outputs.
    """
    kind = ""
    framework = backends.current
    listing = Listing(_with_constant_state, _is_trained, framework.is_traced)

    def run(mark: Any) -> tuple[Any, Any]:
        nonlocal kind
        listing.begin(mark)
        with _losses_collected(model):
            value, kind = _loss(model, batch, loss)
        listing.end()
        kept = [call.planned for call in listing.calls]
        return value, (value, [(x[1], x[2], *x.state) for x in kept])

    with _unchanged(model):
        for step_by_step in (False, True):
            with listing.listed():
                (value, kept), gradients = marked_gradients(run, step_by_step)
            if not listing.traced:
                break
    uses = tuple(_uses(listing.calls, kept, gradients))
    unexamined = _unexamined(model, uses, listing)
    return Captured(uses, unexamined, kind, _number(value))


def marked_gradients(
    run: Callable[[Callable[[Tensor], Tensor]], tuple[Tensor, Any]],
    step_by_step: bool,
) -> tuple[Any, list[Tensor | None]]:
    """Compute the gradients of a loss with respect to tensors inside it.

    No gradient is stored with a variable.

    Args:
        run: Given a function that marks a tensor and returns an equal one
            to go on with. Returns the loss, and nested tensors to keep.
            JAX calls it twice, and takes the gradients of the second call.
        step_by_step: Whether to run recurrent loops and the compiled
            functions of layers eagerly.

    Returns:
        What was kept, and a gradient for each marked tensor, in the order
        of marking; None if the loss does not depend on it. (JAX: zeros.)
    """
    name = f"{__package__}.{keras.backend.backend()}"
    return importlib.import_module(name).marked_gradients(run, step_by_step)


def _uses(
    calls: Iterable[ContractionCall],
    kept: Iterable[Sequence[Tensor]],
    gradients: Iterable[Tensor | None],
) -> Iterator[Use]:
    """Yield the uses of weights and products, with the values of a pass."""
    products: dict[tuple[int, str], Product] = {}
    for call, tensors, gradient in zip(calls, kept, gradients, strict=True):
        weight: Any = call.weight
        if weight is None:
            key = id(call.layer), call.name
            weight = products.setdefault(key, Product(call.name))
        inputs, weights, *state = tensors
        plan: Any = call.planned.plan
        operands = inputs, weights, tuple(state)
        yield Use(call.layer, weight, plan, *operands, gradient)


def loss_of(model: keras.Layer, batch: Batch, loss: Loss | None) -> float:
    """Return the loss of a forward pass, as `captured` computes it."""
    # The seeds are the same too: dropout drops the same values.
    with _unchanged(model), _losses_collected(model):
        return _number(_loss(model, batch, loss)[0])


def synchronize(model: Any) -> None:
    """Put the values that a trainer of JAX holds into a model's variables."""
    if keras.backend.backend() == "jax" and isinstance(model, keras.Model):
        model.jax_state_sync()


@contextlib.contextmanager
def calls_undone(model: keras.Layer) -> Iterator[list[keras.Layer]]:
    """On exit of the block, restore what calls of a model changed.

    These are the attributes of its layers, and the counters and plans of its
    float8 states. Values of variables are not restored.

    Yields:
        The layers in the model, without float8 states.
    """
    within = layers_within(model)
    states = [each for each in within if isinstance(each, Float8State)]
    layers = [each for each in within if not isinstance(each, Float8State)]
    plans = [state.last_call.plan for state in states]
    matrices = [matrix for state in states for matrix in state.matrices]
    uses = [matrix.uses for matrix in matrices]
    try:
        with undone(layers):
            yield layers
    finally:
        for state, plan in zip(states, plans, strict=True):
            state.last_call.plan = plan
        for matrix, number in zip(matrices, uses, strict=True):
            matrix.uses = number


@contextlib.contextmanager
def _unchanged(model: keras.Layer) -> Iterator[None]:
    """On exit of the block, restore a model's layers and random states."""
    with calls_undone(model), backends.current.unchanged_random_state():
        yield


def _number(value: Tensor) -> float:
    return float(ops.convert_to_numpy(ops.cast(value, "float32")))


def by_kernel(uses: Iterable[Use]) -> list[list[Use]]:
    """Return uses in lists, one for each kernel of each layer."""
    found: dict[tuple[int, int], list[Use]] = {}
    for use in uses:
        key = id(use.layer), id(use.kernel)
        found.setdefault(key, []).append(use)
    return list(found.values())


def differing(uses: Sequence[Use], operand: str) -> Sequence[Use]:
    """Return the uses whose operands differ: of a weight, the first one."""
    is_weight = not isinstance(uses[0].kernel, Product)
    return uses[:1] if is_weight and operand == "kernel" else uses


def note_of(uses: Sequence[Use], operand: str, figures: Figures) -> str:
    """Return what is unusual about an operand, in words; "" for nothing."""
    if operand == "kernel" and not uses[0].kernel.trainable:
        return "frozen"
    if operand == "outputs_grad" and not figures.amax:
        empty = all(0 in use.inputs.shape for use in uses)
        return "no values" if empty else "no gradient"
    if not figures.size:
        return "no values"
    if not figures.amax:
        return "zeros"
    return _idle_matrices(uses) if operand == "inputs" else ""


def _idle_matrices(uses: Sequence[Use]) -> str:
    """Return how many matrices of a bank have inputs of zeros in all uses."""
    if isinstance(uses[0].kernel, Product):
        return ""
    idle: Any = True
    for use in uses:
        bank = with_bank(use.plan.contraction)
        if not isinstance(bank, EinsumOfBank):
            return ""
        x = ops.cast(use.inputs, "float32")
        if 0 not in x.shape:
            x = bank.operand("inputs", x, None)
            amaxes = ops.convert_to_numpy(bank.amaxes("inputs", x, None))
            idle = np.logical_and(idle, amaxes == 0.0)
    count = int(np.sum(idle))
    return f"no values for {count} of {idle.size} matrices" if count else ""


class Listing:
    """The float8 contractions of a pass, listed as they run.

    Args:
        compute: Computes one of them, and returns its outputs.
        selects: Returns whether to list one of them.
        is_traced: Returns whether outputs have no values, since a compiler
            traces what computes them.

    Attributes:
        calls: Those that were listed, in the order in which they ran.
        traced: The layers of those that were traced.
        left: The layers of those that were not wanted.
    """

    def __init__(
        self,
        compute: Callable[[ContractionCall], Tensor],
        selects: Callable[[ContractionCall], bool],
        is_traced: Callable[[Tensor], bool],
    ) -> None:
        self._compute, self._selects = compute, selects
        self._is_traced = is_traced
        self.begin(lambda x: x)

    def begin(self, mark: Callable[[Tensor], Tensor]) -> None:
        """Forget what was listed, for another pass that marks outputs."""
        self._mark, self._ended = mark, False
        self.calls: list[ContractionCall] = []
        self.traced: list[keras.Layer] = []
        self.left: list[keras.Layer] = []

    def end(self) -> None:
        """List no more: what is computed again for gradients is listed."""
        self._ended = True

    def listed(self) -> contextlib.AbstractContextManager[None]:
        """Return a block in which contractions of this thread are listed."""
        return on_contraction(self._take)

    def _take(self, call: ContractionCall) -> Tensor:
        outputs = self._compute(call)
        if not self._selects(call):
            self.left.append(call.layer)
            return outputs
        if self._is_traced(outputs):
            self.traced.append(call.layer)
            return outputs
        if not self._ended:
            self.calls.append(call)
        return self._mark(outputs)


def _is_trained(call: ContractionCall) -> bool:
    return not call.planned.is_frozen


def _with_constant_state(call: ContractionCall) -> Tensor:
    """Run a contraction; its state has no gradient."""
    planned = call.planned
    if planned.is_frozen or not planned.state:
        return call.run()
    state = tuple(map(ops.stop_gradient, planned.state))
    return call.run(planned._replace(state=state))


SQUARES = "the sum of squares of the outputs"
"""The loss of a model that is not compiled."""

COMPILED = "the loss that the model was compiled with"


OWN = "the `compute_loss` of the model"

GIVEN = "the loss passed as `loss`"


def check_loss(loss: Any) -> None:
    """Raise if an argument `loss` is no function.

    Raises:
        TypeError: If it is none.
    """
    if loss is not None and not callable(loss):
        raise TypeError(
            f"`loss` is no function. Received: {loss!r} (of type "
            f"{type(loss).__name__}). Allowed: f(y, outputs) with a scalar, "
            "such as keras.losses.MeanSquaredError(); or None, for the loss "
            "that the model was compiled with."
        )


def _losses_collected(model: keras.Layer) -> keras.StatelessScope:
    """Return a scope in which a model is called and its losses are read."""
    regularized = [
        (v, v.value)
        for v in model.trainable_variables
        if getattr(v, "regularizer", None) is not None
    ]
    return keras.StatelessScope(regularized, collect_losses=True)


def _loss(model: Any, batch: Batch, loss: Loss | None) -> tuple[Tensor, str]:
    """Call a model; return its loss, scaled as to train, and words for it."""
    check_loss(loss)
    kind = _kind(model, batch, loss)
    outputs = model(batch.x, training=True)
    # Losses of `add_loss` are known after the call.
    if kind == SQUARES and getattr(model, "compiled", False) and model.losses:
        kind = COMPILED
    if loss is not None:
        value = loss(batch.y, outputs)
        if tuple(value.shape) != ():
            raise ValueError(
                "`loss` returns no scalar. Received: a tensor of shape "
                f"{tuple(value.shape)}. Allowed: f(y, outputs) with a scalar, "
                "such as keras.losses.MeanSquaredError()."
            )
    elif kind == SQUARES:
        floats = [
            ops.cast(x, "float32")
            for x in keras.tree.flatten(outputs)
            if keras.backend.is_float_dtype(x.dtype)
        ]
        value = sum(ops.sum(ops.square(x)) for x in floats)
    else:
        # A `compute_loss` for an older Keras has no `training`.
        known = inspect.signature(model.compute_loss).parameters
        value = model.compute_loss(
            x=batch.x,
            y=batch.y,
            y_pred=outputs,
            sample_weight=batch.sample_weight,
            **({"training": True} if "training" in known else {}),
        )
    optimizer = getattr(model, "optimizer", None)
    return value if optimizer is None else optimizer.scale_loss(value), kind


def lacks_targets(model: Any, batch: Batch) -> bool:
    """Return True if the loss of a model needs targets that a batch lacks."""
    compiled = getattr(model, "compiled", False)
    own = compiled and type(model).compute_loss is not keras.Model.compute_loss
    has_loss = getattr(model, "loss", None) is not None
    return bool(compiled and not own and has_loss and batch.y is None)


def _kind(model: Any, batch: Batch, loss: Loss | None) -> str:
    """Return the words for the loss of a model, as far as it is known."""
    if loss is not None:
        return GIVEN
    if not getattr(model, "compiled", False):
        return SQUARES
    if type(model).compute_loss is not keras.Model.compute_loss:
        return OWN
    if getattr(model, "loss", None) is None:
        return SQUARES
    if lacks_targets(model, batch):
        several = (
            " A list is several inputs." if isinstance(batch.x, list) else ""
        )
        raise ValueError(
            f"{model.name!r} is compiled with a loss, and `data` has no "
            f"targets. Received: inputs alone.{several} Allowed: a tuple "
            "(x, y), or `loss=` with a function of the targets and the "
            "outputs that does not need the targets. Pass a batch as to "
            "`train_on_batch`."
        )
    return COMPILED


def _unexamined(
    model: keras.Layer, uses: Iterable[Use], listing: Listing
) -> dict[str, str]:
    """Return the paths of float8 layers without a use, each with the reason."""
    used = {id(use.layer) for use in uses}
    stored, traced = map(path_of, listing.left), map(path_of, listing.traced)
    why = dict.fromkeys(
        traced, "it is compiled or rematerialized by itself"
    ) | dict.fromkeys(stored, "its kernel is frozen to codes")
    found = {}
    for layer in layers_in_float8(model):
        path = path_of(layer)
        if id(layer) in used or not layer.float8_controller.kernel_paths:
            continue
        found[path] = why.get(path, "the model did not call it")
    return found
