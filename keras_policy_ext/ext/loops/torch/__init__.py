"""`fully_shard` of PyTorch."""
