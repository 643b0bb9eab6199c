"""Codes, products and states are those of the reference in NumPy."""

import math

import hostile
import keras
import measuring
import numpy as np
from keras import ops
from promises import BACKEND, Broken, dense, require, ways
from steps_of_layers import forward_backward, numpy
from workloads import normal

import keras_policy_ext as kpe
from keras_policy_ext import backends, formats, reference

LARGEST = formats.get("float8_e4m3fn").max
TOLERANCES = {"float32": 2.0**-11, "mixed_bfloat16": 2.0**-8}
"""Of the error of a product, as a fraction of it.

Hopper's tensor cores add products with some 14 bits (DeepSeek-V3, arXiv
2412.19437, section 3.5.2); a result in bfloat16 has 8.
"""
LOST_BY_ADDING = 2.0**-14
"""The same, for each 32 terms that are added so, one after the other: in the
forward pass, which is the one that accumulates fast, on a GPU."""
LOST_BY_A_CODE = 2.0**-2
"""The same for an operand of one number of which XLA, whose quotients have an
error on a GPU, takes the next code: a large number among normal ones."""


# Codes


def casts():
    """The casts of the kernels give the codes of the reference."""
    engine, checked = backends.engine, 0
    for name in hostile.FORMATS:
        for values in (hostile.bfloat16_values(), hostile.float32_values(name)):
            for scale in (1.0, 0.25, 2.0**-20):
                for cast in (engine.cast, engine.narrow_cast):
                    _same_codes(cast, values, scale, name)
                    checked += len(values)
    return {"compared": checked, "different": 0, **_scaled_casts(engine)}


def _scaled_casts(engine, count=2**20):
    """How many codes differ under a scale that is no power of two.

    XLA divides on a GPU with an error of up to 2 ulp, which takes some one
    in a million numbers to the next code.
    """
    values = np.random.default_rng(0).normal(size=count).astype("float32")
    scale, found = np.float32(0.0131), {}
    x, divisor = map(ops.convert_to_tensor, (values, scale))
    for name in hostile.FORMATS:
        expected = reference.quantize(values, scale, name).astype("float32")
        codes = np.unique(expected)
        for cast in (engine.cast, engine.narrow_cast):
            places = [
                np.searchsorted(codes, each)
                for each in (numpy(cast(x, divisor, name)), expected)
            ]
            steps = np.abs(places[0] - places[1])
            different = int((steps > 0).sum())
            require(
                steps.max() <= 1 and different <= 1e-5 * count,
                f"{name}, scale {scale}: {different} of {count} codes "
                f"differ, by up to {steps.max()} steps.",
            )
            key = f"different of {count} {name}, scale {scale}"
            found[key] = max(different, found.get(key, 0))
    return found


def _same_codes(cast, values, scale, name):
    x = ops.convert_to_tensor(values)
    found = numpy(cast(x, ops.convert_to_tensor(np.float32(scale)), name))
    expected = reference.quantize(values, scale, name).astype("float32")
    _require_equal(found, expected, values, f"{name}, scale {scale}")


def _require_equal(found, expected, values, what):
    wrong = ~((found == expected) | (np.isnan(found) & np.isnan(expected)))
    if wrong.any():
        place = np.flatnonzero(wrong)[0]
        raise Broken(
            f"{what}: {wrong.sum()} of {wrong.size} codes differ; "
            f"{values.flat[place]!r} became {found.flat[place]!r} and not "
            f"{expected.flat[place]!r}."
        )


def codes_in_layers():
    """A layer quantizes inputs and output gradients as the reference does.

    Its kernel is a multiple of the identity and its scales are 1, so that
    outputs and the gradient of the inputs are that multiple of the codes
    themselves, whatever fused kernel has cast them.
    """
    checked = 0
    recipes = {
        "delayed": kpe.recipes.DelayedScaling(initial_scale=1.0),
        "current": kpe.recipes.CurrentScaling(),
    }
    for source in TOLERANCES:
        for name, recipe in recipes.items():
            layer = dense(16, 16, recipe, source)
            kernel = LARGEST * np.eye(16, dtype="float32")
            layer.layers[0].kernel.assign(kernel)
            for compiled in ways():
                run = forward_backward(layer, compiled)
                what = f"{name} from {source}, {compiled=}"
                operands = _operands(source, saturating=name == "delayed")
                checked += _require_codes(run, *operands, what)
                # XLA fuses otherwise where there is one row.
                for row in range(0, len(operands[0]), 101):
                    one = [each[[row]] for each in operands]
                    if name == "current":
                        one[0][0, 0], one[1][0, 0] = limits()
                    checked += _require_codes(run, *one, f"{what}, one row")
    return {"compared": checked, "different": 0}


def limits():
    """The largest numbers of the formats of inputs and output gradients."""
    return [formats.get(name).max for name in hostile.FORMATS]


def _operands(source, saturating):
    """Inputs and output gradients of one shape.

    Args:
        source: Where they are to be numbers of bfloat16, all are among them.
        saturating: Whether some are beyond the largest number of the format.
            Else the largest is that number, so that its scale is 1.
    """
    found = []
    for name in hostile.FORMATS:
        values = hostile.float32_values(name)
        if source == "mixed_bfloat16":
            values = hostile.bfloat16_values()
        limit = formats.get(name).max
        if not saturating:
            values = np.append(values[np.abs(values) <= limit], limit)
        found.append(hostile.in_rows(values.astype("float32")))
    rows = max(map(len, found))
    return [np.resize(each, (rows, 16)) for each in found]


def _require_codes(run, x, g, what):
    """How many numbers were compared."""
    dtype = "bfloat16" if "bfloat16" in what else "float32"
    tensors = (ops.cast(ops.convert_to_tensor(each), dtype) for each in (x, g))
    y, x_grad, _ = run(*tensors)
    for found, values, name in zip(
        (y, x_grad), (x, g), hostile.FORMATS, strict=True
    ):
        expected = reference.cast(values, name).astype("float32")
        codes = numpy(found) / np.float32(LARGEST)
        _require_equal(codes, expected, values, f"{name}, {what}")
    return x.size + g.size


# Products


def matmuls():
    """The three matmuls are those of the reference, within the tolerance."""
    long = (64, 8192, 64) if measuring.on_gpu() else (16, 512, 16)
    return _products([(32, 128, 64), (256, 256, 256), long])


def odd_shapes():
    """The matmuls hold for sizes that no hardware likes, and for sequences."""
    return _products([(1, 16, 16), (3, 7, 5), (31, 250, 510), (2, 5, 33, 17)])


def _products(sizes):
    largest, kinds = {}, set()
    for source, tolerance in TOLERANCES.items():
        for *rows, inputs, units in sizes:
            shapes = (*rows, inputs), (*rows, units)
            for compiled in ways():
                errors, kind = _errors(source, *shapes, compiled)
                kinds.add(kind)
                for name, error in errors.items():
                    key, allowed = f"{name}, {source}", tolerance
                    if name == "forward" and measuring.on_gpu():
                        allowed += inputs / 32 * LOST_BY_ADDING
                    if BACKEND != "torch" and measuring.on_gpu():
                        numbers = min(math.prod(rows) * inputs, inputs * units)
                        allowed += LOST_BY_A_CODE / numbers**0.5
                    largest[key] = max(error, largest.get(key, 0.0))
                    require(
                        error < allowed,
                        f"{key}, {shapes}, {compiled=}: the error is "
                        f"{error:.2g} of the result, more than "
                        f"{allowed:.2g}.",
                    )
    rounded = {k: measuring.rounded(each, 2) for k, each in largest.items()}
    return {"kernels": " and ".join(sorted(kinds)), **rounded}


def _errors(source, inputs_shape, outputs_shape, compiled):
    """Of outputs and gradients of a layer, as fractions of them.

    Returns:
        The errors by the name of the matmul, and the kind of the kernel.
    """
    layer = dense(inputs_shape[1:], outputs_shape[-1], "current", source)
    dtype = "float32" if source == "float32" else "bfloat16"
    x, g = normal(inputs_shape, dtype), normal(outputs_shape, dtype, seed=1)
    y, x_grad, grads = forward_backward(layer, compiled)(x, g)
    recipe = kpe.recipes.CurrentScaling()
    kernel = numpy(layer.layers[0].kernel)
    exact = reference.linear(numpy(x), kernel, numpy(g), recipe)
    pairs = {
        "forward": (y, exact.y),
        "inputs_grad": (x_grad, exact.inputs_grad),
        "kernel_grad": (grads[0], exact.kernel_grad),
    }
    errors = {
        name: float(np.linalg.norm(numpy(a) - b) / np.linalg.norm(b))
        for name, (a, b) in pairs.items()
    }
    return errors, kpe.inspect(layer).layers[0].kernel


def biases():
    """A bias is added to each row, and its gradient is the sum of the rows."""
    found = {}
    for source, tolerance in TOLERANCES.items():
        for sizes in (32, 128, 64), (3, 7, 5):
            for compiled in ways():
                errors = _errors_of_bias(source, *sizes, compiled)
                for name, error in errors.items():
                    key, allowed = f"{name}, {source}", tolerance
                    if name == "gradient":
                        # JAX rounds each sum of two rows on a CPU.
                        allowed *= sizes[0] ** 0.5
                    found[key] = max(error, found.get(key, 0.0))
                    require(
                        error < allowed,
                        f"{key}, {sizes}, {compiled=}: the error is "
                        f"{error:.2g} of it, more than {allowed:.2g}.",
                    )
    return {k: measuring.rounded(each, 2) for k, each in found.items()}


def _errors_of_bias(source, rows, inputs, units, compiled):
    """Of outputs with a bias and of its gradient, as fractions of them."""
    layer = dense(inputs, units, "current", source, use_bias=True)
    dtype = "float32" if source == "float32" else "bfloat16"
    x, g = normal((rows, inputs), dtype), normal((rows, units), dtype, seed=1)
    bias = numpy(normal((units,), dtype, seed=2))
    layer.layers[0].bias.assign(bias)
    y, _, grads = forward_backward(layer, compiled)(x, g)
    kernel, recipe = numpy(layer.layers[0].kernel), kpe.recipes.CurrentScaling()
    exact = reference.linear(numpy(x), kernel, numpy(g), recipe)
    pairs = {
        "outputs": (y, exact.y + bias),
        "gradient": (grads[1], numpy(g).sum(axis=0)),
    }
    return {
        name: float(np.linalg.norm(numpy(a) - b) / np.linalg.norm(b))
        for name, (a, b) in pairs.items()
    }


def state_update():
    """Amaxes and scales are those of the reference, step by step."""
    recipe = kpe.recipes.DelayedScaling(amax_history_length=3)
    layer = dense(32, 16, recipe, "float32")
    run = forward_backward(layer)
    optimizer = keras.optimizers.SGD(0.0)
    variables = layer.trainable_variables
    optimizer.build(variables)
    expected = reference.DelayedLinear(recipe)
    kernel = numpy(layer.layers[0].kernel)
    for step, size in enumerate((1.0, 4.0, 0.5, 0.25, 0.25, 8.0)):
        x = size * numpy(normal((8, 32), "float32", seed=step))
        g = numpy(normal((8, 16), "float32", seed=step)) / size
        *_, grads = run(ops.convert_to_tensor(x), ops.convert_to_tensor(g))
        _apply(optimizer, grads, variables)
        expected.forward(x, kernel)
        expected.backward(g)
        for operand in kpe.inspect(layer).layers[0].operands:
            _same_state(operand, expected, step)
    return {"steps": step + 1}


def _apply(optimizer, grads, variables):
    if BACKEND != "torch":
        optimizer.apply(grads, variables)
        return
    import torch

    with torch.no_grad():
        optimizer.apply(grads, variables)


def _same_state(operand, expected, step):
    amax = expected.histories[operand.name][0]
    # The first step has no scale from the history.
    scale = expected.scales[operand.name] if step else operand.scale
    same = scale is None or np.isclose(operand.scale, scale, rtol=2e-7)
    require(
        operand.amax == amax and same,
        f"Step {step}, {operand.name}: amax {operand.amax} and scale "
        f"{operand.scale}, and not {amax} and {scale}.",
    )
