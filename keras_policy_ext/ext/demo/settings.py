"""Settings of the demo, and its arguments on the command line."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable

from keras_policy_ext import recipes

DESCRIPTION = """\
Train a small transformer for next-character prediction three times, in
float32, mixed_bfloat16 and float8, from the same weights on the same batches;
with --compare in float8 under every recipe. Prints a table of the results,
writes a plot and a CSV file of the losses, and says what was seen.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command-line options of the demo to an argparse parser."""
    parser.add_argument(
        "--text",
        metavar="FILE",
        help="UTF-8 text to learn from; without it the topics of Python's "
        "own pydoc",
        default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--steps",
        type=_at_least(1),
        metavar="N",
        help=f"training steps (default: {Settings.steps}, and fewer where a "
        "step takes long)",
        default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--seed",
        "--seeds",
        type=_seeds,
        metavar="SEEDS",
        dest="seeds",
        default="0",
        help="of the weights and the batches; several, such as 0,1,2, show "
        "the spread",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--recipe",
        type=_recipe,
        metavar="SPEC",
        default="delayed",
        help=f"how numbers are scaled: {', '.join(recipes.names())}, or one "
        "with arguments, such as 'nvfp4(hadamard=False)'",
    )
    which.add_argument(
        "--compare",
        action="store_true",
        help="train under every recipe",
        default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write the numbers of the tables, too",
        default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        default="keras-policy-ext-demo",
        help="folder for the plot and the CSV file; made if missing",
    )


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Convert parsed command-line arguments to the demo's `Settings`."""
    compare = getattr(arguments, "compare", False)
    steps = getattr(arguments, "steps", None)
    return Settings(
        steps=steps or Settings.steps,
        may_shorten=steps is None,
        seeds=arguments.seeds,
        recipes=recipes.names() if compare else (arguments.recipe,),
        text=getattr(arguments, "text", None),
        out=arguments.out,
        json=getattr(arguments, "json", None),
    )


def _at_least(least: int) -> Callable[[str], int]:
    """Return an argparse `type` that parses integers of at least `least`."""

    def integer(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(
                f"an integer of {least} or more is needed, not {text!r}"
            )
        return int(text)

    return integer


def _seeds(text: str) -> tuple[int, ...]:
    """Parse "0,1,2" to a tuple of distinct integers, for argparse."""
    return tuple(dict.fromkeys(map(_at_least(0), text.split(","))))


def _recipe(text: str) -> str:
    """Return the text of a recipe; raise if it cannot train, for argparse."""
    try:
        recipe = recipes.parse(text)
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not recipe.trains:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a recipe to train with. Allowed: "
            f"{', '.join(recipes.names())}"
        )
    return text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """The layer sizes of the demo's decoder model.

    Attributes:
        context: The number of characters of its input.
        width: The width of the residual stream.
        heads: The number of heads of each attention.
        hidden: The hidden width of each feed-forward part.
        blocks: The number of attention and feed-forward pairs.
    """

    context: int = 64
    width: int = 128
    heads: int = 4
    hidden: int = 512
    blocks: int = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of the demo; the defaults are those of the command.

    Attributes:
        steps: Training steps of each run.
        may_shorten: Whether to take fewer steps if a precision takes many times
            as long as float32.
        seeds: Random seeds of the weights and the batches; each precision has
            a run for each seed.
        recipes: Float8 recipes, as `recipes.parse` reads them.
        text: UTF-8 file to learn from; None: the topics of `pydoc`.
        out: Folder for the plot and the CSV file.
        json: A file to write the numbers to, or None.
        size: The size of the model.
        windows: Windows of text in a batch.
        learning_rate: The highest learning rate of the schedule.
        validations: How often the validation loss is computed during training.
        validation_windows: Windows of text in the validation batch.
    """

    steps: int = 300
    may_shorten: bool = False
    seeds: tuple[int, ...] = (0,)
    recipes: tuple[str, ...] = ("delayed",)
    text: str | None = None
    out: str = "keras-policy-ext-demo"
    json: str | None = None
    size: Size = Size()
    windows: int = 32
    learning_rate: float = 3e-3
    validations: int = 10
    validation_windows: int = 256
