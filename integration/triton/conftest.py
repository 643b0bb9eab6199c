"""Triton's interpreter runs kernels on any machine; it is chosen on import."""

import os

os.environ["TRITON_INTERPRET"] = "1"
