"""How fast frozen models answer on a CPU, beside the float model they were.

    KERAS_BACKEND=jax python integration/benchmarks/served.py
    KERAS_BACKEND=jax python integration/benchmarks/served.py --generate

The first prints, for kernels of several sizes and numbers of rows, the time of
`predict_on_batch` of a frozen and of a widened model, divided by that of the
float32 model; the second, tokens a second of a KerasHub Llama and Gemma with
random weights. All models take turns in one process; the best of the rounds
counts. Frameworks use as many threads as the process has cores: for one, set
OMP_NUM_THREADS=1, TF_NUM_INTRAOP_THREADS=1 and
XLA_FLAGS=--xla_cpu_multi_thread_eigen=false as well.
"""

import argparse
import functools
import json
import time

import keras
import measuring
import numpy as np

import keras_policy_ext as kpe

SIZES = [(512, 512), (1024, 4096), (2048, 2048), (2048, 8192)]
VOCABULARY = 4096


def dense_models(inputs, units, numbers):
    """Models of pairs of Dense with so many numbers, or two layers."""

    def model():
        keras.utils.set_random_seed(0)
        x = start = keras.Input((inputs,))
        for _ in range(max(numbers // (inputs * units) // 2, 1)):
            x = keras.layers.Dense(units, "relu")(x)
            x = keras.layers.Dense(inputs)(x)
        return keras.Model(start, x)

    frozen, widened = model(), model()
    kpe.freeze(frozen)
    kpe.freeze(widened)
    kpe.widen(widened)
    return {"float32": model(), "frozen": frozen, "widened": widened}


def best(functions, rounds):
    """The shortest time of each function, called in turn, in seconds."""
    found = dict.fromkeys(functions, float("inf"))
    for number in range(rounds + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if number:  # The first compiles.
                took = time.perf_counter() - start
                found[name] = min(found[name], took)
    return found


def predictions(asked):
    """For each size and number of rows the ratios to float32."""
    for inputs, units in SIZES:
        models = dense_models(inputs, units, asked.numbers)
        for rows in asked.rows:
            x = np.random.default_rng(0).normal(size=(rows, inputs))
            x = x.astype("float32")
            functions = {
                name: lambda model=model, x=x: model.predict_on_batch(x)
                for name, model in models.items()
            }
            took = best(functions, asked.rounds)
            yield {
                "kernels": f"{inputs} x {units}",
                "rows": rows,
                "float32 ms": measuring.rounded(1e3 * took["float32"]),
                **{
                    name: measuring.rounded(took[name] / took["float32"])
                    for name in ("frozen", "widened")
                },
            }


def language_model(family, policy="float32"):
    """A small language model of KerasHub with random weights."""
    import keras_hub

    keras.utils.set_random_seed(0)
    sizes = {
        "vocabulary_size": VOCABULARY,
        "num_layers": 4,
        "num_query_heads": 8,
        "hidden_dim": 1024,
        "dtype": policy,
    }
    if family == "Llama":
        backbone = keras_hub.models.LlamaBackbone(
            num_key_value_heads=4, intermediate_dim=2816, **sizes
        )
        model = keras_hub.models.LlamaCausalLM(backbone, preprocessor=None)
    else:
        backbone = keras_hub.models.GemmaBackbone(
            num_key_value_heads=1, intermediate_dim=5632, head_dim=128, **sizes
        )
        model = keras_hub.models.GemmaCausalLM(backbone, preprocessor=None)
    model.compile(sampler="greedy")
    return model


def changed(model, change):
    """The model after a change of its weights, to be compiled again."""
    change(model)
    model.compile(sampler="greedy")
    return model


def generated(asked, family):
    """For each batch the tokens a second, as ratios to float32."""

    def widen(model):
        kpe.freeze(model)
        kpe.widen(model)

    models = {
        "float32": language_model(family),
        "bfloat16": language_model(family, "bfloat16"),
        "int8 of Keras": changed(
            language_model(family), lambda model: model.quantize("int8")
        ),
        "frozen": changed(language_model(family), kpe.freeze),
        "widened": changed(language_model(family), widen),
    }
    megabytes = {
        name: sum(
            int(np.prod(v.shape)) * np.dtype(v.dtype).itemsize
            for v in model.variables
        )
        // 2**20
        for name, model in models.items()
    }
    for batch in (1, 8):
        tokens = {
            "token_ids": np.ones((batch, 8 + asked.tokens), "int32"),
            "padding_mask": np.arange(8 + asked.tokens)[None] < 8,
        }
        mask = np.broadcast_to(
            tokens["padding_mask"], (batch, 8 + asked.tokens)
        )
        tokens["padding_mask"] = mask
        functions = {
            name: functools.partial(model.generate, tokens, stop_token_ids=None)
            for name, model in models.items()
        }
        took = best(functions, asked.rounds // 3)
        yield {
            "model": family,
            "batch": batch,
            "float32 tokens/s": measuring.rounded(
                batch * asked.tokens / took["float32"]
            ),
            **{
                name: measuring.rounded(took["float32"] / seconds)
                for name, seconds in took.items()
            },
            "MiB of weights": megabytes,
        }


def main():
    """Print a line of JSON for each row of a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 128])
    parser.add_argument("--numbers", type=int, default=1 << 26)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--generate", action="store_true")
    asked = parser.parse_args()
    print(json.dumps(measuring.environment()))
    if asked.generate:
        for family in ("Llama", "Gemma"):
            for row in generated(asked, family):
                print(json.dumps(row), flush=True)
        return
    for row in predictions(asked):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
