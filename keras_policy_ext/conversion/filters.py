"""Filters for `convert`: leave out layers that float8 slows down or hurts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from keras_policy_ext import _extensions
from keras_policy_ext._types import override
from keras_policy_ext.conversion.candidates import (
    Candidate,
    SizeFilter,
    not_multiples,
)

if TYPE_CHECKING:
    from keras_policy_ext.ext.gain.auto import Auto

__all__ = ["Auto", "Safe"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Safe(SizeFilter):
    """The filter `"safe"`: it leaves out what other libraries leave out.

    These are the first layer; heads, and the last layer if no head is known;
    layers that decide, such as routers; and layers whose sizes are not
    multiples of 16. Sources:

    - torchao's example of a `module_filter_fn` leaves out the last layer, and
      sizes that are not multiples of 16 (`torchao/float8/README.md`).
    - torchtitan's `module_filter_fn` leaves out such sizes
      (`torchtitan/components/quantization/utils.py`), and its tests of
      DeepSeek V3 have `filter_fqns = ["output", "router.gate"]`
      (`torchtitan/experiments/graph_trainer/tests`). Its
      `auto_filter_small_kn` is about speed, as `"auto"` is here.
    - ModelOpt's `_default_disabled_quantizer_cfg` leaves out `*lm_head*`,
      `*proj_out.*`, `*output_layer*`, `*router*`, `*block_sparse_moe.gate*`,
      `*mlp.gate.*`, `*mlp.shared_expert_gate.*`, `*linear_attn.conv1d*` and
      `*mixer.conv1d*` (`modelopt/torch/quantization/config.py`). Here the
      gate of a shared expert has an output size of 1, and these convolutions
      sum over the few taps of a window: no multiples of 16.
    - DoReFa-Net leaves out the first layer, besides the last one (arXiv
      1606.06160).

    Attributes:
        multiple: Both the summed and the output size must be multiples of it.

    Examples:
        >>> layers = [keras.layers.Dense(size) for size in (32, 64, 32, 8)]
        >>> model = keras.Sequential([keras.Input((32,)), *layers])
        >>> report = kpe.convert(model, filter="safe")
        >>> len(report.converted), len(report.skipped)
        (2, 2)
    """

    multiple: int = 16

    @override
    def reasons(self, candidates: Sequence[Candidate]) -> dict[int, str]:
        """Return why candidates are left out, by index: odd sizes."""
        return {  # Reversed: the reason of the first kernel counts.
            number: reason
            for number, candidate in enumerate(candidates)
            for summed, free in candidate.sizes[::-1]
            if (reason := not_multiples(summed, free, self.multiple))
        }


def __getattr__(name: str) -> Any:
    """Import `Auto`, an extension's, at its first use."""
    if name == "Auto":
        return _extensions.get("conversion.filters.Auto")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
