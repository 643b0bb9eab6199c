"""Training steps as the guides of Keras write them for each backend."""

import keras

BACKEND = keras.backend.backend()


class OneLoss(keras.Model):
    """A model with one loss, `batch_loss(data)`, and no `call`.

    Subclasses may override `after_step`, e.g. to move an average.
    """

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        # Else `fit` calls it on JAX and PyTorch, to build it.
        self.built = True

    def train_step(self, *args):
        steps = {
            "jax": self._step_in_jax,
            "tensorflow": self._step_in_tensorflow,
            "torch": self._step_in_torch,
        }
        return steps[BACKEND](*args)

    def after_step(self):
        pass

    def _step_in_tensorflow(self, data):
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = self.batch_loss(data)
        weights = self.trainable_weights
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.after_step()
        return {"loss": loss}

    def _step_in_torch(self, data):
        import torch

        self.zero_grad()
        loss = self.batch_loss(data)
        loss.backward()
        weights = [v for v in self.trainable_weights]
        gradients = [v.value.grad for v in weights]
        with torch.no_grad():
            self.optimizer.apply(gradients, weights)
            self.after_step()
        return {"loss": loss}

    def _step_in_jax(self, state, data):
        import jax

        trainable, fixed, slots, metrics = state

        def loss_of(trainable, fixed):
            with keras.StatelessScope(self._mapping(trainable, fixed)) as scope:
                loss = self.batch_loss(data)
            return loss, self._values(scope, self.non_trainable_variables)

        differentiate = jax.value_and_grad(loss_of, has_aux=True)
        (loss, fixed), gradients = differentiate(trainable, fixed)
        trainable, slots = self.optimizer.stateless_apply(
            slots, gradients, trainable
        )
        with keras.StatelessScope(self._mapping(trainable, fixed)) as scope:
            self.after_step()
        fixed = self._values(scope, self.non_trainable_variables)
        return {"loss": loss}, (trainable, fixed, slots, metrics)

    def _mapping(self, trainable, fixed):
        return [
            *zip(self.trainable_variables, trainable, strict=True),
            *zip(self.non_trainable_variables, fixed, strict=True),
        ]

    def _values(self, scope, variables):
        return [scope.get_current_value(v) for v in variables]
