"""The settings of the demo."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """The size of a decoder.

    Attributes:
        context: Characters it sees at once.
        width: Of the residual stream.
        heads: Of each attention.
        hidden: Of each feed-forward part.
        blocks: Attention and feed-forward pairs.
    """

    context: int = 64
    width: int = 128
    heads: int = 4
    hidden: int = 512
    blocks: int = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of the demo, with the defaults of the command.

    Attributes:
        steps: Training steps of each run.
        may_shorten: Whether there may be fewer steps where a precision takes
            many times as long as float32.
        seeds: Of the weights and the batches; each precision has a run for
            each of them.
        recipes: Float8 recipes, as `recipes.parse` reads them.
        text: UTF-8 file to learn from; None: the topics of `pydoc`.
        out: Folder for the plot and the CSV file.
        json: A file for the numbers; None for none.
        size: Of the model.
        windows: Windows of text in a batch.
        learning_rate: The highest; it rises and falls again.
        validations: How often the validation loss is taken on the way.
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
