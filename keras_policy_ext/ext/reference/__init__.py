"""The arithmetic in NumPy, by which tests judge every kernel."""
