"""Float8 layers of others, where they are installed."""

import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import keras

BACKEND = keras.backend.backend()
RATE = 1e-9


class Peer(NamedTuple):
    """A layer of someone else.

    Attributes:
        step: Runs forward and backward, and updates the weights by SGD.
        gradients: Returns outputs, the gradient of the inputs, and a list of
            that of the kernel.
    """

    step: Callable
    gradients: Callable


def layers(kernel, x, outputs_grad, compiled):
    """The layers of others that the framework in use has.

    Args:
        kernel: (in, out), float32.
        x: (rows, in), bfloat16.
        outputs_grad: (rows, out), bfloat16.
        compiled: Whether those of PyTorch are compiled too.

    Returns:
        Each by its name.
    """
    if BACKEND == "torch" and importlib.util.find_spec("torchao"):
        found = {"torchao tensorwise": _torchao(kernel, x, outputs_grad)}
        if compiled:
            found["torchao tensorwise, compiled"] = _torchao(
                kernel, x, outputs_grad, compiled
            )
        return found
    if BACKEND == "jax" and importlib.util.find_spec("flax"):
        return {"Flax Fp8DirectDotGeneralOp": _flax(kernel, x, outputs_grad)}
    return {}


def _torchao(kernel, x, outputs_grad, compiled=False):
    """torchao's Float8Linear; emulated where there are no float8 units.

    Its weights are float32, as those of a Keras layer, and autocast.
    """
    import torch
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    capable = torch.cuda.is_available() and (
        torch.cuda.get_device_capability() >= (8, 9)
    )
    linear = torch.nn.Linear(*kernel.shape)
    with torch.no_grad():
        linear.weight.copy_(torch.tensor(kernel.T))
        linear.bias.zero_()
    model = convert_to_float8_training(
        torch.nn.Sequential(linear.to(x.device)),
        config=Float8LinearConfig(emulate=not capable),
    )
    run = torch.compile(model) if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), RATE)

    def gradients():
        optimizer.zero_grad()
        given = x.detach().requires_grad_()
        with torch.autocast(x.device.type, torch.bfloat16):
            y = run(given)
        y.backward(outputs_grad)
        weight = next(w for w in model.parameters() if w.ndim == 2)
        return y.detach(), given.grad, [weight.grad.T]

    def step():
        gradients()
        optimizer.step()

    return Peer(step, gradients)


def _flax(kernel, x, outputs_grad):
    """Flax's Dense with its float8 dot_general, delayed scaling."""
    import jax
    import jax.numpy as jnp
    from flax import linen
    from flax.linen import fp8_ops

    state = "_overwrite_with_gradient"
    dense = linen.Dense(
        kernel.shape[1],
        dtype=jnp.bfloat16,
        dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp,
    )
    held = dict(dense.init(jax.random.PRNGKey(0), x))
    held["params"]["kernel"] = jnp.array(kernel)

    def both(variables, x, outputs_grad):
        y, backward = jax.vjp(dense.apply, variables, x)
        grads, x_grad = backward(outputs_grad)
        return y, x_grad, grads

    def updated(variables, x, outputs_grad):
        y, x_grad, grads = both(variables, x, outputs_grad)
        params = jax.tree.map(
            lambda w, g: w - RATE * g, variables["params"], grads["params"]
        )
        return y, x_grad, {"params": params, state: grads[state]}

    first, compiled = jax.jit(both), jax.jit(updated, donate_argnums=0)

    def gradients():
        # The first step of its delayed scaling has the scale 1.
        *_, grads = first(held, x, outputs_grad)
        known = {"params": held["params"], state: grads[state]}
        y, x_grad, grads = first(known, x, outputs_grad)
        return y, x_grad, [grads["params"]["kernel"]]

    def step():
        y, x_grad, new = compiled(dict(held), x, outputs_grad)
        held.update(new)
        return y, x_grad

    return Peer(step, gradients)
