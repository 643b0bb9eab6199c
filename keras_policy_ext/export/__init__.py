"""Models in the files of other programs."""
