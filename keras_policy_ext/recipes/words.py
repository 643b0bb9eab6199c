"""What somebody may have meant by a word that names nothing here."""

from __future__ import annotations

import re
from collections.abc import Iterable

# Words of other libraries, in small letters without separators.
_OF_OTHERS = {
    "float8": ("delayed",),
    "fp8": ("float8", "delayed"),
    "f8": ("float8", "delayed"),
    "mixedfp8": ("mixed_float8", "delayed"),
    "tensorwise": ("current",),
    "dynamic": ("current",),
    "hybrid": ("delayed",),
    "e4m3": ("delayed(fp8_format='e4m3')",),
    "e4m3fn": ("delayed(fp8_format='e4m3')",),
    "mx": ("mxfp8",),
    "fp4": ("nvfp4",),
    "float4": ("nvfp4",),
}


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """A question to be put into an error, such as `"Did you mean 'delayed'? "`.

    Args:
        word: What was received.
        known: The words that are allowed there.

    Returns:
        The question with a space after it; "" if no word is near.
    """
    if not isinstance(word, str):
        return ""
    names = list(known)
    near = _near(word, names)
    return f"Did you mean {near!r}? " if near else ""


def _near(word: str, names: list[str]) -> str | None:
    plain = {_plain(name): name for name in names}
    if _plain(word) in plain:
        return plain[_plain(word)]
    for meant in _OF_OTHERS.get(_plain(word), ()):
        if meant.partition("(")[0] in names:
            return meant
    import difflib  # Only errors need it.

    found = difflib.get_close_matches(_plain(word), plain, n=1)
    return plain[found[0]] if found else None


def _plain(word: str) -> str:
    return re.sub(r"[\s_\-./]", "", word.lower())
