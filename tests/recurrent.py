"""Sizes of recurrent layers, and how near their numbers are."""

import numpy as np

from steps import numpy

BATCH, STEPS, FEATURES, UNITS = 4, 3, 3, 2


def assert_close(some, others, tolerance=2e-6):
    """Equal up to the order of float32 sums; the scale is that of each."""
    for one, other in zip(some, others, strict=True):
        one, other = numpy(one), numpy(other)
        atol = tolerance * max(np.abs(other).max(), 1e-3)
        np.testing.assert_allclose(one, other, rtol=0, atol=atol)
