"""Reports of what was done to the layers of a model."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from keras_policy_ext.conversion import summary, work
from keras_policy_ext.conversion.candidates import Unconverted, path_of
from keras_policy_ext.conversion.report import (
    Converted,
    Report,
    Skipped,
    outcome_of,
)
from keras_policy_ext.layers.state import StateVariable
from keras_policy_ext.policies.of_layers import float8_policy_of

LITTLE = 0.1
"""A smaller share of the multiplications in float8 is warned of."""

REASONS = 3
"""So many reasons are told then, those of the most multiplications."""


def report_of(
    model: Any, converted: Sequence[Any], left: Sequence[Unconverted]
) -> Report:
    """Write the report of a change that was made.

    Args:
        model: The model or layer that was changed.
        converted: Layers in it that follow another policy now.
        left: Layers in it that do not.

    Returns:
        The report, with the work of each layer.
    """
    counts = work.count(model, [*converted, *(each.layer for each in left)])
    done = [
        Converted(path_of(layer), type(layer).__name__, _policy(layer), *_of(w))
        for layer, w in zip(converted, counts, strict=False)
    ]
    rest = [
        Skipped(
            path_of(each.layer),
            type(each.layer).__name__,
            each.reason,
            _float8_policy(each.layer),
            *_of(w),
        )
        for each, w in zip(left, counts[len(done) :], strict=True)
    ]
    weights = [v for v in model.weights if not isinstance(v, StateVariable)]
    return Report(tuple(done), tuple(rest), work.scalars(weights))


def warn_of_little(report: Report, model: Any, stacklevel: int) -> None:
    """Warn of a model with less than a tenth of its work in float8.

    Args:
        report: What `convert` has done.
        model: The model.
        stacklevel: 1 for the caller, 2 for the caller's caller, and so on.
    """
    totals = report.totals
    part, whole = totals.multiplications_in_float8, totals.multiplications
    if part >= LITTLE * whole and whole:
        return
    if whole:
        share = f"Only {summary.percent(part, whole)}" if part else "None"
        message = (
            f"{share} of the multiplications of {model.name!r} are in float8 "
            "after `convert`. "
            f"{_reasons(report)} To have more in float8, change `include`, "
            "`exclude`, `filter`, `min_size` or the rules of the policy where "
            "one of these is the reason. Where it is the class of a layer, use "
            "a class that has a float8 form, or derive yours from "
            "Float8Mixin; if neither is possible, there is little to gain, and "
            "`kpe.revert` takes the rest out. `print(report)` tells more."
        )
    else:
        message = (
            f"`convert` has changed nothing: no layer of {model.name!r} "
            "multiplies with a kernel that Keras knows as a weight. Pass the "
            "model that has the layers, or write layers of your own with "
            "Float8Mixin."
        )
    warnings.warn(message, stacklevel=stacklevel + 1)


def _reasons(report: Report) -> str:
    """Where the most multiplications are that are not in float8, and why."""
    totals = report.totals
    groups = [group for group in report.groups if not group[0].in_float8]
    groups.sort(key=lambda group: -sum(e.multiplications for e in group))
    found = []
    for group in groups[:REASONS]:
        share, _ = summary.shares(group, totals)
        layers = summary.counted(len(group), "layer")
        reason = outcome_of(group).removeprefix("– ")
        found.append(
            f"{share} are in {layers} of class {group[0].class_name}: {reason}."
        )
    return " ".join(found)


def _of(counted: work.Work) -> tuple[int, int, bool]:
    return counted.parameters, counted.multiplications, counted.sizes_known


def _float8_policy(layer: Any) -> str | None:
    policy = float8_policy_of(layer)
    return None if policy is None else policy.full_name


def _policy(layer: Any) -> str:
    return _float8_policy(layer) or layer.dtype_policy.name
