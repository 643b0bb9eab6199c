"""PyTorch: `scaled_mm`, gradients by `torch.autograd.Function`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from keras_policy_ext import formats
from keras_policy_ext.kernels import torch_observations
from keras_policy_ext.kernels.agnostic import AgnosticEngine, float32, scaled
from keras_policy_ext.kernels.contract import HOPPER_OR_ADA, Choice, Quantized
from keras_policy_ext.kernels.contractions import Conv, Einsum
from keras_policy_ext.kernels.einsum import matmul_form, split
from keras_policy_ext.kernels.plan import Plan, Residuals, preferring
from keras_policy_ext.kernels.preference import preferred
from keras_policy_ext.numerics import casting
from keras_policy_ext.numerics.rules import Prior
from keras_policy_ext.recipes import Recipe

Tensor = Any

ALIGNMENT = 16
"""`scaled_mm` on CUDA wants sizes that are multiples of this."""


class TorchEngine(AgnosticEngine):
    """`scaled_mm` where it pays, otherwise float32."""

    name = "torch"

    def is_compiling(self) -> bool:
        """See `Engine.is_compiling`: torch.compile breaks its graph at one."""
        return bool(torch.compiler.is_compiling())

    def select(self, plan: Plan) -> Choice:
        """Native on CUDA with float8 hardware; on a CPU only if asked for."""
        refusal = _refusal(plan)
        if refusal:
            return Choice("emulated", refusal)
        if torch.cuda.is_available():
            return Choice("native", "scaled_mm on CUDA")
        if plan.prefer == "native":
            return Choice("native", "scaled_mm on a CPU, asked for")
        # 256x512x2048, 2 cores, torch 2.13: 4.8 ms against 2.8 ms.
        return Choice("emulated", "scaled_mm is slower than float32 on a CPU")

    def quantize(
        self, x: Tensor, scale: Tensor, dtype: str, native: bool
    ) -> Quantized:
        """See `Engine.quantize`."""
        if native:
            values = _clipped(x, scale, dtype).to(getattr(torch, dtype))
        elif torch.compiler.is_exporting():
            values = _round_to_format(_clipped(x, scale, dtype), dtype)
            values = values.copysign(x)
        elif torch.compiler.is_compiling():
            values = _rounded_in_graph(x, scale, dtype)
        else:
            values = _rounded(x, scale, dtype)
        return Quantized(values, scale)

    def einsum(
        self,
        equation: str,
        a: Quantized,
        b: Quantized,
        dtype: str,
        fast: bool = False,
    ) -> Tensor:
        """See `Engine.einsum`."""
        if a.values.dtype != torch.float32:

            def native(x: Tensor, y: Tensor) -> Tensor:
                out = getattr(torch, dtype)
                return _scaled_mm(x, y, a.scale, b.scale, out, fast)

            return _einsum(equation, a.values, b.values, native)
        if _fits_bfloat16(a, dtype) and matmul_form(equation):
            return _bfloat16_einsum(equation, a, b)
        product = _einsum(equation, a.values, b.values, torch.matmul)
        return product.mul_(a.scale * b.scale).to(getattr(torch, dtype))

    def conv_inputs_grad(
        self, conv: Conv, g: Quantized, w: Quantized, shape: Any, dtype: str
    ) -> Tensor:
        """See `Engine.conv_inputs_grad`."""
        x = g.values.new_zeros(tuple(shape))
        gradient = _conv_backward(conv, float32(g), x, float32(w), 0)
        return scaled(gradient, g, w, dtype)

    def conv_kernel_grad(
        self, conv: Conv, x: Quantized, g: Quantized, shape: Any, dtype: str
    ) -> Tensor:
        """See `Engine.conv_kernel_grad`."""
        w = g.values.new_zeros(tuple(shape))
        gradient = _conv_backward(conv, float32(g), float32(x), w, 1)
        return scaled(gradient, x, g, dtype)

    def prior(self, rule: Any, *state: Tensor) -> Prior:
        """See `AgnosticEngine.prior`.

        A CPU knows whether all operands were seen. Then there is no choice of
        scale to compute, three of the five times that a step would.
        """
        prior = super().prior(rule, *state)
        if _is_known(prior.unseen) and not bool(prior.unseen.any()):
            return prior._replace(unseen=None)
        return prior

    @torch.compiler.disable
    def settle(self, recipe: Recipe, value: Tensor, previous: Tensor) -> Tensor:
        """See `Engine.settle`; not compiled either."""
        with torch.no_grad():
            return super().settle(recipe, value, previous)

    def step_by_step(self) -> AbstractContextManager[None]:
        """See `AgnosticEngine.step_by_step`."""
        return torch.no_grad()

    def keep_observations(self, variable: Any, tensor: Tensor) -> None:
        """See `AgnosticEngine.keep_observations`."""
        torch_observations.keep_apart(variable, tensor)

    @torch.compiler.disable
    def assigned(self, variable: Any, value: Tensor) -> Tensor:
        """See `AgnosticEngine.assigned`."""
        with torch.no_grad():
            value = torch_observations.with_observed(variable, value)
            return super().assigned(variable, value)

    def earlier_observation(self, variable: Any) -> Tensor | None:
        """See `AgnosticEngine.earlier_observation`."""
        return variable.observed.earlier

    def put_earlier_observation(self, variable: Any, value: Any) -> None:
        """See `AgnosticEngine.put_earlier_observation`."""
        value = torch.as_tensor(value, device=variable.value.device)
        variable.observed.earlier = value

    def known_value(self, variable: Any) -> Tensor | None:
        """See `AgnosticEngine.known_value`; once for each change."""
        if torch.compiler.is_compiling():
            return None
        return torch_observations.changed_value(variable)

    def settle_observed(self, variables: Sequence[Any]) -> None:
        """See `AgnosticEngine.settle_observed`."""
        torch_observations.enter(variables)

    def run(
        self, plan: Plan, inputs: Tensor, kernel: Tensor, *state: Tensor
    ) -> Tensor:
        """See `Engine.run`."""
        if torch.compiler.is_exporting():
            return self._run_exported(plan, inputs, kernel, state)
        return self._run(plan, inputs, kernel, *state)

    def _run_exported(
        self, plan: Plan, inputs: Tensor, kernel: Tensor, state: Any
    ) -> Tensor:
        """A forward pass of PyTorch's own operations and nothing else.

        Observing chooses a scale that was never observed without a branch,
        which a file cannot have inside the loop of a recurrent layer.
        """
        _refuse_onnx()
        if torch.compiler.is_dynamo_compiling():
            raise NotImplementedError(
                "A layer in float8 cannot be traced by the compiler of "
                "PyTorch. Received: torch.export.export(..., strict=True). "
                "Allowed: strict=False, which gives the same program."
            )
        return plan.forward(self, inputs, kernel, state, observe=True)[0]

    # torch.compile goes on around a contraction and not into it: compiled, a
    # step of a 512-2048-512 MLP took a third longer, and a minute to compile
    # (torch 2.13, 2 cores).
    @torch.compiler.disable
    def _run(
        self, plan: Plan, inputs: Tensor, kernel: Tensor, *state: Tensor
    ) -> Tensor:
        _refuse_onnx()
        if plan.prefer is None:
            plan = preferring(plan, preferred())
        tensors = (inputs, kernel, *state)
        with _no_autocast(inputs):
            if torch.is_grad_enabled() and any(
                tensor.requires_grad for tensor in tensors
            ):
                if state:
                    torch_observations.know_replicas(*state)
                return _Contract.apply(plan, inputs, kernel, *state)
            return plan.forward(self, inputs, kernel, state, observe=False)[0]


ENGINE = TorchEngine()


def _refuse_onnx() -> None:
    """Raise while `torch.onnx.export` traces a model."""
    if torch.onnx.is_in_onnx_export():
        raise NotImplementedError(
            "A layer in float8 cannot be exported to ONNX, which has no "
            "operation on the bits of a number. Received: an export by "
            "torch.onnx. Allowed: torch.export. For ONNX save the model, "
            "call `keras_policy_ext.revert(model)` and export then."
        )


class _Contract(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, plan: Plan, inputs: Tensor, kernel: Tensor, *state: Tensor
    ) -> Tensor:
        observe = plan.training is not False
        outputs, residuals = plan.forward(
            ENGINE, inputs, kernel, state, observe
        )
        ctx.plan = plan
        ctx.shapes = tuple(inputs.shape), tuple(kernel.shape)
        x, w, prior, amaxes = residuals
        ctx.save_for_backward(
            *x, *w, *(prior or (None, None)), *(amaxes or (None, None)), *state
        )
        return _no_view(outputs)

    # Differentiated again, roundings and scales would be taken for functions
    # whose slope says something; what comes out is far off.
    @staticmethod
    @torch.compiler.disable
    @once_differentiable
    def backward(ctx: Any, outputs_grad: Tensor) -> tuple[Any, ...]:
        x, sx, w, sw, scales, unseen, ax, aw, *state = ctx.saved_tensors
        residuals = Residuals(
            Quantized(x, sx),
            Quantized(w, sw),
            None if scales is None else Prior(scales, unseen),
            None if ax is None else (ax, aw),
        )
        with _no_autocast(outputs_grad):
            inputs_grad, kernel_grad, state_grad = ctx.plan.backward(
                ENGINE,
                residuals,
                outputs_grad,
                ctx.shapes,
                tuple(state),
                needed=ctx.needs_input_grad[1:3],
            )
        return None, inputs_grad, kernel_grad, *state_grad


def _no_view(x: Tensor) -> Tensor:
    """The same memory as a tensor of its own.

    Autograd refuses to change a view in place where a custom function made
    it: `y += 1` on the outputs, or the softmax of Keras 3.12 adding its mask.
    """
    return x.new_empty(0).set_(x) if x._is_view() else x


def _no_autocast(x: Tensor) -> Any:
    """Keeps `torch.autocast` from narrowing unscaled products."""
    return torch.autocast(x.device.type, enabled=False)


def _refusal(plan: Plan) -> str | None:
    """Why a contraction cannot be native, or None."""
    if plan.prefer == "emulated":
        return "asked for by kernels.prefer"
    if not isinstance(plan.contraction, Einsum):
        return "torch has no float8 convolution"
    form = matmul_form(plan.contraction.equation)
    if form is None:
        return "an axis of one operand is summed alone"
    if form.batch:
        return "torch has no batched float8 matmul"
    if not hasattr(F, "scaled_mm"):
        return f"torch {torch.__version__} has no scaled_mm"
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        if capability < HOPPER_OR_ADA:
            return f"compute capability {capability} has no float8 matmul"
    return None


def _clipped(x: Tensor, scale: Tensor, dtype: str) -> Tensor:
    limit = formats.get(dtype).max
    return (x.float() / scale).clamp_(-limit, limit)


def _rounded(x: Tensor, scale: Tensor, dtype: str) -> Tensor:
    """The quantized numbers, in float32."""
    values = _clipped(x, scale, dtype)
    if values.device.type == "cpu":
        return _round_to_format(values, dtype).copysign_(x)
    return values.to(getattr(torch, dtype)).float()


@torch.library.custom_op("keras_policy_ext::rounded", mutates_args=())
def _rounded_in_graph(
    x: torch.Tensor, scale: torch.Tensor, dtype: str
) -> torch.Tensor:
    """`_rounded` as one operation that a compiler cannot look into.

    Inductor computes in float32 throughout and drops a cast to float8 and
    back (torch 2.13): nothing would be quantized.
    """
    return _rounded(x, scale, dtype)


@_rounded_in_graph.register_fake
def _(x: Tensor, scale: Tensor, dtype: str) -> Tensor:
    return torch.empty_like(x, dtype=torch.float32)


def _round_to_format(x: Tensor, dtype: str) -> Tensor:
    """`casting.round_to_format` in place, the signs of zeros left to do.

    On a CPU torch needs four times as long to cast to float8 and back, and
    most of the time of a new tensor is that of its memory.
    """
    lowest, shift = casting.grid_constants(dtype)
    bits = x.view(torch.int32) & casting.EXPONENT_BITS
    anchor = bits.clamp_min_(lowest).add_(shift).view(torch.float32)
    return x.add_(anchor).sub_(anchor)


def _einsum(equation: str, a: Tensor, b: Tensor, matmul: Any) -> Tensor:
    """An einsum by a matmul, or `torch.einsum` if it is none.

    Args:
        equation: Explicit.
        a: First operand.
        b: Second operand.
        matmul: Takes (rows, contracted) and (contracted, columns), or both
            with an axis of the batch before them.
    """
    form = matmul_form(equation)
    if form is None:
        return torch.einsum(equation, a, b)
    first, second, out = split(equation)
    a = _permute(a, first, form.batch + form.rows + form.contracted)
    b = _permute(b, second, form.batch + form.contracted + form.columns)
    i, j = len(form.batch), len(form.batch + form.rows)
    batch, rows, contracted = a.shape[:i], a.shape[i:j], a.shape[j:]
    columns = b.shape[i + len(form.contracted) :]
    lead = (batch.numel(),) if form.batch else ()
    product = matmul(
        a.reshape(*lead, rows.numel(), contracted.numel()),
        b.reshape(*lead, contracted.numel(), columns.numel()),
    )
    product = product.reshape(batch + rows + columns)
    return _permute(product, form.batch + form.rows + form.columns, out)


def _is_known(x: Tensor | None) -> TypeGuard[Tensor]:
    """Whether a number can be read without waiting for a device."""
    # Tensors of other types stand for numbers that are not there yet.
    if x is None or type(x) is not torch.Tensor:
        return False
    return x.device.type == "cpu"


def _fits_bfloat16(a: Quantized, dtype: str) -> bool:
    """Whether a matmul in bfloat16 gives the same and is the faster one.

    Numbers of every float8 format are numbers of bfloat16. 256x512x2048 on a
    core with AVX512-BF16: 2.5 ms against 5.6 ms in float32 (torch 2.13).
    """
    return (
        dtype == "bfloat16"
        and a.values.dtype == torch.float32
        and _is_known(a.scale)
        and _multiplies_bfloat16()
    )


@functools.cache
def _multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for it, as far as torch can tell."""
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    checks = [getattr(torch.cpu, name, None) for name in names]
    return any(check is not None and check() for check in checks)


def _bfloat16_einsum(equation: str, a: Quantized, b: Quantized) -> Tensor:
    """Like `Engine.einsum`, for operands in float32 and a result in bfloat16.

    `alpha` multiplies what was accumulated in float32, before it is rounded:
    a product in bfloat16 that is scaled afterwards is rounded twice.
    """
    scale = float(a.scale * b.scale)

    def matmul(x: Tensor, y: Tensor) -> Tensor:
        product = torch.addmm if x.ndim == 2 else torch.baddbmm
        return product(x.new_zeros((1,) * x.ndim), x, y, beta=0, alpha=scale)

    return _einsum(equation, a.values.bfloat16(), b.values.bfloat16(), matmul)


def _permute(x: Tensor, axes: str, wanted: str) -> Tensor:
    if axes == wanted:
        return x
    return x.permute([axes.index(c) for c in wanted])


def _scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    dtype: torch.dtype,
    fast: bool,
) -> Tensor:
    """`a @ b * scale_a * scale_b` of two float8 matrices, padded to 16.

    CUDA wants the first operand row-major and the second column-major, both
    contiguous along the contracted axis.
    """
    rows, columns = a.shape[0], b.shape[1]
    if a.device.type == "cuda":
        a, b = _padded(a), _padded(b)
    product = F.scaled_mm(
        _contiguous(a),
        _contiguous(b.t()).t(),
        scale_a,
        F.ScalingType.TensorWise,
        scale_b,
        F.ScalingType.TensorWise,
        output_dtype=dtype,
        use_fast_accum=fast and a.device.type == "cuda",
    )
    return product.narrow(0, 0, rows).narrow(1, 0, columns)


def _contiguous(x: Tensor) -> Tensor:
    # `contiguous` and slices want the device itself; a clone and `narrow` can
    # be checked on fake CUDA tensors without CUDA (torch 2.13).
    if x.is_contiguous():
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _padded(x: Tensor) -> Tensor:
    """Zeros appended so that both sizes are multiples of `ALIGNMENT`."""
    rows, columns = (-size % ALIGNMENT for size in x.shape)
    if not rows and not columns:
        return x
    return F.pad(x.view(torch.uint8), (0, columns, 0, rows)).view(x.dtype)


def _conv_backward(
    conv: Conv, g: Tensor, x: Tensor, w: Tensor, operand: int
) -> Tensor:
    """The gradient of a convolution for inputs (0) or kernel (1).

    All tensors are in Keras's layouts: `(batch, *spatial, channels)` or
    channels first, kernel `(*spatial, channels / groups, filters)`.
    """
    last = conv.data_format == "channels_last"
    if last:
        x, g = x.movedim(-1, 1), g.movedim(-1, 1)
    rank = len(conv.strides)
    w = w.permute(rank + 1, rank, *range(rank))
    pads = _same_padding(conv, x.shape[2:], w.shape[2:])
    flat = [p for pair in reversed(pads) for p in pair]
    padded = F.pad(x, flat)
    mask = [operand == 0, operand == 1, False]
    gradients = torch.ops.aten.convolution_backward(
        g.contiguous(),
        padded,
        w,
        None,
        list(conv.strides),
        [0] * rank,
        list(conv.dilation_rate),
        False,
        [0] * rank,
        x.shape[1] // w.shape[1],
        mask,
    )
    if operand == 1:
        return gradients[1].permute(*range(2, rank + 2), 1, 0)
    gradient = gradients[0]
    for axis, (before, _) in enumerate(pads):
        gradient = gradient.narrow(axis + 2, before, x.shape[axis + 2])
    return gradient.movedim(1, -1) if last else gradient


def _same_padding(
    conv: Conv, sizes: torch.Size, kernel_sizes: torch.Size
) -> list[tuple[int, int]]:
    """Zeros before and after each spatial axis, as TensorFlow pads."""
    pads = []
    for size, kernel, stride, dilation in zip(
        sizes, kernel_sizes, conv.strides, conv.dilation_rate, strict=True
    ):
        outputs = -(-size // stride)
        reach = (kernel - 1) * dilation + 1
        total = max((outputs - 1) * stride + reach - size, 0)
        total = total if conv.padding == "same" else 0
        pads.append((total // 2, total - total // 2))
    return pads
