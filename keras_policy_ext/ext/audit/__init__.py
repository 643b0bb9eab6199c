"""Find scales that see other positions or examples."""
