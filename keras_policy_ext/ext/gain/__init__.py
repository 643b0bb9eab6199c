"""Estimate which layers float8 makes faster on a device."""
