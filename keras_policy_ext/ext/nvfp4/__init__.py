"""NVFP4: four bits a value, and scales on two levels.

`recipe` is plain data. `quantized` computes what no other recipe asks for:
scales of two levels, Hadamard transforms, rounding at random. It is imported
for the first operand that is quantized so.
"""
