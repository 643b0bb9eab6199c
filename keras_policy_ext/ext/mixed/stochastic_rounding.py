"""Train bfloat16 variables without losing small updates."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_policy_ext import backends
from keras_policy_ext._keras import optimizer_facts, optimizer_variables
from keras_policy_ext._types import Tensor
from keras_policy_ext.ext.mixed import _keras, inner_optimizers
from keras_policy_ext.ext.mixed.float32_views import Float32View, Float32Views

SEED_KEY = "seed_generator_state"
"""The name of the seed state in a file."""

NUMBERS_OF_A_GROUP = 1 << 16
"""The most numbers of several weights that are updated together."""


@keras.saving.register_keras_serializable("keras_policy_ext")
class StochasticRounding(keras.optimizers.Optimizer):
    """An optimizer wrapper that rounds bfloat16 updates stochastically.

    bfloat16 has 8 significant bits: an update smaller than about 1/512 of a
    weight rounds back to the old weight, at every step, and training makes no
    progress. Under this wrapper the inner optimizer computes a step in
    float32, and each new weight is rounded at random to one of its two
    neighbours in the variable's dtype, so that its expected value is the
    float32 weight. A small update then takes effect in some steps, and in full
    on average.

    Between steps only the narrow weights are stored, no float32 copy. The
    optimizer's own state (momenta, second moments, averages, accumulated
    gradients) is in float32, because bfloat16 would lose its small updates
    too. Variables of other dtypes, and float8 state, are updated as without
    the wrapper.

    ```python
    model.compile(
        optimizer=kpe.mixed_precision.StochasticRounding(
            keras.optimizers.Adam(1e-3), seed=1
        ),
        loss="mse",
    )
    ```

    Weight decay, clipping, a learning-rate schedule, moving averages and
    gradient accumulation belong to the inner optimizer. A loss scaler wraps
    this one: `LossScaleOptimizer(StochasticRounding(Adam()))`.

    Args:
        inner_optimizer: A `keras.optimizers.Optimizer` that is not built, wraps
            no other optimizer and is not wrapped.
        seed: Integer from 0 to 2^31 - 1. The same seed gives the same run.
            None draws a seed. Processes that train replicas of one model
            need the same integer.
        name: The name of the optimizer.

    Raises:
        TypeError: If `inner_optimizer` is no Keras optimizer, or `seed` no
            integer.
        ValueError: If `inner_optimizer` is built, wraps another one or is
            wrapped, or `seed` is out of range.
        NotImplementedError: By `build`, for narrow variables with replicas
            of `tf.distribute`.

    Examples:
        >>> weight = keras.Variable(np.ones(1000), dtype="bfloat16")
        >>> optimizer = kpe.mixed_precision.StochasticRounding(
        ...     keras.optimizers.SGD(1e-3), seed=1
        ... )
        >>> optimizer.apply([keras.ops.ones((1000,), "bfloat16")], [weight])
        >>> mean = float(keras.ops.mean(keras.ops.cast(weight, "float32")))
        >>> 0.998 < mean < 1.0  # without it every weight would still be 1
        True
    """

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        seed: int | None = None,
        name: str | None = None,
    ):
        _check_inner(inner_optimizer)
        seed = _checked_seed(seed)
        super().__init__(learning_rate=0.0, name=name)
        self.inner_optimizer = inner_optimizer
        self.seed_generator = keras.random.SeedGenerator(_spread(seed))
        self._seed = seed
        self._views = Float32Views(self.seed_generator)
        inner_optimizers.register_wrapper(inner_optimizer, self)

    def build(self, variables: list[keras.Variable]) -> None:
        """Build the inner optimizer, with float32 views of the variables.

        Args:
            variables: The variables that this optimizer is to update.
        """
        if self.built:
            return
        super().build(variables)
        views = self._views.of(variables)
        _keras.follow_weight_decay_exclusions(
            self.inner_optimizer, zip(variables, views, strict=True)
        )
        self.inner_optimizer.build(views)

    def apply(
        self,
        grads: list[Tensor],
        trainable_variables: Iterable[keras.Variable] | None = None,
    ) -> None:
        """Update variables; round bfloat16 and float16 stochastically.

        Args:
            grads: Gradients of any dtype, one for each variable, or None.
            trainable_variables: The variables; None for those of `build`.

        Raises:
            ValueError: If there are no variables to build the optimizer with,
                or their number differs from that of the gradients.
        """
        variables = inner_optimizers.variables_of(
            self, trainable_variables, len(grads)
        )
        if not self.built:
            self.build(variables)
        for number, group in enumerate(self._groups(grads, variables)):
            if number:  # All are one step.
                self.inner_optimizer.iterations.assign_sub(1)
            self._apply(*map(list, zip(*group, strict=True)))

    def _apply(self, grads: list[Any], views: list[Any]) -> None:
        grads = [_for(v, g) for v, g in zip(views, grads, strict=True)]
        with self._views.held():
            self.inner_optimizer.apply(grads, views)

    def _groups(
        self, grads: list[Any], variables: list[Any]
    ) -> list[list[tuple[Any, Any]]]:
        """Return groups of gradients and views that are updated together."""
        # Each weight of a group has copies in float32. A compiled step makes
        # them when it needs them, so all weights are one group there.
        pairs = list(zip(grads, self._views.of(variables), strict=True))
        if not self.updates_in_groups or any(g is None for g in grads):
            return [pairs] if pairs else []
        numbers = 0
        groups: list[list[tuple[Any, Any]]] = []
        for pair in pairs:
            size = math.prod(pair[1].shape)
            numbers += size
            if not groups or numbers > NUMBERS_OF_A_GROUP:
                groups.append([])
                numbers = size
            groups[-1].append(pair)
        return groups

    @property
    def updates_in_groups(self) -> bool:
        """True if a step updates weights group by group."""
        inner = self.inner_optimizer
        # An eager step, and an update of a weight that reads no other weight.
        return (
            keras.backend.backend() == "torch"
            and not backends.current.is_compiling()
            and optimizer_facts.updates_apart(inner)
            and not inner.use_ema
            and not inner.global_clipnorm
            and not inner.gradient_accumulation_steps
            and not _keras.excludes_weights(inner)
        )

    def finalize_variable_values(self, var_list: list[keras.Variable]) -> None:
        """Overwrite variables by moving averages, if the optimizer has any.

        Args:
            var_list: The variables that the optimizer was built with.
        """
        inner = self.inner_optimizer
        # In the order of its averages, which conversion may have changed.
        known = optimizer_variables.known_to_optimizer(inner)
        inner.finalize_variable_values(known or self._views.of(var_list))

    def exclude_from_weight_decay(
        self,
        var_list: list[keras.Variable] | None = None,
        var_names: list[str] | None = None,
    ) -> None:
        """Exclude variables from weight decay of the inner optimizer.

        Args:
            var_list: Variables.
            var_names: Parts of variable names.
        """
        self.inner_optimizer.exclude_from_weight_decay(
            self._views.of(var_list or []), var_names
        )

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss as scaled by the inner optimizer."""
        return self.inner_optimizer.scale_loss(loss)

    @property
    def variables(self) -> list[keras.Variable]:
        """The variables of this optimizer, the seed and the inner optimizer."""
        return [
            *super().variables,
            self.seed_generator.state,
            *self.inner_optimizer.variables,
        ]

    @property
    def iterations(self) -> keras.Variable:
        """The step counter of the inner optimizer."""
        return self.inner_optimizer.iterations

    @property
    def learning_rate(self) -> Any:
        """The learning rate of the inner optimizer; assignable."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        self.inner_optimizer.learning_rate = learning_rate

    @property
    def loss_scale_factor(self) -> float | None:
        """The loss scale factor of the inner optimizer; assignable."""
        return self.inner_optimizer.loss_scale_factor

    @loss_scale_factor.setter
    def loss_scale_factor(self, factor: float | None) -> None:
        # Keras's own constructor sets it too, before there is an inner one.
        if "inner_optimizer" in self.__dict__:
            self.inner_optimizer.loss_scale_factor = factor

    def save_own_variables(
        self, store: MutableMapping[str, np.ndarray]
    ) -> None:
        """Write the state of the random seed to a file's store."""
        # The inner optimizer has its own group in the file.
        store[SEED_KEY] = ops.convert_to_numpy(self.seed_generator.state)

    def load_own_variables(self, store: Mapping[str, np.ndarray]) -> None:
        """Read the state of the random seed from a file's store.

        If the file has none, the seed is that of the constructor.
        """
        if SEED_KEY in store.keys():  # noqa: SIM118 (Keras's store)
            self.seed_generator.state.assign(store[SEED_KEY])

    def get_config(self) -> dict[str, Any]:
        """Return the name, the seed and the inner optimizer's config."""
        inner = self.inner_optimizer
        config = keras.saving.serialize_keras_object(inner)
        return {
            "name": self.name,
            "seed": self._seed,
            "inner_optimizer": optimizer_facts.with_public_class(config, inner),
        }

    @classmethod
    def from_config(
        cls,
        config: dict[str, Any],
        custom_objects: Mapping[str, object] | None = None,
    ) -> StochasticRounding:
        """Create the optimizer from a config; it is not built yet.

        Args:
            config: A config from `get_config`.
            custom_objects: Classes that the inner config names.
        """
        inner = keras.saving.deserialize_keras_object(
            config["inner_optimizer"], custom_objects=custom_objects
        )
        return cls(**{**config, "inner_optimizer": inner})


def _for(variable: keras.Variable, gradient: Tensor | None) -> Tensor | None:
    """Convert the gradient of a `Float32View` to a dense float32 tensor."""
    if gradient is None or not isinstance(variable, Float32View):
        return gradient
    if hasattr(gradient, "dense_shape"):
        # tf.IndexedSlices, of embeddings
        gradient = ops.add(gradient, ops.zeros_like(variable.value))
    return ops.cast(gradient, "float32")


def _check_inner(inner: object) -> None:
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise TypeError(
            f"`inner_optimizer` is not a Keras optimizer. Received: {inner!r} "
            f"(of type {type(inner).__name__}). Allowed: a "
            "keras.optimizers.Optimizer. Write "
            "`StochasticRounding(keras.optimizers.Adam(1e-3))`."
        )
    if hasattr(inner, "inner_optimizer"):
        raise ValueError(
            "`inner_optimizer` wraps another optimizer, and "
            "StochasticRounding must be the innermost wrapper. Received: "
            f"inner_optimizer of class {type(inner).__name__}, which wraps "
            "another. Allowed: an optimizer that wraps none. Write "
            "`LossScaleOptimizer(StochasticRounding(Adam()))`."
        )
    if inner.built:
        raise ValueError(
            "`inner_optimizer` is built: its state has the dtype of the "
            "variables and not float32. Received: a built "
            f"{type(inner).__name__}. Allowed: one that is not built. Make a "
            "new one: `type(optimizer).from_config(optimizer.get_config())`."
        )
    inner_optimizers.check_not_wrapped(inner, "StochasticRounding")


def _checked_seed(seed: object) -> int | None:
    if seed is None:
        return None
    # numpy's integers register as Integral; its bool does not.
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
        raise TypeError(
            f"`seed` is not an integer. Received: seed={seed!r}. Allowed: "
            "None or an int from 0 to 2147483647. Write `seed=1`."
        )
    number = int(seed)  # JSON has no numpy integers.
    if not 0 <= number < 2**31:
        raise ValueError(
            f"`seed` is out of range. Received: seed={seed}. Allowed: from 0 "
            "to 2147483647. Write `seed=1`."
        )
    return number


def _spread(seed: int | None) -> int | None:
    """Map neighbouring seeds to seeds from 0 to 2^31 - 1 that are far apart."""
    # On torch Keras adds the number of draws to the seed (3.12 to 3.15): runs
    # with the seeds 1 and 2 would use the same bits, one draw apart.
    return None if seed is None else seed * 0x9E3779B1 % 2**31
