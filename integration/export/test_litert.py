"""Codes and scales that LiteRT's quantizer finds in floats on the grid."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe

if keras.backend.backend() != "tensorflow":
    pytest.skip(
        "Keras writes these files with TensorFlow; with PyTorch it takes "
        "litert-torch, which wants another PyTorch.",
        allow_module_level=True,
    )

from ai_edge_litert.interpreter import Interpreter
from ai_edge_quantizer import qtyping, quantizer
from ai_edge_quantizer.algorithm_manager import AlgorithmName

X = np.random.default_rng(0).normal(size=(1, 64)).astype("float32")


def frozen(recipe):
    """A frozen model, its outputs, and its stored kernels by their sizes."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((64,), batch_size=1)
    hidden = keras.layers.Dense(64, activation="relu")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(32)(hidden))
    kpe.convert(model, recipe)
    kpe.freeze(model)
    stored = [layer.kernel.stored for layer in model.layers[1:]]
    return (
        model,
        ops.convert_to_numpy(model(X)),
        {each.matrix.shape: each for each in stored},
    )


def quantized(path, bits):
    """What the quantizer makes of a file whose weights are on the grid."""
    weights = qtyping.TensorQuantizationConfig(
        num_bits=bits,
        symmetric=True,
        granularity=qtyping.QuantGranularity.CHANNELWISE,
    )
    made = quantizer.Quantizer(str(path))
    made.update_quantization_recipe(
        regex=".*",
        operation_name=qtyping.TFLOperationName.ALL_SUPPORTED,
        op_config=qtyping.OpQuantizationConfig(
            weight_tensor_config=weights,
            compute_precision=qtyping.ComputePrecision.FLOAT,
            explicit_dequantize=True,
        ),
        algorithm_key=AlgorithmName.DEQUANTIZED_WEIGHT_RECOVERY,
    )
    return bytes(made.quantize().quantized_model)


@pytest.mark.parametrize(
    ("recipe", "bits", "error"),
    [
        # It takes the smallest difference of two weights for the scale. Each
        # has the error of float32, 2⁻²⁴ of it.
        ("int8", 8, 2 * 127 * 2.0**-24),
        ("int4", 4, 1e-6),
        # Float32 has all products of a scale in bfloat16 and a code.
        ("int8(scale_format='bfloat16')", 8, 0),
        ("int4(scale_format='bfloat16')", 4, 0),
    ],
)
def test_codes_and_scales_are_those_of_the_frozen_model(
    recipe, bits, error, tmp_path
):
    model, expected, stored = frozen(recipe)
    kpe.thaw(model)
    model.export(tmp_path / "m.tflite", format="litert", verbose=False)
    content = quantized(tmp_path / "m.tflite", bits)
    reader = Interpreter(model_content=content)
    reader.allocate_tensors()
    found = 0
    for tensor in reader.get_tensor_details():
        scale = tensor["quantization_parameters"]["scales"]
        if scale.size < 2:
            continue
        ours = stored[tuple(tensor["shape"])]
        np.testing.assert_allclose(scale, ours.scale.reshape(-1), rtol=error)
        codes = reader.get_tensor(tensor["index"])
        np.testing.assert_array_equal(codes, ours.matrix.view("int8"))
        found += 1
    assert found == 2
    reader.set_tensor(reader.get_input_details()[0]["index"], X)
    reader.invoke()
    outputs = reader.get_tensor(reader.get_output_details()[0]["index"])
    assert np.abs(outputs - expected).max() < 1e-5 * np.abs(expected).max()
