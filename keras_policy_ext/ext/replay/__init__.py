"""Record the steps before a bad loss, and run them again."""
