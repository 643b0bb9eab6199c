"""Speak to users: warnings at their line of code, and their scopes."""

from keras_policy_ext._scopes import Scopes
from keras_policy_ext._user_code import once, stacklevel, warn

__all__ = ["Scopes", "once", "stacklevel", "warn"]
