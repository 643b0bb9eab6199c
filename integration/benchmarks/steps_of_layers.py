"""A layer or model forward and backward, on each backend, eager or compiled."""

import contextlib

import keras
import numpy as np
from keras import ops

BACKEND = keras.backend.backend()
COMPILED = BACKEND != "torch"
"""Whether steps are compiled where nothing else is asked for."""


def numpy(x):
    """A tensor or variable of any floating dtype as float32 of NumPy."""
    x = ops.cast(ops.convert_to_tensor(x), "float32")
    return ops.convert_to_numpy(x)


def forward_backward(layer, compiled=COMPILED):
    """A function that runs a layer in training and takes its gradients.

    Args:
        layer: Built.
        compiled: By XLA, or on PyTorch by torch.compile.

    Returns:
        `f(x, outputs_grad)` to the outputs, the gradient of x, and those of
        `layer.trainable_variables`.
    """
    make = {"jax": _jax, "tensorflow": _tensorflow, "torch": _torch}
    return make[BACKEND](layer, compiled)


def compiled_function(function, compiled=COMPILED):
    """A function of tensors, compiled if so asked."""
    if not compiled:
        return function
    if BACKEND == "jax":
        import jax

        return jax.jit(function)
    if BACKEND == "torch":
        return _compiled_by_torch(function)
    import tensorflow as tf

    return tf.function(function, jit_compile=True)


def _compiled_by_torch(function):
    """A function that is compiled anew for each model of a benchmark.

    By default PyTorch compiles one piece of code at most eight times, and then
    runs it eagerly.
    """
    import torch

    torch._dynamo.config.recompile_limit = 256
    return torch.compile(function)


def _jax(layer, compiled):
    import jax

    def both(trainable, others, x, outputs_grad):
        def outputs(trainable, x):
            return layer.stateless_call(trainable, others, x, training=True)[0]

        y, backward = jax.vjp(outputs, trainable, x)
        grads, x_grad = backward(outputs_grad.astype(y.dtype))
        return y, x_grad, grads

    both = jax.jit(both) if compiled else both

    def run(x, outputs_grad):
        trainable = [v.value for v in layer.trainable_variables]
        others = [v.value for v in layer.non_trainable_variables]
        return both(trainable, others, x, outputs_grad)

    return run


def _tensorflow(layer, compiled):
    import tensorflow as tf

    def run(x, outputs_grad):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
        variables = [v.value for v in layer.trainable_variables]
        outputs_grad = tf.cast(outputs_grad, y.dtype)
        x_grad, *grads = tape.gradient(y, [x, *variables], outputs_grad)
        return y, x_grad, grads

    return tf.function(run, jit_compile=True) if compiled else run


def _torch(layer, compiled):
    import torch

    def outputs(x):
        return layer(x, training=True)

    outputs = _compiled_by_torch(outputs) if compiled else outputs

    def run(x, outputs_grad):
        x = x.detach().requires_grad_()
        variables = [v.value for v in layer.trainable_variables]
        y = outputs(x)
        x_grad, *grads = torch.autograd.grad(
            y, [x, *variables], outputs_grad.to(y.dtype)
        )
        return y.detach(), x_grad, grads

    return run


def sgd():
    """An optimizer that leaves the weights about where they are."""
    return keras.optimizers.SGD(1e-9)


def training_step(layer, compiled=COMPILED):
    """A function that runs a layer in training and updates its weights.

    Args:
        layer: Built.
        compiled: As for `forward_backward`.

    Returns:
        `f(x, outputs_grad)` to the outputs and the gradient of x. By SGD,
        which asks for no memory of its own; scales and histories go on.
    """
    optimizer = sgd()
    optimizer.build(layer.trainable_variables)
    make = {"jax": _jax_step, "tensorflow": _tf_step, "torch": _torch_step}
    return make[BACKEND](layer, optimizer, compiled)


def _jax_step(layer, optimizer, compiled):
    import jax

    def step(trainable, optimizer_variables, others, x, outputs_grad):
        def outputs(trainable, x):
            return layer.stateless_call(trainable, others, x, training=True)[0]

        y, backward = jax.vjp(outputs, trainable, x)
        grads, x_grad = backward(outputs_grad.astype(y.dtype))
        updated = optimizer.stateless_apply(
            optimizer_variables, grads, trainable
        )
        return y, x_grad, *updated

    jitted = jax.jit(step, donate_argnums=(0, 1))
    step = jitted if compiled else step
    # Copies, since those of the layer are given away by the first step.
    state = [
        [jax.numpy.array(v.value) for v in variables]
        for variables in (layer.trainable_variables, optimizer.variables)
    ]
    others = [v.value for v in layer.non_trainable_variables]

    def run(x, outputs_grad):
        y, x_grad, *state[:] = step(*state, others, x, outputs_grad)
        return y, x_grad

    run.compiled = lambda x, outputs_grad: jitted.lower(
        *state, others, x, outputs_grad
    ).compile()
    return run


def _tf_step(layer, optimizer, compiled):
    import tensorflow as tf

    def run(x, outputs_grad):
        y, x_grad, grads = forward_backward(layer, False)(x, outputs_grad)
        optimizer.apply(grads, layer.trainable_variables)
        return y, x_grad

    return tf.function(run, jit_compile=True) if compiled else run


def _torch_step(layer, optimizer, compiled):
    import torch

    def outputs(x):
        return layer(x, training=True)

    outputs = _compiled_by_torch(outputs) if compiled else outputs

    def run(x, outputs_grad):
        x = x.detach().requires_grad_()
        y = outputs(x)
        y.backward(outputs_grad.to(y.dtype))
        variables = layer.trainable_variables
        with torch.no_grad():
            optimizer.apply([v.value.grad for v in variables], variables)
        layer.zero_grad()
        return y.detach(), x.grad

    return run


@contextlib.contextmanager
def exact_float32():
    """A block in which products of float32 are not rounded to TF32."""
    if BACKEND == "jax":
        import jax

        with jax.default_matmul_precision("highest"):
            yield
        return
    if BACKEND == "tensorflow":
        import tensorflow as tf

        config = tf.config.experimental
        before = config.tensor_float_32_execution_enabled()
        config.enable_tensor_float_32_execution(False)
        try:
            yield
        finally:
            config.enable_tensor_float_32_execution(before)
        return
    yield  # PyTorch does not, unless it is told to.


def sqnr_db(reference, approximation):
    """The signal beside the error in decibels, of NumPy arrays; one digit."""
    reference = np.asarray(reference, "float64")
    error = np.asarray(approximation, "float64") - reference
    noise = np.sum(error**2)
    if noise == 0:
        return None
    return round(float(10 * np.log10(np.sum(reference**2) / noise)), 1)
