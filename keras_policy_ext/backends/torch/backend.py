"""The backend for PyTorch, and what its current device can do."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np
import torch

from keras_policy_ext import user_code
from keras_policy_ext._keras import calls, variable_values
from keras_policy_ext._types import Tensor, override
from keras_policy_ext.backends import devices
from keras_policy_ext.backends.devices import Device
from keras_policy_ext.backends.interface import (
    Backend,
    FrozenOperation,
    Operation,
    saved_dtype,
)
from keras_policy_ext.backends.parts import FEW, LARGE, StoredMatrix
from keras_policy_ext.backends.torch import (
    operators,
    stored_products,
    traced_programs,
    transforms,
)
from keras_policy_ext.backends.torch.gradients import (
    Differentiable,
    Frozen,
    Relu,
    are_transforms_active,
    links_of,
    no_autocast,
    refuse_compiled_transforms,
)
from keras_policy_ext.formats import FAMILIES

FIRST_CUDA = {"blocks": (12, 9), "mx": (12, 8)}
"""The first version of CUDA whose cuBLAS reads scales of this kind."""


def here() -> Device:
    """Return the `Device` that `pretend` set, else the one PyTorch runs on."""
    return devices.pretended() or _found()


def lacking(*formats: str) -> str | None:
    """Return why PyTorch has no matmul of these formats here, or None.

    On a CPU it has one, which is slower than a float32 matmul.
    """
    device = here()
    if device.maker == "cpu":
        others = [each for each in formats if each not in FAMILIES["ocp"]]
        return f"scaled_mm on a CPU reads no {others[0]}" if others else None
    if device.maker == "google":
        return f"PyTorch does not run on {device.title} here"
    return device.lacking(*formats)


def scales_rows(device: torch.device) -> bool:
    """Return True if `scaled_mm` takes row scales for bfloat16 outputs."""
    if device.type == "cpu":
        return torch.__version__ >= (2, 13)
    # Builds for Windows lack this kernel.
    return sys.platform != "win32" and "rows" in here().scales


def lacking_scales(kind: str, size: int) -> str | None:
    """Return why there is no matmul with scales of blocks, or None.

    `kind` is that of `Device.scales`, `size` the elements along a block.
    """
    device = here()
    if device.maker != "nvidia":
        return f"torch has scales of {size} numbers with NVIDIA's CUDA only"
    if kind not in device.scales:
        return f"{device.title} has no matmul with scales of {size} numbers"
    if devices.pretended() is not None:
        return None  # Any CUDA may be there.
    built_for = tuple(map(int, str(torch.version.cuda).split(".")[:2]))
    if built_for < FIRST_CUDA[kind]:
        wanted = ".".join(map(str, FIRST_CUDA[kind]))
        return (
            f"scales of {size} numbers want CUDA {wanted}; torch is built "
            f"for {torch.version.cuda}"
        )
    return None


def casts_to_float8(device: torch.device) -> bool:
    """Return True if PyTorch can cast to float8 dtypes on a device.

    Apple's GPUs raise TypeError (all releases up to September 2026).
    """
    if device.type == "cpu":
        return True
    apple = device.type == "mps"
    described = devices.KNOWN["mps"] if apple else here()
    return described.holds_float8


def multiplies_bfloat16() -> bool:
    """Return True if this is a CPU that multiplies bfloat16 fast."""
    return here() is devices.KNOWN["cpu_bf16"]


def sums_in_float32(dtype: str) -> bool:
    """Return True if the GPU's matmuls of `dtype` can return float32."""
    fp16 = getattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", False)
    return _sums_in_float32(dtype, bool(fp16))


@functools.cache
def _sums_in_float32(dtype: str, allows_fp16: bool) -> bool:
    """Run a matmul of `dtype`; return True if its float32 sums are exact."""
    # `allows_fp16` is read by the cache: the setting may change the result.
    try:
        x = torch.ones((16, 4112), device="cuda", dtype=getattr(torch, dtype))
        x[:, 0] = 0.5
        sums = torch.mm(x, torch.ones_like(x).t(), out_dtype=torch.float32)
        # A sum that no 16-bit dtype can hold.
        return bool((sums == 4111.5).all())
    # Older versions of PyTorch, and builds for other makers, lack `out_dtype`.
    except (RuntimeError, TypeError):
        return False


def _found() -> Device:
    """Return the `Device` that PyTorch has here: a GPU, or the CPU."""
    if torch.cuda.is_available():
        return gpu_of(torch.cuda.current_device())
    if torch.backends.mps.is_available():
        return devices.KNOWN["mps"]
    return devices.KNOWN["cpu_bf16" if _has_bfloat16_instructions() else "cpu"]


@functools.cache
def gpu_of(index: int) -> Device:
    """Return the `Device` of the GPU with this index; CUDA is asked once."""
    if torch.version.hip:  # PyTorch for AMD: such as "gfx942:sramecc+".
        name = torch.cuda.get_device_properties(index).gcnArchName
        return devices.of_amd(name, title=name.partition(":")[0])
    capability = torch.cuda.get_device_capability(index)
    title = f"compute capability {capability}"
    return devices.of_nvidia(capability, title)


@functools.cache
def _has_bfloat16_instructions() -> bool:
    """Return True if torch reports bfloat16 instructions on this CPU."""
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    checks = [getattr(torch.cpu, name, None) for name in names]
    return any(check is not None and check() for check in checks)


SMALLEST_NORMAL = torch.finfo(torch.float32).smallest_normal
LARGEST = torch.finfo(torch.float32).max

GATHERS = "fsdp_pre_all_gather"
"""The name of a method of parameters that `fully_shard` has not gathered."""

FULLY_SHARD = (
    "Under fully_shard a Keras layer is not trained, in float8 or not: its "
    "variables keep their first tensors, and the optimizer gets other ones. "
    "Received: a layer that torch.distributed.fsdp.fully_shard has sharded, "
    "or a model with such a layer. Allowed: a model after "
    "kpe.loops.follow_shards(model), which points the variables at the "
    "shards. Call it once, before you make the optimizer."
)


IGNORED = (
    "Keras ignores the tensors that this model was given, with or without "
    "float8: its layers read the tensors of their own variables, and gradients "
    "of the given tensors are 0. Received: tensors by "
    "torch.func.functional_call, load_state_dict(assign=True), or another "
    "function that replaces parameters of a module. Allowed: "
    "model.stateless_call(trainable, non_trainable, x) for values, and "
    "load_state_dict without assign=True."
)

_WARNED: weakref.WeakSet[Any] = weakref.WeakSet()
"""The models for which this warning was given."""


class TorchBackend(Backend):
    """The backend for PyTorch."""

    name = "torch"
    numbers_of_a_part = 1 << 17

    trace = staticmethod(traced_programs.trace)
    steps = staticmethod(traced_programs.steps)
    in_scope = staticmethod(traced_programs.in_scope)
    # Callers then read no context variable, which would break the graph.
    is_compiling = staticmethod(torch.compiler.is_compiling)

    @override
    def step_by_step(self) -> AbstractContextManager[None]:
        # Loops run eagerly anyway. Callers read values, and take no gradients.
        return torch.no_grad()

    # 1 µs; `ops.reshape` takes 30 (torch 2.13).
    reshape = staticmethod(torch.reshape)
    permute = staticmethod(torch.permute)

    @override
    def run_if(
        self,
        flag: Tensor,
        update: Callable[..., None],
        arguments: tuple[Any, ...],
        variables: Sequence[keras.Variable],
    ) -> None:
        """Call `update` if a flag is set; in a graph else undo it."""
        compiles = torch.compiler.is_compiling()
        if not compiles or variable_values.is_stateless():
            super().run_if(flag, update, arguments, variables)
            return
        # A branch would end the graph, and wait for the flag. So the update is
        # computed in any case, and the former values put back if it is unset.
        with torch.no_grad():
            before = [each.value.clone() for each in variables]
            update(*arguments)
            for variable, value in zip(variables, before, strict=True):
                kept = torch.where(flag, variable.value, value)
                variable.value.copy_(kept)

    @override
    def repeat(self, x: Tensor, repeats: int, axis: int) -> Tensor:
        # `ops.repeat` fails on the device "meta" (keras 3.15).
        return torch.repeat_interleave(x, repeats, dim=axis)

    @override
    def stack(self, tensors: Sequence[Tensor], axis: int) -> Tensor:
        # `ops.stack` makes a reference cycle, which keeps the tensors until
        # garbage is collected (keras 3.15).
        return torch.stack(tuple(tensors), axis)

    @override
    def known_number(self, x: Tensor) -> float | None:
        """Return a float32 scalar on a CPU as a float; else None."""
        # To compute a scale takes 5 µs from a number, and 50 from a tensor.
        if not is_known(x) or x.dim() or x.dtype != torch.float32:
            return None
        # While a step is compiled or exported, tensors have no values.
        return None if torch.compiler.is_compiling() else x.item()

    @override
    def have_normal_product(self, a: Tensor, b: Tensor) -> bool:
        """Return True if products of scales are normal, or on a GPU."""
        if torch.compiler.is_compiling():
            return False  # Their values are not known yet.
        if not (is_known(a) and is_known(b)):
            # A GPU is not asked, since the host would wait. It multiplies by
            # subnormal numbers, which a CPU may read as 0.
            return a.device.type != "cpu"
        if a.numel() == 1 == b.numel():
            product = a.item() * b.item()
            return SMALLEST_NORMAL <= product <= LARGEST
        if not (a.numel() and b.numel()):
            return True  # The scales of an empty batch: there is no product.
        # Scales are positive.
        (a_min, a_max), (b_min, b_max) = (
            [each.item() for each in x.aminmax()] for x in (a, b)
        )
        return a_min * b_min >= SMALLEST_NORMAL and a_max * b_max <= LARGEST

    @override
    def known_any(self, flags: Tensor) -> bool | None:
        # A caller that knows that no operand is unseen computes fewer scales.
        return bool(flags.any()) if is_known(flags) else None

    @override
    def look_for_other_parameter(self, variable: Any) -> None:
        """Warn once if PyTorch was given a tensor that Keras ignores."""
        listed = calls.parameter_of_call(variable)
        own = getattr(variable, "_value", listed)
        # Shards are followed: see `kpe.loops.follow_shards`.
        if listed is own or not is_real(listed) or not is_real(own):
            return
        model = calls.entry_layer()
        if model in _WARNED:
            return
        _WARNED.add(model)
        # Two variables of one path share the place of one.
        values = (getattr(v, "_value", None) for v in model.variables)
        if not any(listed is value for value in values):
            user_code.warn(IGNORED)

    @override
    def gathering_of(self, variable: keras.Variable) -> Any:
        # `kpe.loops` sets it for kernels that `fully_shard` has sharded.
        return getattr(variable, "float8_gathering", None)

    @override
    def on_cpu(self, x: Tensor) -> bool:
        return bool(x.device.type == "cpu")

    @override
    def kept_dtype(self, x: Tensor, format_name: str) -> str:
        # Apple's GPUs have no float8 dtype.
        on_apple = x.device.type == "mps"
        return "uint8" if on_apple else saved_dtype(format_name)

    @override
    def may_take_gradients(self) -> bool:
        return bool(torch.is_grad_enabled())

    @override
    def relu(self, x: Tensor) -> Tensor:
        """Compute a ReLU; in an eager step, save one bit per element."""
        if not torch.is_grad_enabled():
            return torch.relu(x)  # Nothing is saved.
        # torch.compile chooses itself what to save, and transforms of
        # `torch.func` take no function whose `forward` has a context.
        if torch.compiler.is_compiling() or are_transforms_active():
            return torch.relu(x)
        return Relu.apply(x)

    @override
    def run(
        self,
        operation: Operation,
        bias: Tensor | None,
        inputs: Tensor,
        kernel: Tensor,
        *state: Tensor,
    ) -> Tensor:
        """Run an operation and add a bias: compiled, transformed or eager."""
        if torch.compiler.is_compiling():
            if is_exporting():
                outputs = _run_exported(operation, inputs, kernel, state)
                return outputs if bias is None else outputs + bias
            if torch.compiler.is_dynamo_compiling():
                refuse_compiled_transforms()
                return operators.run(operation, bias, inputs, kernel, *state)
        # Else another thread compiles: torch 2.13 sets its flag in all threads.
        if torch.jit.is_tracing():  # As `torch.onnx` without Dynamo does.
            _refuse_onnx()
            _refuse_torchscript()
        # `fully_shard` marks the parameter that it replaces (torch 2.13), and
        # Keras goes on reading that one (keras 3.15).
        if hasattr(kernel, "_fsdp_orig_uid") or hasattr(kernel, GATHERS):
            raise NotImplementedError(FULLY_SHARD)
        # A plan made while another thread compiles lacks the preference: it is
        # read now, as the backward pass may run on a thread that has another.
        operation = operation.with_preference()
        tensors = (inputs, kernel, *state)
        if are_transforms_active():
            return transforms.run(operation, bias, *tensors)
        with no_autocast(inputs):
            if torch.is_grad_enabled() and (
                inputs.requires_grad
                or kernel.requires_grad
                or (state and state[0].requires_grad)
            ):
                if state:
                    operation.source.before_gradients(*state)
                links = links_of(inputs, kernel)
                return Differentiable.apply(operation, links, bias, *tensors)
            # If only the bias is trained, its gradient is that of an addition.
            bias_is_apart = bias is not None and torch.is_grad_enabled()
            outputs, _ = operation.bound.forward(
                inputs,
                kernel,
                state,
                observe=False,
                bias=None if bias_is_apart else bias,
                slot=operation.slot,
            )
            return outputs + bias if bias_is_apart else outputs

    @override
    def unchanged_random_state(self) -> AbstractContextManager[Any]:
        # PyTorch warns if there are several devices that are not named.
        return torch.random.fork_rng(range(torch.cuda.device_count()))

    @override
    def random_state(self) -> list[np.ndarray]:
        states = [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]
        return [x.numpy().copy() for x in states]

    @override
    def restore_random_state(self, states: Sequence[np.ndarray]) -> None:
        """Restore the random state of the CPU, then of each GPU."""
        first, *others = (torch.from_numpy(x.copy()) for x in states)
        torch.set_rng_state(first)
        for device, state in enumerate(others[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, device)

    @override
    def run_frozen(
        self, operation: FrozenOperation, inputs: Tensor, *constants: Tensor
    ) -> Tensor:
        """Run a frozen operation: compiled, transformed or eager."""
        takes_gradient = torch.is_grad_enabled() and inputs.requires_grad
        if torch.compiler.is_dynamo_compiling():
            # On a GPU the compiler may fuse what only widens. On a CPU it
            # would write a whole kernel in floats.
            fuses = not self.on_cpu(inputs) or is_exporting()
            if operation.only_widens and fuses and not takes_gradient:
                return operation.forward(inputs, constants)
            refuse_compiled_transforms()
            return operators.run_frozen(operation, inputs, *constants)
        _refuse_torchscript()
        if are_transforms_active():
            return transforms.run_frozen(operation, inputs, *constants)
        if takes_gradient:
            return Frozen.apply(operation, inputs, *constants)
        return operation.forward(inputs, constants)

    @override
    def by_rows(
        self, function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Return `function(0, *tensors)`; on a CPU of some rows at a time.

        The first argument is how many numbers are before those rows.
        """
        # On a CPU the intermediate results of a part stay in its cache.
        first, count = tensors[0], tensors[0].numel()
        fits = count <= self.numbers_of_a_part
        if fits or torch.compiler.is_compiling() or not self.on_cpu(first):
            return function(0, *tensors)
        columns = count // len(first)
        step = max(self.numbers_of_a_part // columns, 1)  # In rows.
        parts = [
            function(
                start * columns, *(x[start : start + step] for x in tensors)
            )
            for start in range(0, len(first), step)
        ]
        return tuple(torch.cat(part) for part in zip(*parts, strict=True))

    @override
    def sqrt(self, x: Tensor) -> Tensor:
        """Return the square roots of float32 values, rounded correctly."""
        # In float32 a CPU rounds one root of 150 wrongly (torch 2.13, x86).
        if self.on_cpu(x):
            return x.double().sqrt_().float()
        return x.sqrt()

    @override
    def numbers(self, codes: Tensor, format_name: str) -> Tensor:
        """Convert codes to float32 values, on a CPU by a table."""
        # A GPU casts float8, and so does an exported program.
        is_cast = codes.device.type != "cpu" or not is_real(codes)
        if is_cast and format_name.startswith("float8"):
            return self.as_float8(codes, format_name).float()
        return stored_products.numbers(codes, format_name)

    @override
    def cuts(self, numbers: int) -> bool:
        """Return True if products cut a kernel of so many numbers."""
        # A transform of `torch.func` follows nothing that is used again.
        if torch.compiler.is_compiling() or are_transforms_active():
            return False
        return numbers > LARGE

    @override
    def gains_from_float16(self, numbers: int) -> bool:
        return True

    @override
    def product_by_parts(
        self, x: Tensor, kernel: StoredMatrix, dtype: str
    ) -> Tensor | None:
        """Multiply rows by a stored kernel; None to decode it first."""
        on_cpu = x.device.type == "cpu" == kernel.codes.device.type
        if not (on_cpu and is_real(x) and is_real(kernel.codes)):
            return None
        # What is written in place cannot be differentiated.
        if torch.is_grad_enabled() and x.requires_grad:
            return None
        # A CPU that multiplies bfloat16 does so faster than float32.
        in_bfloat16 = dtype == "bfloat16" and multiplies_bfloat16()
        if in_bfloat16 and x.shape[1] > FEW:
            return None
        return stored_products.product_by_parts(x, kernel)

    pack = staticmethod(stored_products.pack)

    @override
    def as_float8(self, codes: Tensor, format_name: str) -> Tensor:
        return codes.view(getattr(torch, format_name))

    @override
    def as_dtype(self, x: Tensor, dtype: str) -> Tensor:
        return x.to(getattr(torch, dtype))


BACKEND = TorchBackend()


def is_real(x: Tensor) -> bool:
    """Return True if a tensor has data; other types stand for one."""
    return type(x) in (torch.Tensor, torch.nn.Parameter)


@torch.compiler.assume_constant_result
def is_exporting() -> bool:
    """Return True inside `torch.export`, also where its compiler traces.

    The compiler of torch 2.11 would take `torch.compiler.is_exporting()` for
    True. It runs this function, as it is, once for each graph.
    """
    return bool(torch.compiler.is_exporting())


def is_known(x: Tensor) -> bool:
    """Return True if reading a tensor does not wait for a device."""
    return type(x) is torch.Tensor and x.device.type == "cpu"


def _run_exported(
    operation: Operation,
    inputs: Tensor,
    kernel: Tensor,
    state: tuple[Tensor, ...],
) -> Tensor:
    """Compute an operation's outputs with PyTorch's own operations only."""
    _refuse_onnx()
    if torch.compiler.is_dynamo_compiling():
        _refuse_strict_export()
    # With `observe=True` the scale of an unobserved operand is chosen without a
    # branch, which an exported file cannot have in a recurrent layer's loop.
    outputs, _ = operation.bound.forward(inputs, kernel, state, observe=True)
    return outputs


# The compiler runs it, as it is. It would follow what is raised in traced code
# into Keras's filter of tracebacks, and stumble there (torch 2.14).
@torch.compiler.assume_constant_result
def _refuse_strict_export() -> None:
    """Raise an error, since the compiler traces a strict export."""
    raise NotImplementedError(
        "A layer in float8 cannot be traced by the compiler of PyTorch. "
        "Received: torch.export.export(..., strict=True). Allowed: "
        "strict=False, which gives the same program."
    )


def _refuse_onnx() -> None:
    """Raise if `torch.onnx.export` is tracing the current call."""
    if torch.onnx.is_in_onnx_export():
        raise NotImplementedError(
            "torch.onnx cannot export a layer in float8, since ONNX has no "
            "operation on the bits of a number. Received: an export by "
            "torch.onnx. Allowed: `keras_policy_ext.export(model, path, "
            "format='onnx')`, or torch.export. To export floats with "
            "torch.onnx, save the model and call "
            "`keras_policy_ext.revert(model)` first."
        )


def _refuse_torchscript() -> None:
    """Raise if `torch.jit.trace` is tracing the current call."""
    if torch.jit.is_tracing():
        raise NotImplementedError(
            "torch.jit.trace cannot trace a layer in float8, since "
            "TorchScript has no operation on the bits of a number. Received: "
            "torch.jit.trace, or a function that calls it, such as "
            "SummaryWriter.add_graph. Allowed: torch.export. To trace floats, "
            "save the model and call `keras_policy_ext.revert(model)` first, "
            "or `keras_policy_ext.thaw(model)` if it is frozen."
        )
