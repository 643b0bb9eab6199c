"""Arrays, gradients and training steps, written once for every backend."""

import keras
import numpy as np
from keras import ops

from keras_policy_ext import seams
from keras_policy_ext.layers.state_of import is_state


def numpy(x):
    """A tensor or variable of any dtype as a NumPy array."""
    x = ops.convert_to_tensor(x)
    if "float8" in keras.backend.standardize_dtype(x.dtype):
        x = ops.cast(x, "float32")
    return ops.convert_to_numpy(x)


def normal(*shape, seed=0, scale=1.0):
    """A float32 array of normal numbers with this deviation."""
    values = np.random.default_rng(seed).normal(size=shape) * scale
    return values.astype("float32")


def mean_square(y):
    """A loss."""
    return ops.mean(ops.square(ops.cast(y, "float32")))


def relative_rms(actual, expected):
    """How far off an array is; 0 where nothing is, zeros included."""
    error = np.sqrt(np.mean(np.square(actual - expected)))
    signal = np.sqrt(np.mean(np.square(expected)))
    return error / signal if error else 0.0


def gradients(layer, x, loss, training=True, compiled=False):
    """`(outputs, gradient of x, gradients of layer.trainable_variables)`.

    Args:
        layer: A built layer or model.
        x: Inputs, an array.
        loss: Function of the outputs, to a scalar.
        training: Passed on to the call.
        compiled: Whether JAX compiles the whole: sooner done than the many
            operations of an eager call, which are compiled one by one.
    """
    if compiled and keras.backend.backend() == "jax":
        return _jax_gradients(layer, x, loss, training, compiled)
    run = {
        "jax": _jax_gradients,
        "tensorflow": _tensorflow_gradients,
        "torch": _torch_gradients,
    }
    backend = keras.backend.backend()
    return run[backend](layer, x, loss, training)


def step(layer, optimizer, x, loss, training=True):
    """One eager step of a custom loop with a Keras optimizer."""
    outputs, _, grads = gradients(layer, x, loss, training)
    value = float(numpy(loss(outputs)))
    with no_grad():
        optimizer.apply(grads, layer.trainable_variables)
    return value


def no_grad():
    """`torch.no_grad` on torch, nothing elsewhere."""
    if keras.backend.backend() != "torch":
        import contextlib

        return contextlib.nullcontext()
    import torch

    return torch.no_grad()


def _jax_gradients(layer, x, loss, training, compiled=False):
    import jax

    def scalar(trainable, x):
        outputs, _ = layer.stateless_call(
            trainable,
            [v.value for v in layer.non_trainable_variables],
            x,
            training=training,
        )
        return loss(outputs), outputs

    trainable = [v.value for v in layer.trainable_variables]
    differentiate = jax.value_and_grad(scalar, argnums=(0, 1), has_aux=True)
    if compiled:
        differentiate = jax.jit(differentiate)
    (_, outputs), (grads, x_grad) = differentiate(
        trainable, ops.convert_to_tensor(x)
    )
    return outputs, x_grad, grads


def _tensorflow_gradients(layer, x, loss, training):
    import tensorflow as tf

    x = ops.convert_to_tensor(x)
    with tf.GradientTape() as tape:
        tape.watch(x)
        outputs = layer(x, training=training)
        value = loss(outputs)
    variables = [v.value for v in layer.trainable_variables]
    grads = tape.gradient(value, [x, *variables])
    return outputs, grads[0], grads[1:]


def _torch_gradients(layer, x, loss, training):
    import torch

    x = ops.convert_to_tensor(x)
    if x.dtype.is_floating_point:
        x = x.detach().requires_grad_()
    outputs = layer(x, training=training)
    wanted = [x, *(v.value for v in layer.trainable_variables)]
    needed = [tensor for tensor in wanted if tensor.requires_grad]
    # Not `backward`, which keeps observations apart from `.grad`.
    found = torch.autograd.grad(loss(outputs), needed, allow_unused=True)
    grads = {id(t): g for t, g in zip(needed, found, strict=True)}
    x_grad, *grads = (grads.get(id(tensor)) for tensor in wanted)
    return outputs.detach(), x_grad, grads


def weights_of(model):
    """All weights of a model but the states, as from `kpe.loops.weights`."""
    return [v for v in model.weights if not is_state(v)]


def observe_inputs(model, x):
    """Enter the largest inputs of each kernel in a call into its state."""
    seen = {}

    def observe(call):
        weight = call.weight
        state = None if weight is None else call.layer.float8_state.of(weight)
        if state is not None:
            amax = np.abs(numpy(call.planned.inputs)).max()
            seen[id(state)] = state, max(amax, seen.get(id(state), (0, 0))[1])
        return call.run()

    with seams.on_contraction(observe):
        model(x, training=False)
    for state, amax in seen.values():
        state.observe("inputs", amax)


def state_of(layer):
    """The settled float8 state of a layer's one kernel, by operand.

    Returns:
        Dict of `inputs`, `kernel`, `outputs_grad` to `(scale, history)`.
    """
    from keras_policy_ext.ext.delayed.observations import UNSEEN, VALID_MARK
    from keras_policy_ext.numerics.scale_sources import source_of
    from keras_policy_ext.recipes import OPERANDS

    (variable,) = layer.float8_state.matrices
    layout = source_of(variable.recipe).layout
    matrix = numpy(variable)
    is_settled = np.isin(matrix[:, 0], (VALID_MARK, UNSEEN))
    assert is_settled.all(), "the state is not settled"
    pairs = zip(layout.scale(matrix), layout.history(matrix), strict=True)
    return dict(zip(OPERANDS, pairs, strict=True))
