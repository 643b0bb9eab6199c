"""Show what float8 does in a model: the demo, the doctor, tables, plots."""
