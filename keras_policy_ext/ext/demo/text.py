"""The text of the demo as token numbers; needs NumPy only."""

from __future__ import annotations

import dataclasses
import importlib
import pathlib
from collections import Counter

import numpy as np

VOCABULARY_LIMIT = 256
"""The maximum number of tokens; rarer characters share token 0."""

VALIDATION_FRACTION = 0.1


@dataclasses.dataclass(frozen=True)
class Batch:
    """Input tokens and the next tokens, each of shape (windows, context)."""

    inputs: np.ndarray
    targets: np.ndarray


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A text as int32 tokens, split into training and validation parts.

    Attributes:
        source: Where the text comes from, in words.
        vocabulary: The characters, one for each token; token 0 stands for
            all other characters.
        train: The first nine tenths.
        validation: The rest.
    """

    source: str
    vocabulary: str
    train: np.ndarray
    validation: np.ndarray

    @property
    def tokens(self) -> int:
        """The number of distinct tokens."""
        return len(self.vocabulary) + 1

    def batch(self, step: int, seed: int, windows: int, context: int) -> Batch:
        """Return the training batch for a step and a seed, drawn at random."""
        random = np.random.default_rng((seed, step))
        starts = random.integers(len(self.train) - context, size=windows)
        return _windows(self.train, starts, context)

    def validation_batch(self, windows: int, context: int) -> Batch:
        """Return up to `windows` windows, spread over the validation text."""
        last = len(self.validation) - context - 1
        count = min(windows, last // context + 1)
        starts = np.linspace(0, last, count).astype(int)
        return _windows(self.validation, starts, context)


def load(path: str | None, context: int) -> Corpus:
    """Read a UTF-8 file; without a path, read the help topics of `pydoc`.

    Both parts of the text hold a window of `context` characters.

    Raises:
        ValueError: If there is no such file, it is no UTF-8 text, or it is
            too short.
    """
    source, text = _pydoc_topics() if path is None else _file(path)
    needed = int((context + 1) / VALIDATION_FRACTION) + 1
    if len(text) < needed:
        raise ValueError(
            f"{source} is too short for context={context}. Received: "
            f"{len(text):,} characters. Allowed: at least {needed:,}. Take a "
            "longer file or a smaller context."
        )
    return encode(source, text)


def encode(source: str, text: str) -> Corpus:
    """Convert a text to a `Corpus`, with one token per character."""
    common = Counter(text).most_common(VOCABULARY_LIMIT - 1)
    vocabulary = "".join(sorted(character for character, _ in common))
    number = {character: i + 1 for i, character in enumerate(vocabulary)}
    tokens = np.array([number.get(c, 0) for c in text], "int32")
    split = len(tokens) - int(len(tokens) * VALIDATION_FRACTION)
    return Corpus(source, vocabulary, tokens[:split], tokens[split:])


def _windows(tokens: np.ndarray, starts: np.ndarray, context: int) -> Batch:
    index = starts[:, None] + np.arange(context)
    return Batch(tokens[index], tokens[index + 1])


def _pydoc_topics() -> tuple[str, str]:
    try:
        module = importlib.import_module("pydoc_data.topics")
    except ImportError as error:
        raise ValueError(
            "This Python comes without pydoc_data, whose text the demo "
            "learns from. Name a text of your own: --text FILE."
        ) from error
    return "pydoc_data.topics", "\n".join(module.topics.values())


def _file(path: str) -> tuple[str, str]:
    try:
        return path, pathlib.Path(path).read_text(encoding="utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(f"Cannot read {path}: {reason}.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}.") from error
