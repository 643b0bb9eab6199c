"""Compare what recipes would do to a model on one batch."""
