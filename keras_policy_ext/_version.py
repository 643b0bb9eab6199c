"""The version of the package, which is written in this file only."""

__version__ = "0.1.0"
