"""What each step on the way to a third of the memory saves.

    KERAS_BACKEND=jax python integration/benchmarks/third_of_memory.py

By `kpe.memory`, for a transformer of twelve blocks under `mixed_bfloat16` with
Adam, and for GPT-2 of KerasHub in its smallest size, without numbers of a
preset. No step is taken. The ratio is of weights, optimizer and what is kept
for the backward pass together, without gradients.
"""

import dataclasses

import keras
import measuring
from workloads import Llama

import keras_policy_ext as kpe

LLAMA = (512, 1408, 8, 2, 12)
SHAPES = [(1, 128), (4, 128)]


def gpt2():
    """GPT-2 with 124 million weights, for token ids."""
    import keras_hub

    return keras_hub.models.GPT2Backbone(
        vocabulary_size=50257,
        num_layers=12,
        num_heads=12,
        hidden_dim=768,
        intermediate_dim=3072,
        max_sequence_length=128,
    )


def batch_of(model, shape):
    """What a model is called with."""
    if not isinstance(model.input, dict):
        return (*shape, LLAMA[0])
    return {x.name: keras.KerasTensor(shape, x.dtype) for x in model.inputs}


def ways(model, batch):
    """A form of the memory report for each step of the way, by name."""
    adam = kpe.mixed_precision.StochasticRounding(keras.optimizers.Adam())
    small = kpe.optimizers.quantize_state(adam)
    stock, float8 = kpe.memory(model, batch, "delayed").forms
    _, narrow = kpe.memory(model, batch, "delayed", optimizer=small).forms
    # Other layers make no other moments.
    _, moments = kpe.memory(model, batch, (), optimizer="float8").forms
    one_byte = dataclasses.replace(float8, optimizer=moments.optimizer)
    return {
        "`mixed_bfloat16`, Adam": stock,
        "layers in float8": float8,
        "moments in one byte": one_byte,
        "weights in bfloat16": narrow,
    }


def rows(name, model, shape):
    """The rows of the results for one model and batch."""
    first = None
    for way, form in ways(model, batch_of(model, shape)).items():
        held = form.weights + form.optimizer + form.kept
        first = first or held
        parts = ("weights", "gradients", "optimizer", "state", "kept")
        yield {
            "case": f"memory of a step: {name}, {shape[0]} × {shape[1]} tokens",
            "variant": way,
            **{
                f"{part}_mb": measuring.rounded(getattr(form, part) / 1e6)
                for part in parts
            },
            "of_mixed_bfloat16": measuring.rounded(held / first),
        }


def main():
    asked = measuring.arguments(__doc__)
    found = []
    with kpe.policy_scope("mixed_bfloat16"):
        models = {
            f"12 blocks of {LLAMA[0]}": Llama(1, 128, *LLAMA).model(),
            "GPT-2 of KerasHub": gpt2(),
        }
    for name, model in models.items():
        model.compile("adam", "mse")
        for shape in SHAPES:
            for row in rows(name, model, shape):
                print(row, flush=True)
                found.append(row)
    measuring.write("third_of_memory", asked, found, asked.out)


if __name__ == "__main__":
    main()
