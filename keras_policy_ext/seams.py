"""Functions by which other code follows what layers do, or replaces it.

`on_contraction` calls a handler for each contraction of a float8 layer,
`on_operation` for each operation of `keras.ops` in a layer. The result of the
handler is the result of the contraction or operation. So a handler can watch,
change the operands, or compute something else. Blocks nest: the innermost
handler is called first, and `run` calls the others. A block applies to its own
thread and asyncio task. Without a block a step calls no handler, and reads one
number. `register_follower` adds an object that is called before and after
`convert` and `revert`, to change what belongs to the model, such as its
optimizer.

The names are stable: `calibrate`, `watch` and `audit` use them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import keras
from keras import ops

from keras_policy_ext import contractions
from keras_policy_ext._keras import products
from keras_policy_ext._keras.products import CASTS, MOVES, PRODUCTS, Blocks
from keras_policy_ext._keras.variable_values import value_without_autocast
from keras_policy_ext._types import Tensor

__all__ = [
    "CASTS",
    "MOVES",
    "PRODUCTS",
    "SCORES",
    "WEIGHTED_SUM",
    "ContractionCall",
    "Follower",
    "ModelChange",
    "Planned",
    "followers",
    "on_contraction",
    "on_operation",
    "register_follower",
]

# Contractions of float8 layers

SCORES = "scores"
"""The name of the product of queries and keys in attention."""

WEIGHTED_SUM = "weighted sum"
"""The name of the product of weights and values in attention."""


class Planned(NamedTuple):
    """A contraction that is ready to run.

    Attributes:
        plan: How it is quantized, with its recipe: a `Plan`, or a `FrozenPlan`
            for a kernel that is stored in float8.
        inputs: The first operand, in the compute dtype.
        kernel: The second operand, in its own dtype; codes if it is stored.
        state: The state matrix of the recipe, or nothing; of a stored kernel
            its scales.
        bias: What is added to the outputs, in their dtype; None for nothing.
    """

    plan: contractions.Plan | contractions.FrozenPlan
    inputs: Tensor
    kernel: Tensor
    state: tuple[Tensor, ...] = ()
    bias: Tensor | None = None

    @classmethod
    def of(
        cls,
        plan: contractions.Plan | contractions.FrozenPlan,
        inputs: Tensor,
        kernel: Tensor,
        *state: Tensor,
        bias: Tensor | None = None,
    ) -> Planned:
        """Return a contraction from the arguments of `contractions.run`.

        `plan` says how it is quantized, `state` what the recipe remembers.
        """
        return cls(plan, inputs, kernel, state, bias)

    @property
    def is_frozen(self) -> bool:
        """True if the kernel is stored in float8."""
        return isinstance(self.plan, contractions.FrozenPlan)

    def run(self) -> Tensor:
        """Compute the outputs; no handler is called."""
        plan: Any
        plan, inputs, kernel, state, bias = self
        dtype = plan.dtype if self.is_frozen else plan.inputs_dtype
        # A handler may have put variables or arrays in the place of tensors.
        inputs = ops.convert_to_tensor(inputs, dtype)
        kernel = value_without_autocast(kernel)
        bias = None if bias is None else ops.convert_to_tensor(bias, dtype)
        run = contractions.run_frozen if self.is_frozen else contractions.run
        return run(plan, inputs, kernel, *state, bias=bias)


@dataclasses.dataclass(frozen=True, eq=False)
class ContractionCall:
    """A contraction of a float8 layer that is about to run.

    Attributes:
        layer: The layer.
        name: The name of the weight; `SCORES` or `WEIGHTED_SUM` for the
            product of two activations.
        weight: The weight; None for two activations.
        contraction: What is multiplied: a `kernels.Einsum` or `kernels.Conv`.
        operands: Both operands as the layer passes them; the second one is the
            weight, if there is one.
        shapes: The shapes in which they are multiplied: a weight may be
            transposed or reshaped first.
        dtype: The dtype of the outputs.
    """

    layer: keras.Layer
    name: str
    weight: keras.Variable | None
    contraction: contractions.Contraction
    operands: tuple[Tensor, Any]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtype: str
    _plan: Callable[[], Planned]  # Makes `planned`, and keeps it.
    # The handlers that are still to be called; the next one is last.
    _outer: tuple[ContractionHandler, ...]

    @property
    def planned(self) -> Planned:
        """The plan, and the operands that it multiplies.

        They are made when this is first read. That counts as a use of the
        weight in the step, as if the contraction ran.
        """
        return self._plan()

    def run(self, planned: Planned | None = None) -> Tensor:
        """Run the contraction; the handlers of outer blocks are called first.

        Args:
            planned: What to run; None for `self.planned`. Pass
                `self.planned._replace(...)` to run something else.

        Returns:
            The outputs, of dtype `dtype` and with the gradients of the plan.
        """
        if not self._outer:
            return (planned or self.planned).run()
        *outer, handler = self._outer
        make_plan = self._plan if planned is None else lambda: planned
        return handler(
            dataclasses.replace(self, _plan=make_plan, _outer=tuple(outer))
        )


ContractionHandler = Callable[[ContractionCall], Tensor]

blocks: Blocks[ContractionHandler] = Blocks("handlers of contractions")
"""The handlers of `on_contraction`.

A step reads their number, and nothing else if it is 0: torch.compile breaks its
graph where a context variable is read.
"""


def on_contraction(
    handler: ContractionHandler,
) -> contextlib.AbstractContextManager[None]:
    """Return a block in which a handler is called for contractions.

    It is called for each contraction of a float8 layer.

    A function that was compiled before the block runs as it was compiled. One
    that JAX or TensorFlow traces in the block keeps what the handler computes,
    also after the block; its operands have no values. In what torch.compile
    compiles no handler is called.

    Contractions that the handler computes itself, such as those of a layer that
    it calls, are not handled.

    Args:
        handler: Called with a `ContractionCall`, before it runs. What it
            returns is the result: `call.run()`, or another tensor of the same
            shape and dtype.

    Raises:
        TypeError: If `handler` cannot be called.

    Examples:
        >>> layer = kpe.layers.Dense(4, dtype="float8_from_float32")
        >>> seen = []
        >>> def note(call):
        ...     seen.append((call.layer.name, call.name, call.shapes))
        ...     return call.run()
        >>> with kpe.seams.on_contraction(note):
        ...     outputs = layer(np.ones((2, 8)))
        >>> seen == [(layer.name, "kernel", ((2, 8), (8, 4)))]
        True
    """
    if not callable(handler):
        raise TypeError(
            f"`handler` cannot be called. Received: {handler!r}. Allowed: a "
            "function of a ContractionCall, such as `lambda call: call.run()`."
        )
    return blocks.opened(handler)


def handlers() -> tuple[ContractionHandler, ...]:
    """Return the handlers of this thread and task; the innermost is last."""
    return () if products.is_handling() else blocks.values()


def through_handlers(
    layer: keras.Layer,
    name: str,
    weight: keras.Variable | None,
    contraction: contractions.Contraction,
    operands: Sequence[Any],
    second_shape: Sequence[int],
    dtype: str,
    contract: Callable[..., Any],
) -> Tensor:
    """Return what the handlers make of a contraction; there is one at least.

    The arguments are as in `ContractionCall`; `second_shape` is the second of
    `shapes`. `contract` is called once at most, with `run=Planned.of`.
    """
    first, second = operands
    *outer, handler = handlers()  # The innermost is called first.
    call = ContractionCall(
        layer,
        name,
        weight,
        contraction,
        (first, second),
        (tuple(first.shape), tuple(second_shape)),
        dtype,
        functools.cache(lambda: contract(run=Planned.of)),
        tuple(outer),
    )
    # Else a product that the handler computes would count as the layer's; nor
    # are layers handled that it calls.
    with products.handling(), products.outside_of_layers():
        return handler(call)


# Operations of Keras

OperationHandler = Callable[..., Any]


def on_operation(
    handlers: Mapping[tuple[str, ...], OperationHandler],
) -> contextlib.AbstractContextManager[None]:
    """Return a block in which handlers are called for operations of Keras.

    They are called inside of layers, however a layer imports the operation.
    Operations outside of a layer, such as those of a loss, are not seen, nor
    are functions of a framework that a layer calls itself. A function that was
    compiled before runs as it was compiled, and in what torch.compile compiles
    no handler is called.

    Args:
        handlers: Handlers by names of operations, as in `keras.ops`; for
            instance those of `PRODUCTS` (two operands are multiplied), `MOVES`
            (elements are moved, none is changed) and `CASTS`. A handler is
            called as `handler(layer, run, name, args, kwargs)`, and what it
            returns is the result: `run(*args, **kwargs)`, or something else,
            whose own operations are not seen.

    Returns:
        A context manager.

    Raises:
        TypeError: If `handlers` is not a dict of functions by tuples of names.
        ValueError: If the backend has no function of such a name.

    Examples:
        >>> layer = keras.layers.Dense(4, use_bias=False)
        >>> layer.build((None, 8))
        >>> seen = []
        >>> def note(layer, run, name, args, kwargs):
        ...     seen.append(name)
        ...     return run(*args, **kwargs)
        >>> with kpe.seams.on_operation({kpe.seams.PRODUCTS: note}):
        ...     outputs = layer(np.ones((2, 8)))
        >>> seen
        ['matmul']
    """
    given: Mapping[Any, Any] = handlers
    if not all(isinstance(x, tuple) and callable(given[x]) for x in given):
        raise TypeError(
            "`handlers` is not a dict of functions by tuples of names. "
            f"Received: {handlers!r}. Allowed: for instance "
            '{PRODUCTS: handler}, or {("matmul",): handler}.'
        )
    if unknown := products.not_in_keras(itertools.chain(*given)):
        raise ValueError(
            "No operation of Keras's backend has such a name. Received: "
            f"{', '.join(map(repr, unknown))}. Allowed: functions of "
            "`keras.ops` that the backend has under the same name, such as "
            "'matmul'. Those that are made of others are seen as their parts."
        )
    return products.on_operation(handlers)


# Changes of whole models


class ModelChange(NamedTuple):
    """A change of a model by `convert` or `revert`.

    Attributes:
        model: The model, or a layer.
        to_float8: True for `convert`, False for `revert`.
        find_optimizers: It returns the optimizers of the model and of models in
            it, without those that they wrap.
        optimizer_option: The argument `optimizer` of `convert`, or None.
    """

    model: keras.Layer
    to_float8: bool
    find_optimizers: Callable[[], list[keras.optimizers.Optimizer]]
    optimizer_option: Any = None


class Follower:
    """The base class of those that follow changes of models; it does nothing.

    A change is all or nothing: if anything raises in it, `after` included, the
    layers and optimizers of the model have their former classes, attributes
    and variables again. Numbers that `after` assigned to a variable are not
    restored, nor is what does not belong to the model.

    Attributes:
        takes_optimizer_option: Whether it acts on the argument `optimizer` of
            `convert`.
    """

    takes_optimizer_option: ClassVar[bool] = False

    def before(self, change: ModelChange) -> Any:
        """Return what `after` needs to know of the model before the change.

        Raises:
            Exception: If it could not follow the change. Nothing has changed,
                and nothing will.
        """
        return None

    def after(self, change: ModelChange, known: Any) -> None:
        """Bring what belongs to the model in step with its new layers.

        Args:
            change: The change, as for `before`.
            known: What `before` returned.

        Raises:
            Exception: To undo the whole change.
        """

    def may_wrap_optimizer(self, model: keras.Model) -> bool:
        """Return True if `compile` may have wrapped the optimizer of a model.

        A file of the model then may have the wrapper or lack it.
        """
        return False


_F = TypeVar("_F", bound=Follower)
_followers: list[Follower] = []


def register_follower(follower: _F) -> _F:
    """Call a follower before and after every later change of a model.

    Followers are called in the order in which they are registered.

    ```python
    class Printing(kpe.seams.Follower):
        def after(self, change, known):
            print(change.model.name, change.to_float8)

    kpe.seams.register_follower(Printing())
    ```

    Returns:
        The follower.

    Raises:
        TypeError: If it is not a `Follower`.
    """
    if not isinstance(follower, Follower):
        raise TypeError(
            f"Not a follower. Received: {follower!r}. Allowed: an instance of "
            "a class that derives from `kpe.seams.Follower`."
        )
    _followers.append(follower)
    return follower


def followers() -> tuple[Follower, ...]:
    """Return the registered followers."""
    return tuple(_followers)
