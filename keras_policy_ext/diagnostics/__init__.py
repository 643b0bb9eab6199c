"""Watching float8 at work: the demo, the doctor, tables and plots."""
