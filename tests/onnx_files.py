"""Run ONNX files, and what layers with stored kernels compute, in NumPy."""

import keras
import ml_dtypes
import numpy as np

from keras_policy_ext import stored_kernels
from keras_policy_ext.ext import onnx as onnx_export

LEVELS = (
    "ORT_DISABLE_ALL",
    "ORT_ENABLE_BASIC",
    "ORT_ENABLE_EXTENDED",
    "ORT_ENABLE_ALL",
)
UNIT = 2.0**-24  # half an ulp of float32, relative


def run(path, *inputs, level="ORT_ENABLE_ALL"):
    """The outputs of a file, in order."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = getattr(
        onnxruntime.GraphOptimizationLevel, level
    )
    session = onnxruntime.InferenceSession(str(path), options)
    names = [each.name for each in session.get_inputs()]
    return session.run(None, dict(zip(names, inputs, strict=True)))


def run_at_all_levels(model, folder, *inputs, **options):
    """Write a model; its outputs at each level of optimization."""
    path = folder / "model.onnx"
    onnx_export.write(model, path, overwrite=True, **options)
    return [run(path, *inputs, level=level) for level in LEVELS]


def values(rng, *shape):
    """Numbers of several magnitudes, some rows of which are zero."""
    x = rng.normal(size=shape) * 2.0 ** rng.integers(-3, 4, shape[-1:])
    if shape[0] > 1:
        x[-1] = 0
    return x.astype("float32")


def rounded(x, axes, scale=None):
    """Inputs rounded to e4m3fn, with a scale for what lies along `axes`."""
    if scale is None:
        amax = np.abs(x).max(axis=axes, keepdims=True)
        scale = np.where(amax == 0, np.float32(1), amax / np.float32(448))
    codes = np.clip(x / np.float32(scale), -448, 448).astype(
        ml_dtypes.float8_e4m3fn
    )
    return codes.astype("float32") * np.float32(scale)


def store(layer, axes, granularity="channel", weights="float8_e4m3fn"):
    """Give a layer the numbers that its stored kernel stands for."""
    variable = layer.weights[0]
    kernel = keras.ops.convert_to_numpy(variable)
    stored = stored_kernels.quantize(kernel, axes, granularity, weights)
    variable.assign(stored.dequantized())


def bound(layer, x, terms):
    """How far two sums of float32 products may lie apart, at each output.

    Each is within `terms` roundings of the exact sum, relative to the sum of
    the magnitudes (Higham, Accuracy and Stability, 3.5), and the layer adds
    a bias. The magnitudes are those of a layer of all-positive weights.
    """
    weights = layer.get_weights()
    layer.set_weights([np.abs(weight) for weight in weights])
    magnitude = keras.ops.convert_to_numpy(layer(np.abs(x)))
    layer.set_weights(weights)
    return 2 * (terms + 2) * UNIT * magnitude
