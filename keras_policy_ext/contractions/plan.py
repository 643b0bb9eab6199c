"""A plan says how a contraction is quantized; `prefer` how it is to run."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from keras_policy_ext import backends
from keras_policy_ext._keras import calls
from keras_policy_ext._types import Tensor
from keras_policy_ext.backends.matmuls import Choice
from keras_policy_ext.contractions.bound_plan import BoundPlan
from keras_policy_ext.contractions.kinds import Contraction, EinsumOfBank
from keras_policy_ext.contractions.operands import Operands, operands_of
from keras_policy_ext.numerics.scale_sources import Slot, source_of
from keras_policy_ext.recipes import CurrentScaling, Recipe

KINDS = ("auto", "native", "emulated")

_preferred = contextvars.ContextVar("preferred kind of kernel", default="auto")


def preferred() -> str:
    """Return the kind that the innermost `prefer` block sets, or `"auto"`.

    A plan stores it, so that a backward pass on another thread has it.
    """
    return _preferred.get()


@contextlib.contextmanager
def prefer(kind: str) -> Iterator[None]:
    """In the block, prefer native or emulated matmuls, as `kind` says.

    Both kinds quantize the operands to the same values. Their results are equal
    up to the order of summation. If no native matmul exists, asking for one
    still emulates; `select` reports it. A compiled function keeps its kind.

    The block applies to its own thread and asyncio task, and to tasks started
    in it. It does not apply to other threads, including the replicas of a
    `tf.distribute` strategy. For those, enter it in the function that they
    run, or start them with `contextvars.copy_context().run`.

    Args:
        kind: `"auto"` (the faster one here), `"native"` or `"emulated"`.

    Raises:
        ValueError: If `kind` is something else.

    Examples:
        >>> with kpe.kernels.prefer("emulated"):
        ...     kpe.kernels.select("ab,bc->ac").kind
        'emulated'
    """
    if kind not in KINDS:
        raise ValueError(
            f"Unknown kind of kernel. Received: {kind!r}. Allowed: "
            f"{', '.join(KINDS)}."
        )
    token = _preferred.set(kind)
    try:
        yield
    finally:
        _preferred.reset(token)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The plan of one float8 contraction; hashable data.

    `bound` has the kernels, casts and layouts that are chosen for a device.

    Attributes:
        contraction: The contraction.
        recipe: How the operands are scaled.
        inputs_dtype: The dtype of the inputs, their gradient and the outputs:
            the compute dtype.
        kernel_dtype: The dtype of the kernel and of its gradient.
        training: True observes amaxes. False observes only a kernel that
            exceeds its recorded amaxes. None observes if a gradient is taken.
        slot: The number of this use of the kernel in the step.
        prefer: `"auto"`, `"native"` or `"emulated"`; None if it is not known
            before the plan runs.
        for_xla: Whether XLA is known to compile it.
        gathering: How a sharded kernel is gathered; see
            `Backend.gathering_of`.
    """

    contraction: Contraction
    recipe: Recipe
    inputs_dtype: str
    kernel_dtype: str
    training: bool | None = None
    slot: int = 0
    prefer: str | None = "auto"
    for_xla: bool = False
    gathering: Any = None

    @functools.cached_property
    def first_use(self) -> Plan:
        """The plan of the first use in a step, the same object for all uses.

        It is what is bound and compiled. The slot, the number of the use, is an
        argument of a pass.
        """
        if self.slot == 0:
            return self
        # All fields in order, by position: the cache tells calls apart by that.
        return plan_of(
            self.contraction,
            self.recipe,
            self.inputs_dtype,
            self.kernel_dtype,
            self.training,
            0,  # The slot.
            self.prefer,
            self.for_xla,
            self.gathering,
        )

    def another_slot(self, slot: Slot) -> Slot:
        """Return another slot, for gradients that are differentiated.

        A slot is the number of a use of a kernel in a step.
        """
        return self.source.another_slot(slot)

    @functools.cached_property
    def source(self) -> Any:
        """The object that computes the recipe's scales."""
        return source_of(self.recipe, self.states)

    @functools.cached_property
    def states(self) -> int:
        """The number of states of the kernel: 1, or one per matrix of a bank.

        It is 1 also for recipes without a state: shapes are made of it.
        """
        if isinstance(self.contraction, EinsumOfBank):
            return self.contraction.states
        return 1

    def with_preference(self) -> Plan:
        """Return a copy of this plan with the current value of `prefer`."""
        return self if self.prefer else preferring(self, preferred())

    @functools.cached_property
    def operands(self) -> Operands:
        """Return the quantizations and layouts of the three operands."""
        return operands_of(self.contraction, self.recipe)

    @property
    def bound(self) -> BoundPlan:
        """This plan with the kernels selected for the current device.

        It is one object for all uses of a kernel in a step, until the device or
        engine changes.
        """
        engine = backends.engine
        device = engine.device()
        plan = self.first_use
        # One attribute with its device and engine: another thread, which may
        # pretend another device, can replace it at any time.
        bound: BoundPlan | None = vars(plan).get("_bound")
        if (
            bound is None
            or bound.device is not device
            or bound.engine is not engine
        ):
            bound = BoundPlan(plan, engine, device)
            vars(plan)["_bound"] = bound
        return bound

    def choose(self, matmul: str) -> tuple[Any, Choice]:
        """Return the kernel selected for a matmul, and its `Choice`."""
        return self.bound.selections[matmul]

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Return the kind of kernel for each matmul, and the reason."""
        return tuple(choice for _, choice in self.bound.selections.values())

    @property
    def choice(self) -> Choice:
        """Return the kind of kernel for the outputs, and the reason."""
        grid = self.recipe.grid
        if grid is None:
            return self.choose("forward")[1]
        return Choice(
            "rounded",
            f"a step rounds kernels to {grid.weights} per {grid.granularity}, "
            f"and multiplies in {self.inputs_dtype}",
        )


plan_of = functools.lru_cache(maxsize=4096)(Plan)
"""Return a `Plan` with these fields, from a cache."""


@functools.lru_cache(maxsize=4096)
def preferring(plan: Plan, kind: str) -> Plan:
    """Return a copy of a plan with `prefer` set to `kind`, from a cache."""
    return dataclasses.replace(plan, prefer=kind)


_NOTHING_ROUNDED = CurrentScaling(
    forward="high_precision",
    inputs_grad="high_precision",
    kernel_grad="high_precision",
)


def make_plan(
    contraction: Contraction,
    recipe: Recipe,
    inputs_dtype: str,
    kernel_dtype: str,
    training: bool | None = None,
    slot: int = 0,
    gathering: Any = None,
) -> Plan:
    """Return a contraction's plan for the current backend and settings.

    `training`, `slot` (the number of this use of the kernel in the step) and
    `gathering` are as for `Plan`.
    """
    framework = backends.current
    fields = contraction, recipe, inputs_dtype, kernel_dtype, training, slot
    if framework.is_compiling():
        # All fields: torch 2.11 would look up defaults in each call. `prefer`,
        # a context variable, is read when the plan runs: see `with_preference`.
        kind, for_xla, gathering = None, False, None
        return Plan(*fields, kind, for_xla, gathering)
    return plan_of(
        *fields, _preferred.get(), framework.traces_for_xla(), gathering
    )


def run(
    plan: Plan,
    inputs: Tensor,
    kernel: Tensor,
    *state: Any,
    bias: Tensor | None = None,
) -> Any:
    """Compute the outputs of a planned contraction; its plan has the gradients.

    The operands have the dtypes of the plan, the bias that of the outputs. The
    state is one matrix, if the recipe has one.
    """
    if calls.are_shapes_alone_wanted():  # Then nothing is quantized.
        plan, state = unrounded(plan), ()
    return backends.current.run(plan, bias, inputs, kernel, *state)


@functools.cache
def unrounded(plan: Plan) -> Plan:
    """Return a plan without rounding; the outputs have the same shape."""
    return dataclasses.replace(plan, recipe=_NOTHING_ROUNDED)
