"""`tune`: choose the recipe of each layer by what it does to the loss."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_policy_ext import user_code
from keras_policy_ext.conversion import Report
from keras_policy_ext.conversion.candidates import check_is_layer, path_of
from keras_policy_ext.conversion.in_place import converted
from keras_policy_ext.ext import output_files
from keras_policy_ext.ext.sampling.captured import (
    Batch,
    Loss,
    Product,
    captured,
    loss_of,
)
from keras_policy_ext.ext.sampling.recipes_compared import (
    NOTHING_ROUNDED,
    read_recipes,
    short,
)
from keras_policy_ext.ext.tune.sensitivity import (
    Effect,
    Option,
    by_layer,
    options,
)
from keras_policy_ext.files import input_files
from keras_policy_ext.policies import Float8DTypePolicy
from keras_policy_ext.policies.of_layers import source_policy_of
from keras_policy_ext.recipes import DEFAULT, Recipe
from keras_policy_ext.reports import (
    BaseReport,
    Column,
    Table,
    counted,
    percent,
)

Budget = float | Mapping[str, float]
Rules = tuple[tuple[str, str | None], ...]


@dataclasses.dataclass(frozen=True)
class LayerScore:
    """The score of a recipe in one layer: its cost in loss, and its savings.

    An error is a share: the sum of squares of what rounding changes in the
    result of a matmul, divided by the sum of squares of the result.

    Attributes:
        layer: The path of the layer.
        class_name: The name of its class.
        recipe: The recipe, as in the names of policies.
        chosen: Whether the layer gets this recipe.
        loss_increase: By how much the loss is expected to rise if this layer
            alone has the recipe; None if that is not finite.
        forward_error: The error of the outputs, measured.
        inputs_grad_error: The error of the gradient of the inputs: the sum of
            the errors of its two operands.
        kernel_grad_error: The same for the gradient of the kernel.
        multiplications: Multiplications for a sample, in those of the three
            matmuls that the recipe quantizes.
        bytes: Bytes of the operands that the three matmuls read in the batch.
        plain_bytes: The same without the recipe.
    """

    layer: str
    class_name: str
    recipe: str
    chosen: bool
    loss_increase: float | None
    forward_error: float
    inputs_grad_error: float
    kernel_grad_error: float
    multiplications: float
    bytes: int
    plain_bytes: int


@dataclasses.dataclass(frozen=True, repr=False)
class Tuned(BaseReport):
    """The result of `tune`: a policy, and its expected and measured effect.

    Attributes:
        policy_name: The name of the policy without its rules.
        rules: The rules: pairs of the path of a layer, and the name of its
            policy or None.
        recipes: The recipes that could be chosen.
        budget: `"multiplications"`, `"bytes"` or `"loss"`, and the number.
        loss: The loss of the batch without rounding.
        expected_increase: By how much the policy is expected to raise it.
        noise: The standard deviation of the rise from batch to batch.
        measured_increase: By how much it rose, in a forward pass over the
            batch.
        multiplications: The share of the multiplications with kernels that the
            policy quantizes, of those in the three matmuls of all layers.
        bytes: The bytes that the matmuls of `scores` read, as a share of those
            without the policy.
        scores: A score for each layer and recipe, in the order of the model.
        unexamined: The paths of layers that could be in float8 and have no
            scores, with the reasons. They stay in high precision.
    """

    policy_name: str
    rules: Rules
    recipes: tuple[str, ...]
    budget: tuple[str, float]
    loss: float
    expected_increase: float
    noise: float
    measured_increase: float
    multiplications: float
    bytes: float
    scores: tuple[LayerScore, ...]
    unexamined: dict[str, str] = dataclasses.field(default_factory=dict)

    _every = "Every layer: tuned.table(full=True)"

    @property
    def policy(self) -> Float8DTypePolicy:
        """The policy with its rules."""
        return _policy(self.policy_name, self.rules)

    def save(self, path: str | pathlib.Path) -> None:
        """Write a file of JSON, with a line for each rule and each score."""
        entries = (
            f" {json.dumps(name)}: {_text(value)}"
            for name, value in self.as_dict().items()
        )
        text = "{\n" + ",\n".join(entries) + "\n}\n"
        with output_files.whole(pathlib.Path(path)) as part:
            part.write_text(text)

    @classmethod
    def load(cls, path: str | pathlib.Path) -> Tuned:
        """Read a file that `save` has written.

        Raises:
            ValueError: If it is no such file.
        """
        read = input_files.json_in(pathlib.Path(path).read_bytes(), path)
        try:
            fields = dict(read)
            scores = [LayerScore(**each) for each in fields.pop("scores")]
            rules = [(pattern, name) for pattern, name in fields.pop("rules")]
            found = cls(
                rules=tuple(rules),
                recipes=tuple(fields.pop("recipes")),
                budget=tuple(fields.pop("budget")),
                scores=tuple(scores),
                **fields,
            )
            # What has other types cannot be shown.
            _ = found.policy, found.table(full=True)
            if Float8DTypePolicy(found.policy_name).rules:
                raise ValueError(f"patterns in {found.policy_name!r}")
        except (
            AttributeError,
            IndexError,
            KeyError,
            TypeError,
            ValueError,
        ) as error:
            raise ValueError(
                f"{str(path)!r} is no file of `tune`. Received: {error}. "
                "Allowed: a file that `Tuned.save` has written. Save it anew."
            ) from error
        return found

    def _count(self) -> int:
        return len(self._rows())

    def _rows(self) -> dict[str, list[LayerScore]]:
        found: dict[str, list[LayerScore]] = {}
        for score in self.scores:
            found.setdefault(score.layer, []).append(score)
        return found

    def _parts(self, full: bool, number: int) -> Iterator[str | Table]:
        """Yield what is expected and what came, and a table of layers."""
        rows = self._rows()
        chosen = sum(score.chosen for score in self.scores)
        yield (
            f"{chosen} of {counted(len(rows), 'layer')}, "
            f"{percent(self.multiplications, 1)} of the multiplications; "
            f"matmuls read {percent(self.bytes, 1)} of the bytes."
        )
        yield (
            f"Loss {self.loss:.5g}; expected to rise by "
            f"{self.expected_increase:.2g} ± {self.noise:.1g}, rose by "
            f"{self.measured_increase:.2g}."
        )
        columns = [
            Column("layer", apart=True),
            *(Column(short(each), right=True) for each in self.recipes),
            Column("chosen"),
        ]
        items = list(rows.items())
        if not full:
            items.sort(key=lambda item: -max(map(_increase, item[1])))
            items = items[:number]
        cells = [
            [
                layer,
                *(
                    "–" if s.loss_increase is None else f"{s.loss_increase:.1e}"
                    for s in row
                ),
                next((s.recipe for s in row if s.chosen), "–"),
            ]
            for layer, row in items
        ]
        yield Table(
            columns,
            cells,
            "Expected rise of the loss if this layer alone has the recipe",
        )
        if left := len(rows) - len(items):
            yield f"and {left} more"
        if self.unexamined:
            shown = list(self.unexamined.items())[: None if full else 3]
            words = "; ".join(f"{path}: {reason}" for path, reason in shown)
            layers = counted(len(self.unexamined), "layer")
            yield f"Without scores, not rounded: {layers}. {words}."


def _increase(score: LayerScore) -> float:
    found = score.loss_increase
    return math.inf if found is None else found


def _text(value: Any) -> str:
    """Return JSON, of a list with a line for each entry."""
    if not isinstance(value, list) or not value:
        return json.dumps(value)
    lines = ",\n".join(f"  {json.dumps(each)}" for each in value)
    return f"[\n{lines}\n ]"


@user_code.once
def tune(
    model: keras.Layer,
    data: Any,
    budget: Budget,
    recipes: Sequence[Recipe | str] | Recipe | str | None = None,
    loss: Loss | None = None,
) -> Tuned:
    """Choose the recipe of each layer by what it does to the loss.

    ```python
    tuned = kpe.tune(model, (x, y), budget={"loss": 0.01})
    print(tuned)
    tuned.save("tuned.json")
    kpe.convert(model, tuned)
    ```

    It runs one forward and one backward pass over a batch, without rounding.
    For each recipe and each layer it then computes the outputs once more, with
    rounded operands, and from the gradients of the outputs the rise of the
    loss. Two more forward passes calibrate these numbers and check the result.
    With all six recipes the multiplications are those of four training steps.
    The model, its optimizer, its states and its random seeds are not changed.

    A budget counts what the forward matmul does to the loss. The errors of the
    gradients are in the scores, and in no budget.

    Args:
        model: A built model, in float8 or not, trained for some steps at
            least: what is learned first tells little about later.
        data: A batch, as for `what_if`. Some hundred samples; more give
            better scores.
        budget: One of these; a number alone is a share of multiplications.
            `{"multiplications": 0.9}`: at least this share is quantized, of
            those with kernels. `{"bytes": 0.5}`: the matmuls read at most this
            share of the bytes that they read without rounding. Both are met
            with the least rise of the loss. `{"loss": 0.01}`: the loss is
            expected to rise by at most this share of itself; as many bytes
            as possible are saved.
        recipes: The recipes to choose from, or their names; None for all
            names. Name those that your device computes natively.
        loss: `f(y, outputs)`, as for `what_if`.

    Returns:
        What `convert` takes as a policy, with the scores. `print` it for a
        table.

    Raises:
        TypeError: If `model` is not a Keras model or layer, `data` not a batch
            or `budget` not a budget.
        ValueError: If the model is not built or no layer of it can be in
            float8, products of its attention are, there is no such recipe, the
            loss lacks targets or is not finite, the batch is empty, or the
            budget cannot be met.

    Examples:
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        >>> x = np.random.default_rng(0).normal(size=(16, 8))
        >>> tuned = kpe.tune(model, x, budget={"bytes": 0.3}, recipes="mxfp8")
        >>> kpe.convert(model, tuned).converted[0].policy
        'float8/mxfp8_from_float32'
    """
    check_is_layer(model, "have layers to tune")
    kind, limit = _budget(budget)
    wanted = read_recipes(recipes)
    batch = Batch.read(data)
    samples = _samples(batch)
    scale = _loss_scale(model)
    plain, offered, unexamined = _offered(model, batch, loss, wanted, scale)

    def rise(policy: Any) -> tuple[float, Report]:
        with converted(model, policy) as report:
            return loss_of(model, batch, loss) / scale - plain, report

    layers, total = _calibrated(offered, wanted, samples, rise)
    chosen = _chosen(layers, kind, limit, total, abs(plain))
    name, rules = _rules(offered, chosen, unexamined)
    places = list(zip(layers, chosen, strict=True))
    picked = [row[place] for row, place in places if place is not None]
    taken = sum(row[0].plain_bytes for row in layers)
    return Tuned(
        policy_name=name,
        rules=rules,
        recipes=tuple(recipe.spec or recipe.name for recipe in wanted),
        budget=(kind, limit),
        loss=plain,
        expected_increase=sum(each.loss for each in picked),
        noise=math.sqrt(sum(each.option.effect.squares for each in picked)),
        measured_increase=rise(_policy(name, rules))[0],
        multiplications=sum(each.multiplications for each in picked)
        / max(total, 1),
        bytes=1 - sum(each.saved for each in picked) / max(taken, 1),
        scores=tuple(
            item.score(number == place)
            for row, place in places
            for number, item in enumerate(row)
        ),
        unexamined=unexamined,
    )


def _samples(batch: Batch) -> int:
    """Return the number of samples in a batch."""
    shape = tuple(keras.tree.flatten(batch.x)[0].shape)
    if 0 in shape[:1]:
        raise ValueError(
            "`data` is an empty batch, so nothing can be measured. Received: "
            f"x of shape {shape}. Allowed: at least one sample; some hundred "
            "give better scores. Pass another batch."
        )
    return int(shape[0])


def _offered(
    model: Any,
    batch: Batch,
    loss: Loss | None,
    recipes: list[Recipe],
    scale: float,
) -> tuple[float, list[list[Option]], dict[str, str]]:
    """Return (unrounded loss, options by layer and recipe, layers without)."""
    with converted(model, NOTHING_ROUNDED):
        found = captured(model, batch, loss)
        plain = found.value / scale
        if not math.isfinite(plain):
            raise ValueError(
                "The loss of the batch is infinite or NaN, so recipes cannot "
                f"be compared. Received: a loss of {plain}. Allowed: a model "
                "and a batch with a finite loss. Look at the batch, and at "
                "the weights: `keras_policy_ext.watch` names the layer where "
                "such values begin."
            )
        if any(isinstance(use.kernel, Product) for use in found.uses):
            raise ValueError(
                "The products of attention are in float8, and `tune` has no "
                f"scores for them. Received: {model.name!r}, converted with "
                "attention='float8'. Allowed: a model without it. Call "
                "`keras_policy_ext.revert` first, and pass `attention=` to "
                "`convert` with the result."
            )
        samples = _samples(batch)
        offered = [
            list(options(uses, recipes, samples, scale))
            for uses in by_layer(found.uses)
        ]
    if not offered:
        raise ValueError(
            f"{model.name!r} has no layer to tune. Received: a model whose "
            "call multiplies by no kernel that can be in float8. Allowed: one "
            "that does. `keras_policy_ext.convert` says why in its report."
        )
    return plain, offered, found.unexamined


class _Item(NamedTuple):
    """An option with the numbers that a budget counts."""

    option: Option
    loss: float
    multiplications: float
    bytes: int
    plain_bytes: int

    @classmethod
    def of(cls, option: Option, unit: float, number: int) -> _Item:
        """Return an option of a layer with so many multiplications."""
        return cls(
            option,
            unit * option.effect.squares,
            number * option.share,
            option.bytes(True),
            option.bytes(False),
        )

    @property
    def saved(self) -> int:
        """The bytes that it saves."""
        return self.plain_bytes - self.bytes

    def score(self, chosen: bool) -> LayerScore:
        """Return what the report says of it."""
        layer, recipe = self.option.layer, self.option.recipe
        errors = self.option.effect.errors
        return LayerScore(
            layer=path_of(layer),
            class_name=type(layer).__name__,
            recipe=recipe.spec or recipe.name,
            chosen=chosen,
            loss_increase=self.loss if math.isfinite(self.loss) else None,
            forward_error=errors["forward"],
            inputs_grad_error=errors["inputs_grad"],
            kernel_grad_error=errors["kernel_grad"],
            multiplications=self.multiplications,
            bytes=self.bytes,
            plain_bytes=self.plain_bytes,
        )


_KINDS = ("multiplications", "bytes", "loss")


def _budget(given: Any) -> tuple[str, float]:
    budget = given if isinstance(given, Mapping) else {_KINDS[0]: given}
    wrong = (
        f"`budget` is not a budget. Received: {given!r}. Allowed: "
        "{'multiplications': share} or the share alone, {'bytes': share}, with "
        "shares above 0 and up to 1, or {'loss': share}, 0 or more. Pass one "
        "of them."
    )
    if len(budget) != 1:
        raise ValueError(wrong)
    ((kind, limit),) = budget.items()
    if isinstance(limit, bool) or not isinstance(limit, (int, float)):
        raise TypeError(wrong)
    fits = limit >= 0 if kind == "loss" else 0 < limit <= 1
    if kind not in _KINDS or not fits:
        raise ValueError(wrong)
    return kind, float(limit)


def _loss_scale(model: Any) -> float:
    """Return the factor by which the optimizer multiplies losses."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return 1.0
    one = optimizer.scale_loss(ops.ones((), "float32"))
    return float(ops.convert_to_numpy(one))


def _largest(offered: list[list[Option]]) -> tuple[int, Effect]:
    """Return (place of the recipe of most effect, its effect in all layers)."""
    found = []
    for several in zip(*offered, strict=True):
        effects = [option.effect for option in several]
        first = sum(effect.first for effect in effects)
        squares = sum(effect.squares for effect in effects)
        found.append(Effect(first, squares, {}))
    number = max(range(len(found)), key=lambda n: found[n].squares)
    return number, found[number]


def _calibrated(
    offered: list[list[Option]],
    recipes: list[Recipe],
    samples: int,
    rise: Callable[[Any], tuple[float, Report]],
) -> tuple[list[list[_Item]], int]:
    """Return options with a budget's numbers, and multiplications a sample."""
    # `rise` returns the rise of the loss under a policy, and `convert`'s
    # report.
    number, effect = _largest(offered)
    measured, report = rise(recipes[number])
    unit = _unit(samples / 2, effect, measured)
    work: dict[str, int] = {}  # Several layers may have one path.
    for each in report.converted:
        work.setdefault(each.path, 0)
        work[each.path] += each.multiplications or 0
        work[each.path] -= each.plain_multiplications or 0
    layers = [
        [_Item.of(x, unit, work[path_of(x.layer)]) for x in several]
        for several in offered
    ]
    return layers, report.totals.multiplications


def _unit(unit: float, effect: Effect, measured: float) -> float:
    """Return the loss for each unit of `Effect.squares`, `unit` if unknown."""
    # `unit` is that of a mean of negative log likelihoods; `measured` the rise
    # of the loss under a recipe with this effect.
    if not effect.squares:
        return unit
    found = (measured - effect.first) / effect.squares
    return found if math.isfinite(found) and found > 0 else unit


class _Step(NamedTuple):
    """A change of a layer to an option that saves more."""

    slope: float
    row: int
    place: int
    loss: float
    gain: float


def _chosen(
    layers: list[list[_Item]], kind: str, limit: float, total: int, loss: float
) -> list[int | None]:
    """Return the place of each layer's option, None unrounded; or raise."""
    counts = kind == "multiplications"
    rows = [
        [(x.multiplications if counts else x.saved, x.loss) for x in row]
        for row in layers
    ]
    if kind == "loss":
        return choose(rows, None, limit * loss) or []
    whole = total if counts else sum(row[0].plain_bytes for row in layers)
    # Less a little, since shares are not exact.
    goal = (limit if counts else 1 - limit) * whole * (1 - 1e-9)
    found = choose(rows, goal, None)
    if found is None:
        # An option that makes the loss infinite is never taken.
        gains = [[a for a, b in row if math.isfinite(b)] for row in rows]
        most = sum(max(each, default=0.0) for each in gains) / whole
        bound = f"at most {most:.4g}" if counts else f"at least {1 - most:.4g}"
        raise ValueError(
            f"The budget cannot be met. Received: {{{kind!r}: {limit}}}. "
            f"Allowed with these recipes and layers: {bound}. Pass that, or "
            "other recipes."
        )
    return found


def choose(
    layers: Sequence[Sequence[tuple[float, float]]],
    goal: float | None,
    bound: float | None,
) -> list[int | None] | None:
    """Choose an option for each layer, or none, by gain and loss.

    Steps from one option of a layer to the next are taken in the order of the
    loss that they cost for what they gain. Options above the lower convex hull
    of the others are left out.

    Args:
        layers: For each layer the (gain, loss) of each option.
        goal: What the gains are to add up to; None for as much as possible.
        bound: What the losses may add up to; None for any.

    Returns:
        The place of an option for each layer, or None for no option. None if
        the goal cannot be reached.
    """
    steps = [s for row in range(len(layers)) for s in _steps(row, layers[row])]
    chosen: list[int | None] = [None] * len(layers)
    closed: set[int] = set()
    gained = lost = 0.0
    for step in sorted(steps):
        if goal is not None and gained >= goal:
            break
        if bound is not None and lost + step.loss > bound:
            closed.add(step.row)
        if step.row not in closed:
            chosen[step.row] = step.place
            gained, lost = gained + step.gain, lost + step.loss
    return chosen if goal is None or gained >= goal else None


def _steps(row: int, options: Sequence[tuple[float, float]]) -> Iterator[_Step]:
    """Yield the steps along the lower convex hull of (gain, loss)."""
    gain = loss = 0.0
    while True:
        further = [
            _Step((b - loss) / (a - gain), row, place, b - loss, a - gain)
            for place, (a, b) in enumerate(options)
            if a > gain and math.isfinite(b)
        ]
        if not further:
            return
        # Of equal slopes the longest step; of equal steps the first option.
        best = min(further, key=lambda x: (x.slope, -x.gain, x.place))
        yield best
        gain, loss = gain + best.gain, loss + best.loss


def _rules(
    offered: list[list[Option]],
    chosen: list[int | None],
    unexamined: dict[str, str],
) -> tuple[str, Rules]:
    """Return the policy of most layers, and rules for the others."""
    source = source_policy_of(offered[0][0].layer)
    names: dict[str, str | None] = {}
    for row, place in zip(offered, chosen, strict=True):
        name = None
        if place is not None:
            recipe = row[place].recipe
            name = Float8DTypePolicy(source.name, recipe=recipe).full_name
        names[path_of(row[0].layer)] = name
    names |= dict.fromkeys(unexamined)
    found = [name for name in names.values() if name is not None]
    if not found:  # A model in which nothing is to be rounded.
        policy = Float8DTypePolicy(source.name, recipe=DEFAULT)
        found.append(policy.full_name)
    (usual, _), *_ = collections.Counter(found).most_common(1)
    rules = ((path, name) for path, name in names.items() if name != usual)
    return usual, tuple(rules)


def _policy(name: str, rules: Rules) -> Float8DTypePolicy:
    # Paths are escaped: a file could have a pattern that is slow to match.
    return Float8DTypePolicy(
        name, rules=[(re.escape(path), each) for path, each in rules]
    )
