"""PyTorch's `fully_shard`: variables follow it, and it gathers float8 codes.

`fully_shard` looks for two methods on the shard of a parameter (PyTorch 2.11
to 2.13): `fsdp_pre_all_gather` returns the tensors to gather, and
`fsdp_post_all_gather` makes the whole parameter of what was gathered. Here each
process quantizes its shard, with one scale for all shards, and gathers one byte
per element. A float8 layer multiplies the gathered codes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from keras_policy_ext import backends, numerics
from keras_policy_ext._keras import variable_values
from keras_policy_ext._types import Tensor
from keras_policy_ext.backends.interface import saved_dtype
from keras_policy_ext.backends.torch.backend import GATHERS
from keras_policy_ext.ext.delayed.torch import observations
from keras_policy_ext.numerics.quantized import Quantized
from keras_policy_ext.numerics.quantized import quantize as quantize_matrix
from keras_policy_ext.numerics.scale_sources import Amax, ScaleSource
from keras_policy_ext.recipes import Quantization

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_aten = torch.ops.aten


class Contents:
    """The codes and scales of a gathered kernel; the next gather replaces them.

    Attributes:
        codes: Uint8, of the shape of the kernel. `fully_shard` frees its
            memory after a pass, and gathers into it again.
        scale: Float32 (1, 1, 1).
        marked_scale: The same, NaN if the kernel is not finite and no state
            records that.
        amax: Float32 scalar, the amax of the shard of this process.
    """

    def __init__(self, *fields: Tensor):
        self.renew(*fields)

    def renew(
        self, codes: Tensor, scale: Tensor, marked_scale: Tensor, amax: Tensor
    ) -> None:
        """Set all fields."""
        self.codes, self.amax = codes, amax
        self.scale, self.marked_scale = scale, marked_scale


class ShardCast:
    """The cast of a kernel's shards, with one scale for all of them.

    Args:
        quantization: How the recipe quantizes the kernel; with one scale.
        source: The source of scales of the recipe.
        state: The state variable of the kernel; None for none.
    """

    def __init__(
        self, quantization: Quantization, source: ScaleSource, state: Tensor
    ):
        self.quantization = quantization
        self._source, self._state = source, state
        self._last: tuple[Tensor, Tensor | None, Tensor | None] | None = None

    def __call__(
        self, shard: Tensor, group: dist.ProcessGroup
    ) -> tuple[Tensor, ...]:
        """Quantize the shard of this process.

        In a backward pass it computes the codes of the forward pass again,
        since the layer has saved their scale.

        Args:
            shard: Of the shape of all shards, with zeros for missing rows.
            group: The process group of the shards.

        Returns:
            The fields of `Contents`, the codes of the shard first.
        """
        if self._last is None or torch._C._current_graph_task_id() < 0:
            amax = numerics.amax(shard)
            if self._state is None:
                self._last = amax, _largest(amax, group), None
            else:
                self._last = amax, None, self._known_scale(amax, group)
        amax, whole, scale = self._last
        engine: Any = backends.engine
        asked = self.quantization
        read, _ = quantize_matrix(
            shard, asked, scale, engine.narrow_cast, lambda _: whole
        )
        codes = read.encoded(saved_dtype(asked.format), engine.encode).values
        marked = read if whole is None else read.with_nan_scales(whole)
        return codes.view(torch.uint8), read.scale, marked.scale, amax

    def _known_scale(
        self, amax: Tensor, group: dist.ProcessGroup
    ) -> Tensor | None:
        """Return the scale that the state of the kernel gives."""
        source: Any = self._source
        known = source.read(self._state.matrix().detach())
        # All processes have the same state, and so decide the same.
        unseen = known.unseen
        if unseen is None or backends.current.known_any(unseen) is False:
            known = dataclasses.replace(known, unseen=None)
        else:
            amax = _largest(amax, group)
        now = Amax(amax, True, lambda x: x)
        return source.scale("kernel", self.quantization, now, known)


def _largest(amax: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the largest amax of all processes; NaN if one is NaN."""
    # A collective may drop NaN from a maximum of floats. The bits of amaxes, as
    # integers, are in the same order, and those of NaN are the largest.
    bits = amax.abs().reshape(1).view(torch.int32).clone()
    dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=group)
    return bits.view(torch.float32).reshape(())


class ShardedKernel(torch.Tensor):
    """A kernel, or the shard of one, that is gathered as float8.

    All operations run on the tensor inside. The results are plain tensors,
    except for those of which `fully_shard` makes a shard.
    """

    tensor: Tensor
    cast: ShardCast

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, tensor: Tensor, cast: ShardCast) -> ShardedKernel:
        """Return a wrapper of a tensor, which shares its memory."""
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            tensor.shape,
            strides=tensor.stride(),
            dtype=tensor.dtype,
            device=tensor.device,
            requires_grad=tensor.requires_grad,
        )
        made.tensor, made.cast = tensor, cast
        return made

    def __init__(self, tensor: Tensor, cast: ShardCast):
        pass

    def __repr__(self) -> str:
        return f"ShardedKernel({self.tensor!r})"

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        # Files have plain tensors.
        return self.tensor.__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Callable[..., Tensor],
        types: Sequence[type],
        args: Sequence[Tensor] = (),
        kwargs: dict[str, object] | None = None,
    ) -> Any:
        """Run an operation on the tensors inside."""
        casts = []

        def unwrap(x: ShardedKernel) -> Tensor:
            casts.append(x.cast)
            return x.tensor

        args, kwargs = pytree.tree_map_only(cls, unwrap, (args, kwargs or {}))
        found = func(*args, **kwargs)
        if func not in _SHARDS:
            return found
        return pytree.tree_map_only(
            torch.Tensor, lambda x: cls(x, casts[0]), found
        )

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: torch.nn.Module,
        mp_policy: object,
    ) -> tuple[tuple[Tensor], Any]:
        """Return the codes to gather, and what `fsdp_post_all_gather` needs.

        Raises:
            NotImplementedError: If the kernel is not sharded along axis 0.
        """
        shard = self.tensor
        if shard.shape[1:] != outer_size[1:]:
            raise NotImplementedError(
                "A kernel that is gathered as float8 must be sharded along "
                "its first axis. Received: a shard of shape "
                f"{tuple(shard.shape)} of a kernel of shape "
                f"{tuple(outer_size)}. Allowed: fully_shard without "
                "shard_placement_fn. Or leave out kpe.loops.gather_float8."
            )
        rows = -(-outer_size[0] // mesh.size())
        if len(shard) < rows:
            zeros = [0, 0] * (shard.dim() - 1)
            shard = F.pad(shard, [*zeros, 0, rows - len(shard)])
        codes, *scales = self.cast(shard, mesh.get_group())
        return (codes,), (outer_size[0], scales)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: Sequence[Tensor],
        metadata: tuple[int, Sequence[Tensor]],
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> Any:
        """Make the whole kernel of gathered codes, or renew that in `out`."""
        rows, scales = metadata
        if self.is_cuda:
            # They were made on another stream, which may reuse their memory.
            for each in scales:
                each.record_stream(torch.cuda.current_stream())
        fields = all_gather_outputs[0][:rows], *scales
        if out is None:
            contents = Contents(*fields)
            return GatheredKernel(contents, param_dtype), all_gather_outputs
        out.contents.renew(*fields)
        return None


_SHARDS = {
    _aten.detach.default,
    _aten.new_zeros.default,
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten.view.default,
    _aten.as_strided.default,
    _aten.clone.default,
    _aten._to_copy.default,
    _aten._pin_memory.default,
}
"""The operations by which `fully_shard` makes shards of a parameter."""


class GatheredKernel(torch.Tensor):
    """A gathered kernel: float8 codes that only a float8 layer can read.

    Autograd takes it for a leaf of the kernel's shape and dtype.
    """

    contents: Contents

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, contents: Contents, dtype: torch.dtype) -> GatheredKernel:
        """Return a tensor of a dtype, without memory of its own."""
        codes = contents.codes
        made = torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=dtype, device=codes.device
        )
        made.contents = contents
        return made

    def __init__(self, contents: Contents, dtype: torch.dtype):
        pass

    def __repr__(self) -> str:
        return f"GatheredKernel({self.contents.codes!r})"

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Callable[..., Tensor],
        types: Sequence[type],
        args: Sequence[Tensor] = (),
        kwargs: dict[str, object] | None = None,
    ) -> Any:
        """Return the same kernel, or zeros of its shape, or raise."""
        if func in _ALIASES:
            return cls(args[0].contents, args[0].dtype)
        if func is _aten.zeros_like.default:
            x = args[0]
            return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        raise NotImplementedError(
            "A kernel that was gathered as float8 can be multiplied by its "
            f"float8 layer only. Received: the operation {func}. Allowed: "
            "layers that read the kernel in their float8 matmul alone, and "
            "run outside of torch.compile; leave out kpe.loops.gather_float8 "
            "for other layers. Do you read it after a pass? Call "
            "`reshard()` of the layer first."
        )

    def read(self, asked: Quantization, narrow: bool) -> tuple[Any, Any, Any]:
        """Return the kernel quantized, with both scales, and its amax.

        Args:
            asked: How the plan quantizes it.
            narrow: Whether a float8 matmul reads it.
        """
        held = self.contents
        values = held.codes
        if narrow or saved_dtype(asked.format) != "uint8":
            values = backends.current.as_float8(values, asked.format)
        read, marked = (
            Quantized(values, scale, asked)
            for scale in (held.scale, held.marked_scale)
        )
        return read, marked, held.amax


_ALIASES = {_aten.detach.default, _aten.alias.default, _aten.as_strided.default}
"""The operations by which `fully_shard` makes a parameter of it."""


def prepare(kernels: Iterable[Any], modules: Iterable[torch.nn.Module]) -> None:
    """Replace the parameters of kernels by ones that are gathered as float8.

    Args:
        kernels: Objects with the attributes `variable`, `quantization`,
            `source` (of its scales), and `state`, which may be None. Those
            that were replaced before are left as they are.
        modules: The layers of the model.

    Raises:
        ValueError: If a kernel is sharded already. Nothing is changed then.
    """
    parameters = parameters_of(modules)
    sharded = holders_of_parts(parameters)
    new = [
        each
        for each in kernels
        if not isinstance(each.variable.value, ShardedKernel)
    ]
    for each in new:
        if each.variable.path in sharded:
            raise ValueError(
                "A kernel that is sharded already cannot be gathered as "
                f"float8. Received: {each.variable.path!r}. Allowed: kernels "
                "of a model before fully_shard. Call kpe.loops.gather_float8 "
                "first, then fully_shard, then kpe.loops.follow_shards."
            )
    for each in new:
        _prepare(each, parameters)


def _prepare(kernel: Any, parameters: Iterable[Any]) -> None:
    """Replace the parameter of a kernel, in all dicts that have it."""
    if kernel.state is not None:
        kernel.state.look_last()
    variable = kernel.variable
    before = variable.value
    cast = ShardCast(kernel.quantization, kernel.source, kernel.state)
    after = torch.nn.Parameter(
        ShardedKernel(before.detach(), cast), before.requires_grad
    )
    for each in parameters:
        for name in [n for n, p in each.items() if p is before]:
            each[name] = after
    variable_values.replace(variable, after)


class Gathering(NamedTuple):
    """A kernel that `fully_shard` gathers as codes, before its layer runs.

    Attributes:
        axes: An empty entry for each axis of the kernel; see
            `Backend.gathering_of`.
        is_quantized: True.
    """

    axes: tuple[tuple[str, ...], ...]
    is_quantized: bool = True


def follow(variables: Sequence[Any], modules: Iterable[Any]) -> None:
    """Make variables read the sharded parameters of `fully_shard`.

    Keras stores the parameters of a layer in a dict, by variable path.
    `fully_shard` puts the shard of this process into that dict, and the whole
    parameter during a pass.

    Raises:
        ValueError: If no variable is sharded, or one is sharded twice or is
            not trainable. Nothing is changed then.
    """
    dicts = parameters_of(modules)
    holders = holders_of_parts(dicts)
    cut = [v for v in variables if v.path in holders]
    for variable in cut:
        _check(variable, holders[variable.path])
    if not cut:
        raise ValueError(
            "Nothing of this model is sharded. Received: a model without "
            "fully_shard, or one whose weights are all in ignored_params. "
            "Allowed: a model that fully_shard was called on, or on a "
            "layer of it. Call torch.distributed.fsdp.fully_shard first."
        )
    for variable in cut:
        holder = holders[variable.path][0]
        if hasattr(holder[variable.path].to_local(), GATHERS):
            axes = ((),) * len(variable.shape)
            variable.float8_gathering = Gathering(axes)
        variable_values.read_from(variable, holder, variable.path)
        # A Keras model lists the weights of its layers as its own, and would
        # keep and save what these were before.
        for each in dicts:
            if variable.path in each and each not in holders[variable.path]:
                each[variable.path] = holder[variable.path]
    group = cut[0].value.device_mesh.get_group()
    observations.know_group(variables, group)


def parameters_of(modules: Iterable[Any]) -> list[Any]:
    """Return the dicts of parameters in modules, without repeats."""
    dicts = {
        id(inner): inner
        for module in modules
        for inner in module.modules()
        if isinstance(inner, torch.nn.ParameterDict)
    }
    return list(dicts.values())


def holders_of_parts(dicts: list[Any]) -> dict[str, list[Any]]:
    """Return, by parameter name, the dicts that hold the parameter's shards."""
    # Not at the top: it takes a tenth of a second.
    from torch.distributed.tensor import DTensor

    found: dict[str, list[Any]] = {}
    for each in dicts:
        for name, parameter in each.items():
            if isinstance(parameter, DTensor):
                found.setdefault(name, []).append(each)
    return found


def _check(variable: Any, holders: list[Any]) -> None:
    parts = {id(holder[variable.path]) for holder in holders}
    if len(parts) > 1:
        raise ValueError(
            "A weight is sharded twice, and only one of the two copies would "
            f"be trained. Received: {variable.path!r}, by fully_shard of its "
            "layer and by fully_shard of the Keras model, which lists it too. "
            "Allowed: fully_shard of the model, or of its layers, not both."
        )
    state = getattr(variable, "overwrite_with_gradient", False)
    if state or not variable.trainable:
        raise ValueError(
            "An assignment to a sharded variable would be lost. Received: "
            f"{variable.path!r}, sharded by fully_shard. Allowed: weights that "
            "an optimizer updates. Pass all others to fully_shard(..., "
            "ignored_params=kpe.loops.uncut(model))."
        )
