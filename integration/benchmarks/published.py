"""Published speed-ups over bfloat16, and how well `kpe.plan` estimates them.

Every second row of a source is fitted, the others are kept out, and so are
all of this project and of the sources in `UNSEEN`. Run it to fit anew, and to
write the errors into `published_errors.json`:

    python integration/benchmarks/published.py
"""

import collections
import json
import math
import pathlib
import re
from typing import NamedTuple

import numpy as np
from generated import write_or_check

from keras_policy_ext import recipes
from keras_policy_ext.ext.gain import estimate
from keras_policy_ext.ext.gain.estimate import (
    CARDS,
    XLA_RESULTS,
    Card,
    Matmuls,
)

ROOT = pathlib.Path(__file__).parents[2]
ERRORS = pathlib.Path(__file__).parent / "published_errors.json"
MODULE = ROOT / "keras_policy_ext" / "ext" / "gain" / "estimate.py"

OTHERS = {
    "H200 NVL": Card(835e12, 1671e12, 0, 4.8e12),
    "H100 of Meta": Card(989e12, 1979e12, 0, 2.4e12),
}
"""Cards of the rows that none can ask for; torchtitan tells the bandwidth of
the H100 that its and torchao's rows were measured on."""

HOPPER = ("H100 of Meta", "H200", "H200 NVL")


class Step(NamedTuple):
    """What is computed.

    Attributes:
        matmuls: Matmuls in low precision.
        plain: Matmuls in bfloat16 under each recipe.
        attention: Multiplications of two activations, forward.
        kept: Bytes that the forward pass keeps.
        weights: Weights that this device updates.
        which: Which matmuls of the three.
        casts: As for `Estimator.quantized`.
        runs: Likewise.
    """

    matmuls: tuple
    plain: tuple = ()
    attention: float = 0
    kept: float = 0
    weights: float = 0
    which: tuple = ("forward", "inputs_grad", "kernel_grad")
    casts: str = "once"
    runs: float = 1


class Row(NamedTuple):
    """A published speed-up over bfloat16.

    Attributes:
        source: Where it is published.
        what: What was measured.
        device: A key of `CARDS` or `OTHERS`.
        recipe: The name of a recipe.
        speedup: The speed over bfloat16.
        step: What is computed.
        ours: Whether it was measured by this project.
        results: As for `Estimator`.
        floors: Seconds of the host, in bfloat16 and in float8.
    """

    source: str
    what: str
    device: str
    recipe: str
    speedup: float
    step: Step
    ours: bool = False
    results: float = 0
    floors: tuple = (0, 0)


def dense_model(
    batch,
    length,
    h,
    ffn,
    kv,
    layers,
    vocabulary,
    weights,
    share=1.0,
    parts=1,
    runs=1.5,
):
    """A step of a decoder with SwiGLU; `share` of layers in low precision.

    Half of the forward matmuls run again, as torchtitan's selective
    checkpointing has it. Weights are spread over the devices, and with tensor
    parallelism each matmul is over so many `parts`.
    """
    rows = batch * length
    out = h, kv, kv, ffn, ffn
    sizes = [(h, n // parts) for n in out]
    sizes += [(n // parts, h) for n in (h, ffn)]
    all_of_them = [Matmuls.of(rows, *size) for size in sizes] * layers
    low = round(share * layers) * len(sizes)
    head = Matmuls.of(rows, h, vocabulary // parts)
    kept = rows * (layers * 2 * (6 * h + h + 2 * kv + 4 * ffn))
    kept += rows * vocabulary * 10
    return Step(
        tuple(all_of_them[:low]),
        (*all_of_them[low:], head),
        # Causal: half of two products.
        attention=layers * batch * length**2 * h // parts,
        kept=kept // parts,
        weights=weights,
        runs=runs,
    )


def llama(batch, length, devices=8, **kwargs):
    size = 4096, 14336, 1024, 32, 128256, 8e9 / devices
    return dense_model(batch, length, *size, **kwargs)


def llama_70b(batch, length, devices, **kwargs):
    size = 8192, 28672, 1024, 80, 128256, 70e9 / devices
    return dense_model(batch, length, *size, **kwargs)


def deepseek_v3(rows, experts, layers=61, h=7168, ffn=2048):
    """A step of a micro-batch: so many of 256 experts are on each device.

    The first three layers, which have no experts, are taken to be as the rest.
    """
    latent = [(h, 1536), (1536, 24576), (h, 576), (512, 32768), (16384, h)]
    sizes = [*latent, (h, ffn), (h, ffn), (ffn, h)]
    low = [Matmuls.of(rows, *size) for size in sizes]
    routed = rows * 8
    low += [Matmuls.of(routed, h, ffn, experts)] * 2
    low += [Matmuls.of(routed, ffn, h, experts)]
    kept = 7 * h + 24576 + 32768 + 16384 + 4 * ffn * 9
    return Step(
        tuple(low * layers),
        (Matmuls.of(rows, h, 129280),),
        attention=layers * rows * 4096 * 128 * (192 + 128) // 2,
        kept=rows * (layers * 2 * kept + 129280 * 10),
        runs=1,
    )


def qwen(batch, length, devices, share=1.0):
    return dense_model(
        batch, length, 4096, 12288, 1024, 36, 151936, 8.2e9 / devices, share
    )


def scout(rows, layers, grouped, linear, experts=16, runs=1.5):
    """Llama 4 Scout: a shared and a routed expert of 16 in each layer.

    With experts on 16 devices each has one, for as many tokens.
    """
    h, ffn = 5120, 8192
    banks = [Matmuls.of(rows, h, ffn, experts)] * 2
    banks += [Matmuls.of(rows, ffn, h, experts)]
    others = [Matmuls.of(rows, h, ffn)] * 2 + [Matmuls.of(rows, ffn, h)]
    others += [Matmuls.of(rows, h, n) for n in (h, 1024, 1024, h)]
    head = Matmuls.of(rows, h, 202048)
    low = banks * layers * grouped + others * layers * linear
    plain = banks * layers * (not grouped)
    plain += others * layers * (not linear)
    return Step(
        tuple(low),
        (*plain, head),
        attention=layers * rows * 8192 * h,
        kept=rows * (layers * 2 * (7 * h + 8 * ffn) + 202048 * 10),
        runs=runs,
    )


def expert_layer(free, summed):
    """A layer of experts alone: three banks, and what lies between them."""
    rows = 131072
    up = Matmuls.of(rows, summed, free, 8)
    down = Matmuls.of(rows, free, summed, 8)
    return Step((up, up, down), kept=rows * 2 * (4 * free + 4 * summed))


LAYER_5B = ((4096, 12288), (4096, 4096), (4096, 16384), (16384, 4096))
NAMES_5B = ("QKV", "attention output", "MLP up", "MLP down")


def of_5b(casts, which=Step._field_defaults["which"], sizes=LAYER_5B):
    matmuls = tuple(Matmuls.of(15872, *size) for size in sizes)
    return Step(matmuls, casts=casts, which=which)


def square(size, **kwargs):
    return Step((Matmuls.of(size, size, size),), **kwargs)


TE = "Transformer Engine, GEMM profiling, 2026-06"
AO = "torchao/float8/README.md, 2026-08"
TITAN = "torchtitan, benchmarks/llama3_h100_202412"
TITAN4 = "torchtitan, quantization/nvfp4.md, 2026-08"
MOE = "torchao/prototype/moe_training/README.md, 2026-08"
AO_LINEAR = "torchao, LayerNorm-Linear-Sigmoid, rowwise"
AO_MATMUL = "torchao, matmul alone"
TP = "torchtitan, benchmarks/asyncTP_llama3_h100_2025-06"
BRIDGE = "Megatron Bridge, performance summary, NeMo 25.11"
TE_JAX = "Transformer Engine, docs/examples/jax/dense.rst, 2026-08"
HERE = "this project, 2026-11-26, an earlier version"
LATER = "this project, 2026-11-27"
UNSEEN = (TP, BRIDGE, TE_JAX)
"""Sources that were found after the model was made: none of their rows is
fitted."""

META = "H100 of Meta"
GW_HP = "rowwise(kernel_grad='high_precision')"


def rows():
    """Every published row."""
    for recipe, speed in {
        "delayed": 32.014 / 18.978,
        "current": 32.014 / 20.285,
        "block": 32.014 / 22.882,
    }.items():
        what = "5B model, matmuls and casts"
        yield Row(TE, what, "H200 NVL", recipe, speed, of_5b("each"))
    what = "5B model, matmuls alone"
    step = of_5b("none")
    yield Row(TE, what, "H200 NVL", "current", 31.968 / 16.785, step)
    total = {"delayed": 7.802, "current": 9.147, "mxfp8": 8.984}
    total["nvfp4"] = 6.453
    for recipe, took in total.items():
        what = "5B model, matmuls and casts"
        yield Row(TE, what, "B300", recipe, 12.758 / took, of_5b("each"))
    for recipe, took in {
        "current": 6.812,
        "mxfp8": 7.161,
        "nvfp4": 3.764,
    }.items():
        what = "5B model, matmuls alone"
        yield Row(TE, what, "B300", recipe, 13.102 / took, of_5b("none"))
    order = ("current", "delayed", "mxfp8", "nvfp4")
    for number, (plain, *took) in enumerate(
        (
            (1.071, 0.605, 0.503, 0.579, 0.392),
            (0.307, 0.317, 0.231, 0.269, 0.256),
            (1.393, 0.924, 0.850, 0.924, 0.635),
            (1.426, 1.033, 0.901, 1.076, 0.649),
        )
    ):
        step = of_5b("each", ("forward",), LAYER_5B[number : number + 1])
        for recipe, time in zip(order, took, strict=True):
            what = f"forward matmul, {NAMES_5B[number]}"
            yield Row(TE, what, "B300", recipe, plain / time, step)
    eight = "Llama 3 8B, 8192 tokens"
    for device, recipe, speed in (
        (META, "current", 7689.5 / 6150),
        (META, "rowwise", 6768 / 6150),
        ("MI300X", "current", 6166 / 5376.5),
        ("MI300X", GW_HP, 6100 / 5376.5),
        ("MI300X", "rowwise", 5891 / 5376.5),
        ("B200", "current", 10417 / 8307.5),
        ("B200", "mxfp8", 9969 / 8307.5),
        ("B200", "mxfp8", 9642 / 8307.5),
        ("B200", "rowwise", 8640.5 / 8307.5),
    ):
        yield Row(AO, eight, device, recipe, speed, llama(1, 8192))
    what = "Llama 3.1 8B, 2 × 8192 tokens"
    step = llama(2, 8192)
    yield Row(TITAN, what, META, "current", 8532 / 6667, step)
    step, what = llama(2, 8192, 128), f"{what}, 128 GPUs"
    yield Row(TITAN, what, META, "current", 8380 / 6514, step)
    what, name = "Llama 3 8B, 32 × 2048 tokens", "mxfp8"
    step = llama(32, 2048, 4)
    yield Row(TITAN4, what, "B200", name, 28084 / 21919, step)
    step = llama(32, 2048, 4, share=27 / 32)
    yield Row(TITAN4, what, "B200", "nvfp4", 30040 / 21919, step)
    what = "Qwen3 8B, 16 × 2048 tokens"
    step = qwen(16, 2048, 4)
    yield Row(TITAN4, what, "B200", name, 27587 / 20913, step)
    step = qwen(16, 2048, 4, 30 / 36)
    yield Row(TITAN4, what, "B200", "nvfp4", 26732 / 20913, step)
    for size, speeds in {
        (8192, 5120): (1.808, 1.690, 1.637, 1.700),
        (2048, 7168): (1.188, 1.321, 1.595, 1.440),
    }.items():
        free, summed = size
        for groups, speed in zip((1, 2, 4, 8), speeds, strict=True):
            what = f"128000 tokens, {groups} experts of {summed} × {free}"
            step = Step((Matmuls.of(128000, summed, free, groups),))
            yield Row(MOE, what, "B200", name, speed, step)
    for title, size, speed in (
        ("Llama 4 Scout", (8192, 5120), 1.431),
        ("DeepSeek V3", (2048, 7168), 1.148),
    ):
        what = f"layer of experts, {title}"
        yield Row(MOE, what, "B200", name, speed, expert_layer(*size))
    for what, parts, speed in (
        ("linear layers", (False, True), 52038 / 49381),
        ("experts", (True, False), 69350 / 49381),
        ("both", (True, True), 70747 / 49381),
    ):
        step = scout(16 * 8192, 2, *parts)
        title = f"2 layers of Llama 4 Scout, {what} in MXFP8"
        yield Row(MOE, title, "B200", name, speed, step)
    step = scout(8192, 48, True, True, experts=1, runs=1)
    what = "Llama 4 Scout, 512 GPUs"
    yield Row(MOE, what, "GB200", name, 7401 / 6169, step)
    for size, speed in (
        ((4096, 4096, 4096), 0.84),
        ((8192, 8192, 8192), 1.20),
        ((16384, 8192, 16384), 1.39),
        ((32768, 32768, 16384), 1.70),
    ):
        step = Step((Matmuls.of(*size),), kept=4 * size[0] * size[2])
        step = step._replace(kept=step.kept + 4 * size[0] * size[1])
        what = " × ".join(map(str, size))
        yield Row(AO_LINEAR, what, META, "rowwise", speed, step)
    for size, speed in {1024: 1.37, 2048: 1.54, 4096: 1.93, 8192: 2.11}.items():
        step = square(size, casts="none", which=("forward",))
        what = f"matmul {size}³"
        yield Row(AO_MATMUL, what, META, "current", speed, step)
    yield from unseen_rows()
    yield from own_rows()


def unseen_rows():
    """Rows that had no part in making the model."""
    large = llama_70b(16, 8192, 256, parts=8, runs=2)
    small = llama(12, 8192, 64, parts=8)
    for what, step, plain, tensor, rowwise in (
        ("70B, 256 GPUs", large, 597.3, 809.8, 599.6),
        ("70B, 256 GPUs, async", large, 652.4, 942.4, 624.8),
        ("8B, 64 GPUs", small, 4378, 5078.1, 3708.5),
        ("8B, 64 GPUs, async", small, 4809.4, 5570.1, 3914.9),
    ):
        what = f"Llama 3 {what}, tensor parallel over 8"
        yield Row(TP, what, META, "current", tensor / plain, step)
        yield Row(TP, what, META, "rowwise", rowwise / plain, step)
    what = "DeepSeek V3, 256 GPUs, experts over 32"
    step = deepseek_v3(4096, 256 // 32)
    yield Row(BRIDGE, what, "GB300", "mxfp8", 4357 / 3848, step)
    for what, free, plain, took in (
        ("Dense 16384 × 8192 × 32768", 32768, 18.056, 11.260),
        ("the same over 2 × 2 GPUs", 16384, 5.516, 3.712),
    ):
        rows = 16384 * free // 32768
        step = Step((Matmuls.of(rows, 8192, free)._replace(kernel_bytes=4),))
        yield Row(TE_JAX, what, "GB200", "mxfp8", plain / took, step)


MATMUL_FLOORS = (32e-6, 126e-6)
"""What eager PyTorch takes for a matmul of 1024³, in seconds."""


def own_rows():
    """Rows that were measured here; the times of the host are of 1024³.

    The eager steps are of an earlier version, as are the times of its host.
    Those of `estimate.HOST` are from eager steps themselves.
    """
    for size, speed in {4096: 1.30, 8192: 1.91}.items():
        step = square(size, casts="none", which=("forward",))
        row = Row(
            HERE, f"PyTorch, matmul {size}³", "H200", "current", speed, step
        )
        yield row._replace(ours=True, floors=MATMUL_FLOORS)
    for recipe, speed in {"delayed": 0.34, "current": 0.42}.items():
        what = "PyTorch, eager, Dense 4096³"
        row = Row(HERE, what, "H200", recipe, speed, square(4096), True)
        host = {"delayed": 6.36e-3, "current": 4.61e-3}[recipe]
        yield row._replace(floors=(2.06e-3, host))
    for size, speed in {4096: 0.72, 8192: 1.25}.items():
        row = Row(
            HERE, f"JAX, Dense {size}³", "H200", "rowwise", speed, square(size)
        )
        yield row._replace(ours=True, results=XLA_RESULTS)
    for size, recipe, speed in (
        (2048, "delayed", 0.8472),
        (2048, "current", 1.002),
        (4096, "delayed", 1.444),
        (4096, "current", 1.415),
        (4096, "rowwise", 1.104),
    ):
        what = f"JAX, Dense {size}³"
        row = Row(LATER, what, "H200", recipe, speed, square(size))
        yield row._replace(ours=True, results=XLA_RESULTS)


def kept_out(found):
    """The numbers of the rows that are not fitted: every second of a source."""
    out, seen = set(), {}
    for number, row in enumerate(found):
        seen[row.source] = seen.get(row.source, 0) + 1
        unseen = row.ours or row.source in UNSEEN
        if unseen or seen[row.source] % 2 == 0:
            out.add(number)
    return out


def estimated(row, fitted):
    """The estimate of a row."""
    card = OTHERS.get(row.device) or CARDS[row.device]
    layout = row.device in HOPPER
    estimator = estimate.Estimator(
        card, layout, results=row.results, fitted=fitted
    )
    step, recipe = row.step, recipes.get(row.recipe)
    options = {"which": step.which, "runs": step.runs}
    same = sum(
        n * estimator.plain(m, **options)
        for m, n in collections.Counter(step.plain).items()
    )
    same += estimator.other(step.attention, step.kept, step.weights)
    several = collections.Counter(step.matmuls).items()
    plain = sum(n * estimator.plain(m, **options) for m, n in several)
    quantized = sum(
        n * estimator.quantized(m, recipe, casts=step.casts, **options)
        for m, n in several
    )
    times = plain + same, quantized + same
    before, after = map(max, zip(times, row.floors, strict=True))
    return before / after


def fit(found, steps=12):
    """The parameters of least squared errors of the logarithms."""
    names = list(estimate.FITTED)
    start = np.log([1, 0.8, 0.8, 0.9, 0.6, 0.7, 3])

    def errors(logs):
        fitted = dict(zip(names, np.exp(logs), strict=True))
        off = [math.log(estimated(r, fitted) / r.speedup) for r in found]
        # A weak pull to the start decides what no row says.
        return np.array([*off, *(0.03 * (logs - start))])

    logs, now, damping = start, errors(start), 1e-2
    for _ in range(steps):
        columns = [
            (errors(logs + 1e-4 * each) - now) / 1e-4
            for each in np.eye(len(names))
        ]
        slope = np.stack(columns, 1)
        system = np.vstack([slope, math.sqrt(damping) * np.eye(len(names))])
        wanted = np.concatenate([-now, np.zeros(len(names))])
        move = np.linalg.lstsq(system, wanted, rcond=None)[0]
        tried = errors(logs + move)
        if tried @ tried < now @ now:
            logs, now, damping = logs + move, tried, damping / 3
        else:
            damping *= 4
    return {
        name: round(float(value), 3)
        for name, value in zip(names, np.exp(logs), strict=True)
    }


def figures(found, numbers, fitted):
    """Rows, mean absolute error, signs that are right."""
    pairs = [(found[n].speedup, estimated(found[n], fitted)) for n in numbers]
    errors = [abs(guess / true - 1) for true, guess in pairs]
    right = sum((true > 1) == (guess > 1) for true, guess in pairs)
    return len(pairs), sum(errors) / len(errors), right


def errors(found, fitted):
    """Every row with its estimate, and figures of groups of them, as JSON."""
    out = kept_out(found)
    theirs = {n for n in out if not found[n].ours}
    later = {n for n in out if found[n].source in UNSEEN}
    groups = {
        "fitted": set(range(len(found))) - out,
        "kept out": out,
        "kept out, of others": theirs,
        "of these, found after the model was made": later,
        "kept out, of this project": out - theirs,
    }
    of_groups = {}
    for name, numbers in groups.items():
        total, error, right = figures(found, sorted(numbers), fitted)
        mean = round(error, 4)
        of_groups[name] = {"rows": total, "error": mean, "signs_right": right}
    return {
        "constants": fitted,
        "groups": of_groups,
        "rows": [
            {
                "source": row.source,
                "what": row.what,
                "device": row.device,
                "recipe": row.recipe,
                "published": round(row.speedup, 3),
                "estimated": round(estimated(row, fitted), 3),
                "fitted": number not in out,
            }
            for number, row in enumerate(found)
        ],
    }


def text_of(found):
    """The JSON as it is in the file."""
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def module(fitted):
    """The module, with its constants written anew."""
    lines = "".join(f'    "{n}": {v},\n' for n, v in fitted.items())
    text = MODULE.read_text("utf-8")
    return re.sub(
        r"FITTED = \{.*?\}", f"FITTED = {{\n{lines}}}", text, flags=re.S
    )


if __name__ == "__main__":
    published = list(rows())
    left = kept_out(published)
    constants = fit([r for n, r in enumerate(published) if n not in left])
    write_or_check(MODULE, module(constants))
    write_or_check(ERRORS, text_of(errors(published, constants)))
