"""Trains the demo's model under recipes and seeds, on the current backend.

    KERAS_BACKEND=torch python integration/recipes/train.py \\
        [--seeds 0 1 2] [--steps 300] [--results FOLDER] [RECIPE ...]

A recipe is what `recipes.parse` reads, such as `"nvfp4(hadamard=False)"`;
without one, all recipes and a few variants are trained. float32 and
mixed_bfloat16 are trained along with them. Under `"delayed; unrounded: kernel"`
an operand is scaled and not rounded, and `"delayed; nudged 1"` starts from
weights that differ by one part in ten thousand: how much is chance.

Every run is appended to `results/<backend>.json` when it is over, and one that
is there already is not repeated: what was interrupted goes on where it was.
`training_page.py` makes a page of the files.
"""

import argparse
import contextlib
import json
import math
import os
import pathlib
import re

import keras
import numpy as np

from keras_policy_ext import conversion, policies
from keras_policy_ext.contractions.operands import OperandUse
from keras_policy_ext.ext import demo
from keras_policy_ext.ext.delayed.variable import StateVariable
from keras_policy_ext.ext.demo import text, train
from keras_policy_ext.ext.sampling import machine

RESULTS = pathlib.Path(__file__).parent / "results"
NUDGED = "; nudged "
"""Between a recipe and the number of a draw: from weights that differ by one
part in ten thousand."""

UNROUNDED = "; unrounded: "
"""Between a recipe and the operand that is not rounded under it."""

EIGHT_BITS = "; eight bits: "
"""Between a recipe and the blocks, `first` or `last`, that stay at eight bits
with the logits."""

PLAIN = ("float32", train.BASELINE, f"{train.BASELINE}{NUDGED}1")
RECIPES = (
    "delayed",
    "current",
    "rowwise(power_of_two=False)",
    "block(power_of_two=False)",
    "mxfp8",
    "nvfp4",
    "nvfp4(hadamard=False)",
    "nvfp4(stochastic_rounding=False)",
    "rowwise(power_of_two=True,kernel_grad='high_precision')",
    "current(power_of_two=True)",
    "rowwise(power_of_two=True)",
    "block(power_of_two=True)",
)


def main(argv=None):
    arguments = _arguments(argv)
    path = arguments.results / f"{machine.backend()}.json"
    for recipe in (*PLAIN, *arguments.recipes):
        for seed in arguments.seeds:
            settings = demo.Settings(steps=arguments.steps, seed=seed)
            result = _read(path)
            key = {"recipe": recipe, "seed": seed, "steps": settings.steps}
            if any(key.items() <= run.items() for run in result["runs"]):
                continue
            run = {**key, **trained(recipe, settings)}
            _append(path, run)
            print(json.dumps(run), flush=True)


def _arguments(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("recipes", nargs="*", default=RECIPES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    return parser.parse_args(argv)


def trained(recipe, settings):
    """What is kept of one run."""
    corpus = text.load(None, settings.context)
    weights = train.draw(corpus, settings)
    rest, _, draw = recipe.partition(NUDGED)
    spec, _, operand = rest.partition(UNROUNDED)
    if draw:
        weights = nudged(weights, settings.seed, int(draw))
    policy = policy_for(spec)
    keras.backend.clear_session()
    with rounding_all_but(operand):
        run = train.train(policy, corpus, settings, weights)
    states = [v for v in run.model.weights if isinstance(v, StateVariable)]
    return {
        "validation_loss": run.validation_loss,
        "steps_per_second": float(f"{run.steps_per_second:.3g}"),
        "state_bytes": sum(4 * math.prod(state.shape) for state in states),
        "kernels": sorted(re.findall("[a-z]+", run.kernels)),
    }


def policy_for(spec):
    """The policy of a recipe; of a recipe and the block at eight bits."""
    recipe, _, block = spec.partition(EIGHT_BITS)
    if not block:
        return train.policies_compared().get(spec) or train.float8_policy(spec)
    model = train.decoder(9, demo.Settings(), train.BASELINE)
    count = {"first": 0, "last": 0, block: 1}
    rules = conversion.eight_bit_rules(
        model, "rowwise(power_of_two=False)", **count
    )
    return policies.Float8DTypePolicy(
        train.BASELINE, recipe=recipe, rules=rules
    )


@contextlib.contextmanager
def rounding_all_but(operand):
    """Scale an operand of emulated matmuls, and leave it at that."""
    quantize = OperandUse.quantize

    def altered(use, home, amax, known, cast, slot=0):
        if use.operand == operand and use.is_stochastic:
            raise ValueError(f"The {operand} are rounded at random.")
        cast = _unrounded if use.operand == operand else cast
        return quantize(use, home, amax, known, cast, slot)

    OperandUse.quantize = altered
    _forget_what_was_traced()
    try:
        yield
    finally:
        OperandUse.quantize = quantize
        _forget_what_was_traced()


def _forget_what_was_traced():
    """What was traced for an equal plan before would be used again."""
    if machine.backend() == "jax":
        import jax

        jax.clear_caches()
    elif machine.backend() == "tensorflow":
        from keras_policy_ext.backends.tensorflow import backend as framework
        from keras_policy_ext.backends.tensorflow import gradients

        framework._shared_forward.cache_clear()
        gradients._shared_backward.cache_clear()


def _unrounded(x, scale, format_name, is_factor):
    x = keras.ops.cast(x, "float32")
    return x * scale if is_factor else x / scale


def nudged(weights, seed, draw):
    """Weights, each multiplied by a number within 1e-4 of one."""
    random = np.random.default_rng((seed, draw))
    return {
        path: array * random.uniform(1 - 1e-4, 1 + 1e-4, array.shape)
        for path, array in weights.items()
    }


def _read(path):
    if path.exists():
        return json.loads(path.read_text("utf-8"))
    facts = machine.facts()
    names = ("keras-policy-ext", "backend", "device", "keras")
    kept = {name: facts[name] for name in (*names, machine.backend(), "numpy")}
    return {"environment": kept, "runs": []}


def _append(path, run):
    """Read and write at once: another process may have appended since."""
    result = _read(path)
    result["runs"].append(run)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    text = json.dumps(result, indent=1)
    unfinished.write_text(text + "\n", encoding="utf-8")
    os.replace(unfinished, path)


if __name__ == "__main__":
    main()
