"""Float8 layers of others, where they are installed."""

import importlib.util

import keras

BACKEND = keras.backend.backend()
RATE = 1e-9


def layers(kernel, x, outputs_grad, compiled):
    """The layers of others that the framework in use has.

    Args:
        kernel: (in, out), float32.
        x: (rows, in), bfloat16.
        outputs_grad: (rows, out), bfloat16.
        compiled: Whether those of PyTorch are compiled too.

    Returns:
        Each by its name. Its `step()` runs forward and backward, and updates
        the weights by SGD; its `gradients()` returns outputs, the gradient of
        the inputs, and a list of that of the kernel.
    """
    if BACKEND == "torch" and importlib.util.find_spec("torchao"):
        found = {"torchao tensorwise": Torchao(kernel, x, outputs_grad)}
        if compiled:
            found["torchao tensorwise, compiled"] = Torchao(
                kernel, x, outputs_grad, compiled
            )
        return found
    if BACKEND == "jax" and importlib.util.find_spec("flax"):
        return {"Flax Fp8DirectDotGeneralOp": Flax(kernel, x, outputs_grad)}
    return {}


class Torchao:
    """torchao's Float8Linear; emulated where there are no float8 units.

    Its weights are float32, as those of a Keras layer, and autocast.
    """

    def __init__(self, kernel, x, outputs_grad, compiled=False):
        import torch
        from torchao.float8 import (
            Float8LinearConfig,
            convert_to_float8_training,
        )

        capable = torch.cuda.is_available() and (
            torch.cuda.get_device_capability() >= (8, 9)
        )
        linear = torch.nn.Linear(*kernel.shape)
        with torch.no_grad():
            linear.weight.copy_(torch.tensor(kernel.T))
            linear.bias.zero_()
        self.model = convert_to_float8_training(
            torch.nn.Sequential(linear.to(x.device)),
            config=Float8LinearConfig(emulate=not capable),
        )
        self.run = torch.compile(self.model) if compiled else self.model
        self.optimizer = torch.optim.SGD(self.model.parameters(), RATE)
        self.x, self.outputs_grad = x, outputs_grad

    def gradients(self):
        """See `layers`."""
        import torch

        self.optimizer.zero_grad()
        x = self.x.detach().requires_grad_()
        with torch.autocast(x.device.type, torch.bfloat16):
            y = self.run(x)
        y.backward(self.outputs_grad)
        weight = next(w for w in self.model.parameters() if w.ndim == 2)
        return y.detach(), x.grad, [weight.grad.T]

    def step(self):
        """See `layers`."""
        self.gradients()
        self.optimizer.step()


class Flax:
    """Flax's Dense with its float8 dot_general, delayed scaling."""

    STATE = "_overwrite_with_gradient"

    def __init__(self, kernel, x, outputs_grad):
        import jax
        import jax.numpy as jnp
        from flax import linen
        from flax.linen import fp8_ops

        self.dense = linen.Dense(
            kernel.shape[1],
            dtype=jnp.bfloat16,
            dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp,
        )
        self.variables = dict(self.dense.init(jax.random.PRNGKey(0), x))
        self.variables["params"]["kernel"] = jnp.array(kernel)
        self.operands = x, outputs_grad
        self.both = jax.jit(self._both)
        self.updated = jax.jit(self._updated, donate_argnums=0)

    def _both(self, variables, x, outputs_grad):
        import jax

        y, backward = jax.vjp(self.dense.apply, variables, x)
        grads, x_grad = backward(outputs_grad)
        return y, x_grad, grads

    def _updated(self, variables, x, outputs_grad):
        import jax

        y, x_grad, grads = self._both(variables, x, outputs_grad)
        params = jax.tree.map(
            lambda w, g: w - RATE * g, variables["params"], grads["params"]
        )
        return y, x_grad, {"params": params, self.STATE: grads[self.STATE]}

    def gradients(self):
        """See `layers`; the first step of its scaling has the scale 1."""
        *_, grads = self.both(self.variables, *self.operands)
        known = {**self.variables, self.STATE: grads[self.STATE]}
        y, x_grad, grads = self.both(known, *self.operands)
        return y, x_grad, [grads["params"]["kernel"]]

    def step(self):
        """See `layers`."""
        *results, self.variables = self.updated(self.variables, *self.operands)
        return results
