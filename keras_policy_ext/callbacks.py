"""Callbacks for `fit`."""

from keras_policy_ext.ext.replay.callback import FlightRecorder
from keras_policy_ext.ext.watch.callbacks import Float8Autopilot, Float8Monitor
from keras_policy_ext.ext.watch.rules import Thresholds

Autopilot = Float8Autopilot
"""The same class by its shorter name."""

__all__ = [
    "Autopilot",
    "FlightRecorder",
    "Float8Autopilot",
    "Float8Monitor",
    "Thresholds",
]
