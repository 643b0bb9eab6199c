"""How much memory export and load_quantized take, in a process of their own.

    python integration/export/memory.py export FOLDER
    python integration/export/memory.py load FOLDER
    python integration/export/memory.py float

prints one line of JSON, in bytes: the float32 weights, the largest kernel,
and how far the resident memory grew above what it was before, at its peak and
in the end. Linux only.
"""

import ctypes
import gc
import json
import pathlib
import sys
import tempfile

import keras_hub
import numpy as np

import keras_policy_ext as kpe


def backbone(dtype="float32"):
    """50 M parameters in 98 kernels, none of them a large share."""
    return keras_hub.models.Llama3Backbone(
        vocabulary_size=1024,
        num_layers=14,
        num_query_heads=8,
        num_key_value_heads=4,
        hidden_dim=512,
        intermediate_dim=1792,
        tie_word_embeddings=True,
        dtype=dtype,
        name="llama",
    )


def resident(field="VmRSS"):
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {field}")


def growth(function):
    """What a function returns, and how memory grew: at most, and to stay."""
    gc.collect()
    before = resident()
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    made = function()
    peak = resident("VmHWM") - before
    gc.collect()
    # The C library keeps what is free for the next that asks for memory.
    ctypes.CDLL(None).malloc_trim(0)
    return made, peak, resident() - before


def warm_up():
    """What frameworks allocate once is not counted."""
    small = keras_hub.models.Llama3Backbone(
        vocabulary_size=8,
        num_layers=1,
        num_query_heads=2,
        num_key_value_heads=1,
        hidden_dim=8,
        intermediate_dim=8,
    )
    kpe.freeze(small)
    with tempfile.TemporaryDirectory() as folder:
        kpe.export(small, f"{folder}/small")
        kpe.load_quantized(f"{folder}/small")


def main(what, folder=None):
    warm_up()
    if what == "export":
        model = backbone()
        _, peak, stays = growth(
            lambda: kpe.export(model, folder, max_shard_size="20MB")
        )
    elif what == "load":
        model, peak, stays = growth(lambda: kpe.load_quantized(folder))
        model = model.backbone
    else:
        model, peak, stays = growth(backbone)
    sizes = [int(np.prod(v.shape)) * 4 for v in model.weights]
    print(
        json.dumps(
            {
                "float32": int(model.count_params()) * 4,
                "largest": max(sizes),
                "peak": peak,
                "stays": stays,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
