"""What a training step of a Dense layer does with PyTorch on a GPU, counted.

Each operation of PyTorch is one kernel that reads its operands and writes its
results; the tensors have no numbers, and no GPU is needed.

    KERAS_BACKEND=torch python integration/lowering/torch_counts.py
"""

from __future__ import annotations

import dataclasses
import json
import sys
import unittest.mock

import keras
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from keras_policy_ext import backends, contractions, recipes
from keras_policy_ext.backends import devices
from keras_policy_ext.backends.both_layouts import Both
from keras_policy_ext.ext.delayed import frameworks
from keras_policy_ext.ext.delayed.sources import HistoryScales, Settling
from keras_policy_ext.ext.delayed.torch import observations
from keras_policy_ext.numerics.scale_sources import source_of

LARGE = 2**20
"""Bytes; what moves less is small: it costs its launch."""

VIEWS = {
    *("view", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze"),
    *("slice", "select", "narrow", "detach", "alias", "as_strided", "unbind"),
    *("split", "_unsafe_view", "_reshape_alias"),
    *("empty", "empty_like", "new_empty", "empty_strided"),
}
"""What moves nothing."""

MATMULS = ("mm", "addmm", "bmm", "_scaled_mm", "_scaled_mm_v2")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel.

    Attributes:
        name: Of the operation.
        moved: Bytes that it reads and writes.
        matmul: Whether it is a matmul.
    """

    name: str
    moved: int
    matmul: bool = False


class Counter(TorchDispatchMode):
    """Lists the kernels of a block in `kernels`."""

    def __init__(self):
        super().__init__()
        self.kernels = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.split("::")[1]
        written = tensors_in(result)
        if name not in VIEWS and written:
            read = tensors_in((args, kwargs))
            if name == "copy_":
                read = read[1:]
            self.enter(name, [*read, *written], name in MATMULS)
        return result

    def enter(self, name, tensors, matmul=False):
        """Add a kernel that reads and writes these tensors."""
        moved = sum(t.numel() * t.element_size() for t in tensors)
        self.kernels.append(Kernel(name, moved, matmul))


class CountedCasts:
    """Triton's kernels as what they are on a GPU. See `BothLayouts`."""

    sums_columns = True

    def __init__(self, counter):
        self.counter = counter

    def supports(self, *operands):
        """See `BothLayouts.supports` and `StateKernels.supports`."""

    def quantize(self, matrix, asked, known, wanted):
        """See `quantize_both_ways`: what it launches.

        `test_casts.py` of `integration/triton` compares both.
        """
        m, k = matrix.shape
        dtype = getattr(torch, asked.format)
        values = torch.empty(m, k, dtype=dtype)
        across = torch.empty(k, m, dtype=dtype)
        scale, amaxes = torch.empty(()), torch.empty(number_of_tiles(m, k))
        written = [values, across]
        if known.scale is None:
            amaxes = torch.empty(())
            self.counter.enter("zeros", [amaxes])
            self.counter.enter("triton amax", [matrix, amaxes])
        else:
            written += [amaxes] if wanted.amax else []
            if known.unseen is not None and not known.seen_lately:
                # If nothing is unseen, it reads the flag and ends.
                self.counter.enter("triton amax", [known.unseen])
        sums = None
        if wanted.column_sums:
            sums, parts = torch.empty(k), torch.empty(-(-m // 64), k)
            written.append(parts)
        self.counter.enter("triton cast", [matrix, *written])
        if sums is not None:
            self.counter.enter("triton sums", [parts, sums])
        amax = amaxes if wanted.amax else None
        return Both(values, across, scale, amax, sums)

    def history_scales(self, source, state):
        """See `triton_states.history_scales`."""
        self.counter.enter("triton history", [state])
        scales, unseen = torch.empty(3), torch.empty(3, dtype=torch.bool)
        return HistoryScales(scales, unseen)

    def observation(self, source, amaxes, slot):
        """See `triton_states.observation`."""
        found = torch.empty(source.state_shape)
        self.counter.enter("triton observation", [*amaxes, found])
        return found

    def settle(self, source, value, previous):
        """See `triton_states.Settling`."""
        self.counter.enter("triton settle", [value, previous, previous])
        return torch.empty_like(previous)


def tensors_in(tree):
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def number_of_tiles(m, k):
    """See `triton_casts.number_of_tiles`; Triton is not needed here."""
    return -(-m // 64) * -(-k // 64)


def dense_step(size, recipe, triton, seen_lately=True):
    """The kernels of a step with SGD, of `size` x `size` matrices.

    Args:
        size: Of each axis.
        recipe: The name of a recipe, or None for bfloat16.
        triton: Whether operands are cast by Triton.
        seen_lately: Whether the GPU has told that the step before has
            observed all operands, as after the first steps.
    """
    counter = Counter()
    casts = CountedCasts(counter) if triton else None
    engine = dataclasses.replace(
        backends.engine,
        both_layouts=casts,
    )
    loaded = unittest.mock.patch.object(backends, "engine", engine)
    kernels = () if casts is None else (casts,)
    states = unittest.mock.patch.object(frameworks.current, "kernels", kernels)
    # Tensors without numbers, which cost nothing.
    meta = keras.device("meta"), torch.device("meta"), torch.no_grad()
    gpu = devices.pretend("h200")
    told = unittest.mock.patch.object(
        observations, "seen_lately", lambda state: seen_lately
    )
    with meta[0], meta[1], meta[2], loaded, states, gpu, told:
        x, g = (torch.empty(size, size, dtype=torch.bfloat16) for _ in "xg")
        w, bias = torch.empty(size, size), torch.empty(size)
        with counter:
            if recipe is None:
                gradient, sums = _in_bfloat16(x, g, w, bias), g.sum(0)
            else:
                recipe = recipes.get(recipe)
                gradient, sums = _in_float8(x, g, w, bias, recipe)
            bias.add_(sums.float(), alpha=-1e-3)
            w.add_(gradient, alpha=-1e-3)
    return counter.kernels


def _in_bfloat16(x, g, w, bias):
    narrow = w.bfloat16()
    torch.mm(x, narrow) + bias.bfloat16()
    torch.mm(g, narrow.t())
    return torch.mm(x.t(), g).float()


def _in_float8(x, g, w, bias, recipe):
    source = source_of(recipe)
    state = ()
    if source.state_shape is not None:
        state = (torch.empty(source.state_shape),)
    plan = contractions.make_plan(
        contractions.Einsum("ab,bc->ac"), recipe, "bfloat16", "float32", True
    )
    narrow, bound = bias.bfloat16(), plan.bound
    _, residuals = bound.forward(x, w, state, True, narrow)
    shape = bias.shape if bound.takes_bias(narrow, x, w) else None
    _, gradient, observed, sums = bound.backward(
        residuals, g, state, bias_shape=shape
    )
    if state:
        Settling(recipe)(observed[0], state[0])
    return gradient, g.sum(0) if sums is None else sums


def summary(found, size):
    """Large and small kernels beside the matmuls, and bytes per element."""
    beside = [kernel for kernel in found if not kernel.matmul]
    large = [kernel for kernel in beside if kernel.moved >= LARGE]
    moved = sum(kernel.moved for kernel in large)
    return {
        "large_kernels": len(large),
        "small_kernels": len(beside) - len(large),
        "bytes_per_element": round(moved / (3 * size * size), 2),
        "float8_matmuls": sum("scaled_mm" in k.name for k in found),
    }


def main():
    size = 4096
    for recipe in (None, "delayed", "current"):
        for triton in (False, True) if recipe else (False,):
            found = dense_step(size, recipe, triton)
            row = {"recipe": recipe or "bfloat16", "triton": triton}
            print(json.dumps({**row, **summary(found, size)}))
            if "-v" in sys.argv:
                for kernel in found:
                    print("   ", kernel.name, kernel.moved)


if __name__ == "__main__":
    main()
