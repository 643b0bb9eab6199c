"""torchao on the same numbers: its layers, its MX and its NVFP4."""

import numpy as np
import pytest
import torch
from comparing import SHAPES, error, numbers, operands, products, quantized
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import (
    nvfp4_quantize,
    per_tensor_amax_to_scale,
)

from keras_policy_ext import recipes

NAMES = {
    "tensorwise": "current",
    "rowwise": "rowwise(power_of_two=True)",
    "rowwise_with_gw_hp": (
        "rowwise(power_of_two=True,kernel_grad='high_precision')"
    ),
}
LEAST_NORMAL_E4M3 = 2.0**-6


def products_of_torchao(name, x, kernel, g):
    linear = torch.nn.Linear(*kernel.shape, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.from_numpy(kernel.T))
    config = Float8LinearConfig.from_recipe_name(name)
    object.__setattr__(config, "emulate", True)
    layer = Float8Linear.from_float(linear, config=config)
    x = torch.from_numpy(x).requires_grad_()
    y = layer(x)
    y.backward(torch.from_numpy(g))
    return y.detach().numpy(), x.grad.numpy(), layer.weight.grad.numpy().T


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_products_of_a_layer(name, shape, seed):
    """Where scales are powers of two, all codes are equal.

    Others are its reciprocals, so that a quotient is a product with another
    last bit, and now and then another code.
    """
    given = operands(SHAPES[shape], seed)
    ours = products(NAMES[name], *given)
    theirs = products_of_torchao(name, *given)
    most = 2e-3 if name == "tensorwise" else 1e-6
    for found, expected in zip(ours, theirs, strict=True):
        assert error(found, expected) <= most


@pytest.mark.parametrize("spread", [0, 30, 120])
@pytest.mark.parametrize("rounding", ["floor", "round_up"])
def test_mx_blocks(rounding, spread):
    x = numbers((64, 256), 1, spread)
    x[0], x[1, :32] = 0.0, np.float32(2.0**-140)
    x[2, 5], x[3, 40] = np.float32(3e38), -448.0
    asked = recipes.MXFP8Scaling(rounding=rounding)
    found, values, _ = quantized(x, asked.quantization("inputs", "forward"))
    modes = ScaleCalculationMode
    mode = {"floor": modes.FLOOR, "round_up": modes.RCEIL}[rounding]
    scales, codes = to_mx(torch.from_numpy(x), torch.float8_e4m3fn, 32, mode)
    np.testing.assert_array_equal(values, codes.float().numpy())
    bytes_of_ours = found.encoded("uint8").scale.numpy()[0]
    expected = scales.view(torch.uint8).numpy()
    told = np.abs(x.reshape(64, 8, 32)).max(-1) > 0.0
    np.testing.assert_array_equal(bytes_of_ours[told], expected[told])


@pytest.mark.parametrize("seed", range(3))
def test_nvfp4_blocks(seed):
    """Its scales are normal numbers of e4m3, ours all: no block is so small."""
    x = numbers((64, 256), seed, spread=2)
    asked = recipes.NVFP4Scaling().quantization("inputs", "forward")
    found, values, scales = quantized(x, asked)
    whole = torch.from_numpy(x)
    of_tensor = per_tensor_amax_to_scale(whole.abs().max())
    expected, packed = nvfp4_quantize(whole, 16, of_tensor)
    expected = expected.float().numpy().reshape(64, 16)
    assert expected.min() > LEAST_NORMAL_E4M3
    np.testing.assert_array_equal(scales, expected)
    np.testing.assert_allclose(
        found.tensor_scale.numpy(), of_tensor.numpy(), rtol=2e-7
    )
    both = np.stack([packed.numpy() & 15, packed.numpy() >> 4], axis=-1)
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], "float32")
    table = np.concatenate([table, -table])
    same = values == table[both.reshape(64, 256)]
    assert same.mean() >= 0.999
