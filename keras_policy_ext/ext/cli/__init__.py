"""The command `keras-policy-ext`."""
