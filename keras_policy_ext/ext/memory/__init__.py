"""How many bytes a training step takes on a device."""
