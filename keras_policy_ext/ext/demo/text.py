"""The text of the demo as token numbers; needs NumPy only."""

from __future__ import annotations

import importlib
import pathlib
from collections import Counter
from typing import NamedTuple

import numpy as np

VOCABULARY_LIMIT = 256  # tokens; rarer characters share token 0
# Tokens and the next tokens, each int32 of shape (windows, context).
Batch = tuple[np.ndarray, np.ndarray]


class Corpus(NamedTuple):
    """The characters from token 1 on, and a text as tokens in two parts."""

    vocabulary: str
    train: np.ndarray  # the first nine tenths
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


def _windows(tokens: np.ndarray, starts: np.ndarray, context: int) -> Batch:
    index = starts[:, None] + np.arange(context)
    return tokens[index], tokens[index + 1]


def load(path: str | None, context: int) -> Corpus:
    """Read a UTF-8 file; without a path, read the help topics of `pydoc`.

    Raises:
        ValueError: If there is no such text, it is not UTF-8, or a tenth of
            it is too short for a window of `context` characters.
    """
    try:
        if path is not None:
            text = pathlib.Path(path).read_text(encoding="utf-8")
        else:
            topics = importlib.import_module("pydoc_data.topics").topics
            text = "\n".join(topics.values())
    except (ImportError, OSError, UnicodeDecodeError) as error:
        source = path or "the topics of pydoc"
        raise ValueError(
            f"Cannot read {source}: {error}. `--text` takes a UTF-8 file."
        ) from error
    if len(text) < 10 * (context + 2):
        raise ValueError(
            f"The text is too short. Received: {len(text):,} characters. "
            f"Allowed: at least {10 * (context + 2):,}. Take a longer file."
        )
    return encode(text)


def encode(text: str) -> Corpus:
    """Convert a text to a `Corpus`."""
    common = Counter(text).most_common(VOCABULARY_LIMIT - 1)
    vocabulary = "".join(sorted(character for character, _ in common))
    number = {character: i + 1 for i, character in enumerate(vocabulary)}
    tokens = np.array([number.get(c, 0) for c in text], "int32")
    split = len(tokens) - len(tokens) // 10
    return Corpus(vocabulary, tokens[:split], tokens[split:])
