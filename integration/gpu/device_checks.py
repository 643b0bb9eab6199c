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
import ml_dtypes
import numpy as np
from arithmetic_checks import (
    TOLERANCES,
    biases,
    casts,
    codes_in_layers,
    matmuls,
    odd_shapes,
    state_update,
)
from keras import ops
from promises import BACKEND, NotHere, capability, dense, require
from steps_of_layers import (
    COMPILED,
    compiled_function,
    forward_backward,
    numpy,
    sqnr_db,
)
from variants import made
from workloads import Llama, normal

import keras_policy_ext as kpe
from keras_policy_ext import contractions
from keras_policy_ext.ext.gain import auto
from keras_policy_ext.ext.moments import codes as moments
from keras_policy_ext.ext.reference import moments as moments_reference
from keras_policy_ext.ext.stochastic.rounding import key_of_use

CPU_LOSSES = pathlib.Path(__file__).parent / "cpu_losses.json"


def native_kernel():
    """A matmul is native exactly where the device has float8 units."""
    choice = auto.choice_for(contractions.Einsum("ab,bc->ac"))
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
    from keras_policy_ext.backends.torch import casts as triton_casts

    reason = triton_casts.lacking()
    if reason is not None and triton_casts.HAS_TRITON:
        # Where an error is why, this time it is not passed over.
        triton_casts._gives_our_codes()
    require(reason is None, f"They are not by Triton: {reason}.")
    return {"casts": "by Triton"}


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


def mlp(width=64):
    """A small model and its data, the same on every backend and device."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(512, 32)).astype("float32")
    y = np.tanh(x @ rng.normal(size=(32, 16)) / 4).astype("float32")
    with kpe.policy_scope("mixed_bfloat16"):
        model = keras.Sequential(
            [
                keras.Input((32,)),
                keras.layers.Dense(width, "gelu"),
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
        found.append(loss_of_step(model, x[batch], y[batch]))
    return found


def loss_of_step(model, x, y):
    """The loss of one step; Keras up to 3.14 averages over calls."""
    model.reset_metrics()
    return float(model.train_on_batch(x, y))


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
    after = [loss_of_step(each, x, y) for each in (model, loaded)]
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


def mapped_layers():
    """A mapped layer gives what calls one by one give.

    Stock Keras's layer in float32 is mapped as well, for comparison: where it
    differs too, the error is none of this package.
    """
    found, differ = {}, []
    for name, policy in _mapped_policies().items():
        room = keras.layers if name == STOCK else kpe.layers
        layer = room.Dense(4, activation="relu", dtype=policy)
        layer.build((None, 8))
        layer.kernel.assign(normal((8, 4), "float32", seed=1))
        sizes = np.float32([[1], [100], [0.01]])
        xs = ops.convert_to_tensor(sizes * numpy(normal((3, 8), "float32")))
        for what, of_one, of_many in _mapped_functions(layer):
            mapped = numpy(of_many(xs))
            called = np.stack([numpy(of_one(x)) for x in xs])
            error = np.linalg.norm(mapped - called) / np.linalg.norm(called)
            key = f"{name}: {what}"
            found[key] = "not finite"
            if np.isfinite(error):
                found[key] = measuring.rounded(float(error), 2)
            # Also true of NaN.
            if not error < TOLERANCES["float32"]:
                differ.append(key)
    ours = [key for key in differ if not key.startswith(STOCK)]
    require(not ours, f"Different: {differ}. Errors: {found}.")
    return {"different": differ, **found}


STOCK = "stock float32"


def _mapped_policies():
    """Dtype policies by name."""
    recipes = {
        "delayed": kpe.recipes.DelayedScaling(),
        "gradients in high precision": kpe.recipes.RowwiseScaling(
            inputs_grad="high_precision", kernel_grad="high_precision"
        ),
        "inputs_grad alone in float8": kpe.recipes.RowwiseScaling(
            forward="high_precision", kernel_grad="high_precision"
        ),
    }
    policies = {
        name: kpe.Float8DTypePolicy("float32", recipe=recipe)
        for name, recipe in recipes.items()
    }
    return {STOCK: "float32", **policies}


def _mapped_functions(layer):
    """Names, functions of one example, and the same mapped over examples.

    There is no gradient on TensorFlow, whose vectorized loops lose those that
    are custom.
    """

    def outputs(x):
        return layer(x[None])[0]

    def loss(x):
        return ops.sum(outputs(x) ** 2)

    yield "outputs", outputs, lambda xs: ops.vectorized_map(outputs, xs)
    if BACKEND == "torch":
        from torch.func import grad, vmap

        yield "inputs_grad", grad(loss), vmap(grad(loss))
    if BACKEND == "jax":
        import jax

        weights = [v.value for v in layer.trainable_variables]
        others = [v.value for v in layer.non_trainable_variables]

        def loss_of(weights, x):
            y, _ = layer.stateless_call(weights, others, x[None])
            return ops.sum(y**2)

        def kernel_and_inputs(weights, x):
            (kernel, *_), inputs = both(weights, x)
            return ops.concatenate([ops.ravel(kernel), inputs])

        both = jax.grad(loss_of, argnums=(0, 1))
        slopes = jax.jit(kernel_and_inputs)
        mapped = jax.vmap(slopes, in_axes=(None, 0))
        yield (
            "gradients",
            lambda x: slopes(weights, x),
            lambda xs: mapped(weights, xs),
        )


def auto_filter():
    """`filter="auto"` converts large layers where float8 gains, else none."""
    here = auto.here()
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


def one_byte_moments():
    """Moments in one byte have the codes of the reference, and train as well.

    `fit` runs with Adam in float32 and in one byte.
    """
    found = {}
    for kind in moments_reference.KINDS:
        for form in moments_reference.BLOCKS:
            for key in (None, 7):
                found[f"{kind} {form}, {key=}"] = _codes_apart(kind, form, key)
    losses = {}
    for form in ("float32", *moments_reference.BLOCKS):
        model, x, y = mlp(width=256)
        optimizer = keras.optimizers.Adam(2e-3)
        if form != "float32":
            optimizer = kpe.optimizers.quantize_state(optimizer, form)
        model.compile(optimizer, "mse", jit_compile=COMPILED)
        history = model.fit(x, y, 64, epochs=10, verbose=0, shuffle=False)
        losses[form] = history.history["loss"][-1]
        apart = abs(losses[form] / losses["float32"] - 1)
        require(apart < 0.02, f"The losses are {losses}.")
    return {**found, "losses": losses}


def _codes_apart(kind, form, key):
    """How many codes of hostile moments are not those of the reference."""
    values = np.resize(hostile.float32_values(hostile.FORMATS[0]), 2**16)
    rng = np.random.default_rng(0)
    usual = rng.normal(size=2**20).astype("float32") ** 3
    x = np.concatenate([values, usual])
    x = np.abs(x) if kind == "second" else x

    def quantize(x):
        chosen = None
        if key is not None:
            chosen = key_of_use(ops.cast(key, "int32"), 0, 3)
        pair = moments.quantize_moments(x, kind, form, chosen)
        return *pair, moments.dequantize_moments(*pair, kind, form)

    codes, scale, numbers = compiled_function(quantize)(
        ops.convert_to_tensor(x)
    )
    if key is not None:
        key = moments_reference.moment_key(key, 3)
    expected = moments_reference.quantize_moments(x, kind, form, key)
    pairs = zip((codes, scale), expected, strict=True)
    apart = [int((ops.convert_to_numpy(a) != b).sum()) for a, b in pairs]
    exact = moments_reference.dequantize_moments(*expected, kind, form)
    apart.append(int((numpy(numbers) != exact).sum()))
    # XLA divides on a GPU with an error; see `arithmetic_checks`.
    inexact = BACKEND != "torch" and measuring.on_gpu()
    allowed = 1e-5 * x.size if inexact else 0
    require(
        max(apart) <= allowed, f"{kind}, {form}: {apart} of {x.size} differ."
    )
    return apart


def watched_training():
    """A monitor sees in `fit` what the device computed."""
    model, x, y = mlp()
    kpe.convert(model, "current")
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=COMPILED)
    monitor = kpe.callbacks.Float8Monitor((x[:64], y[:64]), every=4)
    model.fit(x, y, 64, epochs=2, verbose=0, callbacks=[monitor])
    entries = [e for e in monitor.watch.history if e["sqnr_db"] is not None]
    require(len(entries) >= 24, f"Only {len(entries)} entries: {entries}.")
    largest = float(np.abs(x[:64].astype(ml_dtypes.bfloat16)).max())
    seen = next(e["amax"] for e in entries if e["operand"] == "inputs")
    require(seen == largest, f"The amax is {seen}, and not {largest}.")
    worst = min(each["sqnr_db"] for each in entries)
    require(worst > 15, f"An operand has {worst} dB.")
    return {"entries": len(entries), "lowest SQNR": measuring.rounded(worst)}


def frozen_model():
    """A frozen model predicts nearly what the model in float8 did."""
    model, x, _ = mlp()
    kpe.convert(model, "current")
    before = model.predict(x, verbose=0)
    kpe.freeze(model)
    after = model.predict(x, verbose=0)
    quality = sqnr_db(before, after)
    require(quality is None or quality > 18, f"Only {quality} dB.")
    layers = kpe.inspect(model).layers
    return {"sqnr_db": quality, "kernels": str({e.kernel for e in layers})}


CHEAP = (
    native_kernel,
    fused_casts,
    casts,
    codes_in_layers,
    matmuls,
    odd_shapes,
    biases,
    state_update,
    training,
    save_and_load,
    steps_keep_memory,
    mapped_layers,
    auto_filter,
    one_byte_moments,
    watched_training,
    frozen_model,
)
"""Those that take seconds on a CPU."""
ALL = (*CHEAP, other_layers, memory_of_a_step, eager_equals_compiled)
