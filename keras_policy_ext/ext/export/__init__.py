"""Export models with float8 kernels to other programs, and load exports.

```python
kpe.freeze(model)
kpe.export(model, "folder", format="compressed-tensors")
```

`kpe.export` is the function, not the module `keras_policy_ext.export`. What
writes and reads is imported at the first call.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keras_policy_ext.conversion.requested import PathPatterns

FORMATS = ("compressed-tensors", "fp8", "modelopt", "safetensors", "onnx")
"""The formats that `export` writes."""


def export(
    model: Any,
    path: str | os.PathLike[str],
    format: str = "compressed-tensors",
    *,
    weights: str | None = None,
    granularity: str | None = None,
    activations: str | None = "auto",
    include: PathPatterns | None = None,
    exclude: PathPatterns | None = None,
    tokenizer: Any = None,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
    **options: Any,
) -> Any:
    """Write a model with float8 kernels, for programs that do not use Keras.

    A frozen kernel is written byte for byte, and weights that were left in
    floats when the model was frozen are written in floats. If no kernel of the
    model is frozen, the kernels are quantized while they are written, one at a
    time; layers that decide, such as routers of experts, are written in floats
    unless `freeze(filter="all")` has frozen them. LoRA adapters are merged into
    the kernel, which is then quantized again. The model is unchanged. The
    output appears at `path` only when it is complete.

    Args:
        model: A built model. For the formats of Hugging Face, a language model
            of KerasHub or its backbone; for the others, any model.
        path: The folder to write, or for `"safetensors"` and `"onnx"` the
            file.
        format: `"compressed-tensors"` (vLLM, transformers), `"fp8"`
            (transformers, vLLM; blocks of 128x128 or per tensor),
            `"modelopt"` (TensorRT-LLM, vLLM; per tensor, static),
            `"safetensors"` (one file with the model's own names) or
            `"onnx"`.
        weights: The float8 format. None: that of the frozen kernels, else
            `"float8_e4m3fn"`.
        granularity: `"channel"`, `"tensor"` or `"block"`. None: that of
            the frozen kernels, else the usual one of the export format.
        activations: None, `"dynamic"` or `"static"`: how a reader quantizes
            inputs. `"auto"`: as the frozen layers do, else None. Static scales
            are taken from frozen layers.
        include: Regular expressions, one of which must be found in the path
            of a layer that is quantized; None for any.
        exclude: Regular expressions for paths of layers to write in float.
        tokenizer: A KerasHub tokenizer to write too; None for that of the task.
        max_shard_size: The most bytes in one file, such as `"5GB"`.
        overwrite: Whether to replace an earlier export at `path`.
        **options: More arguments for the format `"onnx"`.

    Returns:
        An `ExportReport`, or what the writer of ONNX returns.

    Raises:
        ValueError: If the readers of the format cannot read the model, or an
            argument is wrong.
        TypeError: If the format does not support this kind of model.
        OSError: If it cannot be written; FileExistsError if something is at
            `path`.

    Examples:
        >>> layer = keras.layers.Dense(8)
        >>> model = keras.Sequential([keras.Input((32,)), layer])
        >>> report = kpe.export(
        ...     model, "model.safetensors", format="safetensors"
        ... )
        >>> [weight.dtype for weight in report.weights]
        ['float8_e4m3fn', 'float32']
    """
    exporting = importlib.import_module(f"{__name__}.exporting")
    request = exporting.ExportRequest(
        path=path,
        format=format,
        asked=(weights, granularity, activations),
        include=include,
        exclude=exclude,
        tokenizer=tokenizer,
        max_shard_size=max_shard_size,
        overwrite=overwrite,
        options=options,
    )
    return exporting.run(model, request, FORMATS)


def load_quantized(
    path: str | os.PathLike[str], *, dtype: str | None = None
) -> Any:
    """Load a Hugging Face folder of kernels in few bits as a KerasHub model.

    The kernels are frozen with the bytes of the folder; at most one of them is
    in floats at a time. Weights that are in floats in the folder, such as
    embeddings and the layers in `ignore`, are in floats in the model. Inputs
    are quantized as the folder says. For the format `fp8` they are not,
    because its reader does not quantize them on a CPU either.

    Args:
        path: A folder in the format `compressed-tensors` or `fp8`.
        dtype: The dtype policy of the model, such as `"bfloat16"`; None for
            that of the folder.

    Returns:
        The causal language model of the architecture, without a preprocessor:
        `keras_hub.models.CausalLMPreprocessor.from_preset(path)` reads one.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If a file is damaged, or the folder has another format.
        ImportError: If KerasHub is not installed.
    """
    loading = importlib.import_module(f"{__name__}.loading")
    return loading.load(path, dtype)
