"""Reports of `convert`, `revert`, `freeze` and `thaw`, and warnings."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, TypeVar

import keras
import numpy as np

from keras_policy_ext import policy_names, user_code
from keras_policy_ext.conversion import layers_report, roles, saved_input_bytes
from keras_policy_ext.conversion.candidates import (
    NOT_BUILT,
    Unconverted,
    path_of,
)
from keras_policy_ext.conversion.layers_report import LayersReport
from keras_policy_ext.conversion.work import ModelWork, Work, scalars, work_of
from keras_policy_ext.layers.state_of import is_state
from keras_policy_ext.policies.of_layers import (
    float8_policy_of,
    source_policy_of,
)
from keras_policy_ext.reports import (
    EVERY,
    Column,
    Table,
    counted,
    percent,
    readable_bytes,
)
from keras_policy_ext.stored_kernels import StoredKernel

LITTLE = 0.1
"""A warning is given if a smaller share of multiplications is in float8."""

REASONS = 3
"""The number of reasons in that warning: those with most multiplications."""

OF_A_LAYER = (
    "its own code multiplies with weights of other layers or with constants, "
    "such as the table of an embedding, and stays as it is"
)
OF_A_MODEL = (
    "it is a model whose own code multiplies with weights of other layers or "
    "with constants; move the product into a `keras.layers.Layer`"
)
"""Reasons for layers and models without kernels of their own."""

_FROZEN = re.compile(r"(float8|integers)/frozen(?=[(_])")
"""The start of the policy names that `freeze` gives."""

_CONVOLUTIONS = (
    keras.layers.Conv1D,
    keras.layers.Conv2D,
    keras.layers.Conv3D,
    keras.layers.Conv1DTranspose,
    keras.layers.Conv2DTranspose,
    keras.layers.Conv3DTranspose,
    keras.layers.SeparableConv1D,
    keras.layers.SeparableConv2D,
)


@dataclasses.dataclass(frozen=True)
class Converted(Work):
    """A layer whose policy was changed, with parameters and multiplications.

    Of one sample, `multiplications` are those with its kernels (None if they
    are not counted), and `plain_multiplications` those of them in floats.

    Attributes:
        path: The layer's path, e.g. `"model/block/dense"`.
        class_name: The name of its class.
        policy: The name of its policy: `float8_policy.full_name`, or that of
            a plain policy.
        per_tensor: Whether it has one scale per tensor although its recipe has
            one per row or block. This holds for convolutions, and under
            nvfp4 for layers that multiply activations only.
        kept_bytes: Bytes per element of the inputs that are saved for the
            backward pass, without scales; None if it does not train a kernel
            in float8.
        kept_bytes_before: The same without float8.
        shares_scales: Whether it multiplies activations that have one scale
            for all positions and examples.
        looks_up: Whether its call looks up rows of its kernel.
    """

    path: str
    class_name: str
    policy: str
    per_tensor: bool = False
    kept_bytes: int | None = None
    kept_bytes_before: int | None = None
    shares_scales: bool = False
    looks_up: bool = False

    @property
    def in_float8(self) -> bool:
        """True if the layer's new policy is a policy of this package."""
        return policy_names.is_full_name(self.policy)

    @property
    def frozen(self) -> bool:
        """True if the layer's kernels are stored in float8."""
        return _FROZEN.match(self.policy) is not None

    @property
    def outcome(self) -> str:
        """The full name of the layer's new policy."""
        return self.policy


@dataclasses.dataclass(frozen=True)
class Skipped(Work):
    """A layer with weights that was not changed, with its multiplications.

    It is a single kernel where `freeze` has stored another one of the layer.
    The other fields are the counts of its kernels, as for `Converted`.

    Attributes:
        path: The path of the layer, or of the kernel.
        class_name: The name of its class.
        reason: Why.
        policy: The full name of the float8 policy that it follows as before;
            None if it is not in float8.
        per_tensor: As for `Converted`.
        is_kernel: Whether it is a kernel of a layer with others in float8.
    """

    path: str
    class_name: str
    reason: str
    policy: str | None = None
    per_tensor: bool = False
    is_kernel: bool = False

    @property
    def in_float8(self) -> bool:
        """True if the layer already followed a float8 policy."""
        return self.policy is not None

    @property
    def frozen(self) -> bool:
        """True if the layer's kernels were already stored in float8."""
        return _FROZEN.match(self.policy or "") is not None

    @property
    def outcome(self) -> str:
        """The float8 policy that the layer follows, or why it follows none."""
        if self.policy is None:
            return f"– {self.reason}"
        return f"{self.policy} as before"


@dataclasses.dataclass(frozen=True, repr=False)
class Report(LayersReport):
    """The layers that `convert` changed, and the others with the reason.

    `str(report)` says how much of the model is in float8. It has one row for
    all layers of one class with one policy or reason, fits on a screen of
    24 lines, and is as wide as the terminal. `table(full=True)` has a row for
    every layer. Layers without weights are left out. Reasons that differ only
    in numbers or names count as one.

    Attributes:
        converted: One entry for each layer that was converted.
        skipped: One entry for each other layer that has weights.
        parameters: Entries of all weights of the model, without the float8
            state; 0 if that is not known.
        retraced: Compiled functions of the model that are traced anew at
            their next call: paths of layers, with attributes.
        without_effect: Sentences on arguments that had no effect.
    """

    converted: tuple[Converted, ...]
    skipped: tuple[Skipped, ...]
    parameters: int = 0
    retraced: tuple[str, ...] = ()
    without_effect: tuple[str, ...] = ()

    _unchanged_title: ClassVar[str] = "Not converted"
    _verb: ClassVar[str] = "converts"
    _nothing_done: ClassVar[str] = ""  # The whole text if nothing changed.
    _columns = (Column("policy / reason not converted", wraps=True),)
    _full_columns = (
        Column("layer", apart=True),
        Column("class"),
        *layers_report.SHARES,
        Column("policy / reason not converted", wraps=True),
    )
    _every = EVERY

    @property
    def _entries(self) -> tuple[Converted | Skipped, ...]:
        return (*self.converted, *self.skipped)

    def _treatment(self, entry: Converted | Skipped) -> str:
        return _without_names(entry.outcome)

    def _cells(self, group: Sequence[Converted | Skipped]) -> list[str]:
        return [outcome_of(group)]

    def _full_rows(self, entry: Converted | Skipped) -> list[list[str]]:
        """Return the one row of a layer in the full table."""
        cells = [
            entry.path,
            entry.class_name,
            f"{entry.multiplications or 0:,}",
            f"{entry.parameters:,}",
            entry.outcome,
        ]
        return [cells]

    def _head(self) -> list[str]:
        """Return the first lines; of a model without float8, only that."""
        totals = self.totals
        if self._nothing_done and not self.converted:
            return [self._nothing_done]
        if self.converted and totals.layers and not totals.listed_in_float8:
            layers = counted(len(self.converted), "layer")
            return [f"{layers} back in plain policies; none is in float8"]
        return super()._head()

    @property
    def unbuilt(self) -> list[Skipped]:
        """The layers that have no weights yet, since they were never called."""
        return [each for each in self.skipped if each.reason == NOT_BUILT]

    def _notes(self, full: bool) -> list[str]:
        """Return the sentences below the table, on single layers."""
        notes = [*super()._notes(full), *self.without_effect]
        notes += saved_input_bytes.note(self.converted)
        coarser = [e.class_name for e in self._entries if e.per_tensor]
        if coarser:
            classes = _counts_by_class(coarser)
            notes.append(
                f"Scaled per tensor, in eight bits: {classes}. Rows "
                "and blocks are those of matrix products."
            )
        sharing = [e.class_name for e in self.converted if e.shares_scales]
        if sharing:
            classes = _counts_by_class(sharing)
            notes.append(
                f"Scales of all positions and examples: {classes}. "
                "Later tokens and other examples change their outputs a "
                "little, in causal models too; not so under rowwise, block "
                "and mxfp8."
            )
        deciding = [
            e
            for e in self.skipped
            if e.reason.startswith(roles.DECIDES) and not e.in_float8
        ]
        if deciding:
            layers = counted(len(deciding), "layer")
            notes.append(
                f"{self._unchanged_title}, since rounding could change what "
                f"is chosen: {layers}, such as {deciding[0].path!r}. "
                f"`filter='all'` {self._verb} such layers too."
            )
        if self.retraced:
            shown = ", ".join(self.retraced)
            notes.append(
                f"Traced anew at their next call: {shown}. Compile functions "
                "that are not kept in the model yourself again."
            )
        idle = [
            e
            for e in self.converted
            if e.in_float8
            and e.multiplications == 0
            and not e.looks_up
            and e.parameters
        ]
        if idle and self.totals.sizes_known:
            first = idle[0].path
            layers = counted(len(idle), "layer")
            notes.append(
                f"In float8, and no part of the call of the model: {layers}, "
                f"such as {first!r}. Another layer reads the kernel, its "
                "inputs have no numbers, or nothing calls the layer."
            )
        if self.unbuilt:
            first = self.unbuilt[0].path
            layers = counted(len(self.unbuilt), "layer")
            notes.append(
                f"Not counted: {layers} without weights yet, such as "
                f"{first!r}. Call such layers on data, and convert again."
            )
        return notes


ReportClass = TypeVar("ReportClass", bound=Report)


@dataclasses.dataclass(frozen=True, repr=False)
class RevertedReport(Report):
    """The report of `revert`: a `Report` of the layers that left float8."""

    _nothing_done = "No layer was in float8; there is nothing to revert"


_KERNELS = (
    Column("kernel", apart=True),
    Column("before", right=True),
    Column("now", right=True),
    Column("SQNR in dB", right=True),
)


@dataclasses.dataclass(frozen=True)
class Stored:
    """A kernel that `freeze` has stored in float8, and what that changed."""

    path: str  # The path of the kernel.
    bytes_before: int  # Its bytes before, in floats.
    bytes_after: int  # The bytes of its codes and scales.
    # Signal to quantization noise ratio of the kernel, decibels.
    sqnr_db: float

    @classmethod
    def of(
        cls, kernel: keras.Variable, value: Any, stored: StoredKernel
    ) -> Stored:
        """Return the entry of a kernel; `value` is its value in float32."""
        is_16_bits = "16" in keras.backend.standardize_dtype(kernel.dtype)
        return cls(
            kernel.path,
            bytes_before=value.size * (2 if is_16_bits else 4),
            bytes_after=stored.nbytes,
            sqnr_db=_sqnr_db(value, stored.dequantized()),
        )


@dataclasses.dataclass(frozen=True, repr=False)
class FrozenReport(Report):
    """The report of `freeze`: a `Report`, and an entry for each kernel.

    Attributes:
        stored: One entry for each kernel that was stored.
    """

    _unchanged_title: ClassVar[str] = "Not frozen"
    _verb: ClassVar[str] = "freezes"

    stored: tuple[Stored, ...] = ()

    @property
    def bytes_before(self) -> int:
        """The bytes of the kernels before `freeze` stored them in float8."""
        return sum(each.bytes_before for each in self.stored)

    @property
    def bytes_after(self) -> int:
        """The bytes of the codes and scales of the frozen kernels."""
        return sum(each.bytes_after for each in self.stored)

    def _parts(self, full: bool, number: int) -> Iterator[str | Table]:
        """Yield text and tables; in full, also a row per frozen kernel."""
        yield from super()._parts(full, number)
        if full and self.stored:
            rows = [
                [
                    each.path,
                    readable_bytes(each.bytes_before),
                    readable_bytes(each.bytes_after),
                    f"{each.sqnr_db:.1f}",
                ]
                for each in self.stored
            ]
            yield Table(_KERNELS, rows)

    def _notes(self, full: bool) -> list[str]:
        """Return the sentences below the table; one on kernels."""
        notes = super()._notes(full)
        return [*notes, *([self.kernels_note()] if self.stored else [])]

    def kernels_note(self) -> str:
        """Return a sentence: kernel bytes before and now, and lowest SQNR."""
        worst = min(self.stored, key=lambda each: each.sqnr_db)
        return (
            f"Kernels: {readable_bytes(self.bytes_before)} before, "
            f"{readable_bytes(self.bytes_after)} now "
            f"({self.bytes_after / self.bytes_before:.3f}). The least exact "
            f"one, {worst.path!r}, has {worst.sqnr_db:.1f} dB."
        )


@dataclasses.dataclass(frozen=True, repr=False)
class ThawedReport(Report):
    """The report of `thaw`: a `Report`, and a note that weights are rounded."""

    _nothing_done = "No layer was frozen; there is nothing to thaw"

    def _notes(self, full: bool) -> list[str]:
        """Return the sentences below the table; one on rounding."""
        layers = counted(len(self.converted), "layer")
        rounded = (
            f"The weights of {layers} are those that `freeze` has rounded "
            "them to; what was lost does not come back."
        )
        return [*super()._notes(full), *([rounded] if self.converted else [])]


def report_of(
    cls: type[ReportClass],
    model: keras.Layer,
    converted: Sequence[keras.Layer],
    excluded: Sequence[Unconverted],
    # List also layers that multiply with kernels of others, as skipped.
    names_others: bool = False,
    without_effect: Sequence[str] = (),
    retraced: Sequence[str] = (),
    work: ModelWork | None = None,  # If it is known already.
    **more: Any,
) -> ReportClass:
    """Return the report of a change; `more` has fields of its class."""
    work = work or work_of(model)
    listed = {id(x) for x in converted} | {id(each.layer) for each in excluded}
    excluded = [
        *excluded,
        *(
            Unconverted(
                layer,
                OF_A_MODEL if isinstance(layer, keras.Model) else OF_A_LAYER,
            )
            for layer in work.multiplying
            if names_others and id(layer) not in listed
        ),
    ]
    # Kernels of frozen layers that stay in floats have entries of their own.
    kernels: dict[int, list[Any]] = {}  # By the id of the layer.
    for each in excluded:
        if each.kernel is not None:
            kernels.setdefault(id(each.layer), []).append(each.kernel)
    by_kernel: dict[int, Work] = {}  # By the id of the kernel.
    changed = []
    for layer in converted:
        of_layer, in_floats = work.of(layer), kernels.get(id(layer), [])
        if in_floats:
            of_layer, of_kernels = work.of_parts(layer, in_floats)
            by_kernel.update(zip(map(id, in_floats), of_kernels, strict=True))
        changed.append(_entry_of_converted(layer, of_layer))
    skipped = [
        _entry_of_skipped(x, work, by_kernel.get(id(x.kernel)))
        for x in excluded
    ]
    weights = [v for v in model.weights if not is_state(v)]
    return cls(
        converted=tuple(changed),
        skipped=tuple(skipped),
        parameters=scalars(weights),
        retraced=tuple(retraced),
        without_effect=tuple(without_effect),
        **more,
    )


def _entry_of_skipped(
    each: Unconverted, work: ModelWork, of_kernel: Work | None
) -> Skipped:
    """Return the report's entry of a layer that was left, or of one kernel."""
    is_whole = each.kernel is None
    return Skipped(
        path=path_of(each.layer) if each.kernel is None else each.kernel.path,
        class_name=type(each.layer).__name__,
        reason=each.reason,
        policy=_float8_policy_name(each.layer) if is_whole else None,
        per_tensor=is_whole and _is_coarser(each.layer),
        is_kernel=not is_whole,
        **dataclasses.asdict(of_kernel or work.of(each.layer)),
    )


def _entry_of_converted(layer: keras.Layer, work: Work) -> Converted:
    """Return the report's entry of a layer; after `revert` it is in floats."""
    kept, kept_before = saved_input_bytes.of_layer(layer) or (None, None)
    return Converted(
        path=path_of(layer),
        class_name=type(layer).__name__,
        policy=_float8_policy_name(layer) or source_policy_of(layer).name,
        per_tensor=_is_coarser(layer),
        kept_bytes=kept,
        kept_bytes_before=kept_before,
        shares_scales=_shares_scales(layer),
        looks_up=isinstance(layer, keras.layers.Embedding),
        **dataclasses.asdict(work),
    )


def warn_of_little(report: Report, model: keras.Layer) -> None:
    """Warn if under a tenth of a model's multiplications are in float8."""
    totals, measure = report.totals, "multiplications"
    part, whole = totals.multiplications_in_float8, totals.multiplications
    part += totals.multiplications_of_stored
    if not totals.is_counted:  # The extension `count` is missing.
        measure = "entries of kernels"
        entries: list[Any] = [*report.converted, *report.skipped]
        kernels = [e for e in entries if e.multiplications != 0]
        whole = sum(e.parameters for e in kernels)
        part = sum(e.parameters for e in kernels if e.in_float8)
    if whole and part >= LITTLE * whole:
        return
    if not whole and any(e.in_float8 for e in report.converted):
        return  # What is converted multiplies no numbers.
    if whole:
        share = f"Only {percent(part, whole)}" if part else "None"
        notes = "".join(f" {note}" for note in totals.notes())
        message = (
            f"{share} of the {measure} of {model.name!r} are in float8 after "
            "`convert`. "
            f"{_reasons(report)}{notes} To have more in float8, "
            "change `include`, `exclude`, `filter`, `min_size` or the rules of "
            "the policy where one of these is the reason. Where it is the "
            "class of a layer, use a class that has a float8 form, or derive "
            "yours from Float8Mixin; if neither is possible, there is little "
            "to gain, and `kpe.revert` takes the rest out. `print(report)` "
            "tells more."
        )
    elif report.unbuilt:
        layers = counted(len(report.unbuilt), "layer")
        message = (
            f"`convert` has changed nothing: {model.name!r} has {layers} "
            f"without weights yet, such as {report.unbuilt[0].path!r}. Call "
            "the model on data, and convert again."
        )
    else:
        message = (
            f"`convert` has changed nothing: no layer of {model.name!r} "
            "multiplies with a kernel that Keras knows as a weight. Pass the "
            "model that has the layers, or write layers of your own with "
            "Float8Mixin."
        )
    user_code.warn(message)


def outcome_of(group: Sequence[Converted | Skipped]) -> str:
    """Return the outcome of a group of layers; an example if they differ."""
    first = group[0]
    if len({entry.outcome for entry in group}) == 1:
        return first.outcome
    mark, _, reason = first.outcome.partition(" ")
    return f"{mark} e.g. {reason}"


def _without_names(outcome: str) -> str:
    """Return an outcome with numbers and quoted names as `#`, for grouping."""
    if not outcome.startswith("–"):
        return outcome
    return re.sub(r"'[^']*'|\d[\d,.]*", "#", outcome)


def _reasons(report: Report) -> str:
    """Return sentences on the largest groups of layers outside float8."""
    totals = report.totals
    groups = [group for group in report.groups if not group[0].in_float8]
    groups.sort(key=lambda group: -layers_report.multiplications_of(group))
    sentences = []
    for group in groups[:REASONS]:
        share, _ = layers_report.shares(group, totals)
        layers = counted(len(group), "layer")
        reason = outcome_of(group).removeprefix("– ")
        share = f"{share} are in " if totals.is_counted else ""
        sentences.append(
            f"{share}{layers} of class {group[0].class_name}: {reason}."
        )
    return " ".join(sentences)


def _float8_policy_name(layer: keras.Layer) -> str | None:
    """Return the full name of a layer's float8 policy, or None."""
    policy = float8_policy_of(layer)
    return None if policy is None else policy.full_name


def _is_coarser(layer: keras.Layer) -> bool:
    """Return True if a layer scales per tensor though its recipe is finer."""
    policy = float8_policy_of(layer)
    if policy is None or policy.recipe.granularity == "tensorwise":
        return False
    return isinstance(layer, _CONVOLUTIONS) or _shares_scales(layer)


def _shares_scales(layer: keras.Layer) -> bool:
    """Return True if a layer multiplies only activations, scaled per tensor."""
    if float8_policy_of(layer) is None or layer.float8_contracted:
        return False
    recipe = layer.float8_controller.recipe_of_activations
    quantization = recipe.quantization("inputs", "forward")
    return quantization is not None and bool(quantization.has_one_scale)


def _counts_by_class(names: Sequence[str]) -> str:
    """Return names of classes with their counts: `"2 Conv1D, 1 Dense"`."""
    counts = collections.Counter(names).items()
    return ", ".join(f"{number:,} {name}" for name, number in counts)


def _sqnr_db(value: Any, approximation: Any) -> float:
    """Return the signal-to-noise ratio of an approximation in dB."""
    signal = float(np.linalg.norm(value.astype("float64")))
    noise = float(np.linalg.norm(value - approximation.astype("float64")))
    if not noise:
        return math.inf
    return 20 * math.log10(signal / noise) if signal else -math.inf
