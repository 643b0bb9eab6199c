"""Refusals: layers that cannot be written to ONNX."""

from __future__ import annotations


class Refused(Exception):
    """Why a layer or operation cannot be written, and what can be.

    Raised where the name of that layer is not known. What knows the name
    catches it and writes the whole message.
    """

    def __init__(self, reason: str, allowed: str):
        super().__init__(reason)
        self.reason = reason
        self.allowed = allowed
