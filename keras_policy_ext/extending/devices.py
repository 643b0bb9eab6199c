"""What devices can do, by name, and pretending that one is present."""

from keras_policy_ext.backends.devices import KNOWN, Device, pretend, pretended
from keras_policy_ext.policies._plain import for_this_device

__all__ = ["KNOWN", "Device", "for_this_device", "pretend", "pretended"]
