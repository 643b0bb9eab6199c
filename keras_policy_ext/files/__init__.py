"""What files have of models: checked, opened, read by one schema, written."""
