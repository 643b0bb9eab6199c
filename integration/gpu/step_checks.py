"""Steps of float8 layers on this machine's device, beside the reference.

They look at what a matmul that scales its own result may get wrong. A check
returns what it saw, and raises `Broken` where a promise does not hold.
`integration/benchmarks/jax_on_card.py --checks` runs them, in a minute.
"""

import functools
import pathlib
import tempfile

import keras
import measuring
import ml_dtypes
import numpy as np
from keras import ops
from promises import dense, require
from steps_of_layers import COMPILED, forward_backward, numpy

import keras_policy_ext as kpe
from keras_policy_ext import formats, reference

RECIPES = {
    "delayed": kpe.recipes.DelayedScaling(amax_history_length=1),
    "current": kpe.recipes.CurrentScaling(),
}
SQUARE = (512, 250) if measuring.on_gpu() else (128, 50)
"""Multiples of 64 and of 16, and of neither."""
OBLONG = (208, 272, 336)
"""Rows, inputs and units: multiples of 16, and not of 64."""
SHAPES = (*((size,) * 3 for size in SQUARE), OBLONG)
OPERANDS = ("inputs", "kernel", "outputs_grad")
FORMATS = ("float8_e4m3fn", "float8_e4m3fn", "float8_e5m2")
RESULTS = ("outputs", "inputs_grad", "kernel_grad")
LARGEST = [formats.get(name).max for name in FORMATS]
OTHER_CODES = 1e-5
"""Part of the codes that may be others: XLA divides on a GPU with an error of
up to 2 ulp, which takes some one in a million there."""
LOST_BY_ADDING = 2.0**-12 if measuring.on_gpu() else 2.0**-20
"""Error of a sum for each 32 terms, as a part of the sum of the magnitudes:
Hopper adds so many with some 14 bits, and cuts the rest off (arXiv 2412.19437,
section 3.5.2), which moves some results to the next number."""


class Step:
    """A step of a Dense layer with a bias of zeros, whose kernel it is given.

    Args:
        shape: Rows, inputs and units.
        recipe: A key of `RECIPES`.
    """

    def __init__(self, shape, recipe):
        self.rows, inputs, units = shape
        model = dense(
            inputs, units, RECIPES[recipe], "mixed_bfloat16", use_bias=True
        )
        (self.layer,) = model.layers
        self.run = forward_backward(model)
        self.variables = model.trainable_variables
        self.optimizer = keras.optimizers.SGD(0.0)
        self.optimizer.build(self.variables)
        self.initial = [numpy(v) for v in self.variables]
        self.has_history = recipe == "delayed"

    def __call__(self, x, kernel, g, steps=None):
        """Outputs, gradients of inputs and kernel, and of the bias.

        Args:
            x: Inputs, whose numbers are those of bfloat16.
            kernel: Of the layer.
            g: The gradient of the outputs, as the inputs.
            steps: How many are taken of these, with the state that follows;
                None for so many that the scales are those of the operands.
        """
        tensors = [
            ops.cast(ops.convert_to_tensor(e), "bfloat16") for e in (x, g)
        ]
        for _ in range(steps or 1 + self.has_history):
            self.layer.kernel.assign(kernel)
            self.layer.bias.assign(np.zeros(kernel.shape[1], "float32"))
            y, x_grad, grads = self.run(*tensors)
            self.optimizer.apply(grads, self.variables)
        # Of a bias and a kernel, which come first.
        return [numpy(each) for each in (y, x_grad, grads[0], grads[1])]

    def forget(self):
        """Begin again, without a history."""
        for variable, value in zip(self.variables, self.initial, strict=True):
            variable.assign(value)


@functools.cache
def step_of(shape, recipe):
    """The `Step`, which is compiled once for all checks."""
    return Step(shape, recipe)


def steps():
    """Each `Step`, without a history, with its recipe's name and its shape."""
    for recipe in RECIPES:
        for shape in SHAPES:
            step = step_of(shape, recipe)
            step.forget()
            yield step, recipe, shape


def bfloat16(x):
    """Numbers rounded to bfloat16, as float32."""
    return np.asarray(x, "float32").astype(ml_dtypes.bfloat16).astype("float32")


def operands(shape, seed=0, sizes=(1.0, 1.0, 1.0)):
    """Random operands of a step, of exponents that spread over 2^10."""
    rng, (rows, inputs, units) = np.random.default_rng(seed), shape
    found = []
    for one, size in zip(
        ((rows, inputs), (inputs, units), (rows, units)), sizes, strict=True
    ):
        x = rng.normal(size=one) * 2.0 ** rng.integers(-8, 3, one)
        found.append((x * size).astype("float32"))
    return bfloat16(found[0]), found[1], bfloat16(found[2])


def scales_of(recipe, operands):
    """The scales that the operands have by their own amaxes."""
    scale_of = {
        "delayed": reference.scale_of_multiplier,
        "current": reference.scale_from_amax,
    }[recipe]
    pairs = zip(operands, FORMATS, strict=True)
    return [np.float32(scale_of(reference.amax(x), name)) for x, name in pairs]


# Codes


def codes_of_both_layouts():
    """Each cast, as a matmul reads it, has the codes of the reference.

    Where an operand is a multiple of the identity, two results of a step are
    multiples of the codes of the others: rounded to bfloat16, which tells one
    code from the next.
    """
    return _require_codes(operands, OTHER_CODES)


def codes_of_ties():
    """Numbers in the middle of two codes have those of the reference.

    Their quotients by the scale are exact, and other ways to compute them,
    such as by its reciprocal, miss some.
    """
    return _require_codes(middles, 0)


def middles(shape):
    """Operands of such numbers, and of one that its scale follows from."""
    rng, (rows, inputs, units) = np.random.default_rng(8), shape
    found = []
    for one, name, odd in zip(
        ((rows, inputs), (inputs, units), (rows, units)),
        FORMATS,
        # Of so few bits that the products are numbers of the operand's dtype.
        (5, 100003, 11),
        strict=True,
    ):
        codes = np.arange(128, dtype=np.uint8).view(formats.get(name).dtype)
        codes = codes.astype("float32")
        codes = codes[np.isfinite(codes)]
        x = rng.choice((codes[1:] + codes[:-1]) / 2, one)
        x *= rng.choice(np.float32([-1, 1]), one)
        x[0, 0] = codes[-1]
        found.append(x * np.float32(odd * 2.0**-10))
    return found


def _require_codes(make, allowed):
    """What `codes_of_both_layouts` and `codes_of_ties` return.

    Args:
        make: Returns the operands of a shape.
        allowed: Which part of the codes of an operand may be others.
    """
    found, compared, wrong = {}, 0, False
    for step, recipe, shape in steps():
        if shape == OBLONG:
            continue
        random = make(shape)
        for alone, operand in enumerate(OPERANDS):
            given = [*random]
            given[alone] = np.float32(0.375) * np.eye(shape[0], dtype="float32")
            scales = scales_of(recipe, given)
            y, x_grad, w_grad, _ = step(*given)
            for read, result in (
                ((1, y), (2, w_grad)),
                ((0, y), (2, x_grad)),
                ((0, w_grad.T), (1, x_grad.T)),
            )[alone]:
                unit = LARGEST[alone] * float(scales[alone])
                wide = result / (unit * float(scales[read]))
                codes = reference.cast(wide.astype("float32"), FORMATS[read])
                key = f"{recipe} {shape[0]}², {OPERANDS[read]} beside {operand}"
                count, words = _codes_apart(
                    codes, given[read], scales[read], FORMATS[read]
                )
                compared += codes.size
                if words:
                    found[key] = words
                wrong |= count > allowed * codes.size
    require(not wrong, f"{found}")
    return {"compared": compared, **(found or {"different": 0})}


def _codes_apart(codes, x, scale, name):
    """How many codes are not the reference's, and words that tell why.

    A device may find a scale that is some ulp from the reference's, which
    takes numbers in the middle of two codes to the other one.
    """
    codes, counts = codes.astype("float32"), {}
    for ulps in (0, 1, -1, 2, -2):
        near = scale
        for _ in range(abs(ulps)):
            near = np.nextafter(near, np.float32(np.inf * ulps))
        expected = reference.quantize(x, near, name).astype("float32")
        counts[ulps] = int((codes != expected).sum())
    ulps = min(counts, key=counts.get)
    words = ""
    if counts[0]:
        words = f"{counts[0]} of {codes.size} codes differ"
    if counts[ulps] < counts[0]:
        words += (
            f", and {counts[ulps]} if its scale is {ulps} ulp from the "
            "reference's"
        )
    if counts[ulps]:
        with np.errstate(all="ignore"):
            product = x * (np.float32(1) / scale)
        other = reference.cast(product, name).astype("float32")
        words += (
            f", and {int((codes != other).sum())} if it multiplies by the "
            "reciprocal of the scale"
        )
    return counts[ulps], words


# Rounding


def exact_sums_are_rounded_once():
    """The scaled result of an exact sum is rounded to bfloat16 once.

    All codes are small integers, so that any order and width of the sum gives
    the same, and the scales are no powers of two.
    """
    found = {}
    for step, recipe, shape in steps():
        codes = integer_codes(shape)
        given, scales = operands_of(codes, recipe)
        results = step(*given)[:3]
        for name, result, pair in zip(
            RESULTS, results, products(codes, scales), strict=True
        ):
            key = f"{recipe} {'×'.join(map(str, shape))}, {name}"
            found[key] = _rounding(key, result, *pair, 2.0**-22 * abs(pair[0]))
    return found


def integer_codes(shape):
    """Operands of small integers, and in each one that is its format's largest.

    The largest meet nothing that makes a sum inexact.
    """
    rng, (rows, inputs, units) = np.random.default_rng(1), shape
    x = rng.integers(-2, 3, (rows, inputs)).astype("float32")
    w = rng.integers(-2, 3, (inputs, units)).astype("float32")
    g = rng.integers(-2, 3, (rows, units)).astype("float32")
    x[-1], w[:, -1] = 0, 0
    x[0, 0], w[1, 1], g[-1, -1] = LARGEST
    return x, w, g


def products(operands, scales):
    """The three sums in float64, each with its scale in float32."""
    x, w, g = (each.astype("float64") for each in operands)
    a, b, c = scales
    return (x @ w, a * b), (g @ w.T, c * b), (x.T @ g, a * c)


def random_sums_are_rounded_once():
    """Results of random codes are those of sums that are rounded once.

    Tells how many are the next number of bfloat16, as a sum in another order
    would have it, and what else would explain more of them.
    """
    found = {}
    for step, recipe, shape in steps():
        codes = random_codes(shape)
        given, scales = operands_of(codes, recipe)
        results = step(*given)[:3]
        magnitudes = products([abs(each) for each in codes], scales)
        rows, inputs, units = shape
        for name, result, pair, (size, _), terms in zip(
            RESULTS,
            results,
            products(codes, scales),
            magnitudes,
            (inputs, units, rows),
            strict=True,
        ):
            key = f"{recipe} {'×'.join(map(str, shape))}, {name}"
            allowed = LOST_BY_ADDING * max(1, terms / 32) * size
            found[key] = _rounding(key, result, *pair, allowed)
    return found


def random_codes(shape):
    """Operands of random codes, among them the largest of each format."""
    found = []
    for number, x in enumerate(operands(shape, seed=2)):
        scale = reference.scale_from_amax(reference.amax(x), FORMATS[number])
        codes = reference.quantize(x, scale, FORMATS[number]).astype("float32")
        codes[0, 0] = LARGEST[number]
        found.append(codes)
    return found


def operands_of(codes, recipe):
    """Operands that have these codes whatever the last bits of their scales.

    Returns:
        The operands, and their scales, which are no powers of two.
    """
    scales = 0.01317, 0.000713, 0.3331
    x, w, g = (c * np.float32(s) for c, s in zip(codes, scales, strict=True))
    given = bfloat16(x), w, bfloat16(g)
    return given, scales_of(recipe, given)


def _rounding(key, result, exact, scale, allowed):
    """How results differ from sums that are scaled and rounded once.

    Args:
        key: What it is about.
        result: Of a step.
        exact: The sums in float64.
        scale: Of all of them, in float32.
        allowed: By how much a sum may be another.

    Returns:
        Words that tell it.
    """
    sums = exact.astype("float32")
    # XLA may leave the kernel's gradient in float32: nothing is rounded.
    result = bfloat16(result)
    once = bfloat16(sums * scale)
    low, high = (
        bfloat16((exact + side).astype("float32") * scale)
        for side in (-allowed, allowed)
    )
    low, high = np.minimum(low, high), np.maximum(low, high)
    different = int((result != once).sum())
    apart = int(_ulps(result, once).max())
    wrong = int(((result < low) | (result > high)).sum())
    others = {
        "the sum rounded to bfloat16 before it is scaled": bfloat16(
            bfloat16(sums) * scale
        ),
        "a scale rounded to bfloat16": bfloat16(sums * bfloat16(scale)),
        "both": bfloat16(bfloat16(sums) * bfloat16(scale)),
    }
    explained = {
        name: int((result != other).sum()) for name, other in others.items()
    }
    words = (
        f"{different} of {result.size} differ ({different / result.size:.2%})"
    )
    words += f", by up to {apart} ulp, {wrong} of them unexplained"
    better = min(explained, key=explained.get)
    if explained[better] < different:
        words += f"; {better} would leave {explained[better]}"
    require(not wrong and explained[better] >= different, f"{key}: {words}")
    return words


def _ulps(a, b):
    """How many numbers of bfloat16 lie between those of two arrays."""

    def places(x):
        bits = x.astype(ml_dtypes.bfloat16).view("int16").astype("int32")
        return np.where(bits < 0, -0x8000 - bits, bits)

    return np.abs(places(a) - places(b))


def bias_gradients():
    """The gradient of the bias is the sum of the rows."""
    found = {}
    for step, recipe, shape in steps():
        x, w, g = operands(shape, seed=3)
        *_, bias_grad = step(x, w, g)
        exact = g.astype("float64").sum(axis=0)
        error = np.linalg.norm(bias_grad - exact) / np.linalg.norm(exact)
        key = f"{recipe} {'×'.join(map(str, shape))}"
        found[key] = measuring.rounded(float(error), 2)
        # JAX rounds each sum of two rows on a CPU.
        allowed = 2.0**-8 * (1 if measuring.on_gpu() else shape[0] ** 0.5)
        require(error < allowed, f"{key}: its error is {error:.2g}.")
    return found


def first_step_has_current_scales():
    """The first step of delayed scaling has the bits of the second."""
    compared = 0
    for step, recipe, shape in steps():
        if recipe != "delayed":
            continue
        given = operands(shape, seed=4)
        first, second = step(*given, steps=1), step(*given, steps=1)
        for name, a, b in zip(RESULTS, first, second, strict=False):
            count = int((a != b).sum())
            compared += a.size
            require(count == 0, f"{shape}, {name}: {count} differ.")
    return {"compared": compared, "different": 0}


# Numbers that are not finite, and scales that are far from 1


def hostile_numbers():
    """Where NaN and infinities go in, they come out as in the reference."""
    found = {}
    values = {"NaN": np.nan, "inf": np.inf, "-inf": -np.inf}
    for step, recipe, shape in steps():
        for name, value in values.items():
            for number, operand in enumerate(OPERANDS):
                given = [each.copy() for each in operands(shape, seed=5)]
                usual = [*given]
                given[number] = given[number].copy()
                given[number][3, 5] = value
                step.forget()
                step(*usual)
                results = step(*given, steps=1)[:3]
                expected = _reference(recipe, usual, given)
                key = f"{recipe} {shape}, {name} in {operand}"
                for what, a, b in zip(RESULTS, results, expected, strict=True):
                    for kind in (np.isnan, np.isinf):
                        apart = int((kind(a) != kind(bfloat16(b))).sum())
                        if apart:
                            found[f"{key}: {what}, {kind.__name__}"] = apart
                after = step(*usual)[:3]
                if not all(np.isfinite(each).all() for each in after):
                    found[f"{key}: the steps after it"] = "not finite"
    step.forget()
    require(not found, f"{found}")
    return {"cases": len(values) * len(OPERANDS) * len(SHAPES) * len(RECIPES)}


def _reference(recipe, usual, given):
    """Results of the reference for a step after usual ones."""
    x, kernel, g = given
    if recipe == "current":
        with np.errstate(all="ignore"):
            return reference.linear(x, kernel, g, RECIPES[recipe])[:3]
    layer = reference.DelayedLinear(RECIPES[recipe])
    for _ in range(2):
        layer.forward(*usual[:2])
        layer.backward(usual[2])
    with np.errstate(all="ignore"):
        y = layer.forward(x, kernel)
        return y, *layer.backward(g)


def scales_beyond_float32():
    """Products of scales beyond float32's range make no NaN, and lose nothing.

    Half of the rows of the inputs and of the gradients are zeros.
    """
    found = {}
    for step, recipe, shape in steps():
        for sizes in (
            (1e-30, 1.0, 1e-20),
            (1e30, 1.0, 1e20),
            (1e-30, 1e-20, 1e30),
            (1e30, 1e20, 1e-30),
            (1e30, 1e-30, 1e-30),
            (1e-36, 1e30, 1e36),
            # The product of the scales is subnormal, that of the values not.
            (1e-18, 1e-18, 1e-18),
        ):
            x, w, g = operands(shape, seed=6, sizes=sizes)
            x[::2], g[::2] = 0, 0
            step.forget()
            results = step(x, w, g)[:3]
            expected = _reference(recipe, (x, w, g), (x, w, g))
            for name, a, b in zip(RESULTS, results, expected, strict=True):
                key = f"{recipe} {shape} amaxes {sizes}, {name}"
                rounded = bfloat16(b)
                lost = np.isfinite(rounded) & ~np.isfinite(a)
                if np.isnan(a).any() or lost.any():
                    found[key] = f"{np.isnan(a).sum()} NaN, {lost.sum()} lost"
                    continue
                both = np.isfinite(rounded) & np.isfinite(a)
                a, b = (e[both].astype("float64") for e in (a, b))
                # What float32 flushes to zero is no error of the product.
                error = np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-36)
                if error > 2.0**-6:
                    found[key] = f"the error is {error:.2g} of the result"
    require(not found, f"{found}")
    return {"compared": 7 * 3 * len(SHAPES) * len(RECIPES)}


# Training


def skipped_steps():
    """A step whose gradients are not finite is skipped under loss scaling."""
    found = {}
    for recipe in ("delayed", "current"):
        model, x, y = small_mlp(recipe, "loss scaling")
        model.train_on_batch(x, y)
        for what in ("NaN in inputs", "inf in inputs", "inf in gradients"):
            bad, target = x.copy(), y.astype("float32")
            if "gradients" in what:
                target[0, 0] = np.inf
            else:
                bad[3, 5] = np.nan if "NaN" in what else np.inf
            before = [numpy(v) for v in model.trainable_variables]
            skipped = int(model.optimizer.skipped_steps)
            model.train_on_batch(bad, target)
            after = [numpy(v) for v in model.trainable_variables]
            more = int(model.optimizer.skipped_steps) - skipped
            names = [
                v.path
                for v, a, b in zip(
                    model.trainable_variables, before, after, strict=True
                )
                if v.path.endswith(("kernel", "bias")) and (a != b).any()
            ]
            key = f"{recipe}, {what}"
            require(more == 1, f"{key}: {more} steps were skipped.")
            require(not names, f"{key}: changed: {names}")
            loss = float(model.train_on_batch(x, y))
            require(np.isfinite(loss), f"{key}: the next loss is {loss}.")
            found[key] = f"skipped; the next loss {loss:.4g}"
    return found


def small_mlp(recipe, how, width=256):
    """A compiled MLP from random weights, and a batch for it."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1024, width)).astype("float32")
    y = np.tanh(x @ rng.normal(size=(width, width)) / 16).astype("float32")
    keras.utils.set_random_seed(0)
    with kpe.policy_scope("mixed_bfloat16"):
        model = keras.Sequential(
            [
                keras.Input((width,)),
                keras.layers.Dense(width, "gelu"),
                keras.layers.Dense(width),
            ]
        )
    kpe.convert(model, recipe)
    optimizer = keras.optimizers.Adam(1e-3)
    if how == "loss scaling":
        optimizer = kpe.mixed_precision.LossScaleOptimizer(optimizer)
    model.compile(optimizer, "mse", jit_compile=COMPILED)
    return model, x, y


LOSS_STEPS = 200
LOSSES_APART = 0.005


def losses_of_training():
    """A small model in float8 loses what it does in bfloat16, within 0.5 %.

    It predicts the next of 64 tokens from two, of a source that has the two
    decide the odds. Told is the mean loss of the last 20 of 200 steps.
    """
    tokens, targets = markov_chain(LOSS_STEPS, 1024)
    found = {}
    for recipe in ("bfloat16", *RECIPES):
        model = next_token_model()
        if recipe != "bfloat16":
            kpe.convert(model, recipe)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(2e-3), loss, jit_compile=COMPILED)
        every = []
        for x, y in zip(tokens, targets, strict=True):
            model.reset_metrics()
            every.append(float(model.train_on_batch(x, y)))
        found[recipe] = float(np.mean(every[-20:]))
        apart = found[recipe] / found["bfloat16"] - 1
        require(
            abs(apart) <= LOSSES_APART,
            f"{recipe}: the losses are {found}: {apart:+.2%}.",
        )
    return {
        recipe: f"{loss:.4f} ({loss / found['bfloat16'] - 1:+.3%})"
        for recipe, loss in found.items()
    }


def markov_chain(steps, batch, kinds=64):
    """Pairs of tokens `(steps, batch, 2)`, and the tokens after them."""
    rng = np.random.default_rng(7)
    odds = rng.normal(size=(2, kinds, kinds)) * 1.5
    pairs = rng.integers(kinds, size=(steps, batch, 2))
    logits = odds[0][pairs[..., 0]] + odds[1][pairs[..., 1]]
    noise = rng.gumbel(size=logits.shape)
    return pairs.astype("int32"), (logits + noise).argmax(-1).astype("int32")


def next_token_model(kinds=64, width=256):
    """From two tokens to the logits of the next, which stay in bfloat16."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    with kpe.policy_scope("mixed_bfloat16"):
        return keras.Sequential(
            [
                keras.Input((2,), dtype="int32"),
                layers.Embedding(kinds, width // 2),
                layers.Flatten(),
                layers.Dense(2 * width, "gelu"),
                layers.Dense(width, "gelu"),
                layers.Dense(kinds, dtype=keras.DTypePolicy("mixed_bfloat16")),
            ]
        )


def resumed_training():
    """A run that was stopped and loaded takes the same next step, in bits."""
    found = {}
    for recipe in RECIPES:
        model, x, y = small_mlp(RECIPES[recipe], "plain")
        for _ in range(3):
            model.train_on_batch(x, y)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "model.keras")
            model.save(path)
            loaded = kpe.load_model(path)
        for each in (model, loaded):
            each.train_on_batch(x, y)
        pairs = zip(
            [*model.variables, *model.optimizer.variables],
            [*loaded.variables, *loaded.optimizer.variables],
            strict=True,
        )
        different = {}
        total = 0
        for a, b in pairs:
            a_bits, b_bits = (ops.convert_to_numpy(v.value) for v in (a, b))
            total += a_bits.size
            count = int((a_bits != b_bits).sum())
            if count:
                different[a.path] = f"{count} of {a_bits.size}"
        require(not different, f"{recipe}: different: {different}.")
        found[recipe] = f"{total} numbers compared, none different"
    return found


ALL = (
    exact_sums_are_rounded_once,
    codes_of_both_layouts,
    codes_of_ties,
    random_sums_are_rounded_once,
    scales_beyond_float32,
    first_step_has_current_scales,
    bias_gradients,
    losses_of_training,
    resumed_training,
    skipped_steps,
    hostile_numbers,
)
