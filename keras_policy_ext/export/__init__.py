"""Models with float8 kernels in the forms of other readers, and back.

```python
kpe.freeze(model)
kpe.export(model, "folder", format="compressed-tensors")
```

`kpe.export` is the function, not this room, which is loaded when it is called.
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
    """Write a model with float8 kernels, for a reader without Keras.

    A frozen kernel is written with the bytes that it has, and what was left
    in floats when the model was frozen stays so. The kernels of a model in
    which none is frozen are quantized while they are written, one at a time.
    Adapters of LoRA are merged into the kernel, which is then quantized
    again. The model stays as it is. What is written appears under its name
    when it is whole.

    Args:
        model: A built model. For the formats of Hugging Face a language model
            of KerasHub, or its backbone; for the others any.
        path: The folder to write, or for `"safetensors"` and `"onnx"` the
            file.
        format: `"compressed-tensors"` (vLLM, transformers), `"fp8"`
            (transformers, vLLM; blocks of 128x128 or per tensor),
            `"modelopt"` (TensorRT-LLM, vLLM; per tensor, static),
            `"safetensors"` (one file with the model's own names) or
            `"onnx"`.
        weights: The format of the numbers. None: that of frozen kernels, else
            `"float8_e4m3fn"`.
        granularity: `"channel"`, `"tensor"` or `"block"`. None: that of
            frozen kernels, else what the format is mostly read in.
        activations: None, `"dynamic"` or `"static"`: how a reader quantizes
            inputs. `"auto"`: as the frozen layers do, else not. Static scales
            are those of frozen layers.
        include: Regular expressions, one of which must be found in the path
            of a layer that is quantized; None for any.
        exclude: Regular expressions of layers that are written in float.
        tokenizer: Of KerasHub, to be written too; None for that of the task.
        max_shard_size: The most bytes in one file, such as `"5GB"`.
        overwrite: Whether an earlier export at `path` is replaced.
        **options: More arguments of the format `"onnx"`.

    Returns:
        An `ExportReport`, or what the writer of ONNX returns.

    Raises:
        ValueError: If the reader of the format cannot take the model, or an
            argument is wrong.
        TypeError: If the model is none for this format.
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
    """A model of KerasHub from a folder of Hugging Face with float8 kernels.

    The kernels are frozen with the bytes that the folder has; no more than
    one of them is ever held in floats. What is in floats there, such as
    embeddings and the layers in `ignore`, is in floats here. Inputs are
    quantized as the folder says; those of the format `fp8` are not, as its
    reader does it on a CPU.

    Args:
        path: A folder in the form of compressed-tensors, or of `fp8`.
        dtype: The dtype policy of the model, such as `"bfloat16"`; None for
            that of the folder.

    Returns:
        The causal language model of the architecture, without a preprocessor:
        `keras_hub.models.CausalLMPreprocessor.from_preset(path)` reads one.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If a file is damaged, or the folder is of another form.
        ImportError: If KerasHub is not installed.
    """
    loading = importlib.import_module(f"{__name__}.loading")
    return loading.load(path, dtype)
