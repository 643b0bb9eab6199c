"""The matmuls that PyTorch has computed."""
