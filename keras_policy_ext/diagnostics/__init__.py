"""What float8 does in a model: the demo, the doctor, tables and plots."""
