"""What this package promises of a device, one function each.

A check returns what it saw, raises `Broken` where a promise does not hold,
and `NotHere` where there is nothing to look at. All run on a CPU too.
"""

import json
import pathlib
import tempfile

import hostile
import keras
import measuring
import memory
import numpy as np
from keras import ops
from steps_of_layers import COMPILED, forward_backward, numpy, sqnr_db
from variants import made
from workloads import Llama, normal

import keras_policy_ext as kpe
from keras_policy_ext import formats, kernels, reference
from keras_policy_ext.conversion import break_even

BACKEND = keras.backend.backend()
CPU_LOSSES = pathlib.Path(__file__).parent / "cpu_losses.json"
LARGEST = formats.get("float8_e4m3fn").max
TOLERANCES = {"float32": 2.0**-11, "mixed_bfloat16": 2.0**-8}
"""Of the error of a product, as a fraction of it.

Hopper's tensor cores add products with some 14 bits (DeepSeek-V3, arXiv
2412.19437, section 3.5.2); a result in bfloat16 has 8.
"""
LOST_BY_ADDING = 2.0**-14
"""The same, for each 32 terms that are added so, one after the other: in the
forward pass, which is the one that accumulates fast, on a GPU."""


class Broken(Exception):
    """A promise that does not hold."""


class NotHere(Exception):
    """There is nothing to look at on this device."""


def require(holds, message):
    """Raise `Broken` with a message unless something holds."""
    if not holds:
        raise Broken(message)


def capability():
    """The compute capability of the GPU; None on a CPU or another maker's."""
    if not measuring.on_gpu():
        return None
    if BACKEND == "torch":
        import torch

        nvidia = torch.version.cuda is not None
        return torch.cuda.get_device_capability() if nvidia else None
    if BACKEND == "jax":
        import jax

        text = str(getattr(jax.devices()[0], "compute_capability", ""))
        numbers = text.split(".")
        if all(number.isdigit() for number in numbers):
            return tuple(map(int, numbers))
        return None
    import tensorflow as tf

    gpu = tf.config.list_physical_devices("GPU")[0]
    details = tf.config.experimental.get_device_details(gpu)
    return details.get("compute_capability")


def ways():
    """Whether layers are compiled: both on a GPU, the usual on a CPU."""
    return {False, COMPILED} if measuring.on_gpu() else {COMPILED}


def native_kernel():
    """A matmul is native exactly where the device has float8 units."""
    choice = break_even.choice_for(kernels.Einsum("ab,bc->ac"))
    found = {"kernel": choice.kind, "reason": choice.reason}
    has = capability()
    if has is None and measuring.on_gpu():
        return {**found, "capability": "unknown: not of NVIDIA"}
    expected = has is not None and has >= (8, 9)
    require(
        choice.native == expected,
        f"The matmul is {choice.kind} ({choice.reason}), and the compute "
        f"capability of the device is {has}.",
    )
    layer = dense(16, 16, "delayed", "mixed_bfloat16")
    forward_backward(layer)(normal((16, 16)), normal((16, 16)))
    ran = kpe.inspect(layer).layers[0]
    require(
        ran.kernel == choice.kind,
        f"The step was {ran.kernel} ({ran.reason}), and not {choice.kind}.",
    )
    return {**found, "capability": str(has)}


def fused_casts():
    """On CUDA, PyTorch casts for both matmuls in one pass, by Triton."""
    if BACKEND != "torch" or not measuring.on_gpu():
        raise NotHere("only PyTorch on CUDA has such casts")
    from keras_policy_ext.kernels import torch_fused

    reason = torch_fused.lacking()
    if reason is not None and torch_fused.HAS_TRITON:
        # Where an error is why, this time it is not passed over.
        torch_fused._gives_our_codes()
    require(reason is None, f"They are not by Triton: {reason}.")
    return {"casts": "by Triton"}


def dense(inputs, units, recipe, source):
    """A model of one Dense without bias, in float8.

    Args:
        inputs: Their number, or the shape of one sample.
        units: Of the layer.
        recipe: Of the float8 policy.
        source: Its source policy.
    """
    policy = kpe.Float8DTypePolicy(source, recipe=recipe)
    layer = kpe.layers.Dense(units, use_bias=False, dtype=policy)
    shape = (inputs,) if isinstance(inputs, int) else inputs
    return keras.Sequential([keras.Input(shape), layer])


# Codes


def casts():
    """The casts of the kernels give the codes of the reference."""
    engine, checked = kernels.engine(), 0
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


# Layers and models


def other_layers():
    """Convolutions, attention, recurrent layers and projections train."""
    tokens = keras.Input((8, 16))
    attention = keras.layers.MultiHeadAttention(2, 8)
    cases = {
        "EinsumDense": keras.layers.EinsumDense("abc,cd->abd", (None, 24)),
        "Conv1D": keras.layers.Conv1D(8, 3),
        "GRU": keras.layers.GRU(8),
        "attention": lambda x: attention(x, x),
    }
    found = {}
    for name, layer in cases.items():
        exact = keras.Model(tokens, layer(tokens))
        x = normal((4, 8, 16), "float32")
        y, _, _ = forward_backward(exact)(x, ops.ones_like(exact(x)))
        kpe.convert(exact, "current", attention="float8")
        results = forward_backward(exact)(x, ops.ones_like(exact(x)))
        found[name] = sqnr_db(numpy(y), numpy(results[0]))
        finite = [np.isfinite(numpy(g)).all() for g in results[2]]
        require(all(finite), f"{name}: a gradient is not finite.")
        require(
            found[name] is None or found[name] > 15,
            f"{name}: the outputs are {found[name]} dB from those in float32.",
        )
    return found


def mlp():
    """A small model and its data, the same on every backend and device."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(512, 32)).astype("float32")
    y = np.tanh(x @ rng.normal(size=(32, 16)) / 4).astype("float32")
    with kpe.policy_scope("mixed_bfloat16"):
        model = keras.Sequential(
            [
                keras.Input((32,)),
                keras.layers.Dense(64, "gelu"),
                keras.layers.Dense(16, dtype="mixed_bfloat16"),
            ]
        )
    model.set_weights(
        [
            (rng.normal(size=w.shape) / 8).astype("float32")
            for w in model.weights
        ]
    )
    return model, x, y


def losses(recipe, steps=40):
    """What a small model in float8 loses at each step of `fit`."""
    model, x, y = mlp()
    kpe.convert(model, recipe)
    optimizer = keras.optimizers.SGD(0.2, momentum=0.9)
    model.compile(optimizer, "mse", jit_compile=COMPILED)
    found = []
    for step in range(steps):
        batch = slice(64 * (step % 8), 64 * (step % 8) + 64)
        found.append(float(model.train_on_batch(x[batch], y[batch])))
    return found


def training():
    """Training falls, and agrees with the numbers of a CPU."""
    expected = json.loads(CPU_LOSSES.read_text("utf-8"))[BACKEND]
    found = {}
    for recipe, on_a_cpu in expected.items():
        mine = losses(recipe)
        apart = np.abs(np.array(mine) / on_a_cpu - 1)
        found[recipe] = {
            "first loss": measuring.rounded(mine[0]),
            "last loss": measuring.rounded(mine[-1]),
            "apart from a CPU": measuring.rounded(apart.max(), 2),
        }
        require(mine[-1] < mine[0] / 3, f"{recipe}: it does not fall: {mine}")
        require(
            apart.max() < 0.05,
            f"{recipe}: a loss is {apart.max():.1%} from that of a CPU.",
        )
    return found


def save_and_load():
    """A saved model comes back in float8 with the same outputs."""
    model, x, y = mlp()
    kpe.convert(model, "delayed")
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=COMPILED)
    for _ in range(3):
        model.train_on_batch(x, y)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model.keras"
        model.save(path)
        loaded = kpe.load_model(path)
    policies = [
        [layer.policy for layer in kpe.inspect(each).layers]
        for each in (model, loaded)
    ]
    require(policies[0] == policies[1], f"The policies are {policies[1]}.")
    before, outputs = numpy(model(x)), numpy(loaded(x))
    apart = float(np.abs(before - outputs).max())
    # A GPU's library may choose another algorithm when it is asked again.
    allowed = 2.0**-8 * np.abs(before).max() if measuring.on_gpu() else 0
    require(apart <= allowed, f"The outputs are up to {apart} apart.")
    after = [float(each.train_on_batch(x, y)) for each in (model, loaded)]
    require(np.isclose(*after, rtol=1e-3), f"The next losses are {after}.")
    return {"outputs apart": apart, "next losses": after}


def steps_keep_memory():
    """Training holds no more memory after many steps than after some."""
    held = _held()
    if held is None:
        raise NotHere(f"{BACKEND} does not say what is held on a CPU")
    model, x, y = mlp()
    kpe.convert(model, "delayed")
    model.compile("adam", "mse", jit_compile=COMPILED)
    seen = []
    for _ in range(2):
        for _ in range(20):
            model.train_on_batch(x, y)
        measuring.finish()
        seen.append(_held())
    require(seen[1] <= 1.01 * seen[0], f"Bytes held: {seen}.")
    return {"bytes held": seen}


def _held():
    """Bytes that are allocated on the GPU; None where nobody says so."""
    if not measuring.on_gpu():
        return None
    if BACKEND == "torch":
        import torch

        return torch.cuda.memory_allocated()
    if BACKEND == "jax":
        import jax

        return jax.devices()[0].memory_stats()["bytes_in_use"]
    import tensorflow as tf

    return tf.config.experimental.get_memory_info("GPU:0")["current"]


def memory_of_a_step():
    """A step in float8 holds at most half as much again as in bfloat16."""
    sizes = memory.ON_A_GPU if measuring.on_gpu() else (2, 16, 32, 96, 2, 1, 1)
    rows = list(memory.rows(Llama(*sizes)))
    if not rows:
        raise NotHere(f"{BACKEND} does not say what a step holds on a CPU")
    found = {row["variant"]: row["of_bfloat16"] for row in rows}
    if measuring.on_gpu():  # Sizes that mean something.
        worst = max(found["float8 delayed"], found["float8 current"])
        require(worst < 1.5, f"It holds {worst} times as much.")
    return found


def eager_equals_compiled():
    """A compiled step gives what an eager one does."""
    x, g = normal((64, 48)), normal((64, 32), seed=1)
    results = {}
    for compiled in (False, True):
        keras.utils.set_random_seed(0)
        layer = dense(48, 32, "current", "mixed_bfloat16")
        y, x_grad, grads = forward_backward(layer, compiled)(x, g)
        results[compiled] = [numpy(each) for each in (y, x_grad, grads[0])]
    errors = [
        float(np.linalg.norm(a - b) / np.linalg.norm(b))
        for a, b in zip(results[True], results[False], strict=True)
    ]
    require(max(errors) < TOLERANCES["mixed_bfloat16"], f"Errors: {errors}.")
    return {"largest error": measuring.rounded(max(errors), 2)}


def auto_filter():
    """`filter="auto"` converts large layers where float8 gains, else none."""
    here = break_even.here()
    models = made(
        lambda: _wide(8192 if measuring.on_gpu() else 64), ["bfloat16"]
    )
    report = kpe.convert(models["bfloat16"], filter="auto")
    gains = here.size is not None and here.size <= 8192
    require(
        bool(report.converted) == gains,
        f"{len(report.converted)} layers are converted, and the table says "
        f"{here}.",
    )
    return {"from": here.size, "known from": here.origin}


def _wide(size):
    layer = keras.layers.Dense(size, kernel_initializer="zeros")
    return keras.Sequential([keras.Input((size,)), layer])


CHEAP = (
    native_kernel,
    fused_casts,
    casts,
    codes_in_layers,
    matmuls,
    odd_shapes,
    state_update,
    training,
    save_and_load,
    steps_keep_memory,
    auto_filter,
)
"""Those that take seconds on a CPU."""
ALL = (*CHEAP, other_layers, memory_of_a_step, eager_equals_compiled)
