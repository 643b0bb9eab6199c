"""What an error says: the fault first, what was received, what is allowed."""

import contextlib
import re

import pytest


def parts(text):
    """The fault, what was received, and what is allowed."""
    match = re.fullmatch(r"(.+?) Received: (.+?) Allowed: (.+)", text, re.S)
    assert match, f"not of the form 'fault. Received: … Allowed: …': {text}"
    return match.groups()


@contextlib.contextmanager
def refused(error, about, value, instead):
    """A block that raises an error of this kind.

    Args:
        error: Its class.
        about: What the first sentence names: the argument, or what is wrong.
        value: What was received, as the error shows it.
        instead: Something that is allowed.
    """
    with pytest.raises(error) as raised:
        yield
    fault, received, allowed = parts(str(raised.value))
    assert about in fault, fault
    assert value in received, received
    assert instead in allowed, allowed
