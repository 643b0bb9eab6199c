"""The three matmuls of a float8 contraction, the same on every framework."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from keras import ops

from keras_policy_ext import frameworks
from keras_policy_ext.kernels import cast_again, engines, scaled_products
from keras_policy_ext.kernels.both_layouts import Reads, read_both
from keras_policy_ext.kernels.choices import Choices
from keras_policy_ext.kernels.contract import Choice, Contraction, Shapes
from keras_policy_ext.kernels.epilogues import adding, writes
from keras_policy_ext.kernels.forms import shape_of
from keras_policy_ext.kernels.gathering import gathered
from keras_policy_ext.kernels.operands import Operands, amax_of, storing
from keras_policy_ext.kernels.preference import preferred
from keras_policy_ext.kernels.residuals import Residuals, settled
from keras_policy_ext.kernels.second_derivatives import gradients
from keras_policy_ext.numerics import quantized
from keras_policy_ext.numerics.observations import SLOTS, of_kernel_alone
from keras_policy_ext.numerics.quantized import Quantized
from keras_policy_ext.numerics.scale_protocol import Amax, Known
from keras_policy_ext.numerics.scale_sources import source_of
from keras_policy_ext.recipes import (
    MATMULS,
    OPERANDS,
    Quantization,
    Recipe,
    matmuls_of,
)

Tensor = Any
Chosen = dict[str, tuple[Any, Choice]]


@dataclasses.dataclass(frozen=True)
class Plan:
    """One float8 contraction, ready to run; hashable.

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
            it: see `Framework.gathering_of`.
        one_pass: Whether JAX is to cast as `_is_one_pass` says.
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
    one_pass: bool = False

    @functools.cached_property
    def first_use(self) -> Plan:
        """This plan in slot 0: the forward pass is the same in every slot."""
        return dataclasses.replace(self, slot=0)

    @functools.cached_property
    def another_use(self) -> Plan:
        """This plan in the slot that is farthest from its own."""
        far = SLOTS // 2 if self.source.observes_amaxes else 0
        return dataclasses.replace(self, slot=(self.slot + far) % SLOTS)

    @functools.cached_property
    def kernel_grad_dtype(self) -> str:
        """What `kernel_grad` is rounded to: the compute dtype.

        Not float16, in which the gradient of a float32 kernel could overflow;
        and not where what multiplies writes float32: see `epilogues`.
        """
        half = self.inputs_dtype == "float16"
        return self.kernel_dtype if half else self.inputs_dtype

    @property
    def _observes_all(self) -> bool:
        """Whether all operands are observed; otherwise the kernel alone."""
        return self.training is not False

    @functools.cached_property
    def source(self) -> Any:
        """Where the scales of the recipe come from."""
        return source_of(self.recipe)

    def resolved(self) -> Plan:
        """This plan, with what is preferred here and now."""
        return self if self.prefer else preferring(self, preferred())

    @functools.cached_property
    def operands(self) -> Operands:
        """What becomes of each operand, and how it lies in memory."""
        return Operands(self.contraction, self.recipe)

    @functools.cached_property
    def asked(self) -> dict[tuple[str, str], Quantization | None]:
        """What becomes of each operand in each matmul."""
        return self.operands.asked

    @functools.cached_property
    def choices(self) -> Choices:
        """What multiplies in each matmul."""
        return Choices(self)

    def choose(self, matmul: str) -> tuple[Any, Choice]:
        """What multiplies in a matmul, and why."""
        return self.choices.of(matmul)

    @property
    def choice(self) -> Choice:
        """Which kind of kernel runs the forward pass, and why."""
        return self.choose("forward")[1]

    def forward(
        self,
        inputs: Tensor,
        kernel: Tensor,
        state: tuple[Tensor, ...],
        observe: bool,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Residuals]:
        """The outputs, and what the backward pass needs.

        Args:
            inputs: Of dtype `inputs_dtype`.
            kernel: Of dtype `kernel_dtype`.
            state: The state matrix of the recipe, or nothing.
            observe: Whether amaxes are needed for the state.
            bias: To be added, of dtype `inputs_dtype`; None for none.

        Returns:
            Outputs of dtype `inputs_dtype`, and residuals.
        """
        history = self._history(state)
        known = settled(history, state)
        observe = observe and bool(state) and self.source.observes_amaxes
        chosen = self.choices.of_all(MATMULS)
        x, x_kept, x_amax = self._reads(
            "inputs", inputs, known, observe, chosen
        )
        w, w_kept, w_amax = self._reads(
            "kernel", kernel, known, observe, chosen
        )
        shapes = shape_of(inputs), shape_of(kernel)
        reads = {"inputs": x, "kernel": w}
        fused = adding(self.contraction, chosen, bias, shapes)
        outputs = self._product("forward", fused or chosen, reads, shapes)
        if bias is not None and not fused:
            outputs = ops.add(outputs, bias)
        amaxes = (x_amax, w_amax) if observe else None
        w_kept = cast_again.kept(self, kernel, w_kept)
        return outputs, Residuals(x_kept, w_kept, history, amaxes, shapes)

    def residuals(self, leaves: Sequence[Tensor], shapes: Shapes) -> Residuals:
        """Residuals of these tensors, as `Residuals.leaves` lists them.

        Args:
            leaves: The tensors.
            shapes: Of the inputs and the kernel.
        """
        found = iter(leaves)
        x = quantized.of_leaves(found, self.operands.kept["inputs"])
        w = quantized.of_leaves(found, self.operands.kept["kernel"])
        known, rest = self.source.known_of(list(found))
        amaxes = (rest[0], rest[1]) if rest else None
        return Residuals(x, w, known, amaxes, shapes)

    def observed(
        self, residuals: Residuals, inputs: Tensor, kernel: Tensor
    ) -> Residuals:
        """Residuals of a forward pass that did not observe, observed.

        Without training the amax of the kernel stands for that of the inputs.
        """
        if not self.source.observes_amaxes or residuals.known is None:
            return residuals
        x = w = amax_of("kernel")(self._operand("kernel", kernel))
        if self._observes_all:
            x = amax_of("inputs")(self._operand("inputs", inputs))
        return dataclasses.replace(residuals, amaxes=(x, w))

    def backward(
        self,
        residuals: Residuals,
        outputs_grad: Tensor,
        state: tuple[Tensor, ...],
        needed: tuple[bool, bool] = (True, True),
    ) -> tuple[Tensor | None, Tensor | None, tuple[Tensor, ...]]:
        """The gradients of inputs, kernel and state.

        Args:
            residuals: From `forward`.
            outputs_grad: Of dtype `inputs_dtype`.
            state: As for `forward`.
            needed: Whether the gradients of inputs and kernel are wanted.

        Returns:
            The three; None for a gradient that is not needed.
        """
        amaxes, shapes = residuals.amaxes, residuals.shapes
        known, observe = settled(residuals.known, state), amaxes is not None
        counts = self._observes_all and not self.source.observes_amaxes
        chosen = self.choices.of_all(matmuls_of("outputs_grad"))
        wanted = observe and self._observes_all
        g, g_again, g_amax = self._reads(
            "outputs_grad", outputs_grad, known, wanted, chosen
        )
        inputs_grad = kernel_grad = None
        if needed[0]:
            g, w = cast_again.read(self, residuals.kernel, g)
            reads = {"outputs_grad": g, "kernel": w}
            inputs_grad = self._product("inputs_grad", chosen, reads, shapes)
        if needed[1]:
            reads = {"outputs_grad": g_again, "inputs": residuals.inputs}
            kernel_grad = self._product("kernel_grad", chosen, reads, shapes)
            kernel_grad = ops.cast(kernel_grad, self.kernel_dtype)
        if not state:
            return inputs_grad, kernel_grad, ()
        if not observe and not counts:
            return inputs_grad, kernel_grad, (ops.zeros_like(state[0]),)
        if amaxes and not self._observes_all:
            found = self._of_kernel(amaxes[1], residuals.known, *state)
            return inputs_grad, kernel_grad, (found,)
        numbers = self.source.observed(known, [*(amaxes or ()), g_amax])
        observed = self._observation(numbers, *state)
        return inputs_grad, kernel_grad, (observed,)

    def caught_up(
        self, kernel: Tensor, state: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """A state that is large enough for the kernel as it is."""
        if not self.source.observes_amaxes:
            return state
        amax = amax_of("kernel")(kernel)
        return tuple(self.source.caught_up(amax, each) for each in state)

    def second_derivatives(self, *arguments: Any) -> tuple[Any, ...]:
        """See `second_derivatives.gradients`."""
        return gradients(self, *arguments)

    def _history(self, state: tuple[Tensor, ...]) -> Known | None:
        """What the state says before the step; None where there is none."""
        if not state:
            return None
        states = engines.states_for(self.source, *state)
        if states is not None:
            return states.history_scales(self.source, *state)
        found: Known = self.source.history_scales(*state)
        return found

    def _observation(self, numbers: list[Tensor], state: Tensor) -> Tensor:
        """The gradient of the state."""
        states = engines.states_for(self.source, state)
        if states is not None:
            return states.observation(self.source, numbers, self.slot)
        # A kernel may have found an amax for each part of an operand.
        numbers = [ops.max(n) if len(n.shape) else n for n in numbers]
        return self.source.observation(numbers, self.slot)

    def _of_kernel(self, amax: Tensor, known: Any, state: Tensor) -> Tensor:
        """The gradient of the state if the kernel alone may be observed."""
        outgrown = self.source.outgrown(amax, known)
        if frameworks.current().known_any(outgrown) is False:
            return ops.zeros_like(state)
        observation = self._observation([amax] * len(OPERANDS), state)
        return of_kernel_alone(observation, outgrown)

    def _product(
        self,
        matmul: str,
        chosen: Chosen,
        reads: dict[str, Quantized],
        shapes: Shapes,
    ) -> Tensor:
        """One of the three products, of what its operands are read as."""
        kernel, choice = chosen[matmul]
        a, b = (
            self._as_read(operand, matmul, reads[operand], choice)
            for operand in MATMULS[matmul]
        )
        dtype = self.inputs_dtype
        if matmul == "kernel_grad":
            own = writes(kernel, self.kernel_dtype)
            dtype = self.kernel_dtype if own else self.kernel_grad_dtype
        return self.contraction.product(matmul, kernel, a, b, shapes, dtype)

    def _as_read(
        self, operand: str, matmul: str, values: Quantized, choice: Choice
    ) -> Quantized:
        """An operand as a matmul reads it, of what was quantized.

        It is moved last: XLA takes a move past one operation at a time.
        """
        across = self.operands.is_across(operand, matmul)
        if choice.native:
            read = self.matrix(operand, values)
        else:
            wide = values.widened(self._widened, engines.engine().decode)
            wide = self.contraction.read(operand, wide)
            read = scaled_products.folded(wide, across)
        return self.contraction.transposed(read) if across else read

    def _widened(self, values: Tensor) -> Tensor:
        """Numbers of a float8 dtype as what is emulated multiplies them."""
        return engines.engine().widen(values, self.inputs_dtype)

    def _operand(self, operand: str, x: Tensor) -> Tensor:
        """What is quantized for the first matmul that reads an operand."""
        asked = self.asked[operand, matmuls_of(operand)[0]]
        return self.contraction.operand(operand, x, asked)

    def _reads(
        self,
        operand: str,
        x: Tensor,
        known: Known | None,
        observe: bool,
        chosen: Chosen,
    ) -> Reads:
        """What its two matmuls read of an operand, and its amax.

        It is quantized once where the second matmul can read the transpose
        of what the first one reads, and otherwise twice, from its own
        numbers.
        """
        if self._is_in_both_layouts(operand, x):
            return self._read_both(operand, x, known, observe)
        first, second = matmuls_of(operand)
        home = self._operand(operand, x)
        wanted = observe or self.operands.is_stochastic(operand)
        cast = self._cast(chosen[first], chosen[second])
        one_pass = observe and self._is_one_pass(operand, chosen)
        if one_pass:
            cast = storing(cast)
        off_cpu = not frameworks.current().on_cpu(x)
        apart = one_pass or (operand == "kernel" and off_cpu)
        amax = Amax(home, wanted, amax_of(operand), apart)
        how = amax, known, cast
        saturated, marked = self._quantized(operand, first, home, *how)
        values = saturated if first == "forward" else marked
        if not self.operands.read_once[operand]:
            asked = self.asked[operand, second]
            home = self.contraction.operand(operand, x, asked)
            _, marked = self._quantized(operand, second, home, *how)
        return Reads(values, marked, amax.known if observe else None)

    def _is_one_pass(self, operand: str, chosen: Chosen) -> bool:
        """Whether an operand is cast while its amax is found.

        XLA takes no amax into a kernel that transposes. Codes that are stored
        first and then transposed make 5 bytes for a number of bfloat16, where
        the amax and a cast in both layouts make 6, and 3 in place of 5 for
        Blackwell, which wants one layout (JAX 0.10).
        """
        return (
            self.one_pass
            and operand == "outputs_grad"
            and self.operands.read_once[operand]
            and all(chosen[m][1].native for m in matmuls_of(operand))
            and engines.engine().casts_in_one_pass()
        )

    def matrix(self, operand: str, quantized: Quantized) -> Quantized:
        """The home matrix of an operand, or what a convolution reads.

        Args:
            operand: `"inputs"`, `"kernel"` or `"outputs_grad"`.
            quantized: As it was quantized.
        """
        if self._is_in_both_layouts(operand, quantized.values):
            return quantized
        return self.contraction.read(operand, quantized)

    def _is_in_both_layouts(self, operand: str, like: Tensor) -> bool:
        """Whether one cast on this device makes both matrices of an operand."""
        both = engines.engine().both_layouts
        asked = self.operands.in_one_cast[operand]
        if both is None or asked is None or self.source.rule is None:
            return False
        if not all(self.choose(m)[1].native for m in matmuls_of(operand)):
            return False
        dtype = self.kernel_dtype if operand == "kernel" else self.inputs_dtype
        return both.supports(like, dtype, asked.format) is None

    def _read_both(
        self, operand: str, x: Tensor, known: Any, observe: bool
    ) -> Reads:
        """`_reads`, each in the layout that its matmul wants."""
        asked: Any = self.operands.in_one_cast[operand]
        home = Quantized(self._operand(operand, x), None, asked)
        matrix = self.contraction.read(operand, home).values
        both: Any = engines.engine().both_layouts
        rule = self.source.rule
        return read_both(both, matrix, operand, asked, rule, known, observe)

    def _quantized(
        self,
        operand: str,
        matmul: str,
        home: Tensor,
        amax: Amax,
        known: Known | None,
        cast: Any,
    ) -> tuple[Quantized, Quantized]:
        """An operand for a matmul: of the forward pass, and of gradients.

        The outputs are those of saturated operands; where one was not finite
        and no state tells of it, the gradients do. Either is as it lies in
        memory: see `Operands.turned`.
        """
        asked = self.asked[operand, matmul]
        if asked is None:
            plain = quantized.unquantized(ops.cast(home, self.inputs_dtype))
            return plain, plain
        if self.operands.turned[operand, matmul]:
            home = quantized.swapped(home)
        whole, amaxes = quantized.quantize(
            home,
            self.operands.quantized_as(operand, matmul) or asked,
            self.source.scale(operand, asked, amax, known),
            cast,
            amax_of(operand),
            self._key(asked, matmul, amax, known),
            self.operands.is_across(operand, matmul),
        )
        marked = whole if amaxes is None else whole.marked(amaxes)
        if self.gathering is not None and operand == "kernel":
            axes = self.operands.kernel_axes(self.gathering.axes, matmul)
            whole, marked = gathered(self.gathering, axes, whole, marked)
        return whole, marked

    def _cast(self, *chosen: tuple[Any, Choice]) -> Any:
        """The cast of an operand, to a float8 dtype if a matmul reads one."""
        engine = engines.engine()
        if any(choice.native for _, choice in chosen):
            return engine.narrow_cast
        return engine.cast_in_training if self.training else engine.cast

    def _key(
        self, asked: Quantization, matmul: str, amax: Amax, known: Known | None
    ) -> Tensor | None:
        """By what an operand is rounded at random; None for to nearest."""
        if asked.rounding == "nearest":
            return None
        return self.source.key(known, self.slot, amax, matmul)


@functools.lru_cache(maxsize=4096)
def plan_of(*fields: Any) -> Plan:
    """A plan with these fields; the same object for equal ones."""
    return Plan(*fields)


@functools.lru_cache(maxsize=4096)
def preferring(plan: Plan, kind: str) -> Plan:
    """A plan with this preference; the same object for equal ones."""
    return dataclasses.replace(plan, prefer=kind)
