"""qwix on the same numbers: scales of channels, blocks and MX."""

import jax.numpy as jnp
import numpy as np
import pytest
from comparing import numbers, quantized
from qwix._src.core import qarray

from keras_policy_ext import recipes

E4M3 = jnp.float8_e4m3fn
WAYS = {
    "rowwise": (
        recipes.RowwiseScaling(power_of_two=False),
        qarray.HowToQuantize(qtype=E4M3, channelwise_axes=[0]),
    ),
    "block": (
        recipes.BlockScaling(power_of_two=False),
        qarray.HowToQuantize(
            qtype=E4M3, channelwise_axes=[0], tiled_axes={1: 128}
        ),
    ),
    "mxfp8": (
        recipes.MXFP8Scaling(),
        qarray.HowToQuantize(
            qtype="mxfp8", channelwise_axes=[0], tiled_axes={1: 32}
        ),
    ),
    "current": (
        recipes.CurrentScaling(),
        qarray.HowToQuantize(qtype=E4M3),
    ),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", WAYS)
def test_codes_and_scales(name, seed):
    """Scales within a unit in the last place, those of MX to the bit."""
    recipe, how = WAYS[name]
    x = numbers((64, 512), seed, spread=10)
    _, values, scales = quantized(x, recipe.quantization("inputs", "forward"))
    expected = qarray.quantize(jnp.asarray(x), how)
    ulps = 0.0 if name == "mxfp8" else 1.5e-7
    np.testing.assert_allclose(
        scales, np.asarray(expected.scale, "float32"), rtol=ulps
    )
    same = values == np.asarray(expected.qvalue, "float32")
    assert same.mean() >= (1.0 if name == "mxfp8" else 0.9995)
