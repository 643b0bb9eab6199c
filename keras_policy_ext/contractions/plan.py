"""A plan: how a contraction is quantized, as data; and `prefer`."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from keras_policy_ext import backends
from keras_policy_ext.backends.matmuls import Choice
from keras_policy_ext.contractions.bound_plan import BoundPlan
from keras_policy_ext.contractions.kinds import Contraction
from keras_policy_ext.contractions.operands import Operands, operands_of
from keras_policy_ext.numerics.observations import SLOTS
from keras_policy_ext.numerics.scale_sources import source_of
from keras_policy_ext.recipes import Recipe

KINDS = ("auto", "native", "emulated")

_preferred = contextvars.ContextVar("preferred kind of kernel", default="auto")


def preferred() -> str:
    """`"auto"`, or what the innermost `prefer` asks for.

    A plan keeps it, so that a backward pass, which a framework may run on
    another thread, has no need to ask.
    """
    return _preferred.get()


@contextlib.contextmanager
def prefer(kind: str) -> Iterator[None]:
    """Ask for native or for emulated matmuls inside a `with` block.

    Both give the same quantized operands and, up to the order of summation,
    the same results. Asking for native where there is none still emulates;
    `select` says so. A compiled function keeps what it was traced with.

    The block is one of its thread and of its asyncio task. Tasks that are
    started in it are in it too; threads are not, and neither are the replicas
    of a `tf.distribute` strategy, which are threads: enter it in the function
    that they run, or start them with `contextvars.copy_context().run`.

    Args:
        kind: `"auto"` (what is faster on this device), `"native"` or
            `"emulated"`.

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
    """One float8 contraction; hashable data.

    `bound` has the kernels, casts and layouts that are chosen for a device.

    Attributes:
        contraction: What is multiplied.
        recipe: How the operands are scaled.
        inputs_dtype: Dtype of the inputs, of their gradient and of the
            outputs: the compute dtype.
        kernel_dtype: Dtype of the kernel and of its gradient.
        training: True observes; False observes no more than a kernel that
            has outgrown its amaxes; None observes where a gradient is taken.
        slot: Which use of the kernel in this step this is.
        prefer: `"auto"`, `"native"` or `"emulated"`; None where that is not
            known before it runs.
        for_xla: Whether XLA is going to compile it, where a kernel asks.
        gathering: How the kernel is gathered, where devices have parts of
            it: see `Backend.gathering_of`.
        cast_before_amax: Whether JAX may cast the output gradient while its
            amax is found: see `operands`.
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
    cast_before_amax: bool = False

    @functools.cached_property
    def first_use(self) -> Plan:
        """This plan in slot 0: the forward pass is the same in every slot."""
        return dataclasses.replace(self, slot=0)

    @functools.cached_property
    def another_use(self) -> Plan:
        """This plan in the slot that is farthest from its own.

        For gradients that are differentiated, as of a penalty: beside those
        of the loss they are of any size. Up to 4 uses of a layer in a step
        are told apart from theirs.
        """
        far = SLOTS // 2 if self.source.observes_amaxes else 0
        return dataclasses.replace(self, slot=(self.slot + far) % SLOTS)

    @functools.cached_property
    def source(self) -> Any:
        """Where the scales of the recipe come from."""
        return source_of(self.recipe)

    def resolved(self) -> Plan:
        """This plan, with what is preferred here and now."""
        return self if self.prefer else preferring(self, preferred())

    @functools.cached_property
    def operands(self) -> Operands:
        """For each operand: its quantization in each matmul, and its layout."""
        return operands_of(self.contraction, self.recipe)

    @property
    def bound(self) -> BoundPlan:
        """This plan with the kernels for the device that is here.

        The same object until another device is here, or is pretended, or
        the engine is another one.
        """
        engine = backends.engine()
        device = engine.device()
        # In one piece, for threads that pretend different devices.
        bound: BoundPlan | None = vars(self).get("_bound")
        if (
            bound is None
            or bound.device is not device
            or bound.engine is not engine
        ):
            bound = BoundPlan(self, engine, device)
            vars(self)["_bound"] = bound
        return bound

    def choose(self, matmul: str) -> tuple[Any, Choice]:
        """The kernel of a matmul, and the reason for it."""
        return self.bound.selections[matmul]

    @property
    def choice(self) -> Choice:
        """Which kind of kernel runs the forward pass, and why."""
        return self.choose("forward")[1]


@functools.lru_cache(maxsize=4096)
def plan_of(*fields: Any) -> Plan:
    """A plan with these fields; the same object for equal ones."""
    return Plan(*fields)


@functools.lru_cache(maxsize=4096)
def preferring(plan: Plan, kind: str) -> Plan:
    """A plan with this preference; the same object for equal ones."""
    return dataclasses.replace(plan, prefer=kind)
