"""What cannot be written to ONNX."""

from __future__ import annotations


class Refused(Exception):
    """Why a layer or operation cannot be written.

    Who knows its name makes a message of it, with the way out.
    """
