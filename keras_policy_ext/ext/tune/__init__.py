"""Choose a recipe for each layer within a budget."""
