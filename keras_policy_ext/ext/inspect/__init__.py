"""Say what each layer of a model does, and what this machine can do."""
